"""Tells vectors from fields by the shapes of x and y."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.source import Array, SourceSpec

MOST_CHANNELS = 8
SMALLEST_GRID = 8

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Shapes of one row of x and of y, after the rule of `choose_layout`."""

    x_shape: Shape
    y_shape: Shape
    grid_dims: int

    def spec(self, rows: int | None, x_name: str = "x", y_name: str = "y") -> SourceSpec:
        """Return the spec of a source of this layout, with numbered names."""
        return SourceSpec(
            self.x_shape,
            self.y_shape,
            numbered(x_name, self.x_shape[0]),
            numbered(y_name, self.y_shape[0]),
            rows,
            self.grid_dims,
        )

    def shape_x(self, values: Array) -> Array:
        """Reshape stored x, (n, ...), to (n, *x_shape)."""
        return values.reshape(values.shape[0], *self.x_shape)

    def shape_y(self, values: Array) -> Array:
        """Reshape stored y, (n, ...), to (n, *y_shape)."""
        return values.reshape(values.shape[0], *self.y_shape)


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Name `count` columns of one array; a single column keeps the array's own name."""
    return (name,) if count == 1 else tuple(f"{name}[{i}]" for i in range(count))


def choose_layout(x: Shape, y: Shape, dims: int | None = None, name: str = "") -> Layout:
    """Decide whether rows are vectors or fields.

    `name` is what errors call the source. Without `dims`, on the shapes of one row (the first
    axis, rows, taken off):

    - x (N,) and y (N,) of the same N >= 8: one-dimensional fields with one channel;
    - x (C, N) with C <= 8 and N >= 8, and y (Cy, N) or (N,): one-dimensional fields;
    - any other x (H, W) with y (H, W) or (Cy, H, W): two-dimensional fields, x of one channel;
    - x (C, H, W) with y (Cy, H, W) or (H, W): two-dimensional fields;
    - a y of at most one axis that is not x's grid: vectors, x flattened;
    - everything else is an error.

    `dims=0` flattens both to vectors, 1 and 2 demand fields of so many grid axes.

    Raises
    ------
    SourceError
        When x and y both look like fields but their grids differ.
    ConfigError
        When `dims` is none of 0, 1 and 2.
    """
    if dims not in (None, 0, 1, 2):
        raise ConfigError(f"dims is {dims}; choose 0 (vectors), 1 or 2 (fields), or leave it out")
    guess = _guess_dims(x, y) if dims is None else dims
    if guess == 0:
        return Layout((math.prod(x),), (math.prod(y),), 0)
    x_field, y_field = _with_channel(x, guess), _with_channel(y, guess)
    if x_field is None or y_field is None or x_field[1:] != y_field[1:]:
        where = f"{name}: " if name else ""
        raise SourceError(
            f"{where}x rows of shape {x} and y rows of shape {y} do not lie on one grid of {guess} "
            f"dimension{'s' if guess > 1 else ''}; bring both to one grid, or read them as vectors "
            f"with dims=0 (--dims 0)"
        )
    return Layout(x_field, y_field, guess)


def _guess_dims(x: Shape, y: Shape) -> int:
    if len(x) == 1:
        return 1 if x == y and x[0] >= SMALLEST_GRID else 0
    if len(x) == 2:
        channels, points = x
        if channels <= MOST_CHANNELS and points >= SMALLEST_GRID:
            return 1 if len(y) > 1 or y == (points,) else 0
        return 2 if len(y) > 1 else 0
    if len(x) == 3:
        return 2 if len(y) > 1 else 0
    return 0


def _with_channel(shape: Shape, dims: int) -> Shape | None:
    if len(shape) == dims:
        return (1, *shape)
    return shape if len(shape) == dims + 1 else None
