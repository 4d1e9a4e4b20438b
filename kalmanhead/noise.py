"""How noisy the targets are: one variance per output, learnt by the conjugate update.

sigma_j^2 ~ InverseGamma(a_j, b_j), shared with the weights' posterior (matrix-normal
inverse-gamma), so that predictions follow a Student t with 2 a_j degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.special import stdtrit
from torch import Tensor

from kalmanhead.errors import ConfigError
from kalmanhead.posterior import Update

START_MEMORY = 20.0


@dataclass(frozen=True)
class Noise:
    """Belief about the noise variance of each output; an immutable value.

    Attributes
    ----------
    shape:
        a, (..., k): half the rows that count, prior included.
    rate:
        b, (..., k): half their summed squared innovations, prior included.
    """

    shape: Tensor
    rate: Tensor

    @property
    def variance(self) -> Tensor:
        """Scale b / a of the predictive Student t, (..., k)."""
        return self.rate / self.shape


def update_noise(
    noise: Noise,
    quadratic: Tensor,  # (..., k), innovation' S^-1 innovation
    rows: Tensor,  # (k,) or (), summed weights
    discount: float = 1.0,
) -> Noise:
    """Conjugate update with forgetting: a += rows / 2, b += quadratic / 2.

    Before it both are multiplied by `discount`, so that the memory is finite, the large
    innovations of the start fade, and a change of the noise is followed.
    """
    return Noise(
        discount * noise.shape + rows / 2,
        discount * noise.rate + quadratic / 2,
    )


def noise_discount(rows: float, seen: float, memory: float) -> float:
    """Discount for a batch of so many rows when `seen` rows came before.

    The memory grows with half of what was seen, up to `memory` rows: early innovations tell of a
    model that had learnt nothing yet, not of the noise, and are soon outweighed.
    """
    return math.exp(-rows / min(memory, START_MEMORY + seen / 2))


def log_evidence(noise: Noise, update: Update, rows: Tensor) -> Tensor:
    """Log density of the batch under the belief held before it, summed over outputs, (...).

    The rows of one output are jointly Student t with 2a degrees of freedom, location Phi W- and
    scale (b / a) S. Row weights enter through S alone; the constant log R is left out.
    """
    a, b, half = noise.shape, noise.rate, rows / 2
    density = (
        torch.lgamma(a + half)
        - torch.lgamma(a)
        - half * (2 * math.pi * b).log()
        - update.log_determinant[..., None] / 2
        - (a + half) * torch.log1p(update.quadratic / (2 * b))
    )
    return density.sum(-1)


@dataclass(frozen=True)
class Predictive:
    """Student t for each target.

    Attributes
    ----------
    mean, scale:
        Location and scale in the target's units, (n, k) or (n, k, *grid).
    dof:
        Degrees of freedom, broadcastable to `mean`.
    """

    mean: Tensor
    scale: Tensor
    dof: Tensor

    @property
    def variance(self) -> Tensor:
        """Variance, infinite up to two degrees of freedom; shape of `mean`."""
        inflation = torch.where(self.dof > 2, self.dof / (self.dof - 2), math.inf)
        return self.scale.square() * inflation

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the central interval that holds `level` of the probability."""
        if not 0 < level < 1:
            raise ConfigError(f"level is {level}: give a probability between 0 and 1")
        dof = self.dof.detach().cpu().numpy()
        quantile = torch.as_tensor(stdtrit(dof, (1 + level) / 2)).to(self.scale)
        return self.mean - quantile * self.scale, self.mean + quantile * self.scale
