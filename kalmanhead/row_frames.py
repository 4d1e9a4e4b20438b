"""Frames of any kind that narwhals reads, taken apart into rows, weights and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
from numpy.typing import NDArray
from river.utils import dataframe

from kalmanhead.batch import LARGEST_VALUE
from kalmanhead.errors import ConfigError, kind_and_line, shown
from kalmanhead.layout import LARGEST_WEIGHT
from kalmanhead.row_model import RowModel, as_number, plain


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
        weight = float(plain(w))
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise ConfigError(
            f"w is {shown(w)}: give a weight from 0, which leaves the row out, "
            f"to {LARGEST_WEIGHT:g}"
        )
    return weight


def listed(values: Any, what: str) -> list[Any]:
    """What is given row by row, by position: a list, an array or a series, a frame of one column.

    Raises
    ------
    ConfigError
        It has no order or no length, or several values a row.
    """
    if hasattr(values, "columns"):
        frame = frame_of(values)
        if len(frame.columns) == 1:
            return [row[0] for row in frame.iter_rows()]
    elif hasattr(values, "to_pylist"):  # pyarrow's scalars are no plain values
        return list(values.to_pylist())
    elif getattr(values, "ndim", 1) == 1 and _is_row(values):
        return list(values)
    raise ConfigError(
        f"{what} is a {type(values).__name__}: give a list, an array or a series of one value a row"
    )


def _is_row(values: Any) -> bool:
    unordered = isinstance(values, (str, bytes, Mapping, Set))
    return not unordered and hasattr(values, "__len__") and hasattr(values, "__iter__")


def rows_of(X: Any, targets: list[Any], w: Any) -> Iterator[tuple[dict[Any, float], Any, float]]:
    """Rows, targets and weights of a frame, after making sure that they belong together."""
    frame = frame_of(X)
    single = not hasattr(w, "__len__") or getattr(w, "ndim", 1) == 0 or isinstance(w, (str, bytes))
    given = [w] * len(frame) if single else listed(w, "w")
    weights = [as_weight(value) for value in given]
    if not len(frame) == len(targets) == len(weights):
        raise ConfigError(
            f"X has {len(frame)} rows, y {len(targets)} and w {len(weights)}: give as many of each"
        )
    names, matrix = frame.columns, _numbers(frame)
    for values, target, weight in zip(matrix.tolist(), targets, weights, strict=True):
        yield dict(zip(names, values, strict=True)), target, weight


def _numbers(frame: Any) -> NDArray[np.float64]:
    """Values of a frame, (n, columns), NaN where they are missing."""
    if not frame.columns:
        return np.empty((len(frame), 0))
    if all(kind.is_numeric() or kind == nw.Boolean for kind in frame.schema.values()):
        return np.asarray(dataframe.to_numpy(frame), dtype=np.float64)
    # Slower, and says which column holds what is no number.
    rows = [
        [as_number(n, v) for n, v in zip(frame.columns, row, strict=True)] for row in frame.rows()
    ]
    return np.array(rows, dtype=np.float64).reshape(len(frame), len(frame.columns))


def in_places(model: RowModel, frame: Any) -> NDArray[np.float64]:
    """Values of a frame in the model's columns; what is not finite is missing, the rest drops."""
    known = [name for name in frame.columns if name in model.features]
    matrix = _numbers(frame.select(known)) if known else np.empty((len(frame), 0))
    return model.matrix(known, np.where(np.abs(matrix) <= LARGEST_VALUE, matrix, np.nan))


def native_frame(columns: Mapping[Any, NDArray[np.float64]], like: Any) -> Any:
    """A frame of the same kind and index as the one that came.

    Raises
    ------
    ConfigError
        Two names are the same as text, and this kind of frame has no other names.
    """
    if not like.implementation.is_pandas_like():
        texts = [str(name) for name in columns]
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"two columns of the answer would be named {shown(twice)}: give a frame of pandas, "
                "or names that differ as text"
            )
    return dataframe.to_native_frame(columns, like=like)
