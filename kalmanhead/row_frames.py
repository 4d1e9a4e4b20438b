"""Frames of any kind that narwhals reads, taken apart into rows, weights and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
from numpy.typing import NDArray
from river.utils import dataframe

from kalmanhead.batch import LARGEST_VALUE
from kalmanhead.errors import ConfigError, kind_and_line
from kalmanhead.layout import LARGEST_WEIGHT
from kalmanhead.row_model import RowModel, as_number


def frame_of(X: Any) -> Any:
    """A frame of pandas, pyarrow or whatever narwhals reads, as narwhals sees it.

    Raises
    ------
    ConfigError
        It is none, or names a column twice.
    """
    try:
        return dataframe.into_frame(X)
    except (TypeError, ValueError, nw.exceptions.NarwhalsError) as error:
        raise ConfigError(
            f"a {type(X).__name__} cannot be read as rows ({kind_and_line(error)}): give a frame "
            "of pandas or pyarrow, each column under a name of its own"
        ) from error


def as_weight(w: Any) -> float:
    """A row's weight as a float.

    Raises
    ------
    ConfigError
        It is no number, negative, or so large that nothing is left of the prior.
    """
    try:
        weight = float(w)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise ConfigError(
            f"w is {w!r}: give a weight from 0, which leaves the row out, to {LARGEST_WEIGHT:g}"
        )
    return weight


def plain_values(y: Any) -> list[Any]:
    """Targets as plain values, by position."""
    if isinstance(y, (list, tuple)):
        return list(y)
    if isinstance(y, np.ndarray):
        return y.tolist()
    return dataframe.into_series(y).to_list()


def rows_of(X: Any, targets: list[Any], w: Any) -> Iterator[tuple[dict[Any, float], Any, float]]:
    """Rows, targets and weights of a frame, after making sure that they belong together."""
    frame = frame_of(X)
    weights = [float(w)] * len(frame) if np.ndim(w) == 0 else [float(v) for v in w]
    if not len(frame) == len(targets) == len(weights):
        raise ConfigError(
            f"X has {len(frame)} rows, y {len(targets)} and w {len(weights)}: give as many of each"
        )
    for weight in weights:
        as_weight(weight)
    names, matrix = frame.columns, _numbers(frame)
    for values, target, weight in zip(matrix.tolist(), targets, weights, strict=True):
        yield dict(zip(names, values, strict=True)), target, weight


def _numbers(frame: Any) -> NDArray[np.float64]:
    """Values of a frame, (n, columns), NaN where they are missing."""
    if all(kind.is_numeric() or kind == nw.Boolean for kind in frame.schema.values()):
        return np.asarray(dataframe.to_numpy(frame), dtype=np.float64)
    # Slower, and says which column holds what is no number.
    rows = [
        [as_number(n, v) for n, v in zip(frame.columns, row, strict=True)] for row in frame.rows()
    ]
    return np.array(rows, dtype=np.float64).reshape(len(frame), len(frame.columns))


def in_places(model: RowModel, frame: Any) -> NDArray[np.float64]:
    """Values of a frame in the model's columns; what is not finite is missing."""
    matrix = _numbers(frame)
    return model.matrix(frame.columns, np.where(np.abs(matrix) <= LARGEST_VALUE, matrix, np.nan))
