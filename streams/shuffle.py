"""The order of rows in a shuffled epoch, which follows from the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.badrows import Part
from kalmanhead.streams.source import (
    Array,
    Block,
    RandomAccessSource,
    Source,
    concatenate,
)

WINDOW_BYTES = 256 * 2**20
# A source without random access is shuffled in memory, up to this size.
LARGEST_IN_MEMORY = 2**30

_PART_ROWS = 4096


class WindowShuffle:
    """Shuffles the first `rows` rows of a source in windows of whole chunks.

    The chunks are permuted and joined to windows of about `window_bytes`; the rows of each
    window are permuted. A data set that fits one window is permuted uniformly and kept in
    memory for further epochs. Nothing depends on what was read before, so any position is found
    again by reading the one window that holds it.
    """

    def __init__(
        self, source: RandomAccessSource, rows: int, seed: int, window_bytes: int = WINDOW_BYTES
    ):
        self.source, self.rows, self.seed, self.window_bytes = source, rows, seed, window_bytes
        edges = source.edges()
        self._edges = np.append(edges[edges < rows], np.int64(rows))
        self._fits = rows * source.spec.row_bytes <= window_bytes
        self._kept: Block | None = None

    def parts(self, epoch: int, start: int) -> Iterator[Part]:
        """Yield the rows of an epoch from position `start` on."""
        low = 0
        for index, chunks in enumerate(self._windows(epoch)):
            sizes = self._edges[chunks + 1] - self._edges[chunks]
            high = low + int(sizes.sum())
            if high > start:
                yield from self._window(epoch, index, chunks, low, max(start, low))
            low = high

    def _windows(self, epoch: int) -> list[NDArray[np.int64]]:
        count = len(self._edges) - 1
        if self._fits:
            return [np.arange(count)]
        order = np.random.default_rng([self.seed, epoch]).permutation(count)
        row_bytes = self.source.spec.row_bytes
        windows: list[NDArray[np.int64]] = []
        first, size = 0, 0
        for i, rows in enumerate((self._edges[order + 1] - self._edges[order]).tolist()):
            if i > first and size + rows * row_bytes > self.window_bytes:
                windows.append(np.sort(order[first:i]))
                first, size = i, 0
            size += rows * row_bytes
        return [*windows, np.sort(order[first:])]

    def _window(
        self, epoch: int, index: int, chunks: NDArray[np.int64], low: int, start: int
    ) -> Iterator[Part]:
        rows = np.concatenate([np.arange(self._edges[c], self._edges[c + 1]) for c in chunks])
        order = np.random.default_rng([self.seed, epoch, index]).permutation(len(rows))
        block = self._read(chunks)
        for at in range(start - low, len(rows), _PART_ROWS):
            chosen = order[at : at + _PART_ROWS]
            position = low + at
            yield Part(
                block.take(chosen),
                np.arange(position, position + len(chosen), dtype=np.int64),
                rows[chosen],
                position + len(chosen),
            )

    def _read(self, chunks: NDArray[np.int64]) -> Block:
        if self._kept is not None:
            return self._kept
        block = concatenate(
            [self.source.read(int(self._edges[c]), int(self._edges[c + 1])) for c in chunks]
        )
        if self._fits:
            self._kept = block
        return block


class InMemory(RandomAccessSource):
    """A finite source without random access, read once and kept."""

    def __init__(self, source: Source, rows: int):
        size = rows * source.spec.row_bytes
        if size > LARGEST_IN_MEMORY:
            raise ConfigError(
                f"{source.name} can only be read in order and its {size / 2**30:.1f} GiB are too "
                f"many to shuffle in memory; set shuffle=False (--no-shuffle) or limit max_rows "
                f"(--max-rows)"
            )
        self.source, self.name, self.spec, self.rows = source, source.name, source.spec, rows
        self._block: Block | None = None

    def read(self, start: int, stop: int) -> Block:
        """Read the rows `start <= row < stop`."""
        if self._block is None:
            self._block = concatenate(list(take_rows(self.source, 0, self.rows)))
        return self._block.take(slice(start, stop))

    def edges(self) -> NDArray[np.int64]:
        """Return both ends."""
        return np.array([0, self.rows], dtype=np.int64)

    def locate(self, row: int) -> str:
        """Say where the source has the row."""
        return self.source.locate(row)

    def fingerprint(self) -> dict[str, Any]:
        """Return the source's fingerprint."""
        return self.source.fingerprint()


def take_rows(source: Source, start: int, stop: int | None) -> Iterator[Block]:
    """Yield exactly the rows `start <= row < stop`, to the source's end if stop is None.

    Raises
    ------
    SourceError
        When the source ends before `stop`.
    """
    if stop is not None and start >= stop:
        return
    for block in source.iterate(start):
        if stop is not None and start + len(block) >= stop:
            yield block.take(slice(0, stop - start))
            return
        start += len(block)
        yield block
    if stop is not None:
        raise SourceError(
            f"{source.name} ended after {start} rows though {stop} were expected; limit max_rows "
            f"(--max-rows) to what it has"
        )


def in_order(source: Source, start: int, stop: int | None) -> Iterator[Part]:
    """Yield the rows `start <= row < stop` in the source's own order."""
    for block in take_rows(source, start, stop):
        rows: Array = np.arange(start, start + len(block), dtype=np.int64)
        start += len(block)
        yield Part(block, rows, rows, start)
