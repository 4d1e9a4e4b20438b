"""Parquet files (one, a directory, a glob or a URL) as one source of rows."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kalmanhead.errors import SourceError
from kalmanhead.streams.columns import Columns, choose_columns
from kalmanhead.streams.source import (
    Block,
    RandomAccessSource,
    SourceSpec,
    concatenate,
    one_line,
    require_rows,
)

SUFFIXES = (".parquet", ".parq", ".pq")


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that puts part-2 before part-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


class _Footer(NamedTuple):
    """What is kept of a file's footer, so that no file stays open."""

    schema: pa.Schema
    group_rows: list[int]


class ParquetSource(RandomAccessSource):
    """Rows of Parquet files in natural order, read by row group.

    Parameters
    ----------
    target:
        A file, a directory (searched through; names starting with "." or "_" are left out), a
        glob or an fsspec URL of one of these.
    targets:
        Columns to predict; by default the column `y`.
    features:
        Columns to predict from; by default every other column but pandas' stored index.
    weight:
        Column of row weights.
    storage_options:
        Passed to fsspec.
    optional_targets:
        If a target column is not there, give rows with so many missing targets.

    Notes
    -----
    Booleans become 0 and 1, decimals float64, nulls missing values (NaN). A fixed-size list of
    numbers is a vector; a null list is a vector of missing values. x is float32 when all
    features are, else float64, and so is y. One row group is in memory at a time.

    Raises
    ------
    SourceError
        For files that are not there, not Parquet, damaged, or of unequal schemas, and for
        columns that are no numbers.
    """

    def __init__(
        self,
        target: str,
        *,
        targets: tuple[str, ...] | None = None,
        features: tuple[str, ...] | None = None,
        weight: str | None = None,
        storage_options: dict[str, Any] | None = None,
        optional_targets: int | None = None,
    ):
        self.name = target
        self._fs, self.files = _find_files(target, storage_options)
        footers = [self._footer(path) for path in self.files]
        schema = footers[0].schema
        # New rows to be predicted may come without their targets.
        absent = optional_targets and not set(targets or ("y",)) <= set(schema.names)
        self._missing_targets = optional_targets if absent else None
        self.columns: Columns = choose_columns(
            schema, target, targets, features, weight, lack_targets=bool(absent)
        )
        for path, footer in zip(self.files[1:], footers[1:], strict=True):
            self._compare(schema, path, footer.schema, every=features is None)
        groups = [
            (file, group, rows)
            for file, footer in enumerate(footers)
            for group, rows in enumerate(footer.group_rows)
        ]
        self._groups = [group for group in groups if group[2]]
        self._edges = np.cumsum([0, *(rows for _, _, rows in self._groups)], dtype=np.int64)
        self.file_rows = [sum(footer.group_rows) for footer in footers]
        # One open file at a time, shared by whoever iterates: training and holdout may overlap.
        self._opened: tuple[int, pq.ParquetFile] | None = None
        self._lock = threading.Lock()
        self.spec = SourceSpec(
            (len(self.columns.x_names),),
            (self._missing_targets or len(self.columns.y_names),),
            self.columns.x_names,
            self.columns.y_names,
            int(self._edges[-1]),
        )
        require_rows(self)

    def read(self, start: int, stop: int) -> Block:
        """Read the rows `start <= row < stop` from the row groups that hold them."""
        first = int(np.searchsorted(self._edges, start, side="right")) - 1
        blocks = []
        for index in range(first, len(self._groups)):
            low = int(self._edges[index])
            if low >= stop:
                break
            rows = slice(max(start - low, 0), stop - low)
            blocks.append(self._read_group(index).take(rows))
        return concatenate(blocks)

    def edges(self) -> NDArray[np.int64]:
        """Return the first rows of the row groups."""
        return self._edges

    def locate(self, row: int) -> str:
        """Return the file and the row in that file."""
        ends = np.cumsum(self.file_rows)
        file = int(np.searchsorted(ends, row, side="right"))
        return f"{self.files[file]} row {row - int(ends[file]) + self.file_rows[file]}"

    def fingerprint(self) -> dict[str, Any]:
        """Return the files in order with their rows, and the columns."""
        base = os.path.dirname(self.files[0]) if len(self.files) == 1 else os.path.commonpath(
            self.files
        )  # fmt: skip
        names = [os.path.relpath(path, base or ".") for path in self.files]
        return {
            "kind": "parquet",
            "rows": self.spec.rows,
            "files": [list(pair) for pair in zip(names, self.file_rows, strict=True)],
            "x_names": list(self.spec.x_names),
            "y_names": list(self.spec.y_names),
            "weight": self.columns.weight,
        }

    def _open(self, path: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._fs.open(path, "rb"), page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{path} cannot be read as Parquet ({one_line(error)}); write it again"
            ) from error

    def _footer(self, path: str) -> _Footer:
        file = self._open(path)
        try:
            metadata = file.metadata
            groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            return _Footer(file.schema_arrow, groups)
        finally:
            file.close(force=True)

    def _read_group(self, index: int) -> Block:
        file, group, _ = self._groups[index]
        try:
            with self._lock:
                if self._opened is None or self._opened[0] != file:
                    if self._opened is not None:
                        self._opened[1].close(force=True)
                    self._opened = (file, self._open(self.files[file]))
                table = self._opened[1].read_row_group(group, columns=list(self.columns.stored))
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{self.files[file]}: row group {group} cannot be read ({one_line(error)}); the "
                f"file is damaged, write it again"
            ) from error
        block = self.columns.block(table, lambda row: self.locate(int(self._edges[index]) + row))
        if self._missing_targets is None:
            return block
        return replace(block, y=np.full((len(block), self._missing_targets), np.nan))

    def _compare(self, schema: pa.Schema, path: str, other: pa.Schema, every: bool) -> None:
        wanted = schema.names if every else self.columns.stored
        extra = [name for name in other.names if every and name not in schema.names]
        for name in [*wanted, *extra]:
            problem = None
            if name not in other.names:
                problem = "is missing"
            elif name in extra:
                problem = f"is not in {self.files[0]}"
            elif other.field(name).type != schema.field(name).type:
                problem = (
                    f"has type {other.field(name).type}, but {schema.field(name).type} in "
                    f"{self.files[0]}"
                )
            if problem:
                raise SourceError(
                    f"{path}: column {name!r} {problem}; write all files with one schema, or "
                    f"choose columns with features= (--feature)"
                )


def _find_files(target: str, options: dict[str, Any] | None) -> tuple[Any, list[str]]:
    try:
        fs, path = fsspec.core.url_to_fs(target, **(options or {}))
        if any(sign in path for sign in "*?["):
            found = [file for file in fs.glob(path) if not fs.isdir(file)]
        elif fs.isdir(path):
            found = [
                file
                for file in fs.find(path)
                if file.endswith(SUFFIXES) and not _is_hidden(file, path)
            ]
        elif fs.exists(path):
            found = [path]
        else:
            raise SourceError(f"no such file or directory: {target}")
    except SourceError:
        raise
    # fsspec passes on whatever its back ends raise.
    except Exception as error:
        raise SourceError(f"{target} cannot be opened ({one_line(error)}); check it") from error
    if not found:
        raise SourceError(
            f"{target} holds no Parquet files; give a file, directory or glob of *.parquet"
        )
    return fs, sorted(found, key=natural_key)


def _is_hidden(file: str, folder: str) -> bool:
    return any(part.startswith((".", "_")) for part in file[len(folder) :].strip("/").split("/"))
