"""Targets so far from their forecast that they are no measurement, and teach nothing.

A single target a thousand deviations away would throw every head off, and then the backbone, whose
gradient goes through a head. It is put at its forecast, so that it moves nothing, unless the last
rows were strange as well: then the world has changed, and they are believed (`kalmanhead.renewal`).
What is usual still hears of it, as an error at the end of the reach, so that errors which are
large now and then are not strange for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmanhead.layout import as_outputs, as_rows, target_weights
from kalmanhead.noise import noise_discount

State = dict[str, Any]

STATE = ("squares", "rows", "strange", "fresh")

# Beyond so many deviations a value is strange.
LARGEST_DEVIATION = 30.0
# Strange values are believed after those of three batches in a row, or of more with others between:
# the share of strange values in each batch is added up, and the sum fades with every batch.
CALM, ALARM = 0.8, 2.0
# Rows whose errors are remembered, and rows before the first is doubted.
MEMORY, START = 2_000.0, 20.0
# Deviations of the targets themselves within which none is strange, however well all are foreseen.
ORDINARY = 3.0


def hold(values: Tensor, middle: Tensor, reach: Tensor, strange: Tensor) -> tuple[Tensor, Tensor]:
    """Hold strange values at the end of their reach.

    Parameters
    ----------
    values:
        (n, channels); NaN stays.
    middle, reach:
        Values further than `reach` from the middle are strange; (channels,) each.
    strange:
        How strange the last batches were, (channels,).

    Returns
    -------
    values, strange:
        After this batch; the very same values if none is strange.

    Examples
    --------
    >>> middle, reach, strange = torch.zeros(1), torch.ones(1), torch.zeros(1)
    >>> for _ in range(4):
    ...     held, strange = hold(torch.tensor([[5.0]]), middle, reach, strange)
    ...     print(held.item())
    1.0
    1.0
    1.0
    5.0
    """
    low, high = values.aminmax(dim=0)
    believed, fading = strange > ALARM, CALM * strange
    # NaN is not within, and is looked at below.
    if bool(((low >= middle - reach) & (high <= middle + reach)).all()):
        return values, fading
    beyond = ((values - middle).abs() > reach).to(fading).mean(0)
    reach = torch.where(believed, math.inf, reach)
    return values.clamp(middle - reach, middle + reach), fading + beyond


class Outliers:
    """Knows how far targets usually are from their forecasts, and keeps out those that are strange.

    Parameters
    ----------
    outputs:
        Targets, k.
    feature_dim:
        -1 for targets (n, k), 1 for (n, k, *grid), whose points all count.
    device:
        Of what is learnt.
    """

    def __init__(
        self, outputs: int, feature_dim: int, device: torch.device | str | None = None
    ) -> None:
        self.feature_dim = feature_dim
        self.squares = torch.zeros(outputs, dtype=torch.float64, device=device)
        self.rows = torch.zeros_like(self.squares)
        self.strange = torch.zeros_like(self.squares)
        self.seen = 0.0
        # Rows that are still not doubted after a change.
        self.fresh = torch.zeros_like(self.squares)
        # Outputs whose targets are strange and believed: their world has changed with this batch.
        self.changed = torch.zeros(outputs, dtype=torch.bool, device=device)

    @property
    def reach(self) -> Tensor:
        """How far from its forecast a target may be, in scaled units, (k,)."""
        return torch.where((self.rows < START) | (self.fresh > 0), math.inf, self._usual)

    @property
    def _usual(self) -> Tensor:
        deviation = (self.squares / self.rows.clamp_min(1)).sqrt()
        return (LARGEST_DEVIATION * deviation).clamp_min(ORDINARY)

    def expect_anything(self, changed: Tensor) -> None:
        """Doubt nothing of outputs that have changed, (k,), until their errors are as usual again.

        After START rows what they are by then is usual. So a jump that is soon taken back is seen.
        """
        self.fresh = torch.where(changed, START, self.fresh)

    @torch.no_grad()
    def hold(self, y: Tensor, forecast: Tensor, weight: Tensor | None) -> Tensor:
        """Targets to learn from, in scaled units, (n, k) or (n, k, *grid); NaN stays NaN.

        Parameters
        ----------
        y, forecast:
            Scaled targets and what had been foreseen of them, of one shape.
        weight:
            Row weights, (n,).
        """
        errors = as_rows(y - forecast, self.feature_dim).to(torch.float64)
        if len(errors) == 0:
            return y
        middle, reach, alarmed = torch.zeros_like(self.squares), self.reach, self.strange > ALARM
        held, self.strange = hold(errors, middle, reach, self.strange)
        self.changed = alarmed & ((errors.abs() > reach).to(torch.float64).mean(0) > 0.5)
        self.follow(held, target_weights(y, weight, self.feature_dim) * ~self.changed)
        if held is errors:
            return y
        strange = as_outputs((held - errors).abs() > 0, y, self.feature_dim)
        return torch.where(strange, forecast, y)

    def follow(self, errors: Tensor, seen: Tensor) -> None:
        """Take errors (n, k) into what is usual; `seen` holds their weights, 0 where missing."""
        counted = seen.sum(0)
        if bool(self.fresh.any()):
            as_usual = ~(errors.abs() > self._usual).any(0) & (counted > 0)
            self.fresh = torch.where(as_usual, 0.0, (self.fresh - counted).clamp_min(0))
        discount = noise_discount(counted, self.seen, MEMORY)
        news = (seen * torch.where(seen > 0, errors, 0.0).square()).sum(0)
        self.squares = discount * self.squares + news
        self.rows = discount * self.rows + counted
        self.seen += float(counted.max())

    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Follow targets that are now `ratio * y + offset`, both (k,)."""
        self.squares = self.squares * ratio.to(self.squares).square()

    def forget_noise(self, lost: Tensor) -> None:
        """Know nothing of the errors of the outputs of `lost`, (k,)."""
        self.squares = torch.where(lost, 0.0, self.squares)
        self.rows = torch.where(lost, 0.0, self.rows)

    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Errors are none the other for it."""

    def forget_inputs(self, lost: Tensor) -> None:
        """Errors are none the other for it."""

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow a move to another device, but keep the dtype."""
        for name in (*STATE, "changed"):
            value = getattr(self, name)
            setattr(self, name, fn(value).to(value.dtype))

    def state(self) -> State:
        """What must be kept to go on exactly."""
        return {name: getattr(self, name) for name in (*STATE, "seen")}

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned."""
        for name in STATE:
            setattr(self, name, state[name].to(self.squares).clone())
        self.seen = float(state["seen"])
