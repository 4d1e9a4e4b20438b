"""What every equation offers, and how its parameters are declared and checked.

Fields are (n, *grid) in float64; row i belongs to sample index i and to nothing else, so that a
run may stop and go on anywhere. A new equation is a frozen dataclass that fulfils `Equation`,
entered in the table of `kalmanhead.streams.pde.source`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, fields
from typing import Any, Protocol, Self, cast

from torch import Tensor

from kalmanhead.errors import ConfigError


class Equation(Protocol):
    """What a solver must offer to be streamed from and written to a file."""

    @property
    def name(self) -> str:
        """One word."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Grid of one field."""
        ...

    @property
    def labels(self) -> tuple[str, str]:
        """What the fields x and y are."""
        ...

    @property
    def block_rows(self) -> int:
        """Rows that are best solved together."""
        ...

    def with_seed(self, seed: int) -> Self:
        """The same equation with other random fields."""
        ...

    def sample(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Fields x and y of these rows, both (n, *grid), float64."""
        ...

    def plain(
        self,
        x: Tensor,  # (n, *grid)
    ) -> dict[str, Tensor]:
        """Predictions of y, (n, *grid), that need no learning, by name."""
        ...

    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""
        ...


def option(
    default: Any,
    about: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> Any:
    """Declare a parameter of an equation: its default, a line of help and its limits.

    Parameters
    ----------
    default:
        Its kind (int, float or bool) is the parameter's kind.
    about:
        One line of help.
    low, high:
        Least and largest value.
    above:
        Value that it must exceed.
    """
    limits = {"low": low, "above": above, "high": high}
    return field(default=default, metadata={"about": about, **limits})


def check_options(equation: Any) -> None:
    """Check the parameters of an equation, a dataclass, against what `option` says of them.

    Raises
    ------
    ConfigError
        Names the parameter, what it must be and what it is.

    Examples
    --------
    >>> from kalmanhead.streams.pde.advection import Advection
    >>> Advection(period=0.0)
    Traceback (most recent call last):
    kalmanhead.errors.ConfigError: period must be a number above 0.0, got 0.0
    """
    for part in fields(equation):
        if "about" not in part.metadata:
            continue
        value, whole = getattr(equation, part.name), isinstance(part.default, int)
        if isinstance(part.default, bool | str):
            right = type(value) is type(part.default)
        elif isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            right = False
        else:
            right = math.isfinite(value) and _within(value, **_limits(part.metadata))
        if not right:
            kind = {bool: "true or false", str: "a name", int: "a whole number", float: "a number"}
            wanted = kind[type(part.default)] + _words(**_limits(part.metadata))
            raise ConfigError(f"{part.name} must be {wanted}, got {value!r}")


def check_even_grid(grid: int, least: int = 8) -> None:
    """Refuse grids that are odd or too small for a Fourier series."""
    if grid < least or grid % 2:
        raise ConfigError(f"grid must be even and at least {least} points, got {grid}")


def row_numbers(indices: Iterable[int]) -> list[int]:
    """Sample indices as a list; negative ones are refused."""
    rows = [int(i) for i in indices]
    if any(i < 0 for i in rows):
        raise ConfigError(f"sample indices must not be negative, got {min(rows)}")
    return rows


def solving_time(time: float | None, usual: float) -> float:
    """The time to solve for, None for the usual one; what is not positive is refused."""
    time = usual if time is None else time
    if not (math.isfinite(time) and time > 0):
        raise ConfigError(f"time must be a number above 0, got {time}")
    return time


def check_fields(values: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Refuse fields that are not (n, *shape)."""
    if tuple(values.shape[1:]) != shape or values.ndim != len(shape) + 1:
        wanted = ", ".join(["n", *map(str, shape)])
        raise ConfigError(f"{name} must have shape ({wanted}), got {tuple(values.shape)}")


def _limits(metadata: Any) -> dict[str, float | None]:
    return {key: cast("float | None", metadata[key]) for key in ("low", "above", "high")}


def _within(value: float, low: float | None, above: float | None, high: float | None) -> bool:
    return (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
    )


def _words(low: float | None, above: float | None, high: float | None) -> str:
    parts = [
        f" {word} {limit}"
        for word, limit in (("from", low), ("above", above), ("up to", high))
        if limit is not None
    ]
    return "".join(parts)
