"""`kalmanhead plot`: the learning curve of a run."""

from __future__ import annotations

from pathlib import Path

import click

from kalmanhead.cli.options import run_argument


@click.command()
@run_argument
@click.option("--out", type=click.Path(path_type=Path), help="Picture to write (RUN/curve.png).")
def plot(run: Path, out: Path | None) -> None:
    """Draw the learning curve of RUN."""
    from kalmanhead.cli.curve import save_curve
    from kalmanhead.cli.stored import newest_result
    from kalmanhead.rundir import RunDirectory

    directory = RunDirectory.open(run)
    result = newest_result(directory)
    path = directory.curve_path if out is None else out
    save_curve(directory, path, None if result is None else result["holdout"])
    click.echo(f"learning curve: {path}")
