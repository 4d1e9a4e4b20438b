"""How noisy the targets are: one variance per output, learnt by the conjugate update.

sigma_j^2 ~ InverseGamma(a_j, b_j), shared with the weights' posterior (matrix-normal
inverse-gamma), so that predictions follow a Student t with 2 a_j degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaln, stdtrit
from torch import Tensor

from kalmanhead.errors import ConfigError
from kalmanhead.posterior import Update

START_MEMORY = 20.0
# A row tells of the noise as if it were off by so many deviations at most.
LARGEST_SURPRISE = 30.0
# Bounds of a learnt variance and of a squared error. An output that is foreseen exactly for long
# keeps a variance that its first surprise can be divided by.
BOUNDS = {torch.float64: (1e-60, 1e200), torch.float32: (1e-30, 1e30)}


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

    def rescaled(self, ratio: Tensor) -> Noise:
        """The same for outputs that are now `ratio` times as large, (k,)."""
        square = ratio.to(self.rate).square().clamp(*BOUNDS[self.rate.dtype])
        return Noise(self.shape, _bounded(self.rate * square, self.shape))

    def forgotten(self, lost: Tensor) -> Noise:
        """The same with the prior of `Standing.start` for the outputs of `lost`, (k,)."""
        return Noise(torch.where(lost, 1.0, self.shape), torch.where(lost, 1.0, self.rate))

    def moved(self, fn: Callable[[Tensor], Tensor]) -> Noise:
        """The same elsewhere, in the same dtype."""
        return Noise(fn(self.shape).to(self.shape.dtype), fn(self.rate).to(self.rate.dtype))

    def state(self) -> dict[str, Tensor]:
        """What must be kept to go on exactly."""
        return {"shape": self.shape, "rate": self.rate}

    @classmethod
    def from_state(cls, state: dict[str, Tensor], like: Tensor) -> Noise:
        """Noise from what `state` returned, on the device and in the dtype of `like`."""
        return cls(state["shape"].to(like).clone(), state["rate"].to(like).clone())


def update_noise(
    noise: Noise,
    quadratic: Tensor,  # (..., k), innovation' S^-1 innovation
    rows: Tensor,  # (k,) or (), summed weights
    discount: Tensor | float = 1.0,  # (k,) or ()
) -> Noise:
    """Conjugate update with forgetting: a += rows / 2, b += quadratic / 2.

    Before it both are multiplied by `discount`, so that the memory is finite, the large
    innovations of the start fade, and a change of the noise is followed. Rows count as being off
    by thirty deviations at most on average: one that lies a thousand away is no measurement of the
    noise, and would widen every interval for as long as the noise is remembered.
    """
    quadratic = torch.minimum(quadratic, LARGEST_SURPRISE**2 * rows * noise.variance)
    shape = discount * noise.shape + rows / 2
    return Noise(shape, _bounded(discount * noise.rate + quadratic / 2, shape))


def _bounded(rate: Tensor, shape: Tensor) -> Tensor:
    """Rates whose variance is neither 0 nor infinite; NaN stays."""
    least, most = BOUNDS[rate.dtype]
    return torch.minimum(torch.maximum(rate, least * shape), most * shape)


def noise_discount(rows: Tensor, seen: float, memory: float) -> Tensor:
    """Discount of each output for a batch of so many rows, (k,), when `seen` rows came before.

    The memory grows with half of what was seen, up to `memory` rows: early innovations tell of a
    model that had learnt nothing yet, not of the noise, and are soon outweighed. An output that
    was not seen forgets nothing.
    """
    span = min(memory, START_MEMORY + seen / 2)
    kept = [math.exp(-count / span) for count in rows.tolist()]
    return torch.tensor(kept, dtype=rows.dtype, device=rows.device)


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


def matching_student_t(root: Tensor, absolute: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and degrees of freedom of the Student t with these means of |e|^(1/2) and |e|.

    Such low moments tell the weight of the tails from few rows, and an outlier hardly moves
    them, where a kurtosis would tell of little else.
    """
    nu, ratio, mean = _low_moments()
    peakedness = (root.square() / absolute.clamp_min(1e-300)).detach().cpu().numpy()
    log_nu = np.interp(peakedness, ratio, np.log(nu))
    scale = absolute / torch.as_tensor(np.exp(np.interp(log_nu, np.log(nu), np.log(mean)))).to(root)
    return scale, torch.as_tensor(np.exp(log_nu)).to(root)


@cache
def _low_moments() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Degrees of freedom of a standard Student t; E[|t|^(1/2)]^2 / E|t|, which rises; E|t|.

    E|t|^p = nu^(p/2) Gamma((p + 1) / 2) Gamma((nu - p) / 2) / (sqrt(pi) Gamma(nu / 2)).
    """
    nu = np.concatenate([np.linspace(1.2, 10, 200), np.logspace(1.01, 4, 200)])

    def log_moment(p: float) -> NDArray[np.float64]:
        value = p / 2 * np.log(nu) + gammaln((p + 1) / 2) + gammaln((nu - p) / 2)
        return np.asarray(value - gammaln(nu / 2) - np.log(np.pi) / 2)

    return nu, np.exp(2 * log_moment(0.5) - log_moment(1.0)), np.exp(log_moment(1.0))


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
