"""Running mean and variance of every channel, and the scaling by them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kalmanhead.errors import ConfigError
from kalmanhead.outliers import ALARM, LARGEST_DEVIATION, hold

State = dict[str, Any]

# Rows that the old spread counts for after a change.
FEW_ROWS = 3.0
STATE = ("count", "mean", "squares", "strange", "shift", "scale")


class RunningScaler:
    """Centres and scales channels by statistics learnt from the stream.

    Batches are merged by the pairwise update of Chan, Golub and LeVeque (1979) in float64, so
    1000 + 0.05 N(0, 1) in float32 batches of 8 gives 0.05 and not 0. NaN entries are left out.
    A channel that has not varied yet is centred and not scaled. A value beyond 30 deviations
    is left out, so that a single wild one does not spoil the scale for good, until three batches
    in a row say that the channel has changed.

    Parameters
    ----------
    channels:
        Channels, in dimension 1 of the values: columns of (n, channels), channels of
        (n, channels, *grid), whose grid points all count as samples of their channel.
    center:
        Subtract the mean; without it the scale is the root mean square.
    tolerance:
        The scaling in use follows the statistics once some channel's is off by more than this
        share of its deviation; 0 for at once.
    device:
        Of the statistics; values must lie there too.

    Examples
    --------
    >>> scaler = RunningScaler(1)
    >>> scaler.update(torch.tensor([[1.0], [3.0]]))
    True
    >>> scaler(torch.tensor([[4.0]]))
    tensor([[2.]], dtype=torch.float64)
    """

    def __init__(
        self,
        channels: int,
        *,
        center: bool = True,
        tolerance: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        self.center, self.tolerance = center, tolerance
        self.count = torch.zeros(channels, dtype=torch.float64, device=device)
        self.mean = torch.zeros_like(self.count)
        self.squares = torch.zeros_like(self.count)
        self.strange = torch.zeros_like(self.count)
        self.shift = self.mean
        self.scale = torch.ones_like(self.count)

    @torch.no_grad()
    def update(self, values: Tensor, weight: Tensor | None = None) -> bool:
        """Take the rows of a batch, (n, channels, *grid), into the statistics.

        A row of weight 2 counts as two; `weight` is (n,), positive.

        Returns
        -------
        bool
            Whether the scaling in use has changed.

        Raises
        ------
        ConfigError
            The values have another number of channels.
        """
        if values.shape[0] == 0:
            return False
        if values.shape[1] != self.count.shape[0]:
            raise ConfigError(
                f"values have {values.shape[1]} channels, the scaler {self.count.shape[0]}"
            )
        rows = values.detach().movedim(1, -1).flatten(0, -2).to(torch.float64)
        if rows.numel() == 0:
            return False
        rows = self._believed(rows)
        variance, mean = torch.var_mean(rows, 0, correction=0)
        count, squares = torch.full_like(mean, float(rows.shape[0])), variance * rows.shape[0]
        if weight is not None or torch.isnan(mean).any():
            weights = (~torch.isnan(rows)).to(torch.float64)
            if weight is not None:
                points = rows.shape[0] // weight.shape[0]
                weights = weights * weight.to(weights).repeat_interleave(points)[:, None]
            count = weights.sum(0)
            mean = (weights * rows).nansum(0) / _or_one(count)
            squares = (weights * (rows - mean).square()).nansum(0)
        total = self.count + count
        share = count / _or_one(total)
        delta = mean - self.mean
        self.squares = self.squares + squares + delta.square() * self.count * share
        self.mean = self.mean + delta * share
        self.count = total
        return self._refresh()

    @torch.no_grad()
    def restart(self, changed: Tensor, values: Tensor) -> None:
        """Start anew where `changed`, (channels,): at the middle of a batch, with the old spread.

        What is known of the spread counts for few rows from here on, so that it soon is the new.
        """
        rows = values.detach().movedim(1, -1).flatten(0, -2).to(torch.float64)
        few = torch.full_like(self.count, FEW_ROWS)
        self.squares = torch.where(changed, self.squares / _or_one(self.count) * few, self.squares)
        self.mean = torch.where(changed, rows.nanquantile(0.5, dim=0), self.mean)
        self.count = torch.where(changed, few, self.count)
        self.strange = torch.where(changed, ALARM + 1, self.strange)
        self.shift = self.mean if self.center else torch.zeros_like(self.mean)

    def __call__(self, values: Tensor) -> Tensor:
        """Scaled values, (n, channels, *grid), float64."""
        shape = (-1,) + (1,) * (values.dim() - 2)
        return (values - self.shift.view(shape)) / self.scale.view(shape)

    def inverse(self, values: Tensor) -> Tensor:
        """Values in their own units again, float64."""
        shape = (-1,) + (1,) * (values.dim() - 2)
        return values * self.scale.view(shape) + self.shift.view(shape)

    def to(self, device: torch.device) -> None:
        """Move the statistics."""
        self.load_state({name: value.to(device) for name, value in self.state().items()}, device)

    def state(self) -> State:
        """What must be kept to go on exactly."""
        return {name: getattr(self, name) for name in STATE}

    def load_state(self, state: State, device: torch.device | None = None) -> None:
        """Go on from what `state` returned, on this device (None: where they lie)."""
        device = self.count.device if device is None else device
        for name in STATE:
            setattr(self, name, state[name].to(device, torch.float64).clone())

    @property
    def varies(self) -> Tensor:
        """Whether a channel has varied, (channels,); until then its scale is 1."""
        # A spread below the rounding of the mean itself is rounding, not signal.
        return self._variance > (1e-12 * self.mean).square()

    @property
    def _variance(self) -> Tensor:
        """Mean square around the mean, or around 0 without centring, (channels,)."""
        variance = self.squares / _or_one(self.count)
        return variance if self.center else variance + self.mean.square()

    def _believed(self, rows: Tensor) -> Tensor:
        """Rows (n, channels), NaN where they are beyond the deviations that are believed."""
        middle = self.mean if self.center else torch.zeros_like(self.mean)
        reach = torch.where(self.varies, LARGEST_DEVIATION * self._variance.sqrt(), math.inf)
        held, self.strange = hold(rows, middle, reach, self.strange)
        return rows if held is rows else torch.where(held == rows, rows, math.nan)

    def _refresh(self) -> bool:
        """Bring shift and scale up to the statistics, if they are off by too much."""
        scale = torch.where(self.varies, self._variance, 1.0).sqrt()
        shift = self.mean if self.center else torch.zeros_like(self.mean)
        off = torch.maximum((scale / self.scale - 1).abs(), (shift - self.shift).abs() / scale)
        # NaN, of statistics that have overflowed, counts as off.
        if bool((off <= self.tolerance).all()) and self.tolerance > 0:
            return False
        self.shift, self.scale = shift, scale
        return True


def _or_one(count: Tensor) -> Tensor:
    """Counts to divide by: 1 where nothing was counted."""
    return torch.where(count > 0, count, 1.0)
