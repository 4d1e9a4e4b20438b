"""`kalmanhead make`: real input for a newcomer, solved on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from kalmanhead.cli.options import COUNT, SEED, Finite, quiet_option


@click.group(invoke_without_command=True)
@click.pass_context
def make(context: click.Context) -> None:
    """Make a data set by solving an equation."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@make.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Zarr group to make.")
@click.option("--samples", type=COUNT, default=2000, show_default=True, help="Rows.")
@click.option("--grid", type=COUNT, default=256, show_default=True, help="Points of a field.")
@click.option("--nu", type=Finite(), default=0.01, show_default=True, help="Viscosity.")
@click.option("--time", type=Finite(), default=1.0, show_default=True, help="Time solved for.")
@click.option("--length", type=Finite(), default=1.0, show_default=True, help="Of the domain.")
@click.option("--seed", type=SEED, default=0, show_default=True)
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
    from tqdm import tqdm

    from kalmanhead.streams.pde import Burgers, write_zarr

    equation = Burgers(nu=nu, length=length, grid=grid, time=time)
    disable = True if quiet else None
    with tqdm(total=samples, unit="row", disable=disable, dynamic_ncols=True) as bar:
        write_zarr(
            out, equation, samples, seed, dtype=dtype, overwrite=overwrite, progress=bar.update
        )
    if not quiet:
        click.echo(f"{out}: {samples} pairs x -> y of {grid} points")
        click.echo(f"learn it: kalmanhead stream --source {out}")
