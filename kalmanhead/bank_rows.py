"""A batch as a bank of heads sees it: rows, what all heads share of them, and which ones judge."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from kalmanhead.layout import as_rows, target_weights

# Points of a field that judge the heads, in each batch, or one a sample if that is more: neighbours
# say the same.
JUDGES = 512


class BankRows:
    """Rows of a batch behind the constant, in float64.

    Parameters
    ----------
    phi, y, weight:
        Features, targets and row weights in the layouts of `KalmanHead.update`.
    feature_dim:
        Where the features lie.
    turn:
        Number of the batch: other points judge in each.

    Attributes
    ----------
    rows, targets:
        (n, d) with the constant, and (n, k) with NaN where missing.
    seen:
        Weight of each target, 0 where it is missing, (n, k).
    weights:
        Of the rows, (n,); None for 1.
    samples:
        How many rows or fields they come from.
    """

    def __init__(
        self, phi: Tensor, y: Tensor, weight: Tensor | None, feature_dim: int, turn: int
    ) -> None:
        self.rows = rows_of(phi, feature_dim)
        self.targets = as_rows(y.detach(), feature_dim).to(self.rows)
        self.seen = target_weights(y, weight, feature_dim)
        self.complete = not bool(torch.isnan(self.targets).any())
        self.weights = None if weight is None and self.complete else self.seen.amax(1)
        self.samples, self.turn = len(phi), turn

    @property
    def points(self) -> int:
        """Rows that one sample consists of."""
        return len(self.rows) // self.samples

    @property
    def summed(self) -> bool:
        """Whether the heads learn from `sums`: for many rows, one pass over them serves all."""
        return self.complete and len(self.rows) >= self.rows.shape[1]

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor]:
        """Phi' R^-1 Phi (d, d) and Phi' R^-1 Y (d, k), whose leading parts serve a block."""
        weighted = self.rows if self.weights is None else self.rows * self.weights[:, None]
        return weighted.mT @ self.rows, weighted.mT @ self.targets

    @cached_property
    def judges(self) -> Tensor | None:
        """Numbers of the rows that judge the heads; None for all."""
        step = min(self.points, len(self.rows) // JUDGES)
        if step < 2 or not self.summed:
            return None
        step -= 1 - step % 2  # odd, so that samples judge by different points
        return torch.arange(self.turn % step, len(self.rows), step, device=self.rows.device)

    @property
    def judged(self) -> tuple[Tensor, Tensor]:
        """Rows and targets that judge."""
        judges = self.judges
        return (
            (self.rows, self.targets)
            if judges is None
            else (self.rows[judges], self.targets[judges])
        )

    @property
    def heard(self) -> Tensor:
        """Weight of each target that judges; together they weigh as much as all, (judges, k)."""
        if self.judges is None:
            return self.seen
        heard = self.seen[self.judges]
        return heard * (self.seen.sum(0) / heard.sum(0).clamp_min(math.ulp(0)))


def rows_of(phi: Tensor, feature_dim: int) -> Tensor:
    """Features as rows behind the constant, (rows, d), float64."""
    moved = phi.detach().movedim(feature_dim, -1)
    rows = torch.empty(
        *moved.shape[:-1], 1 + moved.shape[-1], dtype=torch.float64, device=phi.device
    )
    rows[..., 0] = 1.0
    rows[..., 1:] = moved
    return rows.flatten(0, -2)
