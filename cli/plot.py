"""`kalmanhead plot`: the learning curve of a run."""

from __future__ import annotations

from pathlib import Path

import click

from kalmanhead.cli.curve import save_curve
from kalmanhead.cli.options import run_argument
from kalmanhead.rundir import RunDirectory


@click.command()
@run_argument
@click.option("--out", type=click.Path(path_type=Path), help="Picture to write (RUN/curve.png).")
def plot(run: Path, out: Path | None) -> None:
    """Draw the learning curve of RUN."""
    directory = RunDirectory.open(run)
    path = directory.curve_path if out is None else out
    save_curve(directory, path)
    click.echo(f"learning curve: {path}")
