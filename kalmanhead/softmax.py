"""Classes by cross-entropy, the last layer solved in closed form all the same."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.head import KalmanHead
from kalmanhead.layout import check_pair
from kalmanhead.losses import cross_entropy
from kalmanhead.noise import Predictive
from kalmanhead.posterior import Posterior, condition

Curvature = Literal["adaptive", "bound"]

# Of a row's curvature, at most 1/2: what is least believed under `adaptive`.
LEAST_CURVATURE = 0.2


class SoftmaxHead(KalmanHead):
    """A last layer of logits whose weights minimise the proximal cross-entropy of every batch.

    The softmax's curvature in the logits is at most 1/2 (Boehning, Ann. Inst. Stat. Math. 44,
    1992), so cross-entropy lies below a parabola that touches it at today's W, and one solve goes
    to the lowest point of the parabola: `KalmanHead`'s own solve, for the target
    logits + (Y - softmax(logits)) / c and rows of weight 2 c, with c the curvature. As all classes
    have the same c, one P serves them all. With c = 1/2 the loss can never rise; `adaptive` takes
    the largest p (1 - p) of a row, which is less where classes are many, and goes back to 1/2
    where the loss would rise.

    Targets are probabilities of the classes, (n, k): 0 and 1 for a label, NaN for a missing one.
    A learner needs `scale_y=False`.

    Parameters
    ----------
    in_features, classes, bias, transition, eta, gamma, prior_precision, dtype, device:
        As for `KalmanHead`, with `drift` at 0.001 and lambda 10 by default. lambda stands against
        the squared loss with the same curvature, so that it means the same for both.
    sweeps:
        Solves for each batch, each at the W of the last.
    curvature:
        `adaptive` or `bound`.

    Raises
    ------
    ConfigError
        Fewer than two classes, no sweep, or an option of `KalmanHead` that makes no sense.

    Examples
    --------
    >>> head = SoftmaxHead(1, 2, prior_precision=0.1, sweeps=5)
    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> head.update(x, torch.eye(2))
    >>> head.predict_proba(x).argmax(1)
    tensor([0, 1])
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        bias: bool = True,
        *,
        transition: str = "drift",
        eta: float | None = None,
        gamma: float | None = None,
        prior_precision: float | Tensor = 10.0,
        sweeps: int = 1,
        curvature: Curvature = "adaptive",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            classes,
            bias,
            transition=transition,
            eta=0.001 if eta is None and transition == "drift" else eta,
            gamma=gamma,
            prior_precision=prior_precision,
            dtype=dtype,
            device=device,
        )
        if classes < 2:
            raise ConfigError(f"classes is {classes}: give 2 or more")
        if not isinstance(sweeps, int) or sweeps < 1:
            raise ConfigError(f"sweeps is {sweeps!r}: give a whole number, 1 or more")
        if curvature not in ("adaptive", "bound"):
            raise ConfigError(f"curvature is {curvature!r}: choose adaptive or bound")
        self.sweeps, self.curvature = sweeps, curvature

    loss = staticmethod(cross_entropy)

    @torch.no_grad()
    def update(self, phi: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Learn from one batch of features (n, d) and class probabilities (n, k).

        Raises
        ------
        ConfigError
            Shapes that do not fit, or rows of y that are no probabilities.
        NumericalError
            A feature that is not finite; the state is untouched.
        """
        check_pair(phi, y, weight, self.in_features, self.out_features, self.feature_dim)
        rows, told = self._rows(phi), y.detach().to(self.weight)
        there = ~torch.isnan(told).any(1)
        if weight is not None:
            there = there & (weight.to(there.device) > 0)
        rows, told = rows[there], told[there]
        if len(rows) == 0:
            return
        if not bool((told >= 0).all() & ((told.sum(1) - 1).abs() < 1e-6).all()):
            raise ConfigError(
                "y holds rows that are no probabilities: give 0 or 1 for each class, and a learner "
                "scale_y=False"
            )
        weights = torch.ones_like(rows[:, 0]) if weight is None else weight[there].to(rows)
        prior = self._prior(float(len(rows)))
        posterior = self._solved(prior, rows, told, weights)
        if not math.isfinite(posterior.mean.sum()):
            raise NumericalError(
                "the solve gave NaN or infinity: a feature of this batch is not finite; nothing "
                "was learnt from it"
            )
        if not self.transition.remembers:
            posterior = replace(self.posterior, mean=posterior.mean)
        self.posterior = posterior
        self.rows_seen += float(weights.sum())
        self.last_rows = float(len(rows))

    @torch.no_grad()
    def predict_proba(self, phi: Tensor) -> Tensor:
        """Probabilities of the classes, (n, k), the logits damped where W is not yet sure.

        By MacKay's approximation (Neural Computation 4, 1992): logit / sqrt(1 + pi v / 8), v being
        the logit's variance.
        """
        told = self.predict_dist(phi)
        return (told.mean / (1 + math.pi / 8 * told.scale.square()).sqrt()).softmax(1)

    @torch.no_grad()
    def predict_dist(self, phi: Tensor) -> Predictive:
        """Normal distribution of the logits, (n, k): how unsure W is."""
        rows = self._rows(phi)
        # The bound's curvature is half of that in which P is counted.
        variance = 2 * self._prior(self.last_rows).variance_of(rows)[:, None]
        mean = rows @ self.weight.mT
        return Predictive(mean, variance.sqrt().expand_as(mean), torch.full_like(mean, math.inf))

    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Classes have no scale.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError("classes are not scaled: give the learner scale_y=False")

    def _solved(self, prior: Posterior, rows: Tensor, told: Tensor, weights: Tensor) -> Posterior:
        """Belief after the sweeps, none of which raises the proximal cross-entropy."""
        posterior, before = prior, _entropy(rows @ prior.mean.mT, told, weights)
        for _ in range(self.sweeps):
            logits = rows @ posterior.mean.mT
            shares = logits.softmax(1)
            bound = torch.full_like(weights, 0.5)
            curvatures = [bound]
            if self.curvature == "adaptive":
                largest = (shares * (1 - shares)).amax(1)
                curvatures = [largest.clamp(LEAST_CURVATURE, 0.5), bound]
            for curvature in curvatures:
                target = logits + (told - shares) / curvature[:, None]
                weight, keep = 2 * curvature * weights, self.transition.remembers
                update = condition(prior, rows, target, weight, keep_covariance=keep)
                fitted = rows @ update.posterior.mean.mT
                # What is left of the quadratic form is |W - W-|^2 in the metric of P-.
                missed = (weight[:, None] * (target - fitted).square()).sum()
                pull = (update.quadratic.sum() - missed).clamp_min(0)
                after = _entropy(fitted, told, weights) + float(pull) / 4
                if after <= before:
                    break
            posterior, before = update.posterior, after
        return posterior


def _entropy(logits: Tensor, told: Tensor, weights: Tensor) -> float:
    """Weighted sum over rows of the cross-entropy."""
    return float(-(weights * (told * logits.log_softmax(1)).sum(1)).sum())
