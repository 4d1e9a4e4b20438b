"""What travels from a source to the learner: a batch of rows and the cursor behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

# Far beyond any measurement, and small enough that sums of squares stay finite in float64.
LARGEST_VALUE = 1e100


@dataclass(frozen=True)
class Cursor:
    """Where a stream goes on: the next source row, in the stream's order of that epoch.

    Attributes
    ----------
    epoch:
        Passes already finished.
    row:
        Position within the epoch of the first row that has not been read. Under shuffling it
        counts positions of that epoch's permutation, which follows from the seed alone.
    """

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class Batch:
    """Rows to be predicted and learnt, and the cursor from which the stream goes on after them.

    Attributes
    ----------
    x:
        Inputs, (n, d_in) for vectors or (n, channels, *grid) for fields; float32 or float64.
    y:
        Targets, (n, k) or (n, k, *grid); NaN marks a missing target.
    weight:
        Row weights, (n,), or None for all ones.
    cursor:
        The position AFTER these rows. It travels with the batch, so that reading ahead can never
        run ahead of what was learnt.
    bad_rows:
        Rows that were left out between the previous batch and this one.
    due:
        What may be learnt once this batch has been predicted. None means the batch itself; under
        a lead of several steps it holds the earlier rows whose targets have come by now.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    cursor: Cursor = field(default_factory=Cursor)
    bad_rows: int = 0
    due: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __len__(self) -> int:
        """Rows in the batch."""
        return int(self.x.shape[0])
