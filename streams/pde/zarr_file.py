"""Zarr files of an equation's fields."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import zarr

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.pde.equation import Equation
from kalmanhead.streams.replacing import check_replaceable


def write_zarr(
    path: str | os.PathLike[str],
    equation: Equation,
    samples: int,
    seed: int | None = None,
    *,
    chunk_rows: int = 64,
    dtype: Literal["float32", "float64"] = "float32",
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Write `samples` pairs of initial field x and solution y to a Zarr group.

    The group is built in a temporary folder beside `path` and renamed when it is complete, so
    that `path` never holds half a data set.

    Parameters
    ----------
    path:
        Folder to be made.
    equation:
        Where fields come from, for example `Burgers()`.
    samples:
        Rows of x and y; sample indices are 0 ... samples - 1.
    seed:
        Seed of the initial fields; None keeps the equation's own.
    chunk_rows:
        Rows in a chunk of the file.
    dtype:
        "float32" or "float64", of both arrays.
    overwrite:
        Replace what is at `path`.
    progress:
        Called with the number of rows just written, after each block of them.

    Returns
    -------
    Path
        The folder: arrays `x` and `y`, (samples, *grid), and the equation's attributes.

    Raises
    ------
    ConfigError
        If a number or the dtype makes no sense.
    SourceError
        If `path` exists and `overwrite` is not set, is no Zarr group, or cannot be written.
    NumericalError
        If the solver overflows.

    Examples
    --------
    >>> from kalmanhead.streams.pde.burgers import Burgers
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = write_zarr(Path(folder) / "b.zarr", Burgers(nu=0.1, grid=32, time=0.1), 3)
    ...     zarr.open_group(out, mode="r")["y"].shape
    (3, 32)
    """
    target = Path(path)
    if samples < 1 or chunk_rows < 1:
        raise ConfigError(f"samples and chunk_rows must be at least 1: {samples}, {chunk_rows}")
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype must be float32 or float64, got {dtype}")
    if os.path.lexists(target) and not overwrite:
        raise SourceError(f"{target} exists: choose another path or ask to overwrite it")
    check_replaceable(target)
    equation = equation if seed is None else equation.with_seed(seed)
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        # mkdtemp makes a private folder; the group below it gets the usual permissions.
        built = scratch / "group"
        _fill(built, equation, samples, chunk_rows, dtype, progress)
        if os.path.lexists(target):
            os.rename(target, scratch / "replaced")
        os.rename(built, target)
    except OSError as error:
        raise SourceError(f"{target} cannot be written: {error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fill(
    folder: Path,
    equation: Equation,
    samples: int,
    chunk_rows: int,
    dtype: str,
    progress: Callable[[int], object] | None,
) -> None:
    """Solve and write chunk by chunk."""
    attributes = {**equation.attributes(), "samples": samples, "dtype": dtype}
    group = zarr.create_group(folder, zarr_format=3, attributes=attributes)
    shape = (samples, *equation.shape)
    chunks = (min(chunk_rows, samples), *equation.shape)
    x = group.create_array("x", shape=shape, chunks=chunks, dtype=dtype)
    y = group.create_array("y", shape=shape, chunks=chunks, dtype=dtype)
    # Whole chunks are written, many at a time: rows that need equal steps are solved together.
    block = chunk_rows * max(1, equation.block_rows // chunk_rows)
    for start in range(0, samples, block):
        stop = min(start + block, samples)
        u0, u1 = equation.sample(range(start, stop))
        x[start:stop] = u0.numpy().astype(dtype)
        y[start:stop] = u1.numpy().astype(dtype)
        if progress is not None:
            progress(stop - start)
