"""`kalmanhead make`: data sets to learn from, made by solving equations."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from kalmanhead.cli.options import COUNT, Finite, Whole, quiet_option

TITLES = {
    "burgers": "Burgers' equation: from a random initial field u(0) to u(TIME), periodic in space.",
    "ks": "Kuramoto-Sivashinsky equation: from u(t) to u(t + TIME), chaotic, periodic in space.",
    "ns2d": "Navier-Stokes equations: a forced vorticity w(t) to w(t + TIME), periodic square.",
    "darcy": "Darcy's law: from a random permeability to the pressure on a square.",
    "advection": "Advection at a speed that drifts from row to row, periodic in space.",
}
COMPARED_ROWS = 32


class Equations(click.Group):
    """A command for each equation, made of its parameters when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the equations."""
        return list(TITLES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Make the command of an equation."""
        return _command(cmd_name) if cmd_name in TITLES else None


@click.group(cls=Equations, invoke_without_command=True)
@click.pass_context
def make(context: click.Context) -> None:
    """Make a data set by solving an equation."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _command(name: str) -> click.Command:
    """The command that writes an equation, with its parameters as options."""
    from kalmanhead.streams.pde import EQUATIONS

    kind = EQUATIONS[name]
    parts = fields(kind)

    @click.option(
        "--out", required=True, type=click.Path(path_type=Path), help="Zarr folder to make."
    )
    @click.option("--samples", type=COUNT, default=1200, show_default=True, help="Rows.")
    @click.option(
        "--dtype",
        type=click.Choice(["float32", "float64"]),
        default="float32",
        show_default=True,
        help="Of both arrays.",
    )
    @click.option("--overwrite", is_flag=True, help="Replace what is at --out.")
    @quiet_option
    def run(
        out: Path, samples: int, dtype: Any, overwrite: bool, quiet: bool, **parameters: Any
    ) -> None:
        write(kind(**parameters), out, samples, dtype=dtype, overwrite=overwrite, quiet=quiet)

    command = click.command(name, help=TITLES[name])(run)
    command.params[2:2] = [parameter_option(part) for part in parts]
    return command


def parameter_option(part: Field[Any]) -> click.Option:
    """An option for one parameter; its limits are the equation's own to check."""
    flag = "--" + part.name.replace("_", "-")
    kind: click.ParamType[Any] | None = None
    if isinstance(part.default, bool):
        flag = f"{flag}/--no-{flag[2:]}"
    elif isinstance(part.default, int):
        kind = Whole()
    elif isinstance(part.default, float):
        kind = Finite()
    return click.Option(
        [flag], type=kind, default=part.default, show_default=True, help=part.metadata["about"]
    )


def write(
    equation: Any, out: Path, samples: int, *, dtype: Any, overwrite: bool, quiet: bool
) -> None:
    """Write the rows, and say what they are and what is known of them without learning."""
    from tqdm import tqdm

    from kalmanhead.streams.pde import baselines, write_zarr

    disable = True if quiet else None
    with tqdm(total=samples, unit="row", disable=disable, dynamic_ncols=True) as bar:
        write_zarr(out, equation, samples, dtype=dtype, overwrite=overwrite, progress=bar.update)
    if quiet:
        return
    points = " x ".join(map(str, equation.shape))
    x, y = equation.labels
    side = f"(0, {equation.length:g})" + "^2" * (len(equation.shape) == 2)
    click.echo(f"{out}: {samples} pairs {x} -> {y} of {points} points on {side}")
    known = baselines(equation, range(min(samples, COMPARED_ROWS)))
    errors = ", ".join(f"{name} {error:.3g}" for name, error in known.items())
    click.echo(f"relative L2 without learning: {errors}")
    click.echo(f"learn it: kalmanhead stream --source {out}")
