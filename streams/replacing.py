"""Whether what stands at a path may be replaced: only what this program could have written."""

from __future__ import annotations

import os
from pathlib import Path

from kalmanhead.errors import SourceError

METADATA = frozenset(("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata"))


def check_replaceable(path: Path) -> None:
    """Refuse to replace anything but a Parquet file or a Zarr group without foreign files.

    Raises
    ------
    SourceError
        A link, a folder that holds anything else, or a file of another kind.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink():
        raise SourceError(f"{path} is a link: give the path it leads to, or remove it yourself")
    if path.is_dir():
        foreign = [entry for entry in sorted(path.iterdir()) if not _is_of_zarr(entry)]
        if foreign or not any((path / name).exists() for name in METADATA):
            held = f" and holds {foreign[0].name}" if foreign else ""
            raise SourceError(
                f"{path} is no Zarr group of its own{held}: give another path or remove it yourself"
            )
    elif path.suffix != ".parquet":
        raise SourceError(f"{path} is a file, no data set: give another path or remove it yourself")


def _is_of_zarr(entry: Path) -> bool:
    """Whether an entry of a group is its metadata, or an array or a group in it."""
    if entry.is_dir() and not entry.is_symlink():
        return any((entry / name).exists() for name in METADATA)
    return entry.name in METADATA
