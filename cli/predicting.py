"""Predictions of a learnt run for the rows of a source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from kalmanhead.checkpoint import CheckpointFolder
from kalmanhead.cli.building import make_learner, open_stream
from kalmanhead.cli.figure import check_picture, write
from kalmanhead.cli.predicted_figure import LastPredictions, predicted_figure
from kalmanhead.cli.predictions import Predicted, open_writer
from kalmanhead.cli.stored import foreign, report, stored_options
from kalmanhead.cli.table import number
from kalmanhead.errors import ConfigError
from kalmanhead.learner import OnlineLearner
from kalmanhead.metrics import Metrics
from kalmanhead.rundir import RunDirectory
from kalmanhead.streams import SourceSpec, Stream


def predict_rows(
    run: Path,
    source: str,
    out: Path,
    *,
    batch_size: int,
    level: float,
    overwrite: bool,
    plot: Path | None,
    trust_code: bool,
    quiet: bool,
) -> None:
    """Write the predictions for a source; see the command for the rest."""
    if plot is not None:
        check_picture(plot)
    refuse_overlap(out, {"the run": str(run), "the source": source})
    directory = RunDirectory.open(run)
    options = stored_options(directory, {}, trust_code=trust_code)
    refuse_overlap(out, {"what the run learnt from": str(options["source"])})
    learner, learnt, features = restored_learner(directory, options)
    stream = open_new_rows(
        options,
        learnt,
        features,
        source,
        batch_size=batch_size,
        optional_targets=learnt.y_shape[0],
    )
    check_rows(stream.spec, learnt, source)
    metrics = Metrics(field=learnt.grid_dims > 0)
    last = LastPredictions(is_field=learnt.grid_dims > 0)
    with open_writer(
        out, learnt.y_names, is_field=learnt.grid_dims > 0, level=level, overwrite=overwrite
    ) as writer:
        for batch in stream:
            if len(batch):
                predictive = learner.predict_dist(batch.x)
                predicted = Predicted.of(predictive, level)
                writer.write(predicted)
                last.add(predicted, batch.y.double().numpy())
                metrics.update(predictive.mean, batch.y)
    if plot is not None:
        write(predicted_figure(last, learnt.y_names[0], level, directory.path.name), plot)
    if not quiet:
        report_end(out, last.rows, level, plot, metrics)


def report_end(out: Path, rows: int, level: float, plot: Path | None, metrics: Metrics) -> None:
    """Say what was written and, where there were targets, how well they were predicted."""
    click.echo(f"{out}: {rows} predictions with {100 * level:g}% intervals")
    errors = metrics.summary()["prequential"]
    if errors["rmse"] is not None:
        click.echo(", ".join(f"{name} {number(value)}" for name, value in errors.items()))
    if plot is not None:
        click.echo(f"picture: {plot}")


def open_new_rows(
    options: dict[str, Any],
    learnt: SourceSpec,
    features: tuple[str, ...],
    source: str,
    **changes: Any,
) -> Stream:
    """Open another source as the run's own was read, once and in order."""
    return open_stream(
        options,
        source=source,
        feature=features,
        weight=None,
        dims=learnt.grid_dims,
        epochs=1,
        shuffle=False,
        holdout=0,
        max_rows=None,
        on_bad="stop",
        **changes,
    )


def restored_learner(
    directory: RunDirectory, options: dict[str, Any]
) -> tuple[OnlineLearner, SourceSpec, tuple[str, ...]]:
    """Learner of the newest sound checkpoint, the rows it learnt from, and their columns."""
    restored = CheckpointFolder(directory.checkpoints_path).latest()
    report(restored)
    tree = restored.tree
    try:
        rows = SourceSpec(**{key: _tuple(value) for key, value in tree["rows"].items()})
        learner = make_learner(options, rows)
        learner.load_state(tree["learner"])
        kind = tree["stream"]["source"]["kind"]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise foreign(restored) from error
    # By name, so that further columns, such as the weight or a date, do no harm.
    features = columns(rows.x_names) if kind == "parquet" else options["feature"]
    return learner, rows, features


def refuse_overlap(out: Path, kept: dict[str, str]) -> None:
    """Refuse to write over, into or around what predictions are made from."""
    target = out.resolve()
    for what, name in kept.items():
        path = Path(name).resolve()
        if path.exists() and (target == path or path.is_relative_to(target)):
            raise ConfigError(f"--out {out} would overwrite {what}, {name}: give another --out")


def columns(names: tuple[str, ...]) -> tuple[str, ...]:
    """Columns of a file from the names of the inputs: v[0] and v[1] are in the column v."""
    return tuple(dict.fromkeys(re.sub(r"\[\d+\]$", "", name) for name in names))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def check_rows(new: SourceSpec, learnt: SourceSpec, source: str) -> None:
    """Refuse rows that the model cannot take; a field may lie on another grid."""
    skip = 1 if learnt.grid_dims else None
    if new.x_shape[:skip] != learnt.x_shape[:skip] or new.grid_dims != learnt.grid_dims:
        raise ConfigError(
            f"{source}: rows have inputs of shape {new.x_shape}, the run learnt {learnt.x_shape}: "
            "give a source with the same inputs"
        )
    if not learnt.grid_dims and new.x_names != learnt.x_names:
        raise ConfigError(
            f"{source}: the inputs are {', '.join(new.x_names)}; the run learnt from "
            f"{', '.join(learnt.x_names)}: give the same columns in the same order"
        )
