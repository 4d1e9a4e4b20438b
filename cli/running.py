"""A run from its options to its result: what `stream` starts and `resume` goes on with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch
from torch import Tensor
from tqdm import tqdm

from kalmanhead.batch import Batch
from kalmanhead.checkpoint import CheckpointFolder, Restored
from kalmanhead.cli.curve import save_curve
from kalmanhead.cli.options import open_stream
from kalmanhead.cli.table import results_table
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.engine import Progress, evaluate, learn_stream
from kalmanhead.errors import ConfigError, KalmanHeadError
from kalmanhead.learner import OnlineLearner
from kalmanhead.metrics import Metrics
from kalmanhead.rundir import RunDirectory
from kalmanhead.streams import Stream


@dataclass
class Run:
    """One run in memory: where it lies, what it was told, and how far it has come."""

    directory: RunDirectory
    options: dict[str, Any]
    stream: Stream
    learner: OnlineLearner
    progress: Progress
    checkpoints: CheckpointFolder

    @property
    def is_field(self) -> bool:
        """Whether rows are fields on a grid."""
        return self.stream.spec.grid_dims > 0


def begin(options: dict[str, Any], path: Path | None) -> Run:
    """Start a run: nothing is written before the source and the model are known to be sound."""
    stream = open_stream(options)
    options = {**options, "shuffle": stream.shuffle}
    learner = make_learner(options, stream)
    directory = RunDirectory.create(path)
    directory.write_config(storable(options))
    progress = Progress(Metrics(field=stream.spec.grid_dims > 0))
    return Run(directory, options, stream, learner, progress, folder(directory, options["keep"]))


def go_on(directory: RunDirectory, options: dict[str, Any], *, quiet: bool) -> Run:
    """Take up a run, opened for writing, where its newest sound checkpoint left it."""
    stream = open_stream(options)
    learner = make_learner(options, stream)
    progress = Progress(Metrics(field=stream.spec.grid_dims > 0))
    run = Run(directory, options, stream, learner, progress, folder(directory, options["keep"]))
    if run.checkpoints.paths():
        restored = run.checkpoints.latest()
        report(restored, quiet)
        restore(run, restored.tree)
    else:
        directory.truncate(0)
    directory.write_config(storable(options))
    return run


def restore(run: Run, tree: dict[str, Any]) -> None:
    """Put a checkpoint's state into a run, and cut the metrics back to it."""
    check_fingerprint(run.stream.fingerprint(), tree["stream"])
    run.learner.load_state(tree["learner"])
    run.progress.load_state(tree["progress"])
    torch.set_rng_state(tree["random"])
    run.directory.truncate(tree["metrics_bytes"])


def execute(run: Run, *, quiet: bool, as_json: bool) -> int:
    """Learn to the end (or to a signal), save, report; returns the exit code."""
    with run.directory, Stopper() as stopper, progress_bar(run, quiet) as bar:

        def on_batch(progress: Progress, batch: Batch, prediction: Tensor) -> None:
            run.directory.append(batch_record(progress))
            if progress.batches % run.options["checkpoint_every"] == 0:
                save(run)
            bar.update(len(batch))
            if bar.n == bar.total or progress.batches % 20 == 1:
                bar.set_postfix_str(recent_error(progress), refresh=False)

        if run.progress.batches == 0:
            torch.manual_seed(run.options["seed"])  # what dropout in a backbone draws from
        batches = run.stream.iterate(run.progress.cursor)
        try:
            finished = learn_stream(
                run.learner,
                batches,
                run.progress,
                max_batches=run.options["max_batches"],
                on_batch=[on_batch],
                should_stop=lambda: stopper.signal is not None,
            )
        except KalmanHeadError as error:
            checkpoint = save(run)
            raise type(error)(
                f"{error} (learnt up to batch {run.progress.batches}, saved in {checkpoint})"
            ) from error
        checkpoint = save(run)
        bar.close()
        stopped = stopper.signal is not None and not finished
        holdout = None if stopped else score_holdout(run)
        result = summary(run, holdout, checkpoint)
        notes = [] if stopped else draw(run)
        report_end(run, result, notes, stopped, quiet, as_json)
    return 128 + int(stopper.signal) if stopped and stopper.signal else 0


def save(run: Run) -> Path:
    """Write a checkpoint of everything that the rest of the run depends on."""
    tree = {
        "learner": run.learner.state(),
        "progress": run.progress.state(),
        "stream": run.stream.fingerprint(),
        "random": torch.get_rng_state(),
        "metrics_bytes": run.directory.flush(),
        "rows": dataclasses.asdict(run.stream.spec),
    }
    return run.checkpoints.write(tree, run.progress.batches)


