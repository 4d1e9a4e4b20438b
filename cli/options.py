"""Options that commands share, and the configuration file behind them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from kalmanhead.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

HEADS = ("auto", "reset", "drift", "forget", "static", "ridge", "adam", "sgd")


class Finite(click.FloatRange):
    """Numbers of a range without NaN and infinity, which a range lets through."""

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert what was typed."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number: give one such as 0.1.", param, ctx)
        return float(super().convert(number, param, ctx))


class Whole(click.IntRange):
    """Whole numbers of a range."""

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert what was typed."""
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number: give one such as 32.", param, ctx)
        return int(super().convert(number, param, ctx))


def _described(kind: click.FloatRange | click.IntRange, text: str) -> str:
    """What help says of a range: nothing of one without ends, which click shows as x<=None."""
    return "" if kind.min is None and kind.max is None else text


COUNT = Whole(1, 2**63 - 1)  # as far as files and generators count
LIMIT = Whole(0, 2**63 - 1)
SEED = LIMIT
SIZE = Whole(1, 2**16)
RATE = Finite(min=0, max=1)


def apply(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Put several options on a command, in the order in which they are to be listed."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Take a TOML file's values as the options' defaults; unknown keys are refused."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not a TOML file that can be read: {error}") from error
    options = typed(context.command, values, str(path), exclude=("config",))
    context.meta["config"] = str(path)
    context.default_map = {**(context.default_map or {}), **options}


def typed(
    command: click.Command, values: Mapping[str, Any], path: str, *, exclude: tuple[str, ...]
) -> dict[str, Any]:
    """Values of a TOML file as they would be typed, so that they are checked like typed ones.

    Raises
    ------
    ConfigError
        A key is no option of the command, or its value is of a kind that no option takes.
    """
    known = {
        max(p.opts, key=len).lstrip("-").replace("-", "_"): p
        for p in command.params
        if isinstance(p, click.Option) and p.name not in exclude
    }
    options: dict[str, Any] = {}
    for key, value in values.items():
        option = known.get(key.replace("-", "_"))
        if option is None:
            raise ConfigError(
                f"{path}: key {key!r} is no option of `kalmanhead {command.name}`; there are "
                f"{', '.join(sorted(known))}"
            )
        assert option.name is not None
        options[option.name] = _as_typed(option, key, value, path)
    return options


def _as_typed(option: click.Option, key: str, value: Any, path: str) -> Any:
    def is_scalar(part: Any) -> bool:
        return isinstance(part, str | int | float) and not isinstance(part, bool)

    if option.is_flag:
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif option.multiple:
        parts = value if isinstance(value, list) else [value]
        if all(is_scalar(part) for part in parts):
            return [str(part) for part in parts]
        wanted = "a list of names"
    else:
        if is_scalar(value):
            return str(value)
        wanted = "one number or text"
    raise ConfigError(f"{path}: {key} is {value!r}: give {wanted}")


config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="TOML file with any of these options; flags win over it.",
)

source_options = apply(
    click.option(
        "--source",
        required=True,
        help="Zarr group, Parquet file, directory or glob, URL, river:NAME or river.synth:NAME.",
    ),
    click.option("--x", default="x", show_default=True, help="Zarr: array of the inputs."),
    click.option("--y", default="y", show_default=True, help="Zarr: array of the targets."),
    click.option("--field", help="Zarr: one array whose row t predicts row t + LEAD."),
    click.option("--lead", type=COUNT, default=1, show_default=True, help="With --field."),
    click.option("--target", multiple=True, help="Parquet: column to predict; may be repeated."),
    click.option("--feature", multiple=True, help="Column to predict from; default: all others."),
    click.option("--weight", help="Array or column of the row weights."),
    click.option("--dims", type=Whole(0, 2), help="0: rows are vectors; 1 or 2: fields on a grid."),
    click.option(
        "--missing-chunks",
        type=click.Choice(["refuse", "fill"]),
        default="refuse",
        show_default=True,
        help="Zarr: what to do with a chunk that is not there.",
    ),
    click.option("--batch-size", type=COUNT, default=32, show_default=True, help="Rows per batch."),
    click.option(
        "--on-bad",
        type=click.Choice(["stop", "skip"]),
        default="stop",
        show_default=True,
        help="What to do with a row that holds NaN or infinity.",
    ),
)

