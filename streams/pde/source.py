"""Equations solved while they are streamed: `pde:NAME?parameter=value&rows=1000`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args, get_type_hints
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.layout import choose_layout
from kalmanhead.streams.pde.advection import Advection
from kalmanhead.streams.pde.burgers import Burgers
from kalmanhead.streams.pde.darcy import Darcy
from kalmanhead.streams.pde.equation import Equation
from kalmanhead.streams.pde.ks import KuramotoSivashinsky
from kalmanhead.streams.pde.ns2d import NavierStokes2d
from kalmanhead.streams.source import (
    LARGEST_EXACT_INTEGER,
    Block,
    RandomAccessSource,
    Source,
    concatenate,
)

EQUATIONS: dict[str, type[Any]] = {
    "burgers": Burgers,
    "ks": KuramotoSivashinsky,
    "ns2d": NavierStokes2d,
    "darcy": Darcy,
    "advection": Advection,
}

_MOST_EDGES = 2**16


class PdeSource(Source):
    """Rows of an equation, without end, solved in blocks as they are asked for.

    Any row can be reached without those before it, at the cost that the equation states: at most
    one block of rows, and for flows the burn-in and the steps of the row's own trajectories.

    Parameters
    ----------
    equation:
        Such as `Burgers(nu=0.01)`.
    dims:
        See `kalmanhead.streams.layout.choose_layout`; by default rows are fields of one channel
        on the equation's grid.

    Examples
    --------
    >>> source = PdeSource(Burgers(nu=0.1, grid=32, time=0.1))
    >>> next(source.iterate(1000)).x.shape[1:]
    (1, 32)
    """

    def __init__(self, equation: Equation, *, dims: int | None = None, rows: int | None = None):
        self.equation, self.name = equation, f"pde:{equation.name}"
        shape = equation.shape
        self.layout = choose_layout(shape, shape, len(shape) if dims is None else dims, self.name)
        self.spec = self.layout.spec(rows, *equation.labels)

    def iterate(self, start: int = 0) -> Iterator[Block]:
        """Yield all rows from `start` on."""
        # Blocks begin at the same rows wherever reading begins, so that a row has the same bits
        # on machines whose vector units make its last one depend on the rows beside it.
        step, end = self.equation.block_rows, self.spec.rows
        low = start // step * step
        while end is None or max(low, start) < end:
            high = low + step if end is None else min(low + step, end)
            x, y = self.equation.sample(range(low, high))
            rows = slice(max(start - low, 0), None)
            yield Block(self.layout.shape_x(x.numpy())[rows], self.layout.shape_y(y.numpy())[rows])
            low = high

    def fingerprint(self) -> dict[str, Any]:
        """Return the equation with all its parameters, and the number of rows."""
        return {"kind": "pde", "equation": self.equation.attributes(), "rows": self.spec.rows}


class FinitePdeSource(PdeSource, RandomAccessSource):
    """The first `rows` rows of an equation, which can be shuffled and held out.

    Rows are solved again in each pass, unless they fit the memory for shuffling.

    Examples
    --------
    >>> source = FinitePdeSource(Burgers(nu=0.1, grid=32, time=0.1), rows=10)
    >>> source.read(3, 7).y.shape
    (4, 1, 32)
    """

    def __init__(self, equation: Equation, rows: int, *, dims: int | None = None):
        super().__init__(equation, dims=dims, rows=rows)
        self.rows = rows

    def read(self, start: int, stop: int) -> Block:
        """Solve the rows `start <= row < stop`."""
        blocks, at = [], start
        for block in self.iterate(start):
            blocks.append(block.take(slice(0, stop - at)))
            at += len(block)
            if at >= stop:
                break
        return concatenate(blocks)

    def edges(self) -> NDArray[np.int64]:
        """Return multiples of the rows that are solved together."""
        blocks = -(-self.rows // self.equation.block_rows)
        step = self.equation.block_rows * -(-blocks // _MOST_EDGES)
        return np.append(np.arange(0, self.rows, step, dtype=np.int64), np.int64(self.rows))


def open_pde(target: str, *, dims: int | None = None) -> PdeSource:
    """Open `pde:NAME?parameter=value&...` as a source.

    Parameters
    ----------
    target:
        NAME is one of `EQUATIONS`; parameters are those of its class, and `rows`, without which
        the source is endless.
    dims:
        See `PdeSource`.

    Raises
    ------
    SourceError
        For an unknown equation or parameter.
    ConfigError
        For a value that makes no sense.

    Examples
    --------
    >>> open_pde("pde:ks?length=22&grid=32&seed=3&rows=20").spec.rows
    20
    """
    name, _, query = target.partition(":")[2].partition("?")
    if name not in EQUATIONS:
        raise SourceError(f"{target}: no equation {name!r}; there are {', '.join(EQUATIONS)}")
    kinds = get_type_hints(EQUATIONS[name])
    kinds = {**{part.name: kinds[part.name] for part in fields(EQUATIONS[name])}, "rows": int}
    options: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in kinds:
            raise SourceError(f"{target}: no parameter {key!r}; there are {', '.join(kinds)}")
        if key in options:
            raise ConfigError(f"{target}: {key} is given twice; give it once")
        options[key] = _value(target, key, text, kinds[key])
    rows = options.pop("rows", None)
    if rows is not None and not 1 <= rows <= LARGEST_EXACT_INTEGER:
        raise ConfigError(f"{target}: rows is {rows}; give a whole number from 1 on, up to 2^53")
    try:
        equation: Equation = EQUATIONS[name](**options)
    except ConfigError as error:
        raise ConfigError(f"{target}: {error}") from None
    if rows is None:
        return PdeSource(equation, dims=dims)
    return FinitePdeSource(equation, rows, dims=dims)


def _value(target: str, key: str, text: str, kind: Any) -> Any:
    """Read a parameter's text as the kind of value that its class declares."""
    kinds = get_args(kind) or (kind,)
    if type(None) in kinds and text == "none":
        return None
    if bool in kinds:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f"{target}: {key} is {text!r}; give true or false")
    if str in kinds:
        return text
    try:
        return int(text) if int in kinds else float(text)
    except ValueError:
        wanted = "a whole number" if int in kinds else "a number"
        raise ConfigError(f"{target}: {key} is {text!r}; give {wanted}") from None
