"""What every source of rows offers: a spec, iteration from any row, names for errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kalmanhead.errors import SourceError

Array = NDArray[Any]

# float64 holds every integer up to here; beyond it neighbours become one number.
LARGEST_EXACT_INTEGER = 2**53


@dataclass(frozen=True)
class SourceSpec:
    """Shapes and names of a source's rows.

    Attributes
    ----------
    x_shape:
        Shape of one row's input: (d,) for vectors, (channels, *grid) for fields.
    y_shape:
        Shape of one row's target: (k,) for vectors, (channels, *grid) for fields.
    x_names, y_names:
        One name per entry of a vector, or per channel of a field.
    rows:
        Number of rows, or None when it is endless or unknown.
    grid_dims:
        0 for vectors, 1 or 2 for fields.
    """

    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    x_names: tuple[str, ...]
    y_names: tuple[str, ...]
    rows: int | None = None
    grid_dims: int = 0

    @property
    def row_bytes(self) -> int:
        """Memory of one row in float64, the bound used to size windows and reads."""
        return 8 * (math.prod(self.x_shape) + math.prod(self.y_shape) + 1)


@dataclass(frozen=True)
class Block:
    """Consecutive rows as a source delivers them.

    Attributes
    ----------
    x:
        Inputs, (n, *x_shape), float32 or float64.
    y:
        Targets, (n, *y_shape), float32 or float64; NaN marks a missing target.
    weight:
        Row weights, (n,), or None for all ones.
    """

    x: Array
    y: Array
    weight: Array | None = None

    def __len__(self) -> int:
        """Rows in the block."""
        return int(self.x.shape[0])

    def take(self, index: slice | Array) -> Block:
        """Return the rows that `index` (a slice, a mask or row numbers) selects."""
        weight = None if self.weight is None else self.weight[index]
        return Block(self.x[index], self.y[index], weight)


def concatenate(blocks: list[Block]) -> Block:
    """Join blocks of one source, in order, into one."""
    if len(blocks) == 1:
        return blocks[0]
    weights = [block.weight for block in blocks if block.weight is not None]
    return Block(
        np.concatenate([block.x for block in blocks]),
        np.concatenate([block.y for block in blocks]),
        np.concatenate(weights) if weights else None,
    )


class Source(ABC):
    """Rows in a fixed order that can be read again from any row on.

    A source knows nothing of batches, epochs or shuffling. Everything random in it must follow
    from its own options, so that two iterations give the same rows.
    """

    name: str
    spec: SourceSpec
    # Steps that a row's target comes later than the row itself, beyond the next one.
    lag: int = 0

    @abstractmethod
    def iterate(self, start: int = 0) -> Iterator[Block]:
        """Yield all rows from row `start` on, in blocks of any size.

        Sources with random access do not read what came before `start`; generators that cannot
        seek replay from their first row and drop.
        """

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return plain JSON that changes when the data behind the source is other data."""

    def locate(self, row: int) -> str:
        """Say where source row `row` comes from, for error messages."""
        return f"{self.name} row {row}"


class RandomAccessSource(Source):
    """A finite source that can read any range of rows by itself."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Block:
        """Read the rows `start <= row < stop`."""

    @abstractmethod
    def edges(self) -> NDArray[np.int64]:
        """Return the ascending row numbers at which reads are cheapest to cut: 0, ..., rows."""

    def iterate(self, start: int = 0) -> Iterator[Block]:
        """Yield all rows from `start` on; every read but the first covers whole chunks."""
        edges = self.edges()
        for stop in edges[np.searchsorted(edges, start, side="right") :].tolist():
            yield self.read(start, stop)
            start = stop


def require_rows(source: Source) -> None:
    """Refuse a source without any rows."""
    if source.spec.rows == 0:
        raise SourceError(f"{source.name} has no rows; write some before streaming from it")
    for name, shape in (("x", source.spec.x_shape), ("y", source.spec.y_shape)):
        if 0 in shape:
            raise SourceError(
                f"{source.name}: rows of {name} have shape {shape}, so they hold no number; "
                f"write at least one column"
            )


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, for use inside another."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def to_float(values: Array, what: str, first_row: int = 0) -> Array:
    """Convert numbers to what the engine computes with: float32 stays, all else is float64.

    Parameters
    ----------
    values:
        Any numeric or boolean array, (n, ...), of any byte order.
    what:
        What the numbers are, for the error.
    first_row:
        Row number of values[0], for the error.

    Raises
    ------
    SourceError
        For a dtype that is no real number, or an integer that float64 cannot hold.
    """
    if values.dtype.kind not in "biuf":
        raise SourceError(
            f"{what} has dtype {values.dtype}, which is no real number; convert it to float"
        )
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        beyond = values > LARGEST_EXACT_INTEGER
        if values.dtype.kind == "i":
            beyond |= values < -LARGEST_EXACT_INTEGER
        if beyond.any():
            row = int(np.argwhere(beyond)[0][0])
            raise SourceError(
                f"{what} row {first_row + row} holds an integer beyond 2^53, which float64 "
                f"cannot hold exactly; subtract an offset or convert it to float"
            )
    dtype = np.float32 if values.dtype.newbyteorder("=") == np.float32 else np.float64
    return values.astype(dtype, copy=False)
