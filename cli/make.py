"""`kalmanhead make`: real input for a newcomer, solved on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
from tqdm import tqdm

from kalmanhead.cli.options import POSITIVE, quiet_option
from kalmanhead.streams.pde import Burgers, write_zarr


@click.group()
def make() -> None:
    """Make a data set by solving an equation."""


@make.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Zarr group to make.")
@click.option("--samples", type=POSITIVE, default=2000, show_default=True, help="Rows.")
@click.option("--grid", type=POSITIVE, default=256, show_default=True, help="Points of a field.")
@click.option("--nu", type=float, default=0.01, show_default=True, help="Viscosity.")
@click.option("--time", type=float, default=1.0, show_default=True, help="Time of the solution.")
@click.option("--length", type=float, default=1.0, show_default=True, help="Length of the domain.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32")
@click.option("--overwrite", is_flag=True, help="Replace what is at --out.")
@quiet_option
def burgers(
    out: Path,
    samples: int,
    grid: int,
    nu: float,
    time: float,
    length: float,
    seed: int,
    dtype: Literal["float32", "float64"],
    overwrite: bool,
    quiet: bool,
) -> None:
    """Burgers' equation: from a random initial field u(0) to u(TIME), periodic in space."""
    equation = Burgers(nu=nu, length=length, grid=grid, time=time)
    disable = True if quiet else None
    with tqdm(total=samples, unit="row", disable=disable, dynamic_ncols=True) as bar:
        write_zarr(
            out, equation, samples, seed, dtype=dtype, overwrite=overwrite, progress=bar.update
        )
    if not quiet:
        click.echo(f"{out}: {samples} pairs x -> y of {grid} points")
        click.echo(f"learn it: kalmanhead stream --source {out}")