pass_options = apply(
    click.option(
        "--epochs", type=COUNT, default=1, show_default=True, help="Passes over the source."
    ),
    click.option(
        "--shuffle/--no-shuffle",
        default=None,
        help="Random order in each pass; by default when there are several passes.",
    ),
    click.option(
        "--holdout",
        type=Finite(min=0),
        default=0,
        help="Last rows (or a fraction of all) that are not learnt but scored at the end.",
    ),
    click.option("--max-batches", type=COUNT, help="Stop after so many batches."),
    click.option("--max-rows", type=COUNT, help="Use only so many rows of the source."),
)

model_options = apply(
    click.option(
        "--backbone",
        default="auto",
        show_default=True,
        help="auto, linear, mlp, fno, or module:path.to:factory.",
    ),
    click.option("--width", type=SIZE, help="Width of the backbone."),
    click.option("--depth", type=SIZE, help="Layers of the backbone."),
    click.option("--modes", type=SIZE, help="Fourier modes of the backbone."),
    click.option("--skip/--no-skip", default=None, help="Inputs among the head's features."),
    click.option(
        "--head", type=click.Choice(HEADS), default="auto", show_default=True, help="Last layer."
    ),
    click.option(
        "--mixing", type=click.Choice(["soft", "best"]), help="How --head auto mixes its heads."
    ),
    click.option("--lam", type=Finite(min=0, min_open=True), help="Prior precision."),
    click.option("--eta", type=RATE, help="Rate of --head drift."),
    click.option("--gamma", type=RATE, help="Forgetting factor of --head forget."),
    click.option(
        "--lambda-scale",
        type=click.Choice(["sum", "mean"]),
        default="sum",
        show_default=True,
        help="Whether lambda stands against a sum or a mean over rows.",
    ),
    click.option(
        "--order",
        type=click.Choice(["head-first", "backbone-first"]),
        default="head-first",
        show_default=True,
        help="What is updated first on a batch.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["adam", "sgd"]),
        default="adam",
        show_default=True,
        help="Of the backbone.",
    ),
    click.option("--lr", type=Finite(min=0), help="Learning rate of the backbone."),
    click.option("--clip", type=Finite(min=0, min_open=True), help="Largest gradient norm."),
    click.option(
        "--anneal",
        type=Finite(min=0),
        help="Batches after which the rate has fallen by the root of 2; 0 for never.",
    ),
    click.option(
        "--average",
        type=Finite(min=0, max=1, max_open=True),
        help="Decay of the averaged model that predicts beside the newest; 0 for none.",
    ),
    click.option(
        "--robust/--no-robust",
        default=None,
        help="Leave out single wild targets; the bank does by default.",
    ),
    click.option(
        "--loss",
        type=click.Choice(["squared", "relative"]),
        default="squared",
        show_default=True,
        help="relative: errors are squared in units of each row's own targets.",
    ),
    click.option(
        "--buffer", type=COUNT, help="Rows kept, from which the backbone's batches are drawn."
    ),
    click.option(
        "--buffer-kind",
        type=click.Choice(["reservoir", "recent"]),
        help="With --buffer: a sample of all rows so far (default), or the last ones.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float64", "float32"]),
        default="float64",
        show_default=True,
        help="Of the head's state.",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda", "mps"]),
        default="auto",
        show_default=True,
    ),
    click.option("--seed", type=SEED, default=0, show_default=True),
)

keep_options = apply(
    click.option(
        "--checkpoint-every",
        type=COUNT,
        default=200,
        show_default=True,
        help="Batches between checkpoints.",
    ),
    click.option(
        "--keep", type=COUNT, default=3, show_default=True, help="Checkpoints that are kept."
    ),
)

quiet_option = click.option("--quiet", is_flag=True, help="Print nothing but errors.")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Last line on stdout is one JSON object."
)
run_argument = click.argument("run", type=click.Path(path_type=Path))
trust_option = click.option(
    "--trust-code",
    is_flag=True,
    help="Import the module that the run's configuration names as its backbone.",
)
