"""Trajectories within a source: rows of which each begins where an earlier one ended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.shuffle import in_order
from kalmanhead.streams.source import Array, Source

# Of a row's largest value: x and y may have been stored in other dtypes.
TOLERANCE = 1e-5


def read_trajectories(
    source: Source,
    steps: int,
    *,
    start: int = 0,
    count: int = 1,
    stride: int | None = None,
) -> tuple[NDArray[np.int64], Array, Array]:
    """Read states and the states that came after them.

    Row i is a step of a trajectory, from x[i] to y[i], and row i + stride its next one.

    Parameters
    ----------
    source:
        Rows whose x and y have the same shape.
    steps:
        States after the first.
    start, count:
        The first row from which to start; with several, they are spread evenly over all rows from
        which the steps fit without a break.
    stride:
        Rows from a step to the next one of the same trajectory. None: the lead of one array
        that predicts itself, otherwise 1.

    Returns
    -------
    rows, first, later:
        (count,), (count, c, *grid) and (count, steps, c, *grid).

    Raises
    ------
    ConfigError
        x and y differ in shape.
    SourceError
        There are too few rows, or rows do not follow one another.
    """
    spec = source.spec
    if spec.x_shape != spec.y_shape:
        raise ConfigError(
            f"{source.name}: x has rows of shape {spec.x_shape}, y of {spec.y_shape}: a roll-out "
            "needs the same, u(t) as x and u(t + 1) as y"
        )
    stride = source.lag + 1 if stride is None else stride
    last = start + (steps - 1) * stride
    if spec.rows is not None and last >= spec.rows:
        raise SourceError(
            f"{source.name}: {steps} steps from row {start} end with row {last}, there are "
            f"{spec.rows} rows; give fewer --steps or an earlier --start"
        )
    starts = np.array([start])
    if count > 1:
        starts = _spread(_unbroken(source, steps, stride, start), count, source, steps)
    rows = starts[:, None] + stride * np.arange(steps)
    x, y = _read(source, rows)
    _check(source, rows, x, y)
    return starts, x[:, 0], y


def follows(y: Array, x: Array) -> NDArray[np.bool_]:
    """Whether states x begin where y ended, (n, ...) each -> (n,); never if one is not finite."""
    axes = tuple(range(1, x.ndim))
    with np.errstate(invalid="ignore"):
        return np.abs(y - x).max(axes) <= TOLERANCE * np.abs(x).max(axes)


def _unbroken(source: Source, steps: int, stride: int, start: int) -> NDArray[np.int64]:
    """Rows from `start` on from which `steps` steps follow one another."""
    if source.spec.rows is None:
        raise SourceError(f"{source.name} has no known end; leave --starts at 1")
    linked = _links(source, stride, start)
    possible = source.spec.rows - start - (steps - 1) * stride
    whole = np.ones(possible, bool)
    for step in range(steps - 1):
        whole &= linked[step * stride : step * stride + possible]
    return start + np.flatnonzero(whole)


def _links(source: Source, stride: int, start: int) -> NDArray[np.bool_]:
    """Whether row i + stride follows row i, for i from `start` on."""
    links: list[NDArray[np.bool_]] = []
    ended: Array | None = None  # the y that still wait for the x after them
    for part in in_order(source, start, None):
        x, y = part.block.x, part.block.y
        ended = y if ended is None else np.concatenate([ended, y])
        x = x[max(0, start + stride - int(part.rows[0])) :]
        links.append(follows(ended[: len(x)], x) if len(x) else np.zeros(0, bool))
        ended = ended[len(x) :]
    return np.concatenate(links)


def _spread(rows: NDArray[np.int64], count: int, source: Source, steps: int) -> NDArray[np.int64]:
    if len(rows) < count:
        raise SourceError(
            f"{source.name}: {steps} steps follow one another from {len(rows)} rows, not from "
            f"{count}; give fewer --starts or --steps, or another --stride"
        )
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def _read(source: Source, rows: NDArray[np.int64]) -> tuple[Array, Array]:
    """X and y of the rows, (n, steps, c, *grid) each."""
    wanted, place = np.unique(rows, return_inverse=True)
    xs, ys = [], []
    for part in in_order(source, int(wanted[0]), None):
        kept = np.isin(part.rows, wanted)
        xs.append(part.block.x[kept])
        ys.append(part.block.y[kept])
        if part.after > wanted[-1]:
            break
    found = sum(len(x) for x in xs)
    if found < len(wanted):
        raise SourceError(
            f"{source.name} ended before row {wanted[found]}; give fewer --steps or an earlier "
            "--start"
        )
    place = place.reshape(rows.shape)
    return np.concatenate(xs)[place], np.concatenate(ys)[place]


def _check(source: Source, rows: NDArray[np.int64], x: Array, y: Array) -> None:
    for own, states, ends in zip(rows, x, y, strict=True):
        if not np.isfinite(states[0]).all():
            raise SourceError(
                f"{source.name} row {own[0]}: x holds NaN or infinity; give another --start"
            )
        broken = np.flatnonzero(~follows(ends[:-1], states[1:]))
        if broken.size:
            here, there = own[broken[0]], own[broken[0] + 1]
            raise SourceError(
                f"{source.name}: y of row {here} is not x of row {there}, so they are no steps of "
                "one trajectory; give another --stride or --start, or fewer --steps"
            )
