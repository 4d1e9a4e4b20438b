"""Sources made of arrays: pairs (x, y), and one series that predicts itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.layout import choose_layout, numbered
from kalmanhead.streams.source import (
    Array,
    Block,
    RandomAccessSource,
    SourceSpec,
    require_rows,
    to_float,
)

# Reads of about this size keep the cost per call small and the memory bounded.
READ_BYTES = 16 * 2**20
# Chunks of x and y that do not divide one another are read in common multiples up to this.
LARGEST_COMMON_READ = 32 * 2**20


class Rows(ABC):
    """One array, (n, ...), read by ranges of its first axis.

    Attributes
    ----------
    name:
        What errors call it.
    shape, dtype:
        As in numpy.
    chunk_rows:
        Rows that are cheapest to read together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int

    @abstractmethod
    def fetch(self, start: int, stop: int) -> Array:
        """Read rows `start <= row < stop` in the stored dtype."""

    def read(self, start: int, stop: int) -> Array:
        """Read rows `start <= row < stop` as float32 or float64."""
        return to_float(self.fetch(start, stop), self.name, start)

    def describe(self) -> dict[str, Any]:
        """Return shape and dtype as plain JSON."""
        return {"shape": list(self.shape), "dtype": self.dtype.newbyteorder("=").str[1:]}


class MemoryRows(Rows):
    """An array or tensor that is already in memory."""

    def __init__(self, values: Any, name: str):
        self.values = as_array(values, name)
        if self.values.ndim == 0:
            raise SourceError(f"{name} is a single number; give an array whose first axis is rows")
        self.name, self.shape, self.dtype = name, self.values.shape, self.values.dtype
        self.chunk_rows = 1

    def fetch(self, start: int, stop: int) -> Array:
        """Return a view of the rows."""
        return self.values[start:stop]


def as_array(values: Any, name: str) -> Array:
    """Turn a tensor or anything array-like into a numeric numpy array."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # numpy has no bfloat16; float64 holds it exactly.
        values = values.double() if values.dtype == torch.bfloat16 else values
        return np.asarray(values.numpy())
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise SourceError(f"{name} is no array: {error}; give rows of equal length") from None
    if array.dtype.kind not in "biuf":
        raise SourceError(
            f"{name} has dtype {array.dtype}, which is no real number; convert it to float"
        )
    return array


class MissingRows(Rows):
    """Targets that nobody has measured yet: NaN throughout."""

    def __init__(self, name: str, shape: tuple[int, ...]):
        self.name, self.shape = name, shape
        self.dtype, self.chunk_rows = np.dtype(np.float64), 1

    def fetch(self, start: int, stop: int) -> Array:
        """Return rows of NaN."""
        return np.full((stop - start, *self.shape[1:]), np.nan)


class PairSource(RandomAccessSource):
    """Rows of x and y (and weights) from arrays of equal length.

    Parameters
    ----------
    x, y, weight:
        The arrays; weight is (n,) or None.
    name:
        What errors call the source.
    dims:
        See `kalmanhead.streams.layout.choose_layout`.
    follow:
        Take the shortest of the arrays instead of refusing unequal lengths.
    kind:
        Recorded in the fingerprint.

    Raises
    ------
    SourceError
        Unequal lengths, no rows, or grids that do not match.
    ConfigError
        When `dims` is none of 0, 1 and 2.
    """

    def __init__(
        self,
        x: Rows,
        y: Rows,
        weight: Rows | None = None,
        *,
        name: str = "arrays",
        dims: int | None = None,
        follow: bool = False,
        kind: str = "arrays",
    ):
        self.x, self.y, self.weight, self.name, self.kind = x, y, weight, name, kind
        self.layout = choose_layout(x.shape[1:], y.shape[1:], dims, name)
        parts = [x, y] if weight is None else [x, y, weight]
        if weight is not None and math.prod(weight.shape[1:]) != 1:
            raise SourceError(f"{weight.name} has shape {weight.shape}; weights are one per row")
        lengths = {part.shape[0] for part in parts}
        if len(lengths) > 1 and not follow:
            listed = ", ".join(f"{part.name} has {part.shape[0]} rows" for part in parts)
            raise SourceError(
                f"{name}: {listed}; make them equal, or take the shorter with follow=True"
            )
        self.rows = min(lengths)
        self.spec = self.layout.spec(self.rows, x.name, y.name)
        self._step = _common_step([part.chunk_rows for part in parts], self.spec.row_bytes)
        require_rows(self)

    def read(self, start: int, stop: int) -> Block:
        """Read the rows `start <= row < stop`."""
        weight = None if self.weight is None else self.weight.read(start, stop).reshape(-1)
        return Block(
            self.layout.shape_x(self.x.read(start, stop)),
            self.layout.shape_y(self.y.read(start, stop)),
            weight,
        )

    def edges(self) -> NDArray[np.int64]:
        """Return multiples of the chunks of all arrays."""
        return _edges(self.rows, self._step)

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, rows, and the arrays' names, shapes and dtypes."""
        parts = {"x": self.x, "y": self.y, "weight": self.weight}
        arrays = {
            role: {"name": part.name, **part.describe()} for role, part in parts.items() if part
        }
        return {"kind": self.kind, "rows": self.rows, "arrays": arrays}


