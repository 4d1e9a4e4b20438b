"""`kalmanhead predict`: what a learnt run says of new rows."""

from __future__ import annotations

from pathlib import Path

import click

from kalmanhead.cli.options import COUNT, Finite, quiet_option, run_argument, trust_option


@click.command()
@run_argument
@click.option("--source", required=True, help="New rows, with or without targets.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help=".parquet or .zarr")
@click.option("--batch-size", type=COUNT, default=256, show_default=True)
@click.option(
    "--level",
    type=Finite(0, 1, min_open=True, max_open=True),
    default=0.9,
    show_default=True,
    help="Probability of the intervals.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is at --out.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Picture to write of the last rows (or the last field): truth, prediction, interval.",
)
@trust_option
@quiet_option
def predict(
    run: Path,
    source: str,
    out: Path,
    batch_size: int,
    level: float,
    overwrite: bool,
    plot: Path | None,
    trust_code: bool,
    quiet: bool,
) -> None:
    """Predict the rows of a new source with the newest checkpoint of RUN.

    Writes the prediction and an interval for every target. Where the source has targets, the
    errors are printed as well.
    """
    from kalmanhead.cli.predicting import predict_rows

    predict_rows(
        run,
        source,
        out,
        batch_size=batch_size,
        level=level,
        overwrite=overwrite,
        plot=plot,
        trust_code=trust_code,
        quiet=quiet,
    )