def batch_record(progress: Progress) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    summary = progress.metrics.summary()
    return {
        "batch": progress.batches,
        "rows": progress.rows,
        "epoch": progress.cursor.epoch,
        "row": progress.cursor.row,
        "bad_rows": progress.bad_rows,
        "prequential": summary["prequential"],
        "recent": summary["recent"],
    }


def summary(run: Run, holdout: Metrics | None, checkpoint: Path) -> dict[str, Any]:
    """The result of a run in plain values."""
    result = run.progress.summary()
    result["holdout"] = None if holdout is None else holdout.summary()["prequential"]
    return {**result, "run": str(run.directory.path), "checkpoint": str(checkpoint)}


def score_holdout(run: Run) -> Metrics | None:
    """Score the rows that were held out, if there are any."""
    if run.stream.holdout_rows == 0:
        return None
    return evaluate(run.learner, run.stream.holdout(), field=run.is_field)


def draw(run: Run) -> list[str]:
    """Draw the learning curve; returns what there is to say about it."""
    run.directory.flush()
    try:
        save_curve(run.directory, run.directory.curve_path)
    except ConfigError as error:
        return [f"no picture: {error}"]
    return [f"learning curve: {run.directory.curve_path}"]


def report_end(
    run: Run, result: dict[str, Any], notes: list[str], stopped: bool, quiet: bool, as_json: bool
) -> None:
    """Say how it went, for people and for programs."""
    path = run.directory.path
    if not quiet:
        click.echo(results_table(result))
        for note in notes:
            click.echo(note)
        if stopped:
            click.echo(f"stopped after batch {run.progress.batches}; everything learnt is saved")
            click.echo(f"go on: kalmanhead resume {path}")
        else:
            click.echo(f"checkpoint: {result['checkpoint']}")
    if as_json:
        click.echo(json.dumps(result))


def make_learner(options: dict[str, Any], stream: Stream) -> OnlineLearner:
    """Build the learner for the rows of a stream."""
    spec = stream.spec
    config = ModelConfig.from_mapping(options)
    return build_learner(config, spec.x_shape, spec.y_shape, spec.grid_dims)


def folder(directory: RunDirectory, keep: int) -> CheckpointFolder:
    """Where a run's checkpoints lie."""
    return CheckpointFolder(directory.checkpoints_path, keep)


def storable(options: dict[str, Any]) -> dict[str, Any]:
    """Options as TOML can hold them."""
    return {key: list(v) if isinstance(v, tuple) else v for key, v in options.items()}


def check_fingerprint(now: dict[str, Any], then: dict[str, Any]) -> None:
    """Refuse a source that is not the one that was learnt from."""
    for key, value in flat(then).items():
        other = flat(now).get(key)
        if other != value:
            raise ConfigError(
                f"the source has changed since the checkpoint: {key} was {value!r}, is {other!r}; "
                "bring back the data and options of the run, or start a new one"
            )


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves of a nested structure under their paths; JSON's lists and tuples are the same."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = {str(i): v for i, v in enumerate(tree)}.items()
    else:
        return {path: tree}
    leaves: dict[str, Any] = {}
    for key, value in items:
        leaves.update(flat(value, f"{path}.{key}" if path else str(key)))
    return leaves


def report(restored: Restored, quiet: bool) -> None:
    """Say which damaged checkpoints were passed over."""
    for message in restored.passed_over:
        click.echo(f"kalmanhead: warning: {message}", err=True)
    if not quiet:
        click.echo(f"going on from {restored.path}")


def recent_error(progress: Progress) -> str:
    """The error that a person watches, over the last rows."""
    recent = progress.metrics.summary()["recent"]
    name = "relative_l2" if "relative_l2" in recent else "rmse"
    value = recent[name]
    return f"{name} {value:.4g}" if value is not None else ""


@contextlib.contextmanager
def progress_bar(run: Run, quiet: bool) -> Iterator[tqdm[Any]]:
    """Bar on stderr with rows per second, recent error and time left; off without a terminal."""
    rows, options = run.stream.rows, run.options
    total = None if rows is None else rows * options["epochs"]
    limit = options["max_batches"]
    if limit is not None:
        total = min(limit * options["batch_size"], total or limit * options["batch_size"])
    bar: tqdm[Any] = tqdm(
        total=total,
        initial=run.progress.rows,
        unit="row",
        unit_scale=True,
        disable=True if quiet else None,
        dynamic_ncols=True,
    )
    try:
        yield bar
    finally:
        bar.close()


class Stopper:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the current batch."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
