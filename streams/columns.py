"""Columns of Arrow tables as numbers: which are features, and how each type is converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kalmanhead.errors import SourceError
from kalmanhead.streams.source import LARGEST_EXACT_INTEGER, Array, Block

Locate = Callable[[int], str]


@dataclass(frozen=True)
class Columns:
    """The chosen columns, in order.

    Attributes
    ----------
    features, targets, weight:
        Stored column names.
    x_names, y_names:
        One name per number: a fixed-size list `v` of 2 gives `v[0]`, `v[1]`.
    x_dtype, y_dtype:
        float32 when all columns are, else float64.
    """

    features: tuple[str, ...]
    targets: tuple[str, ...]
    weight: str | None
    x_names: tuple[str, ...]
    y_names: tuple[str, ...]
    x_dtype: type
    y_dtype: type

    @property
    def stored(self) -> tuple[str, ...]:
        """Every stored column that is read, once."""
        extra = (self.weight,) if self.weight else ()
        return tuple(dict.fromkeys([*self.features, *self.targets, *extra]))

    def block(self, table: pa.Table, locate: Locate) -> Block:
        """Convert a table to a block; `locate` names its rows in errors."""
        weight = None
        if self.weight:
            weight = column_values(table[self.weight], self.weight, locate)[:, 0]
        return Block(
            _stack(table, self.features, len(self.x_names), self.x_dtype, locate),
            _stack(table, self.targets, len(self.y_names), self.y_dtype, locate),
            None if weight is None else weight.astype(np.float64, copy=False),
        )


def choose_columns(
    schema: pa.Schema,
    where: str,
    targets: tuple[str, ...] | None,
    features: tuple[str, ...] | None,
    weight: str | None,
    *,
    lack_targets: bool = False,
) -> Columns:
    """Choose features, targets and weight by name, and check that they are numbers.

    With `lack_targets` no target is chosen; those that are there count as no features.

    Raises
    ------
    SourceError
        For unknown or repeated names, a missing choice of targets, and columns that are not
        numeric.
    """
    names = list(schema.names)
    listed = ", ".join(names)
    for name in names:
        if names.count(name) > 1:
            raise SourceError(f"{where}: column {name!r} is there twice; rename one of them")
    if targets is None:
        if "y" not in names and not lack_targets:
            raise SourceError(
                f"{where}: no column named y; say which to predict with targets= (--target); "
                f"there are {listed}"
            )
        targets = ("y",)
    if lack_targets:
        excluded, targets = targets, ()
    else:
        excluded = targets
    for name in [*targets, *(features or ()), *([weight] if weight else [])]:
        if name not in names:
            raise SourceError(f"{where}: no column {name!r}; there are {listed}")
    if features is None:
        # pandas stores a row index under such names; it is no measurement.
        features = tuple(
            name
            for name in names
            if name not in excluded and name != weight and not name.startswith("__index_level_")
        )
    if not features or not excluded:
        raise SourceError(f"{where}: no column is left to predict from; there are {listed}")
    odd = [n for n in features if not is_numeric(schema.field(n).type)]
    if odd:
        named = ", ".join(f"{n!r} ({schema.field(n).type})" for n in odd)
        raise SourceError(
            f"{where}: features that are no numbers: {named}; choose numeric ones with features= "
            f"(--feature)"
        )
    for name in [*targets, *([weight] if weight else [])]:
        if not is_numeric(schema.field(name).type):
            raise SourceError(
                f"{where}: column {name!r} has type {schema.field(name).type}, which is no "
                f"number; convert it or choose another with targets= (--target)"
            )
    if weight and pa.types.is_fixed_size_list(schema.field(weight).type):
        raise SourceError(f"{where}: weight column {weight!r} is a list; give one number per row")
    return Columns(
        features,
        targets,
        weight,
        _expand(schema, features),
        _expand(schema, targets),
        _common_dtype(schema, features),
        _common_dtype(schema, targets),
    )


def is_numeric(kind: pa.DataType) -> bool:
    """Say whether a column type can be read as numbers."""
    if pa.types.is_fixed_size_list(kind):
        return is_numeric(kind.value_type) and not pa.types.is_fixed_size_list(kind.value_type)
    if pa.types.is_dictionary(kind):
        return is_numeric(kind.value_type)
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def column_values(column: pa.ChunkedArray, name: str, locate: Locate) -> Array:
    """Convert one column to (n, width) of float32 or float64; nulls become NaN.

    Raises
    ------
    SourceError
        For an integer that float64 cannot hold.
    """
    array = _joined(column)
    if not pa.types.is_fixed_size_list(array.type):
        return _numbers(array, name, locate, 1)[:, None]
    width = array.type.list_size
    # `values` ignores where a slice begins, and a null list still has its slots there.
    inner = array.values.slice(array.offset * width, len(array) * width)
    values = _numbers(inner, name, locate, width).reshape(len(array), width)
    if array.null_count:
        values = values.copy()
        values[array.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return values


def _joined(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _numbers(array: pa.Array, name: str, locate: Locate, width: int) -> Array:
    kind = array.type
    if pa.types.is_int64(kind) or pa.types.is_uint64(kind):
        beyond = pc.greater(array, LARGEST_EXACT_INTEGER)
        if pa.types.is_int64(kind):
            beyond = pc.or_(beyond, pc.less(array, -LARGEST_EXACT_INTEGER))
        hit = pc.index(beyond, True).as_py()
        if hit >= 0:
            raise SourceError(
                f"{locate(hit // width)}: column {name!r} holds an integer beyond 2^53, which "
                f"float64 cannot hold exactly; subtract an offset or leave the column out"
            )
    if pa.types.is_decimal(kind):
        # Arrow's own cast multiplies by a power of ten and can miss the nearest float64.
        array = array.cast(pa.string())
    if not pa.types.is_float32(kind):
        array = array.cast(pa.float64())
    if array.null_count:
        array = array.fill_null(float("nan"))
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


def _stack(
    table: pa.Table, names: tuple[str, ...], width: int, dtype: type, locate: Locate
) -> Array:
    out = np.empty((table.num_rows, width), dtype=dtype)
    at = 0
    for name in names:
        values = column_values(table[name], name, locate)
        out[:, at : at + values.shape[1]] = values
        at += values.shape[1]
    return out


def _expand(schema: pa.Schema, names: tuple[str, ...]) -> tuple[str, ...]:
    expanded: list[str] = []
    for name in names:
        kind = schema.field(name).type
        if pa.types.is_fixed_size_list(kind):
            expanded += [f"{name}[{i}]" for i in range(kind.list_size)]
        else:
            expanded.append(name)
    return tuple(expanded)


def _common_dtype(schema: pa.Schema, names: tuple[str, ...]) -> type:
    kinds = [schema.field(name).type for name in names]
    kinds = [k.value_type if pa.types.is_fixed_size_list(k) else k for k in kinds]
    kinds = [k.value_type if pa.types.is_dictionary(k) else k for k in kinds]
    return np.float32 if all(pa.types.is_float32(k) for k in kinds) else np.float64
