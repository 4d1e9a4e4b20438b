"""`kalmanhead rollout`: how long a learnt run foresees a trajectory by itself."""

from __future__ import annotations

from pathlib import Path

import click

from kalmanhead.cli.options import (
    COUNT,
    LIMIT,
    Finite,
    Whole,
    json_option,
    quiet_option,
    run_argument,
    trust_option,
)


@click.command()
@run_argument
@click.option("--source", required=True, help="Rows x, y = u(t), u(t + 1), in order of time.")
@click.option("--steps", required=True, type=Whole(1, 10**6), help="Steps to predict.")
@click.option("--start", type=LIMIT, default=0, show_default=True, help="Row to start from.")
@click.option(
    "--starts",
    type=Whole(1, 10**6),
    default=1,
    show_default=True,
    help="Roll-outs, spread over the rows from --start on.",
)
@click.option(
    "--stride",
    type=COUNT,
    help="Rows from a step to the next of its trajectory (1, or the lead of --field).",
)
@click.option(
    "--field", help="Zarr: one array whose row t predicts row t + LEAD, if not the run's."
)
@click.option("--lead", type=COUNT, help="With --field.")
@click.option(
    "--threshold",
    type=Finite(min=0, min_open=True),
    default=0.3,
    show_default=True,
    help="Relative L2 error up to which the steps are counted.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Picture to write.")
@trust_option
@quiet_option
@json_option
def rollout(
    run: Path,
    source: str,
    steps: int,
    start: int,
    starts: int,
    stride: int | None,
    field: str | None,
    lead: int | None,
    threshold: float,
    plot: Path | None,
    trust_code: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Predict a trajectory of fields with RUN, each step from the prediction before it.

    Prints the relative L2 error by step, beside that of persistence: the first field, kept.
    Rows that RUN has learnt from flatter it.
    """
    from kalmanhead.cli.rolling import Request, roll_out

    request = Request(run, source, steps, start, starts, stride, field, lead, threshold)
    roll_out(request, plot=plot, trust_code=trust_code, quiet=quiet, as_json=as_json)
