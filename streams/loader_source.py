"""torch data loaders as sources of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from kalmanhead.errors import SourceError
from kalmanhead.streams.arrays import as_array
from kalmanhead.streams.layout import choose_layout
from kalmanhead.streams.source import Array, Block, Source, to_float


class LoaderSource(Source):
    """Rows of a torch DataLoader that yields (x, y) or (x, y, weight).

    It cannot seek: a resumed run replays the loader from its start and drops what was learnt.
    That is exact only when the loader gives the same rows again; one with `shuffle=True` does
    not (use this package's own `shuffle` over the data set instead).

    Raises
    ------
    SourceError
        When the loader yields something else, or nothing.
    """

    def __init__(self, loader: DataLoader[Any], *, dims: int | None = None):
        self.loader, self.name = loader, "data loader"
        # Looking at the first rows must not advance the caller's random numbers.
        with torch.random.fork_rng(devices=[]):
            first = next(iter(loader), None)
        if first is None:
            raise SourceError("data loader has no rows; give it a data set that is not empty")
        x, y, _ = self._unpack(first)
        self.layout = choose_layout(x.shape[1:], y.shape[1:], dims)
        self.spec = self.layout.spec(_loader_rows(loader))

    def iterate(self, start: int = 0) -> Iterator[Block]:
        """Yield rows from `start` on, replaying the loader."""
        seen = 0
        for item in self.loader:
            x, y, weight = self._unpack(item)
            skip = min(max(start - seen, 0), len(x))
            seen_before, seen = seen, seen + len(x)
            if skip == len(x):
                continue
            yield Block(
                self.layout.shape_x(to_float(x, "x", seen_before)),
                self.layout.shape_y(to_float(y, "y", seen_before)),
                None if weight is None else to_float(weight, "weight", seen_before).reshape(-1),
            ).take(slice(skip, None))

    def fingerprint(self) -> dict[str, Any]:
        """Return the shapes and, where known, the number of rows."""
        return {
            "kind": "data loader",
            "rows": self.spec.rows,
            "x_shape": list(self.spec.x_shape),
            "y_shape": list(self.spec.y_shape),
        }

    @staticmethod
    def _unpack(item: Any) -> tuple[Array, Array, Array | None]:
        if not isinstance(item, list | tuple) or len(item) not in (2, 3):
            raise SourceError("data loader must yield (x, y) or (x, y, weight); wrap its data set")
        x, y = as_array(item[0], "x"), as_array(item[1], "y")
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise SourceError(
                f"data loader yields x of shape {x.shape} with y of shape {y.shape}; the first "
                f"axes must be the same rows (is batch_size=None set?)"
            )
        return x, y, as_array(item[2], "weight") if len(item) == 3 else None


def _loader_rows(loader: DataLoader[Any]) -> int | None:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    try:
        rows = len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    return len(loader) * loader.batch_size if loader.drop_last else rows
