"""Cuts rows into batches of exactly the asked size, whatever blocks they came in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kalmanhead.streams.badrows import Part
from kalmanhead.streams.source import Array, Block, SourceSpec

Tensors = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Group:
    """The parts of one batch.

    Attributes
    ----------
    parts:
        At least one part; they may hold no row.
    after:
        Position in the epoch from which reading goes on.
    """

    parts: list[Part]
    after: int

    def __len__(self) -> int:
        """Rows in the group."""
        return sum(len(part.block) for part in self.parts)


def rebatch(parts: Iterator[Part], batch_size: int, start: int) -> Iterator[Group]:
    """Group parts, which begin at position `start`, to exactly `batch_size` rows.

    Only what is left at the end is shorter.

    Skipped rows behind the last good one end in a last group, of no rows if need be, so that
    they are counted.
    """
    held: list[Part] = []
    count, after = 0, start
    for part in parts:
        at = 0
        while len(part.block) - at >= batch_size - count:
            stop = at + batch_size - count
            piece = part.take(slice(at, stop))
            after = int(piece.positions[-1]) + 1
            yield Group([*held, piece], after)
            held, count, at = [], 0, stop
        rest = part.take(slice(at, None))
        # An empty rest is kept only while there is nothing else to carry shapes and the end.
        if len(rest.block):
            held = [p for p in held if len(p.block)] + [rest]
        elif not held:
            held = [rest]
        else:
            held[-1] = Part(held[-1].block, held[-1].positions, held[-1].rows, rest.after)
        count += len(rest.block)
    if held and held[-1].after > after:
        yield Group(held, held[-1].after)


def to_tensors(blocks: list[Block], spec: SourceSpec) -> Tensors:
    """Copy blocks, at least one, into tensors that torch allocated.

    Kernels may sum in another order on memory aligned differently; a view into a block would
    make results depend on where a run was resumed.
    """
    rows = sum(len(block) for block in blocks)
    x = _join([block.x for block in blocks], (rows, *spec.x_shape))
    y = _join([block.y for block in blocks], (rows, *spec.y_shape))
    weights = [block.weight for block in blocks if block.weight is not None]
    return x, y, _join(weights, (rows,)) if weights else None


def _join(arrays: list[Array], shape: tuple[int, ...]) -> Tensor:
    dtype = torch.float32 if arrays[0].dtype == np.float32 else torch.float64
    out = torch.empty(shape, dtype=dtype)
    view = out.numpy()
    at = 0
    for array in arrays:
        view[at : at + len(array)] = array
        at += len(array)
    return out


class Lag:
    """Rows that were predicted but whose targets have not come yet.

    After the rows up to position p have been predicted, those before p - lag may be learnt.
    """

    def __init__(self, lag: int):
        self.lag = lag
        self.waiting: deque[Part] = deque()

    def add(self, parts: list[Part]) -> None:
        """Let rows wait."""
        self.waiting.extend(parts)

    def release(self, before: int) -> list[Block]:
        """Return the waiting rows at positions below `before`, which wait no longer.

        There is always at least one block, if an empty one, once any row has been added.
        """
        released = [self.waiting[0].block.take(slice(0, 0))] if self.waiting else []
        while self.waiting:
            part = self.waiting.popleft()
            cut = int(np.searchsorted(part.positions, before))
            released.append(part.block.take(slice(0, cut)))
            if cut < len(part.block):
                self.waiting.appendleft(part.take(slice(cut, None)))
                break
        return released