class LeadSource(RandomAccessSource):
    """One series u, (T, ...), whose row t predicts row t + lead.

    Row t is x = u[t], y = u[t + lead]; there are T - lead rows.

    Raises
    ------
    ConfigError
        When lead is below 1.
    SourceError
        When the series is not longer than lead.
    """

    def __init__(
        self,
        u: Rows,
        lead: int = 1,
        *,
        name: str = "series",
        dims: int | None = None,
        kind: str = "series",
    ):
        if lead < 1:
            raise ConfigError(f"lead is {lead}; it counts steps into the future, at least 1")
        if u.shape[0] <= lead:
            raise SourceError(
                f"{name}: {u.name} has {u.shape[0]} rows, too few for lead {lead}; give a longer "
                f"series or a smaller lead"
            )
        self.u, self.lead, self.name, self.kind = u, lead, name, kind
        self.layout = choose_layout(u.shape[1:], u.shape[1:], dims, name)
        self.rows = u.shape[0] - lead
        now = numbered(u.name, self.layout.x_shape[0])
        self.lag = lead - 1
        self.spec = SourceSpec(
            self.layout.x_shape,
            self.layout.y_shape,
            now,
            tuple(f"{column} at lead {lead}" for column in now),
            self.rows,
            self.layout.grid_dims,
        )
        self._step = _common_step([u.chunk_rows], self.spec.row_bytes)

    def read(self, start: int, stop: int) -> Block:
        """Read the rows `start <= row < stop`."""
        return self._pairs(self.u.read(start, stop + self.lead))

    def iterate(self, start: int = 0) -> Iterator[Block]:
        """Yield all rows from `start` on, reading every chunk of the series once."""
        first = min(start + self.lead, self.u.shape[0])
        held = self.u.read(start, first)
        edges = _edges(self.u.shape[0], self._step)
        for stop in edges[np.searchsorted(edges, first, side="right") :].tolist():
            held = np.concatenate([held, self.u.read(first, stop)])
            yield self._pairs(held)
            held, first = held[-self.lead :], stop

    def edges(self) -> NDArray[np.int64]:
        """Return multiples of the series' chunks."""
        return _edges(self.rows, self._step)

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, rows, lead, and the array's name, shape and dtype."""
        u = {"name": self.u.name, **self.u.describe()}
        return {"kind": self.kind, "rows": self.rows, "lead": self.lead, "arrays": {"field": u}}

    def _pairs(self, series: Array) -> Block:
        return Block(
            self.layout.shape_x(series[: -self.lead]), self.layout.shape_y(series[self.lead :])
        )


def _common_step(chunks: list[int], row_bytes: int) -> int:
    common = math.lcm(*chunks)
    if common * row_bytes > LARGEST_COMMON_READ:
        common = max(chunks)
    return common * max(1, READ_BYTES // (common * row_bytes))


def _edges(rows: int, step: int) -> NDArray[np.int64]:
    return np.append(np.arange(0, rows, step, dtype=np.int64), np.int64(rows))
