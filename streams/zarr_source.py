"""Zarr groups (versions 2 and 3; directory, zip or URL) as sources of rows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import zarr
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, WrapperStore, ZipStore

from kalmanhead.errors import ConfigError, KalmanHeadError, SourceError
from kalmanhead.streams.arrays import LeadSource, MissingRows, PairSource, Rows
from kalmanhead.streams.source import Array, Block, RandomAccessSource, Source, one_line

_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


class _MissingChunkError(Exception):
    """A chunk's key is not in the store."""


class _WatchedStore(WrapperStore[Any]):
    """A store that raises where zarr would read a missing chunk as the fill value.

    Watching the reads themselves costs no request, works for every kind of store and key, and
    sees the shards that a read really touches.
    """

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return the key's bytes; a chunk that is not there is an error."""
        value = await self._store.get(key, prototype, byte_range)
        if value is None and not key.endswith(_METADATA):
            raise _MissingChunkError(key)
        return value


class ZarrRows(Rows):
    """One Zarr array, read in whole chunks along its first axis."""

    def __init__(self, array: zarr.Array[Any], name: str, source_name: str):
        if array.ndim == 0:
            raise SourceError(f"{source_name}: array {name} is a single number; its first axis "
                              f"must be rows")  # fmt: skip
        kind = getattr(array.dtype, "kind", "?")
        if kind not in "biuf":
            raise SourceError(
                f"{source_name}: array {name} has dtype {array.dtype}, which is no real number; "
                f"store it as float"
            )
        self.array, self.name, self.source_name = array, name, source_name
        self.shape, self.dtype = array.shape, array.dtype
        self.chunk_rows = max(1, self._stored_chunks()[0])

    def fetch(self, start: int, stop: int) -> Array:
        """Read the rows; a missing or damaged chunk is a SourceError."""
        where = f"{self.source_name}: array {self.name} rows {start} to {stop - 1}"
        try:
            values: Array = np.asarray(self.array[start:stop])
        except _MissingChunkError as missing:
            raise SourceError(
                f"{self.source_name}: chunk {missing} is missing; restore it, or read it as the "
                f"fill value with missing_chunks='fill' (--missing-chunks fill)"
            ) from None
        # Codecs and file systems raise errors of their own for damaged or unreadable chunks.
        except Exception as error:
            raise SourceError(
                f"{where} cannot be read ({one_line(error)}); a chunk is damaged or cut short, "
                f"write it again"
            ) from error
        return values

    def complete_rows(self) -> int:
        """Count the rows up to the last chunk that has been written."""
        grid = [-(-n // c) for n, c in zip(self.shape, self._stored_chunks(), strict=True)]
        for index in range(grid[0] - 1, -1, -1):
            columns = itertools.product(*(range(n) for n in grid[1:]))
            if all(self._is_stored((index, *column)) for column in columns):
                return min(self.shape[0], (index + 1) * self.chunk_rows)
        return 0

    def _stored_chunks(self) -> tuple[int, ...]:
        return self.array.shards or self.array.chunks

    def _is_stored(self, chunk: tuple[int, ...]) -> bool:
        key = self.array.metadata.encode_chunk_key(chunk)
        path = self.array.path
        return sync(self.array.store.exists(f"{path}/{key}" if path else key))


class _FirstRows(Rows):
    """The leading rows of another array."""

    def __init__(self, rows: Rows, count: int):
        self.rows, self.name, self.dtype = rows, rows.name, rows.dtype
        self.shape, self.chunk_rows = (count, *rows.shape[1:]), rows.chunk_rows

    def fetch(self, start: int, stop: int) -> Array:
        """Read the rows."""
        return self.rows.fetch(start, stop)


class FollowSource(Source):
    """A group that a writer may still be extending: its complete rows, re-opened at each end.

    The number of rows is unknown, so it has no epochs, no shuffling and no holdout. A read ends
    when no complete row is left; reading on from the last cursor picks up what came since.
    """

    def __init__(self, reopen: Callable[[], RandomAccessSource]):
        self.reopen = reopen
        self.latest = reopen()
        self.lag = self.latest.lag
        self.name = self.latest.name
        self.spec = replace(self.latest.spec, rows=None)

    def iterate(self, start: int = 0) -> Iterator[Block]:
        """Yield complete rows from `start` on, and those written meanwhile."""
        while True:
            self.latest = self.reopen()
            rows = self.latest.spec.rows or 0
            if rows <= start:
                return
            yield from self.latest.iterate(start)
            start = rows

    def fingerprint(self) -> dict[str, Any]:
        """Return what must stay the same while the group grows."""
        record = self.latest.fingerprint()
        arrays = {
            role: {**array, "shape": array["shape"][1:]} for role, array in record["arrays"].items()
        }
        return {**record, "rows": None, "arrays": arrays, "follow": True}


def open_zarr(
    target: str,
    *,
    x: str = "x",
    y: str = "y",
    weight: str | None = None,
    field: str | None = None,
    lead: int = 1,
    dims: int | None = None,
    missing_chunks: str = "refuse",
    follow: bool = False,
    storage_options: dict[str, Any] | None = None,
    optional_targets: int | None = None,
) -> Source:
    """Open a Zarr group as a source of rows.

    Parameters
    ----------
    target:
        A directory, a .zip file or an fsspec URL.
    x, y, weight:
        Names of the arrays, (n, ...), (n, ...) and (n,).
    field, lead:
        Instead of x and y: one array whose row t predicts row t + lead.
    dims:
        See `kalmanhead.streams.layout.choose_layout`.
    missing_chunks:
        "refuse" or "fill". Stores written without their all-fill chunks need "fill".
    follow:
        Take the complete rows of a group that is still being written, the shorter of x and y.
    storage_options:
        Passed to fsspec.
    optional_targets:
        If the group has no array y, give rows with so many missing target channels; needs `dims`.

    Raises
    ------
    SourceError
        For anything that is not such a group; while reading, for missing or damaged chunks.
    """
    if missing_chunks not in ("refuse", "fill"):
        raise ConfigError(f"missing_chunks is {missing_chunks!r}; choose 'refuse' or 'fill'")

    def reopen() -> RandomAccessSource:
        group = _open_group(target, missing_chunks == "refuse", storage_options)
        unmeasured = optional_targets is not None and not field and y not in group
        names = (
            [field] if field else [x, *([] if unmeasured else [y]), *([weight] if weight else [])]
        )
        found = {name: ZarrRows(_array(group, name, target), name, target) for name in names}
        rows: dict[str, Rows] = dict(found)
        if unmeasured:
            grid = found[x].shape[len(found[x].shape) - (dims or 0) :]
            rows[y] = MissingRows(y, (found[x].shape[0], optional_targets or 0, *grid))
        if follow:
            rows |= {name: _FirstRows(r, r.complete_rows()) for name, r in found.items()}
        if field:
            return LeadSource(rows[field], lead, name=target, dims=dims, kind="zarr")
        return PairSource(
            rows[x],
            rows[y],
            rows[weight] if weight else None,
            name=target,
            dims=dims,
            follow=follow,
            kind="zarr",
        )

    return FollowSource(reopen) if follow else reopen()


def _open_group(target: str, watch: bool, options: dict[str, Any] | None) -> zarr.Group:
    if "://" not in target and not os.path.exists(target):
        raise SourceError(f"no such file or directory: {target}")
    try:
        store: Any
        if "://" in target:
            store = FsspecStore.from_url(target, storage_options=options, read_only=True)
        elif os.path.isdir(target):
            store = LocalStore(target, read_only=True)
        else:
            store = ZipStore(target, mode="r")
        node = zarr.open(_WatchedStore(store) if watch else store, mode="r")
    except KalmanHeadError:
        raise
    # Each kind of store fails in its own way on what is not there or not Zarr.
    except Exception as error:
        raise SourceError(
            f"{target} is no readable Zarr group ({one_line(error)}); check the path"
        ) from error
    if not isinstance(node, zarr.Group):
        raise SourceError(
            f"{target} is a single Zarr array; give the group that holds it and name it with "
            f"field= (--field)"
        )
    return node


def _array(group: zarr.Group, name: str, target: str) -> zarr.Array[Any]:
    try:
        node = group[name]
    except KeyError:
        node = None
    except Exception as error:
        raise SourceError(
            f"{target}: array {name} cannot be opened ({one_line(error)}); write it again"
        ) from error
    if isinstance(node, zarr.Array):
        return node
    raise SourceError(
        f"{target} has no array {name}; it has {_listing(group)}; choose with x= and y=, or with "
        f"field= (--x, --y, --field)"
    )


def _listing(group: zarr.Group) -> str:
    try:
        names = sorted(p for p, node in group.members(None) if isinstance(node, zarr.Array))
    # Some stores (plain http) cannot list.
    except Exception:
        return "arrays that its store cannot list"
    return ", ".join(names) if names else "no arrays"
