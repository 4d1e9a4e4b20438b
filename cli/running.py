"""A run from its options to its result: what `stream` starts and `resume` goes on with."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from tqdm import tqdm

from kalmanhead.bank import HeadBank
from kalmanhead.batch import Batch
from kalmanhead.checkpoint import CheckpointFolder, Restored
from kalmanhead.cli.building import make_learner, open_stream
from kalmanhead.cli.curve import is_drawn, save_curve
from kalmanhead.cli.foresight import foreseen
from kalmanhead.cli.stored import foreign, report
from kalmanhead.cli.stream import stream as stream_command
from kalmanhead.cli.table import results_table
from kalmanhead.cli.watching import Stopper, progress_bar, recent_error
from kalmanhead.engine import Progress, evaluate, learn_stream
from kalmanhead.errors import ConfigError, KalmanHeadError, SourceError
from kalmanhead.head import Head
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
    learner = make_learner(options, stream.spec)
    directory = RunDirectory.create(path)
    directory.write_config(storable(options))
    return assemble(directory, options, stream, learner)


def go_on(directory: RunDirectory, options: dict[str, Any], *, quiet: bool) -> Run:
    """Take up a run, opened for writing, where its newest sound checkpoint left it."""
    stream = open_stream(options)
    run = assemble(directory, options, stream, make_learner(options, stream.spec))
    if run.checkpoints.paths():
        restored = run.checkpoints.latest()
        report(restored)
        restore(run, restored)
        if not quiet:
            click.echo(f"going on from {restored.path}")
    else:
        directory.truncate(0)
    directory.write_config(storable(options))
    return run


def assemble(
    directory: RunDirectory, options: dict[str, Any], stream: Stream, learner: OnlineLearner
) -> Run:
    """Put a run together that has learnt nothing yet."""
    progress = Progress(Metrics(field=stream.spec.grid_dims > 0))
    checkpoints = CheckpointFolder(directory.checkpoints_path, options["keep"])
    return Run(directory, options, stream, learner, progress, checkpoints)


def restore(run: Run, restored: Restored) -> None:
    """Put a checkpoint's state into a run, and cut the metrics back to it."""
    tree = restored.tree
    try:
        check_fingerprint(run.stream.fingerprint(), tree["stream"])
        run.learner.load_state(tree["learner"])
        run.progress.load_state(tree["progress"])
        set_random_state(tree["random"])
        offset = int(tree["metrics_bytes"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise foreign(restored) from error
    run.directory.truncate(offset)


def execute(run: Run, *, quiet: bool, as_json: bool) -> int:
    """Learn to the end (or to a signal), save, report; returns the exit code."""
    counted = progress_bar(rows_to_read(run), run.progress, quiet)
    with run.directory, Stopper() as stopper, counted as bar:
        finished = learn(run, stopper, bar)
        checkpoint = save(run)
        bar.close()
        stopped = stopper.signal is not None and not finished
        holdout = None if stopped else score_holdout(run)
        if holdout is not None:
            checkpoint = save(run, holdout)
        result = {
            **run.progress.summary(),
            "holdout": holdout,
            **bank_report(run.learner.head),
            "run": str(run.directory.path),
            "checkpoint": str(checkpoint),
        }
        notes = [] if stopped else [*draw(run, holdout), *what_next(run, finished)]
        report_end(run, result, notes, stopped, quiet, as_json)
    return 128 + int(stopper.signal) if stopped and stopper.signal else 0


def learn(run: Run, stopper: Stopper, bar: tqdm[Any]) -> bool:
    """Learn batch by batch with checkpoints; returns whether the stream came to its end."""
    every, append = run.options["checkpoint_every"], run.directory.append

    def on_batch(progress: Progress, batch: Batch, prediction: Tensor) -> None:
        append(batch_record(progress, run.learner.head))
        if progress.batches % every == 0:
            save(run)
        if not bar.disable:
            if progress.batches % 20 == 1:
                bar.set_postfix_str(recent_error(progress), refresh=False)
            bar.update(len(batch) + batch.bad_rows)

    if run.progress.batches == 0:
        torch.manual_seed(run.options["seed"])  # what dropout in a backbone draws from
    try:
        return learn_stream(
            run.learner,
            foreseen(run.stream.iterate(run.progress.cursor), run.learner, run.progress),
            run.progress,
            max_batches=run.options["max_batches"],
            on_batch=[on_batch],
            should_stop=lambda: stopper.signal is not None,
        )
    except SourceError as error:
        # Between two batches, so what has been learnt is whole.
        checkpoint = save(run)
        raise type(error)(
            f"{error} (learnt up to batch {run.progress.batches}, saved in {checkpoint})"
        ) from error
    except KalmanHeadError as error:
        # A batch may be half learnt, which no checkpoint may hold.
        saved = run.checkpoints.paths()
        last = f"the last checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        raise type(error)(f"{error} (in batch {run.progress.batches + 1}; {last})") from error


def rows_to_read(run: Run) -> int | None:
    """Rows that the run will have read at its end, about; None for an endless stream."""
    options = run.options
    total = None if run.stream.rows is None else run.stream.rows * options["epochs"]
    if options["max_batches"] is not None:
        limit = options["max_batches"] * options["batch_size"]
        total = limit if total is None else min(limit, total)
    return total


def save(run: Run, holdout: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint of everything that the rest of the run depends on."""
    tree = {
        "learner": run.learner.state(),
        "progress": run.progress.state(),
        "stream": run.stream.fingerprint(),
        "random": random_state(),
        "metrics_bytes": run.directory.flush(),
        "rows": dataclasses.asdict(run.stream.spec),
        "holdout": holdout,
        **bank_report(run.learner.head),
    }
    return run.checkpoints.write(tree, run.progress.batches)


def random_state() -> dict[str, Any]:
    """What dropout in a backbone draws from, on every device that is there."""
    cuda = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def batch_record(progress: Progress, head: Head) -> dict[str, Any]:
    """One line of metrics.jsonl: the errors of the batch, at some batches also those of all."""
    cursor, metrics = progress.cursor, progress.metrics
    record: dict[str, Any] = {
        "batch": progress.batches,
        "rows": progress.rows,
        "epoch": cursor.epoch,
        "row": cursor.row,
        "bad_rows": progress.bad_rows,
        **metrics.newest(),
    }
    if is_drawn(progress.batches):
        summary = metrics.summary()
        record["prequential"], record["recent"] = summary["prequential"], summary["recent"]
        record.update(bank_report(head))
    return record


def bank_report(head: Head) -> dict[str, Any]:
    """The heads of a bank that lead, with their weights, and what they amount to.

    That is the lambda of one head in the bank's place, and how many rows are remembered. Of a
    single head there is only to say that no others lead.
    """
    if not isinstance(head, HeadBank):
        return {"heads": None}
    return {
        "heads": head.leaders(),
        "lambda": float(head.effective_precision),
        "memory": float(head.effective_memory),
    }


def score_holdout(run: Run) -> dict[str, Any] | None:
    """Errors over the rows that were held out, if there are any."""
    if run.stream.holdout_rows == 0:
        return None
    metrics = evaluate(run.learner, run.stream.holdout(), field=run.is_field)
    errors: dict[str, Any] = metrics.summary()["prequential"]
    return errors


def draw(run: Run, holdout: dict[str, Any] | None) -> list[str]:
    """Draw the learning curve; returns what there is to say about it."""
    run.directory.flush()
    try:
        save_curve(run.directory, run.directory.curve_path, holdout)
    except ConfigError as error:
        return [f"no picture: {error}"]
    return [f"learning curve: {run.directory.curve_path}"]


def what_next(run: Run, finished: bool) -> list[str]:
    """How to go on where the run was ended by a limit."""
    if finished:
        return []
    return [
        f"ended by --max-batches {run.options['max_batches']}; go on: kalmanhead resume "
        f"{run.directory.path} --max-batches N (0: no limit)"
    ]


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


def storable(options: dict[str, Any]) -> dict[str, Any]:
    """Options as TOML can hold them, in the order of the command's help."""
    order = [option.name for option in stream_command.params]
    pairs = sorted(options.items(), key=lambda pair: order.index(pair[0]))
    return {key: list(v) if isinstance(v, tuple) else v for key, v in pairs}


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
