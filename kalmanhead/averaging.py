"""An average of the last models beside the newest one, mixed by how well each foresees.

A stream has no end at which a learning rate could decay, so gradient steps leave the backbone
jittering about. An exponential moving average of backbone and W (Polyak averaging) takes the
jitter out; where the world moves faster than the average, the newest model leads again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kalmanhead.errors import ConfigError, kind_and_line
from kalmanhead.head import Head
from kalmanhead.layout import linear_outputs, rescaled_weight, target_weights
from kalmanhead.linalg import row_major
from kalmanhead.noise import Predictive, matching_student_t, noise_discount
from kalmanhead.posterior import change_rows
from kalmanhead.standing import Standing

State = dict[str, Any]

NOISE_MEMORY = 10_000.0
# The mixture's own errors shrink as it learns, so its intervals look back less far.
MIXTURE_MEMORY = 2_000.0
# Means of |e|^(1/2) and |e| of a standard normal variable.
NORMAL = (0.8221789586623917, 0.7978845608028654)


@dataclass(frozen=True)
class Forecast:
    """Predictions in scaled units: of the newest model, of the average, and of both together."""

    newest: Tensor
    average: Tensor
    mixture: Tensor


class Averaging:
    """Keeps the average, and learns per output how much it is to be trusted.

    Parameters
    ----------
    decay:
        What is kept of the average at each batch, at most; t / (10 + t) after t batches if less.
    backbone, head:
        Of which the average is taken; the backbone is copied.

    Raises
    ------
    ConfigError
        A decay outside of 0 to 1.
    """

    def __init__(self, decay: float, backbone: nn.Module, head: Head) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"average is {decay}: give a decay between 0 and 1, or None")
        self.decay = decay
        try:
            self.backbone = copy.deepcopy(backbone).eval().requires_grad_(False)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"a {type(backbone).__name__} cannot be copied to be averaged "
                f"({kind_and_line(error)}): leave average out"
            ) from error
        self.exact: list[Tensor] = []
        self._hold_exact()
        self.weight = head.weight.detach().clone()
        self.has_bias, self.feature_dim = head.has_bias, head.feature_dim
        self.standing = Standing.start(2, head.out_features, head.weight.device)
        self.moments = self._first_moments()
        self.rows_seen, self.batches = 0.0, 0

    def _first_moments(self) -> Tensor:
        """Sums of the mixture's |e|^(1/2) and |e|, and how many rows they stand for, all (k,)."""
        one = torch.ones_like(self.standing.noise.shape[0])
        return torch.stack([NORMAL[0] * one, NORMAL[1] * one, one])

    def __call__(self, phi: Tensor) -> Tensor:
        """What the averaged model predicts from its own features; shaped as a head's output."""
        return linear_outputs(self.weight, phi, self.has_bias, self.feature_dim)

    def mix(self, newest: Tensor, average: Tensor) -> Tensor:
        """Prediction of both models, weighted."""
        share = self.standing.shares[1].to(newest).view(self._along(newest))
        return newest + share * (average - newest)

    def calibrated(self, predictive: Predictive, mean: Tensor) -> Predictive:
        """The newest model's distribution, moved to the mixture's mean and to its errors.

        Their size sets the scale, and how peaked they are the degrees of freedom.
        """
        root, absolute = self.moments[:2] / self.moments[2]
        scale, dof = matching_student_t(root, absolute)
        ratio = scale / self.standing.noise.variance[0].sqrt()
        along = self._along(mean)
        return Predictive(
            mean,
            predictive.scale * ratio.view(along),
            torch.minimum(predictive.dof, dof.view(along)),
        )

    @torch.no_grad()
    def score(self, newest: Tensor, average: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Judge both predictions by the targets, in scaled units, (n, k) or (n, k, *grid)."""
        forecasts = torch.stack([newest, average, self.mix(newest, average)])
        channel = self.feature_dim if self.feature_dim < 0 else self.feature_dim + 1
        errors = (y.to(torch.float64) - forecasts).movedim(channel, -1).flatten(1, -2)
        seen = target_weights(y, weight, self.feature_dim)
        counted = seen.sum(0)
        total = float(counted.max()) if len(seen) else 0.0
        if total == 0:
            return
        errors = torch.where(seen > 0, errors, 0.0)
        discount = noise_discount(counted, self.rows_seen, NOISE_MEMORY)
        self.standing = self.standing.after(
            errors[:2],
            None,
            seen,
            counted,
            discount,
            samples=float(seen.view(len(y), -1).amax(1).sum()),
            points=len(seen) // len(y),
        )
        discount = noise_discount(counted, self.rows_seen, MIXTURE_MEMORY)
        mixed = errors[2].abs()
        news = torch.stack([(seen * mixed.sqrt()).sum(0), (seen * mixed).sum(0), counted])
        self.moments = discount * self.moments + news
        self.rows_seen += total

    @torch.no_grad()
    def follow(self, backbone: nn.Module, head: Head) -> None:
        """Take the newest model into the average."""
        new = self.step()
        self.weight = torch.lerp(self.weight, head.weight.detach(), new)
        pairs: list[tuple[Tensor, Tensor]]
        pairs = list(zip(self.backbone.parameters(), backbone.parameters(), strict=True))
        averaged = [(own.detach(), p.detach()) for own, p in pairs if _averages(p)]
        exact = iter(self.exact)
        mine = [next(exact) if _is_short(own) else own for own, _ in averaged]
        if mine:
            theirs = [p.to(value.dtype) for value, (_, p) in zip(mine, averaged, strict=True)]
            torch._foreach_lerp_(mine, theirs, new)
        for value, (own, _) in zip(mine, averaged, strict=True):
            if value is not own:
                own.copy_(value)
        copied = [(own, p) for own, p in pairs if not _averages(p)]
        copied += list(zip(self.backbone.buffers(), backbone.buffers(), strict=True))
        for own, value in copied:
            own.copy_(value)

    def step(self) -> float:
        """Count a batch; the share that the newest model has of the average after it."""
        new = 1 - min(self.decay, self.batches / (10 + self.batches))
        self.batches += 1
        return new

    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express what was learnt for targets that are now `ratio * y + offset`, both (k,)."""
        self.weight = rescaled_weight(self.weight, ratio, offset, self.has_bias)
        self.standing = self.standing.rescaled(ratio)
        factor = ratio.to(self.moments)
        self.moments = self.moments * torch.stack([factor.sqrt(), factor, torch.ones_like(factor)])

    def forget_noise(self, lost: Tensor) -> None:
        """Put what is known of the errors of outputs back to the prior, where `lost`, (k,)."""
        self.standing = self.standing.forgotten(lost)
        self.moments = torch.where(lost, self._first_moments(), self.moments)

    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W for leading features that were `ratio * new + offset`, both (p,)."""
        self.weight = row_major(change_rows(self.weight.mT, ratio, offset).mT)

    def forget_inputs(self, lost: Tensor) -> None:
        """Put the weights of leading features back to 0, where `lost`, (p,), says so."""
        self.weight = self.weight.clone()
        self.weight[:, 1 : lost.shape[0] + 1][:, lost] = 0

    def state(self) -> State:
        """What must be kept to go on exactly."""
        return {
            "backbone": self.backbone.state_dict(),
            **{name: getattr(self, name) for name in ("weight", "moments", "rows_seen", "batches")},
            "standing": self.standing.state(),
            "exact": list(self.exact),
        }

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned."""
        self.backbone.load_state_dict(state["backbone"])
        pairs = zip(self.exact, state["exact"], strict=True)
        self.exact = [saved.to(own).clone() for own, saved in pairs]
        self.weight = state["weight"].to(self.weight).clone()
        self.moments = state["moments"].to(self.moments).clone()
        self.standing = self.standing.loaded(state["standing"])
        self.rows_seen, self.batches = state["rows_seen"], state["batches"]

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow a move to another device or dtype; what is solved keeps its dtype."""
        self.backbone._apply(fn)  # type: ignore[no-untyped-call]
        self._hold_exact()
        self.weight = fn(self.weight).to(self.weight.dtype)
        self.standing = self.standing.moved(fn)
        self.moments = fn(self.moments).to(self.moments.dtype)

    def _hold_exact(self) -> None:
        """Parameters of 16 bits as they are averaged: rounded, small steps would be lost."""
        self.exact = [p.detach().float() for p in self.backbone.parameters() if _is_short(p)]

    def _along(self, outputs: Tensor) -> list[int]:
        """Shape in which (k,) meets outputs (n, k) or (n, k, *grid)."""
        shape = [1] * outputs.dim()
        shape[self.feature_dim] = -1
        return shape


def _averages(parameter: Tensor) -> bool:
    """Whether a parameter is a number that can be averaged, and no index."""
    return parameter.is_floating_point() or parameter.is_complex()


def _is_short(parameter: Tensor) -> bool:
    """Whether a parameter has 16 bits."""
    return parameter.is_floating_point() and parameter.itemsize < 4
