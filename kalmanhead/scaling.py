"""The scales of inputs and targets, and what happens to the head when they move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kalmanhead.scaler import RunningScaler

State = dict[str, Any]


# A scaled input beyond this many deviations tells of statistics that no longer hold.
LARGEST_INPUT = 30.0
# A scaled target beyond this many is held there until the statistics have followed: its square is
# of a size that float32 can hold, and a gradient too.
LARGEST_TARGET = 1e6
# A column whose deviation grows by more than this in one batch is another column from now on.
LARGEST_GROWTH = 30.0
# The scaling in use follows the statistics in steps of this share of a deviation, so that once
# these have settled nothing needs to be re-expressed from batch to batch.
TOLERANCE = 0.01


class Scaled(Protocol):
    """What was learnt in scaled units; the methods are those of `kalmanhead.head.Head`."""

    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express it for targets that are now `ratio * y + offset`."""
        ...

    def forget_noise(self, lost: Tensor) -> None:
        """Put the noise of outputs back to the prior, where `lost` says so."""
        ...

    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express it for leading features that were `ratio * new + offset`."""
        ...

    def forget_inputs(self, lost: Tensor) -> None:
        """Put leading features back to the prior, where `lost` says so."""
        ...


class Scaling:
    """Standardises inputs and targets by running statistics, either of them optionally.

    Before the first batch both pass through unchanged.

    Parameters
    ----------
    inputs, targets:
        Whether they are standardised.
    center:
        Whether targets are centred: a head without a constant cannot put the mean back.
    """

    def __init__(self, *, inputs: bool, targets: bool, center: bool) -> None:
        self.inputs, self.targets, self.center = inputs, targets, center
        self.x: RunningScaler | None = None
        self.y: RunningScaler | None = None

    def begin(self, x: Tensor, y: Tensor) -> None:
        """Make room for the channels of the first batch."""
        if self.inputs:
            self.x = _scaler(x.shape[1], True, x.device)
        if self.targets:
            self.y = _scaler(y.shape[1], self.center, y.device)

    def scale_inputs(self, x: Tensor) -> Tensor:
        """Inputs in standardised units, held within 30 deviations.

        A column that has been almost constant and then moves lies millions of deviations away
        until its statistics have followed.
        """
        return x if self.x is None else self.x(x).clamp(-LARGEST_INPUT, LARGEST_INPUT)

    def scale_targets(self, y: Tensor) -> Tensor:
        """Targets in standardised units, held within a million deviations."""
        return y if self.y is None else self.y(y).clamp(-LARGEST_TARGET, LARGEST_TARGET)

    def unscale_targets(self, y: Tensor) -> Tensor:
        """Targets in their own units again."""
        return y if self.y is None else self.y.inverse(y)

    def target_scale(self, like: Tensor) -> Tensor:
        """What a scaled target of 1 is in its own units, (k,)."""
        return torch.ones_like(like) if self.y is None else self.y.scale

    def unscale_spread(self, scale: Tensor) -> Tensor:
        """A scale of targets, (n, k, *grid), in their own units again."""
        return (
            scale if self.y is None else scale * self.y.scale.view((-1,) + (1,) * (scale.dim() - 2))
        )

    def follow(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        parts: Sequence[Scaled],
        *,
        skip: bool,
        express: bool,
    ) -> None:
        """Take a batch into the statistics and re-express in them what has been learnt.

        Parameters
        ----------
        x, y, weight:
            The batch, in its own units.
        parts:
            What was learnt; its leading features are the scaled inputs if `skip`.
        express:
            False at the start, when nothing has been learnt: the head's initial weights are
            meant in the scales that come, not in those that are left.
        """
        if self.x is not None:
            shift, scale = self.x.shift, self.x.scale
            if self.x.update(x, weight) and skip and self.center and express:
                ratio, offset = self.x.scale / scale, (self.x.shift - shift) / scale
                lost = ratio > LARGEST_GROWTH
                if lost.any():
                    # What was learnt on its old scale says nothing about the new one.
                    for part in parts:
                        part.forget_inputs(lost)
                    ratio, offset = torch.where(lost, 1.0, ratio), torch.where(lost, 0.0, offset)
                for part in parts:
                    part.rescale_inputs(ratio, offset)
        if self.y is not None:
            shift, scale, varied = self.y.shift, self.y.scale, self.y.varies
            if self.y.update(y, weight) and express:
                ratio, offset = scale / self.y.scale, (shift - self.y.shift) / self.y.scale
                # Until a target varies its scale is 1, whatever its unit: the prior of the noise
                # was not meant in that, and multiplied by the ratio it would last for ever.
                lost = self.y.varies & ~varied
                for part in parts:
                    part.rescale_targets(ratio, offset)
                    if lost.any():
                        part.forget_noise(lost)

    def restart_targets(self, changed: Tensor, y: Tensor, parts: Sequence[Scaled]) -> None:
        """Start anew from the targets of a batch where `changed`, (k,); predictions stay."""
        if self.y is not None:
            shift, scale = self.y.shift, self.y.scale
            self.y.restart(changed, y)
            for part in parts:
                part.rescale_targets(scale / self.y.scale, (shift - self.y.shift) / self.y.scale)

    def to(self, device: torch.device) -> None:
        """Move the statistics to a device."""
        for scaler in (self.x, self.y):
            if scaler is not None:
                scaler.to(device)

    def state(self) -> State:
        """What must be kept to go on exactly; None before the first batch."""
        return {
            "x": None if self.x is None else self.x.state(),
            "y": None if self.y is None else self.y.state(),
        }

    def load_state(self, state: State, device: torch.device) -> None:
        """Go on from what `state` returned."""
        self.x = _restored(state["x"], True, device)
        self.y = _restored(state["y"], self.center, device)


def _scaler(channels: int, center: bool, device: torch.device) -> RunningScaler:
    return RunningScaler(channels, center=center, tolerance=TOLERANCE, device=device)


def _restored(state: State | None, center: bool, device: torch.device) -> RunningScaler | None:
    if state is None:
        return None
    scaler = _scaler(state["count"].shape[0], center, device)
    scaler.load_state(state)
    return scaler
