"""From what a person names (a path, a URL, a data set, arrays) to a source and a stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.arrays import LeadSource, MemoryRows, PairSource
from kalmanhead.streams.loader_source import LoaderSource
from kalmanhead.streams.parquet_source import SUFFIXES, ParquetSource
from kalmanhead.streams.shuffle import WINDOW_BYTES
from kalmanhead.streams.source import Source
from kalmanhead.streams.stream import Stream
from kalmanhead.streams.zarr_source import open_zarr

_ZARR_MARKS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


@dataclass(frozen=True)
class SourceOptions:
    """What may be said about a source; each kind uses its part. See `open_source`."""

    x: str = "x"
    y: str = "y"
    weight: str | None = None
    field: str | None = None
    lead: int = 1
    targets: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    dims: int | None = None
    missing_chunks: str = "refuse"
    follow: bool = False
    storage_options: dict[str, Any] | None = None
    optional_targets: int | None = None


Opener = Callable[[str, SourceOptions], Source]


def _open_zarr(target: str, options: SourceOptions) -> Source:
    _refuse(target, "a Zarr group", targets=options.targets, features=options.features)
    return open_zarr(
        target,
        x=options.x,
        y=options.y,
        weight=options.weight,
        field=options.field,
        lead=options.lead,
        dims=options.dims,
        missing_chunks=options.missing_chunks,
        follow=options.follow,
        storage_options=options.storage_options,
        optional_targets=options.optional_targets,
    )


def _open_parquet(target: str, options: SourceOptions) -> Source:
    _refuse(target, "Parquet", field=options.field, follow=options.follow)
    return ParquetSource(
        target,
        targets=options.targets,
        features=options.features,
        weight=options.weight,
        storage_options=options.storage_options,
        optional_targets=options.optional_targets,
    )


def _open_river(target: str, options: SourceOptions) -> Source:
    _refuse(
        target,
        "a river data set",
        targets=options.targets,
        field=options.field,
        weight=options.weight,
        follow=options.follow,
    )
    # Slow to import, and needed by few.
    from kalmanhead.streams.river_source import RiverSource

    return RiverSource(target, features=options.features)


def _open_pde(target: str, options: SourceOptions) -> Source:
    _refuse(
        target,
        "an equation",
        targets=options.targets,
        features=options.features,
        field=options.field,
        weight=options.weight,
        follow=options.follow,
    )
    # Slow to import, and needed by few.
    from kalmanhead.streams.pde.source import open_pde

    return open_pde(target, dims=options.dims)


# What stands before the first colon of a target that is neither a path nor a URL.
SCHEMES: dict[str, Opener] = {
    "river": _open_river,
    "river.synth": _open_river,
    "pde": _open_pde,
}


def make_source(target: Any, options: SourceOptions | None = None) -> Source:
    """Open a target as a bare source of rows. See `open_source`."""
    options = SourceOptions() if options is None else options
    if isinstance(target, os.PathLike):
        target = os.fspath(target)
    if isinstance(target, Source):
        return target
    if isinstance(target, str):
        scheme = target.partition(":")[0]
        opener = SCHEMES[scheme] if scheme in SCHEMES and ":" in target else _by_content(target)
        return opener(target, options)
    if isinstance(target, DataLoader):
        return LoaderSource(target, dims=options.dims)
    if isinstance(target, tuple | list) and len(target) in (2, 3):
        names = (options.x, options.y, options.weight or "weight")
        parts = [MemoryRows(part, name) for part, name in zip(target, names, strict=False)]
        return PairSource(*parts, dims=options.dims, follow=options.follow)
    if isinstance(target, np.ndarray | torch.Tensor):
        series = MemoryRows(target, options.field or "u")
        return LeadSource(series, options.lead, dims=options.dims)
    raise SourceError(
        f"cannot stream from {type(target).__name__}; give a path, a URL, river:NAME, pde:NAME, "
        f"arrays (x, y), one array or a torch DataLoader"
    )


def open_source(
    source: Any,
    batch_size: int = 32,
    *,
    x: str = "x",
    y: str = "y",
    weight: str | None = None,
    field: str | None = None,
    lead: int = 1,
    targets: str | Sequence[str] | None = None,
    features: str | Sequence[str] | None = None,
    dims: int | None = None,
    missing_chunks: str = "refuse",
    follow: bool = False,
    storage_options: dict[str, Any] | None = None,
    optional_targets: int | None = None,
    epochs: int = 1,
    shuffle: bool | None = None,
    seed: int = 0,
    holdout: float = 0,
    on_bad: str = "stop",
    prefetch: int = 32,
    max_rows: int | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> Stream:
    """Open anything that holds rows as a stream of batches.

    Parameters
    ----------
    source:
        A path or fsspec URL of a Zarr group (directory or zip) or of Parquet files (one, a
        directory, a glob); `river:NAME` or `river.synth:NAME?seed=3&rows=1000`; an equation
        that is solved while it is read, `pde:NAME?seed=3&rows=1000` (see
        `kalmanhead.streams.pde.source`); arrays or tensors (x, y) or (x, y, weight); one array
        that predicts itself `lead` steps ahead; a torch DataLoader of (x, y), which can be
        resumed exactly only if it does not shuffle; or a `Source`.
    batch_size:
        Rows per batch.
    x, y, weight:
        Names of the arrays in a Zarr group. `weight` is also the weight column of Parquet.
    field, lead:
        Zarr: one array whose row t predicts row t + lead, instead of x and y. A target is then
        learnt only once its time has come.
    targets, features:
        Columns of Parquet: what to predict (default `y`) and from what (default: all others).
        `features` also chooses among river's.
    dims:
        0 reads rows as vectors, 1 or 2 as fields; by default the shapes decide, see
        `kalmanhead.streams.layout.choose_layout`.
    missing_chunks, follow:
        See `kalmanhead.streams.zarr_source.open_zarr`.
    storage_options:
        Passed to fsspec.
    optional_targets:
        Number of targets that rows get as missing ones where a Zarr group or Parquet files do
        not hold them: for new rows that are only to be predicted.
    epochs, shuffle, seed, holdout, on_bad, prefetch, max_rows, window_bytes:
        See `kalmanhead.streams.stream.Stream`.

    Raises
    ------
    SourceError
        When the source cannot be read as asked.
    ConfigError
        When options contradict each other.

    Examples
    --------
    >>> stream = open_source("river:TrumpApproval", batch_size=500)
    >>> [len(batch) for batch in stream]
    [500, 500, 1]
    """
    options = SourceOptions(
        x,
        y,
        weight,
        field,
        lead,
        _names(targets),
        _names(features),
        dims,
        missing_chunks,
        follow,
        storage_options,
        optional_targets,
    )
    return Stream(
        make_source(source, options),
        batch_size,
        epochs=epochs,
        shuffle=shuffle,
        seed=seed,
        holdout=holdout,
        on_bad=on_bad,
        prefetch=prefetch,
        max_rows=max_rows,
        window_bytes=window_bytes,
    )


def _names(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return (names,) if isinstance(names, str) else tuple(names)


def _refuse(target: str, kind: str, **options: object) -> None:
    for name, value in options.items():
        if value:
            raise ConfigError(f"{target} is {kind}, which has no option {name}; leave it out")


def _by_content(target: str) -> Opener:
    """Tell Zarr from Parquet by name, then by what lies there."""
    path = target.rstrip("/")
    if path.endswith(SUFFIXES) or any(sign in path for sign in "*?["):
        return _open_parquet
    if path.endswith((".zarr", ".zip")) or "://" in path:
        return _open_zarr
    if not os.path.exists(path):
        scheme = target.partition(":")[0]
        if ":" in target and "/" not in scheme:
            raise SourceError(
                f"no such file or directory: {target}; besides paths and URLs there are "
                f"{', '.join(f'{known}:NAME' for known in SCHEMES)}"
            )
        raise SourceError(f"no such file or directory: {target}")
    if os.path.isdir(path):
        if any(os.path.exists(os.path.join(path, mark)) for mark in _ZARR_MARKS):
            return _open_zarr
        return _open_parquet
    with open(path, "rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        return _open_parquet
    if start == b"PK\x03\x04":
        return _open_zarr
    raise SourceError(
        f"{target} is neither Parquet nor Zarr; name Parquet files .parquet and Zarr groups .zarr"
    )
