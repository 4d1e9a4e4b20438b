"""Turns a source into batches: epochs, shuffling, holdout, bad rows, lag, reading ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kalmanhead.batch import Batch, Cursor
from kalmanhead.errors import ConfigError
from kalmanhead.streams.badrows import Part, keep_good
from kalmanhead.streams.prefetch import prefetch
from kalmanhead.streams.rebatch import Group, Lag, rebatch, to_tensors
from kalmanhead.streams.shuffle import (
    WINDOW_BYTES,
    InMemory,
    WindowShuffle,
    in_order,
)
from kalmanhead.streams.source import RandomAccessSource, Source, SourceSpec

# What a reading thread may hold ready.
READ_AHEAD_BYTES = 64 * 2**20


class Stream:
    """Batches of exactly `batch_size` rows; only the last of an epoch may be shorter.

    Iterating from the cursor of any batch gives exactly the batches after it, bit for bit.

    Parameters
    ----------
    source:
        Where the rows come from.
    batch_size:
        Rows per batch.
    epochs:
        Passes over the source.
    shuffle:
        Whether each pass has its own random order. None means: when there are several passes
        and the source has random access.
    seed:
        Decides the order of shuffled passes, together with the pass's number.
    holdout:
        Rows at the end that are never learnt: a count, or a fraction below 1.
    on_bad:
        "stop" raises at a row that cannot be learnt from, after the full batches before it;
        "skip" leaves it out and counts it in the next batch's `bad_rows`.
    lag:
        Rows that wait for their targets once predicted: lead - 1. With lag, and without
        shuffling, each batch carries in `due` the rows whose targets have come once it has been
        predicted; a last batch of no rows carries those that are left.
    prefetch:
        Batches that a background thread makes ahead, fewer where they are large (64 MB in all);
        0 makes them in the caller's thread.
    max_rows:
        Use only so many rows of the source. It makes an endless source finite.
    window_bytes:
        Memory for shuffling.

    Raises
    ------
    ConfigError
        For options that are out of range or need a finite source.

    Notes
    -----
    A source that does not know its length has no end-of-epoch cursor: its last batch's cursor
    is the position behind it, from which reading goes on if more has come.

    Examples
    --------
    >>> import numpy as np
    >>> from kalmanhead.streams import open_source
    >>> stream = open_source((np.arange(10.0), np.arange(10.0)), batch_size=4)
    >>> [(len(batch), batch.cursor.epoch, batch.cursor.row) for batch in stream]
    [(4, 0, 4), (4, 0, 8), (2, 1, 0)]
    """

    def __init__(
        self,
        source: Source,
        batch_size: int = 32,
        *,
        epochs: int = 1,
        shuffle: bool | None = None,
        seed: int = 0,
        holdout: float = 0,
        on_bad: str = "stop",
        lag: int | None = None,
        prefetch: int = 32,
        max_rows: int | None = None,
        window_bytes: int = WINDOW_BYTES,
    ):
        _at_least(1, batch_size=batch_size, epochs=epochs, window_bytes=window_bytes)
        lag = source.lag if lag is None else lag
        _at_least(0, lag=lag, prefetch=prefetch, seed=seed, holdout=holdout)
        if max_rows is not None:
            _at_least(1, max_rows=max_rows)
        if on_bad not in ("stop", "skip"):
            raise ConfigError(f"on_bad is {on_bad!r}; choose 'stop' or 'skip'")
        self.source, self.batch_size, self.epochs, self.seed = source, batch_size, epochs, seed
        self.on_bad = on_bad
        affordable = READ_AHEAD_BYTES // (batch_size * source.spec.row_bytes)
        self.prefetch = min(prefetch, max(2, affordable))
        total = source.spec.rows
        if max_rows is not None:
            total = max_rows if total is None else min(total, max_rows)
        self._total = total
        random_access = isinstance(source, RandomAccessSource)
        self.shuffle = (epochs > 1 and random_access) if shuffle is None else shuffle
        if total is None and (epochs > 1 or self.shuffle or holdout):
            raise ConfigError(
                f"{source.name} has no known end, which several epochs, shuffling and a holdout "
                f"need; limit it with max_rows (--max-rows)"
            )
        self.holdout_rows = 0 if total is None else _holdout_rows(holdout, total)
        self.lag = 0 if self.shuffle else lag
        self._shuffled: WindowShuffle | None = None
        if self.shuffle and self.rows is not None:
            base = source if isinstance(source, RandomAccessSource) else InMemory(source, self.rows)
            self._shuffled = WindowShuffle(base, self.rows, seed, window_bytes)

    @property
    def spec(self) -> SourceSpec:
        """Shapes and names of the rows."""
        return self.source.spec

    @property
    def rows(self) -> int | None:
        """Training rows per epoch, or None when unknown."""
        return None if self._total is None else self._total - self.holdout_rows

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches from the start."""
        return self.iterate()

    def iterate(self, cursor: Cursor | None = None) -> Iterator[Batch]:
        """Yield the batches after `cursor`, from the start without one.

        Raises
        ------
        ConfigError
            When the cursor lies behind the end of the source.
        SourceError
            Whatever the source meets while reading.
        BadRowError
            At a bad row, unless bad rows are skipped.
        """
        cursor = Cursor() if cursor is None else cursor
        if min(cursor.epoch, cursor.row) < 0 or (self.rows is not None and cursor.row > self.rows):
            raise ConfigError(
                f"cursor (epoch {cursor.epoch}, row {cursor.row}) is outside {self.source.name}, "
                f"which has {self.rows} training rows; resume with the data of the first run"
            )
        return prefetch(self._batches(cursor), self.prefetch)

    def holdout(self) -> Iterator[Batch]:
        """Yield the held-out rows, in order; their cursors count source rows."""
        if self._total is None or self.rows is None or not self.holdout_rows:
            return iter(())
        parts = self._good(in_order(self.source, self.rows, self._total))
        groups = rebatch(parts, self.batch_size, self.rows)
        return prefetch(self._plain(groups, 0, self.rows, None), self.prefetch)

    def fingerprint(self) -> dict[str, Any]:
        """Return plain JSON of all that decides which row stands at which cursor."""
        return {
            "source": self.source.fingerprint(),
            "rows": self.rows,
            "holdout_rows": self.holdout_rows,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "window_bytes": self._shuffled.window_bytes if self._shuffled else None,
            "lag": self.lag,
        }

    def _batches(self, cursor: Cursor) -> Iterator[Batch]:
        start = cursor.row
        for epoch in range(cursor.epoch, self.epochs):
            if self.lag:
                yield from self._lagging(epoch, start)
            else:
                yield from self._plain(self._groups(epoch, start), epoch, start, self.rows)
            start = 0

    def _groups(self, epoch: int, start: int) -> Iterator[Group]:
        if self._shuffled is not None:
            parts = self._shuffled.parts(epoch, start)
        else:
            parts = in_order(self.source, start, self.rows)
        return rebatch(self._good(parts), self.batch_size, start)

    def _good(self, parts: Iterator[Part]) -> Iterator[Part]:
        return keep_good(parts, self.source, self.on_bad)

    def _plain(
        self, groups: Iterator[Group], epoch: int, start: int, end: int | None
    ) -> Iterator[Batch]:
        for group in groups:
            cursor = Cursor(epoch + 1) if group.after == end else Cursor(epoch, group.after)
            yield self._batch(group, start, cursor)
            start = group.after

    def _lagging(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield batches with `due`; the rows that still wait at `start` are read again."""
        waiting = Lag(self.lag)
        for part in self._good(in_order(self.source, max(0, start - self.lag), start)):
            waiting.add([part])
        for group in self._groups(epoch, start):
            waiting.add(group.parts)
            due = to_tensors(waiting.release(group.after - self.lag), self.spec)
            yield replace(self._batch(group, start, Cursor(epoch, group.after)), due=due)
            start = group.after
        left = waiting.release(start)
        if any(len(block) for block in left):
            x, y, weight = to_tensors(left[:1], self.spec)
            due = to_tensors(left, self.spec)
            yield Batch(x, y, weight, Cursor(epoch + 1), due=due)

    def _batch(self, group: Group, start: int, cursor: Cursor) -> Batch:
        x, y, weight = to_tensors([part.block for part in group.parts], self.spec)
        return Batch(x, y, weight, cursor, bad_rows=group.after - start - len(group))


def _at_least(least: int, **options: float) -> None:
    for name, value in options.items():
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")


def _holdout_rows(holdout: float, total: int) -> int:
    if holdout == 0:
        return 0
    if holdout >= 1 and holdout != int(holdout):
        raise ConfigError(f"holdout is {holdout}; give a count of rows or a fraction below 1")
    rows = int(holdout) if holdout >= 1 else max(1, round(holdout * total))
    if rows >= total:
        raise ConfigError(
            f"holdout of {rows} rows leaves none of {total} to learn from; hold out fewer"
        )
    return rows
