"""`kalmanhead predict`: what a learnt run says of new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kalmanhead.checkpoint import CheckpointFolder
from kalmanhead.cli.options import POSITIVE, open_stream, quiet_option, run_argument, trust_option
from kalmanhead.cli.predictions import open_writer
from kalmanhead.cli.stored import stored_options
from kalmanhead.cli.table import number
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import ConfigError
from kalmanhead.learner import OnlineLearner
from kalmanhead.metrics import Metrics
from kalmanhead.rundir import RunDirectory
from kalmanhead.streams import SourceSpec


@click.command()
@run_argument
@click.option("--source", required=True, help="New rows, with or without targets.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help=".parquet or .zarr")
@click.option("--batch-size", type=POSITIVE, default=256, show_default=True)
@click.option(
    "--level",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.9,
    show_default=True,
    help="Probability of the intervals.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is at --out.")
@trust_option
@quiet_option
def predict(
    run: Path,
    source: str,
    out: Path,
    batch_size: int,
    level: float,
    overwrite: bool,
    trust_code: bool,
    quiet: bool,
) -> None:
    """Predict the rows of a new source with the newest checkpoint of RUN.

    Writes the prediction and an interval for every target. Where the source has targets, the
    errors are printed as well.
    """
    directory = RunDirectory.open(run)
    options = stored_options(directory, {}, trust_code=trust_code)
    learner, learnt = restored_learner(directory, options)
    stream = open_stream(
        options,
        source=source,
        batch_size=batch_size,
        dims=learnt.grid_dims,
        epochs=1,
        shuffle=False,
        holdout=0,
        max_rows=None,
        on_bad="stop",
        optional_targets=learnt.y_shape[0],
    )
    check_rows(stream.spec, learnt, source)
    metrics = Metrics(field=learnt.grid_dims > 0)
    rows = 0
    with open_writer(
        out, learnt.y_names, is_field=learnt.grid_dims > 0, level=level, overwrite=overwrite
    ) as writer:
        for batch in stream:
            if len(batch):
                predictive = learner.predict_dist(batch.x)
                writer.write(predictive)
                metrics.update(predictive.mean, batch.y)
                rows += len(batch)
    if quiet:
        return
    click.echo(f"{out}: {rows} predictions with {level:.0%} intervals")
    errors = metrics.summary()["prequential"]
    if errors["rmse"] is not None:
        click.echo(", ".join(f"{name} {number(value)}" for name, value in errors.items()))


def restored_learner(
    directory: RunDirectory, options: dict[str, Any]
) -> tuple[OnlineLearner, SourceSpec]:
    """Learner of the newest sound checkpoint, and the rows it was learnt from."""
    restored = CheckpointFolder(directory.checkpoints_path).latest()
    for message in restored.passed_over:
        click.echo(f"kalmanhead: warning: {message}", err=True)
    rows = SourceSpec(**{k: _tuple(v) for k, v in restored.tree["rows"].items()})
    config = ModelConfig.from_mapping(options)
    learner = build_learner(config, rows.x_shape, rows.y_shape, rows.grid_dims)
    learner.load_state(restored.tree["learner"])
    return learner, rows


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
