"""Finds rows that cannot be learnt from, and stops at them or leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kalmanhead.batch import LARGEST_VALUE
from kalmanhead.errors import BadRowError
from kalmanhead.streams.source import Array, Block, Source


@dataclass(frozen=True)
class Part:
    """Rows of one epoch in its order.

    Attributes
    ----------
    block:
        The rows.
    positions:
        Position of each row in the epoch, (n,), ascending; skipped rows leave gaps.
    rows:
        Row number of each in the source, (n,).
    after:
        Position behind the last row, skipped ones included.
    """

    block: Block
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    after: int

    def take(self, index: slice | Array) -> Part:
        """Return the rows that `index` selects, with the same end."""
        return Part(self.block.take(index), self.positions[index], self.rows[index], self.after)


def keep_good(parts: Iterator[Part], source: Source, on_bad: str) -> Iterator[Part]:
    """Yield parts without their bad rows, or the rows before the first bad one and its error.

    A row is bad when x holds NaN or an infinity, y an infinity, or the weight is negative or
    not finite; numbers beyond 1e100, whose squares overflow, count as infinite. NaN in y is a
    missing target and passes.

    Raises
    ------
    BadRowError
        With `on_bad="stop"`.
    """
    for part in parts:
        bad = find_bad(part.block)
        if bad is None:
            yield part
        elif on_bad == "skip":
            yield part.take(~bad)
        else:
            first = int(np.argmax(bad))
            if first:
                yield part.take(slice(0, first))
            row = part.block.take(slice(first, first + 1))
            raise BadRowError(explain(row, source, int(part.rows[first])))


def find_bad(block: Block) -> NDArray[np.bool_] | None:
    """Return a mask of the bad rows, (n,), or None when there are none."""
    bad = np.zeros(len(block), dtype=np.bool_)
    if not _sums_up(block.x):
        bad |= ~_per_row(_is_small(block.x))
    if not _sums_up(block.y):
        bad |= ~_per_row(_is_small(block.y) | np.isnan(block.y))
    if block.weight is not None:
        bad |= ~(_is_small(block.weight) & (block.weight >= 0))
    return bad if bad.any() else None


def explain(row: Block, source: Source, number: int) -> str:
    """Say what is wrong with a single bad row, and where it is."""
    spec = source.spec
    value: object
    if not _is_small(row.x).all():
        index = tuple(int(i) for i in np.argwhere(~_is_small(row.x[0]))[0])
        column, value = _column(spec.x_names, index), row.x[0][index]
    elif (~_is_small(row.y) & ~np.isnan(row.y)).any():
        index = tuple(int(i) for i in np.argwhere(~_is_small(row.y[0]) & ~np.isnan(row.y[0]))[0])
        column, value = _column(spec.y_names, index), row.y[0][index]
    else:
        column, value = "weight", row.weight[0] if row.weight is not None else None
    return (
        f"{source.locate(number)}: column {column} is {value}; repair the row, or leave such rows "
        f"out with on_bad='skip' (--on-bad skip)"
    )


def _column(names: tuple[str, ...], index: tuple[int, ...]) -> str:
    point = index[1:]
    name = repr(names[index[0]])
    return f"{name} at grid point {point if len(point) > 1 else point[0]}" if point else name


def _sums_up(values: Array) -> bool:
    """Say whether all values are surely of a usual size, without a temporary."""
    if values.size == 0:
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        if values.dtype == np.float32:  # which cannot hold numbers that are too large
            return bool(np.isfinite(values.sum()))
        return bool(values.min() >= -LARGEST_VALUE and values.max() <= LARGEST_VALUE)


def _is_small(values: Array) -> NDArray[np.bool_]:
    largest = min(LARGEST_VALUE, float(np.finfo(values.dtype).max))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(values) <= largest)


def _per_row(good: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(good.reshape(len(good), -1).all(axis=1))
