"""Files that predictions are written to: Parquet for vectors, Zarr for fields."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from numpy.typing import NDArray

from kalmanhead.errors import ConfigError
from kalmanhead.noise import Predictive
from kalmanhead.streams.replacing import check_replaceable

Array = NDArray[np.float64]


class Predicted(NamedTuple):
    """Predictions of a batch and the ends of their intervals, (n, k) or (n, k, *grid)."""

    mean: Array
    low: Array
    high: Array

    @classmethod
    def of(cls, predictive: Predictive, level: float) -> Predicted:
        """Take them from a distribution."""
        parts = (predictive.mean, *predictive.interval(level))
        return cls(*(part.cpu().double().numpy() for part in parts))


class Writer(Protocol):
    """Takes the predictions of one batch after another."""

    def write(self, predicted: Predicted) -> None:
        """Append the rows of a batch."""
        ...


class ParquetPredictions:
    """Columns NAME, NAME_low and NAME_high for every target."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.names = names
        columns = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
        self.schema = pa.schema([(column, pa.float64()) for column in columns])
        self._writer = pq.ParquetWriter(path, self.schema)

    def write(self, predicted: Predicted) -> None:
        """Append the rows of a batch."""
        columns = [part[:, j] for j in range(len(self.names)) for part in predicted]
        self._writer.write_table(pa.table(columns, schema=self.schema))

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()


class ZarrPredictions:
    """Arrays y, y_low and y_high, (n, k) or (n, k, *grid)."""

    def __init__(self, path: Path, level: float) -> None:
        self.group = zarr.open_group(path, mode="w")
        self.group.attrs["interval_level"] = level

    def write(self, predicted: Predicted) -> None:
        """Append the rows of a batch."""
        for name, values in zip(("y", "y_low", "y_high"), predicted, strict=True):
            if name not in self.group:
                shape = values.shape[1:]
                rows = max(1, 2**20 // (8 * max(1, int(np.prod(shape)))))
                self.group.create_array(
                    name, shape=(0, *shape), chunks=(rows, *shape), dtype="float64"
                )
            array = self.group[name]
            assert isinstance(array, zarr.Array)
            array.append(values)

    def close(self) -> None:
        """Complete the group."""


@contextlib.contextmanager
def open_writer(
    path: Path, names: tuple[str, ...], *, is_field: bool, level: float, overwrite: bool
) -> Iterator[Writer]:
    """Write beside the target and rename when complete, so that no half file stands there.

    Raises
    ------
    ConfigError
        The file exists, its ending does not suit the rows, or it cannot be written.
    """
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists: give another --out, or --overwrite")
    check_replaceable(path)
    if path.suffix not in (".zarr", ".parquet") or (is_field and path.suffix != ".zarr"):
        raise ConfigError(
            f"--out {path}: fields are written to a .zarr, vectors to a .parquet or a .zarr"
        )
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer: ParquetPredictions | ZarrPredictions
        if path.suffix == ".zarr":
            writer = ZarrPredictions(part, level)
        else:
            writer = ParquetPredictions(part, names)
        yield writer
        writer.close()
        remove(path)
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        remove(part)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
