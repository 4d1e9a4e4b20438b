"""What is remembered between batches: the Kalman filter's time update, as small rules.

Each rule turns the belief after one batch into the belief before the next. `variance` is the
prior variance of every feature, 1 / lambda, (d,); a feature with variance 0 is switched off and
stays off under every rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kalmanhead.errors import ConfigError
from kalmanhead.linalg import (
    covariance_root,
    qr_root,
    safe_cholesky,
    solve_lower,
    symmetrise,
)
from kalmanhead.posterior import Posterior


class Transition(Protocol):
    """A rule for the time update.

    Attributes
    ----------
    remembers:
        Whether anything of the covariance is carried on; if not, no d x d matrix is needed.
    """

    @property
    def remembers(self) -> bool:
        """Whether anything of the covariance is carried on."""
        ...

    def predict(self, posterior: Posterior, variance: Tensor) -> Posterior:
        """Belief before the next batch, from the belief after this one."""
        ...


@dataclass(frozen=True)
class Reset:
    """P- = I / lambda: the mean is remembered, the covariance is not (arXiv 2510.04606)."""

    remembers = False

    def predict(self, posterior: Posterior, variance: Tensor) -> Posterior:
        """Belief with the same mean and the prior's variances, `diagonal` in form."""
        return Posterior(posterior.mean, variance, "diagonal")


@dataclass(frozen=True)
class Ridge:
    """W- = 0, P- = I / lambda: nothing is remembered, so each batch is solved on its own.

    The naive closed-form baseline, which fails on small batches.
    """

    remembers = False

    def predict(self, posterior: Posterior, variance: Tensor) -> Posterior:
        """Belief before any data, `diagonal` in form."""
        return Posterior(torch.zeros_like(posterior.mean), variance, "diagonal")


@dataclass(frozen=True)
class Static:
    """P- = P: recursive least squares, equal to one ridge solve over all rows."""

    remembers = True

    def predict(self, posterior: Posterior, variance: Tensor) -> Posterior:
        """Return the belief as it was."""
        return posterior


@dataclass(frozen=True)
class Drift:
    """P- = (1 - eta) P + eta I / lambda: weights that wander, bounded by the prior.

    An interpolation in covariance (an Ornstein-Uhlenbeck process): eta = 1 is `Reset`, eta = 0 is
    `Static`, and a direction that no row excites returns to the prior instead of winding up.
    """

    eta: float

    remembers = True

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.eta <= 1:
            raise ConfigError(f"eta is {self.eta}: give a number from 0 (static) to 1 (reset)")

    def predict(self, posterior: Posterior, variance: Tensor) -> Posterior:
        """Belief with a covariance between the posterior's and the prior's."""
        mean, spread, eta = posterior.mean, posterior.spread, self.eta
        if posterior.form == "diagonal":
            return Posterior(mean, (1 - eta) * spread + eta * variance, "diagonal")
        if posterior.form == "dense":
            return Posterior(mean, (1 - eta) * spread + eta * torch.diag_embed(variance))
        if eta == 0:
            return posterior
        prior_root = torch.diag_embed((eta * variance).sqrt()).expand(spread.shape)
        rows = torch.cat([(1 - eta) ** 0.5 * spread.mT, prior_root], -2)
        return Posterior(mean, qr_root(rows).mT, "root")


@dataclass(frozen=True)
class Forget:
    """P-^-1 = gamma P^-1 + (1 - gamma) lambda I: exponential forgetting of precision, floored.

    The floor is what the textbook's P / gamma lacks: a direction that no row excites keeps a
    precision of at least (1 - gamma) lambda and tends to lambda, so P stays bounded.
    """

    gamma: float

    remembers = True

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"gamma is {self.gamma}: give a number above 0, up to 1 (static)")

    def predict(self, posterior: Posterior, variance: Tensor) -> Posterior:
        """Belief with a precision between the posterior's and the prior's.

        With P = F F' it is F (gamma I + (1 - gamma) F' Lambda F)^-1 F': no inverse of P, so
        features that are switched off need no special care.
        """
        mean, spread, gamma = posterior.mean, posterior.spread, self.gamma
        precision = torch.where(variance > 0, 1 / variance, 0.0)
        if posterior.form == "diagonal":
            return Posterior(mean, spread / (gamma + (1 - gamma) * precision * spread), "diagonal")
        root = covariance_root(spread) if posterior.form == "dense" else spread
        scaled = ((1 - gamma) * precision).sqrt()[..., :, None] * root
        identity = torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device)
        if posterior.form == "dense":
            inner = safe_cholesky(
                gamma * identity + symmetrise(scaled.mT @ scaled), "g I + (1 - g) F' L F"
            )
            new_root = solve_lower(inner, root.mT)
            return Posterior(mean, symmetrise(new_root.mT @ new_root))
        r = qr_root(torch.cat([gamma**0.5 * identity.expand(scaled.shape), scaled], -2))
        new_root = solve_lower(r.mT, root.mT).mT
        return Posterior(mean, new_root, "root")


def make_transition(
    name: str | Transition, *, eta: float | None = None, gamma: float | None = None
) -> Transition:
    """Transition by its name: `reset`, `drift`, `forget`, `static` or `ridge`.

    `eta` (default 0.1) is for `drift` and `gamma` (default 0.99) for `forget`; a `Transition` is
    passed through as it is.

    Raises
    ------
    ConfigError
        An unknown name, or a parameter out of range.

    Examples
    --------
    >>> make_transition("drift", eta=0.1)
    Drift(eta=0.1)
    """
    if not isinstance(name, str):
        if not hasattr(name, "remembers"):
            raise ConfigError(
                f"transition is a {type(name).__name__}: give a name such as reset, or a Transition"
            )
        return name
    if name == "drift":
        return Drift(0.1 if eta is None else eta)
    if name == "forget":
        return Forget(0.99 if gamma is None else gamma)
    plain: dict[str, Transition] = {"reset": Reset(), "static": Static(), "ridge": Ridge()}
    if name not in plain:
        raise ConfigError(
            f"transition {name!r} is unknown: choose reset, drift, forget, static or ridge"
        )
    return plain[name]
