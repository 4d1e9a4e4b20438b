"""Heads of one block of features: what they are, what they believe, how well they foresee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kalmanhead.errors import ConfigError
from kalmanhead.noise import Noise
from kalmanhead.posterior import Posterior

Grid = Mapping[str, tuple[Sequence[float], Sequence[float]]]

# By block: prior precisions (times the mean square of the features) and drift rates. Rate 1 is
# `reset`, the paper's proximal head, and 0 is `static`.
DEFAULT_GRID: Grid = {
    "level": ((0.01,), (1.0, 0.1, 0.01, 0.0)),
    "linear": ((0.1, 10.0), (0.01, 0.0)),
    "deep": ((1.0,), (0.1, 0.01, 0.001, 0.0)),
    "proximal": ((10.0, 100.0, 1000.0, 10000.0), (1.0,)),
}
# Fields bring thousands of rows a batch. What is remembered of them holds the head to features
# that the backbone has left behind, so there only heads of a short memory stay stable.
FIELD_GRID: Grid = {
    "level": ((0.01,), (1.0, 0.0)),
    "linear": ((10.0,), (0.0,)),
    "deep": ((1.0,), (0.1,)),
    "proximal": ((30.0, 100.0, 300.0), (1.0,)),
}


@dataclass(frozen=True)
class Group:
    """Heads of one block: what they are, and what they believe.

    Attributes
    ----------
    block, width:
        Name of the block and number of leading features it uses.
    lam, eta:
        Prior precision and drift rate of each head, (K,).
    posterior, noise:
        Batched beliefs; proximal heads carry no covariance and are `diagonal` in form.
    """

    block: str
    width: int
    lam: Tensor
    eta: Tensor
    posterior: Posterior
    noise: Noise

    @property
    def remembers(self) -> bool:
        """Whether a covariance is carried from batch to batch."""
        return self.posterior.form == "dense"

    def prior(self, power: float, first: bool) -> Posterior:
        """Belief before a batch, P- = (1 - eta) P + eta V.

        V holds the prior variances, 1 / lambda for the constant and 1 / (lambda power) for
        features of mean square `power`.
        """
        variance = (1 / self.lam)[:, None].repeat(1, self.width)
        variance[:, 1:] /= power
        if first or not self.remembers:
            return Posterior(self.posterior.mean, variance, "diagonal")
        eta = self.eta[:, None, None]
        spread = (1 - eta) * self.posterior.spread + torch.diag_embed(self.eta[:, None] * variance)
        return replace(self.posterior, spread=spread)


def make_group(
    block: str,
    width: int,
    outputs: int,
    lams: Sequence[float],
    etas: Sequence[float],
    device: torch.device | str | None,
) -> Group:
    """Heads for all pairs of prior precision and drift rate, before any data.

    Raises
    ------
    ConfigError
        An unknown block, or precisions and rates out of range.
    """
    if block not in DEFAULT_GRID:
        raise ConfigError(f"block {block!r} is unknown: choose {', '.join(DEFAULT_GRID)}")
    pairs = torch.tensor(
        [(lam, eta) for lam in lams for eta in etas], dtype=torch.float64, device=device
    )
    if not len(pairs) or not ((pairs[:, 0] > 0) & (pairs[:, 1] >= 0) & (pairs[:, 1] <= 1)).all():
        raise ConfigError(f"grid of {block}: give precisions above 0 and rates from 0 to 1")
    lam, eta = pairs.unbind(1)
    mean = torch.zeros(len(pairs), outputs, width).to(pairs)
    variance = (1 / lam)[:, None].expand(-1, width)
    if block == "proximal":
        posterior = Posterior(mean, variance.clone(), "diagonal")
    else:
        posterior = Posterior(mean, torch.diag_embed(variance), "dense")
    ones = torch.ones(len(pairs), outputs).to(pairs)
    return Group(block, width, lam, eta, posterior, Noise(ones, ones))


def log_student_t(squares: Tensor, leverage: Tensor, noise: Noise) -> Tensor:
    """Log density of each row under each head's prediction, up to a constant, (K, n, k).

    Parameters
    ----------
    squares:
        innovation^2 / (1 + leverage), (K, n, k).
    leverage:
        phi' P- phi, (K, n).
    noise:
        Belief before the batch, (K, k): a Student t with 2a degrees of freedom, scale b / a.
    """
    a, b = noise.shape[:, None], noise.rate[:, None]
    height = torch.lgamma(a + 0.5) - torch.lgamma(a) - b.log() / 2
    return (
        height - torch.log1p(leverage)[..., None] / 2 - (a + 0.5) * torch.log1p(squares / (2 * b))
    )
