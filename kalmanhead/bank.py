"""Many heads side by side on the same features, so that nobody has to guess lambda or eta.

Heads differ in the block of features they may use, in their prior precision lambda, and in how
much they remember. Each is scored by how well it foresaw every batch, and predictions are the
heads' mixture: a bank of Kalman filters, known as multiple-model adaptive estimation.

Features are [1 | scaled inputs | backbone], so that a block is a leading part of them: `level`
is the constant alone, `linear` the constant and the inputs, `deep` everything. Heads of a block
form a group and are one batched posterior: W (K, k, d), P (K, d, d).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kalmanhead.bank_group import DEFAULT_GRID, FIELD_GRID, Grid, Group, log_student_t, make_group
from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.layout import (
    as_outputs,
    as_rows,
    change_of_inputs,
    check_pair,
    check_sizes,
    linear_outputs,
    point_weights,
    rescaled_weight,
)
from kalmanhead.linalg import symmetrise
from kalmanhead.noise import Noise, Predictive, noise_discount, update_noise
from kalmanhead.posterior import Posterior, Update, condition, forgotten

State = dict[str, Any]

# One row can lower a head's standing against the best by no more than this, in nats: a single
# outlier would otherwise put the vaguest head in charge.
MOST_NATS = 1.0
# Slowest share of a batch in the running mean square of the features.
SLOWEST_POWER = 0.01


class HeadBank(nn.Module):
    """A bank of last layers that finds lambda, eta and the useful features by itself.

    Parameters
    ----------
    in_features, out_features:
        Widths of features and targets, the constant not counted.
    linear_features:
        How many leading features are the scaled inputs; 0 leaves the linear block out.
    feature_dim:
        -1 for (*, d), 1 for (n, d, *grid), as for `KalmanHead`.
    grid:
        By block (`level`, `linear`, `deep`, `proximal`): prior precisions and drift rates, of
        which all pairs become heads. None for `DEFAULT_GRID`, or `FIELD_GRID` with
        `feature_dim` 1.
    discount:
        Factor by which scores fade with every sample.
    share:
        Weight that is spread evenly over all heads after each batch, so that any can come back.
    noise_memory, dtype, device:
        As for `KalmanHead`; float64 only.

    Notes
    -----
    Scores count independent samples: of a field, the mean over its points. Each output has its
    own weights over the heads. A step costs the sum over groups of K (n d^2 + n^2 d), d being
    the block's width, so the deep heads that remember are what bounds it.

    Examples
    --------
    >>> bank = HeadBank(1, 1, linear_features=1)
    >>> x = torch.linspace(-1, 1, 32)[:, None]
    >>> for _ in range(5):
    ...     bank.update(x, 3 * x + 1)
    >>> bank(torch.tensor([[2.0]])).round(decimals=1)
    tensor([[7.]])
    """

    has_bias = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        linear_features: int = 0,
        feature_dim: int = -1,
        grid: Grid | None = None,
        discount: float = 0.99,
        share: float = 0.01,
        noise_memory: float = 10_000.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features, out_features, feature_dim)
        if not 0 <= linear_features <= in_features:
            raise ConfigError(
                f"linear_features is {linear_features}: give 0 to {in_features} leading features"
            )
        if not (0 < discount <= 1 and 0 <= share < 1 and noise_memory > 0):
            raise ConfigError(
                f"discount {discount}, share {share}, noise_memory {noise_memory}: give a discount "
                "in (0, 1], a share in [0, 1) and a memory above 0"
            )
        if grid is None:
            grid = FIELD_GRID if feature_dim == 1 else DEFAULT_GRID
        self.in_features, self.out_features = in_features, out_features
        self.linear_features, self.feature_dim = linear_features, feature_dim
        self.discount, self.share, self.noise_memory = discount, share, noise_memory
        self.groups = tuple(
            make_group(block, self._width(block), out_features, lams, etas, device)
            for block, (lams, etas) in grid.items()
            if block != "linear" or linear_features
        )
        heads = sum(len(group.lam) for group in self.groups)
        if not any(group.width == in_features + 1 for group in self.groups):
            raise ConfigError("the grid has no deep or proximal heads: give the backbone a use")
        self.scores = torch.zeros(heads, out_features, dtype=torch.float64, device=device)
        self.power = 1.0
        self.rows_seen = 0.0
        self._mix()

    @property
    def weight(self) -> Tensor:
        """W of the mixture, (k, d); the constant's weight comes first."""
        return self._weight

    @property
    def weights(self) -> Tensor:
        """Weight of each head for each output, (heads, k); the heads in order of `names`."""
        return self.scores.softmax(0)

    @property
    def names(self) -> list[str]:
        """What each head is."""
        return [
            f"{group.block} lam={lam:g} eta={eta:g}"
            for group in self.groups
            for lam, eta in zip(group.lam.tolist(), group.eta.tolist(), strict=True)
        ]

    def leaders(self, count: int = 3) -> list[tuple[str, float]]:
        """Heads with the largest weights, averaged over outputs, largest first."""
        weights = self.weights.mean(1)
        names = self.names
        return [(names[i], float(weights[i])) for i in weights.argsort(descending=True)[:count]]

    def forward(self, phi: Tensor) -> Tensor:
        """Predictions of the mixture: (*, d) -> (*, k), or (n, d, *grid) -> (n, k, *grid)."""
        return linear_outputs(self._weight, phi, True, self.feature_dim)

    def for_gradient(self, phi: Tensor) -> Tensor:
        """Outputs of the heads that use the backbone, weighted among themselves.

        The whole mixture would starve the backbone while a level or linear head leads.
        """
        return linear_outputs(self._deep, phi, True, self.feature_dim)

    @torch.no_grad()
    def update(self, phi: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Learn from one batch: every head conditions on it, and is scored by its foresight.

        Parameters and errors are those of `KalmanHead.update`.
        """
        check_pair(phi, y, weight, self.in_features, self.out_features, self.feature_dim)
        rows = self._rows(phi)
        targets = as_rows(y.detach(), self.feature_dim).to(rows)
        weights = point_weights(weight, phi, self.feature_dim)
        seen = (~torch.isnan(targets)).to(rows)
        if weights is not None:
            weights = weights.to(rows)
            seen = seen * (weights > 0)[:, None]
        counted = seen.sum(0) if weights is None else (seen * weights[:, None]).sum(0)
        total = float(counted.max()) if len(rows) else 0.0
        if total == 0:
            return
        if not bool(seen.all()):
            weights = seen.amax(1) * (1.0 if weights is None else weights)
        power = self._next_power(rows)
        discount = noise_discount(total, self.rows_seen, self.noise_memory)
        groups, evidence = [], []
        for group in self.groups:
            update = self._condition(group, rows, targets, weights, power)
            squares = update.innovation.square() / (1 + update.leverage[..., None])
            evidence.append(log_student_t(squares, update.leverage, group.noise))
            noise = update_noise(group.noise, (squares * seen).sum(-2), counted, discount)
            posterior = update.posterior
            if not group.remembers:
                posterior = replace(group.posterior, mean=posterior.mean)
            groups.append(replace(group, posterior=posterior, noise=noise))
        if not all(math.isfinite(group.posterior.mean.sum()) for group in groups):
            raise NumericalError(
                "the solve gave NaN or infinity: a feature or a target of this batch is not "
                "finite; nothing was learnt from it"
            )
        samples = phi.shape[0]
        self.scores = self._next_scores(torch.cat(evidence), seen, samples)
        self.groups, self.power = tuple(groups), power
        self.rows_seen += total
        self._mix()

    @torch.no_grad()
    def predict_dist(self, phi: Tensor) -> Predictive:
        """Student t with the mixture's mean and spread, the heads' disagreement included."""
        rows = self._rows(phi)
        mean = rows @ self._weight.mT
        square, dof = torch.zeros_like(mean), torch.zeros_like(mean)
        at = 0
        for group in self.groups:
            share = self.weights[at : at + len(group.lam)]
            at += len(group.lam)
            block = rows[:, : group.width]
            prior = group.prior(self.power, self.rows_seen == 0)
            variance = group.noise.variance[:, None] * (1 + prior.variance_of(block)[..., None])
            apart = (block @ group.posterior.mean.mT - mean).square()
            square += (share[:, None] * (variance + apart)).sum(0)
            dof += (share * 2 * group.noise.shape).sum(0)
        return Predictive(
            *(as_outputs(v, phi, self.feature_dim) for v in (mean, square.sqrt(), dof))
        )

    @torch.no_grad()
    def set_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start the heads that use all features from weights (k, in_features), bias (k,)."""
        zero = torch.zeros_like(weight[:, :1])
        mean = torch.cat([zero if bias is None else bias[:, None], weight], 1).detach()
        self._map(
            lambda group: (
                replace(
                    group.posterior,
                    mean=mean.to(self._weight).expand_as(group.posterior.mean).clone(),
                )
                if group.width == self.in_features + 1
                else group.posterior
            )
        )

    @torch.no_grad()
    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W and the noise for targets that are now `ratio * y + offset`, both (k,)."""
        square = ratio.to(self._weight).square()
        self.groups = tuple(
            replace(group, noise=replace(group.noise, rate=group.noise.rate * square))
            for group in self.groups
        )
        self._map(
            lambda group: replace(
                group.posterior,
                mean=rescaled_weight(group.posterior.mean, ratio, offset, True),
            )
        )

    @torch.no_grad()
    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W and P for leading features that were `ratio * new + offset`, both (p,)."""

        def moved(group: Group) -> Posterior:
            if group.width <= ratio.shape[0]:
                return group.posterior
            change = change_of_inputs(ratio, offset, group.width).to(self._weight)
            old = group.posterior
            spread = symmetrise(change.mT @ old.spread @ change) if group.remembers else old.spread
            return Posterior(old.mean @ change, spread, old.form)

        self._map(moved)

    @torch.no_grad()
    def forget_inputs(self, lost: Tensor) -> None:
        """Put leading features back to the prior, where `lost`, (p,), says so."""
        self._map(
            lambda group: (
                forgotten(group.posterior, lost, 1 / (group.lam * self.power)[:, None])
                if group.width > lost.shape[0]
                else group.posterior
            )
        )

    def state(self) -> State:
        """What must be kept to go on exactly."""
        groups = [
            {
                "lam": group.lam,
                "eta": group.eta,
                "mean": group.posterior.mean,
                "spread": group.posterior.spread,
                "noise_shape": group.noise.shape,
                "noise_rate": group.noise.rate,
            }
            for group in self.groups
        ]
        return {
            "groups": groups,
            "scores": self.scores,
            "power": self.power,
            "rows_seen": self.rows_seen,
        }

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned.

        Raises
        ------
        ConfigError
            The state belongs to a bank of other heads or shapes.
        """
        saved = state.get("groups", [])
        fits = len(saved) == len(self.groups) and all(
            old["mean"].shape == group.posterior.mean.shape
            and torch.equal(old["lam"].to(group.lam), group.lam)
            and torch.equal(old["eta"].to(group.eta), group.eta)
            for old, group in zip(saved, self.groups, strict=True)
        )
        if not fits:
            raise ConfigError(
                "the saved head is a bank of other heads or shapes, or none: build the head with "
                "the options it was saved under"
            )
        self.groups = tuple(
            replace(
                group,
                posterior=Posterior(own["mean"], own["spread"], group.posterior.form),
                noise=Noise(own["noise_shape"], own["noise_rate"]),
            )
            for group, own in (
                (group, {name: v.to(self.scores).clone() for name, v in old.items()})
                for group, old in zip(self.groups, saved, strict=True)
            )
        )
        self.scores = state["scores"].to(self.scores).clone()
        self.power, self.rows_seen = state["power"], state["rows_seen"]
        self._mix()

    def _width(self, block: str) -> int:
        return {"level": 1, "linear": 1 + self.linear_features}.get(block, 1 + self.in_features)

    def _rows(self, phi: Tensor) -> Tensor:
        """Features as rows behind the constant, (rows, d), float64."""
        rows = as_rows(phi.detach(), self.feature_dim).to(torch.float64)
        return torch.cat([torch.ones_like(rows[:, :1]), rows], 1)

    def _next_power(self, rows: Tensor) -> float:
        """Running mean square of the features, so that their units do not matter."""
        if rows.shape[1] == 1:
            return 1.0
        now = float(rows[:, 1:].square().mean())
        n = rows.shape[0]
        share = max(n / (self.rows_seen + n), SLOWEST_POWER)
        power = self.power + (now - self.power) * share
        return power if power > 0 else 1.0

    def _condition(
        self, group: Group, rows: Tensor, targets: Tensor, weights: Tensor | None, power: float
    ) -> Update:
        """A group's update; a missing target is each head's own prediction, which moves nothing."""
        prior = group.prior(power, self.rows_seen == 0)
        block = rows[:, : group.width]
        missing = torch.isnan(targets)
        if bool(missing.any()):
            targets = torch.where(missing, block @ prior.mean.mT, targets)
        return condition(prior, block, targets, weights, keep_covariance=group.remembers)

    def _next_scores(self, evidence: Tensor, seen: Tensor, samples: int) -> Tensor:
        """Scores after a batch, from log densities (heads, rows, k): discounted, then shared."""
        evidence = torch.maximum(evidence, evidence.amax(0) - MOST_NATS) * seen
        gain = evidence.sum(1) * (samples / seen.shape[0])
        weights = (self.discount**samples * self.scores + gain).softmax(0)
        return ((1 - self.share) * weights + self.share / weights.shape[0]).log()

    def _mix(self) -> None:
        """Weights of the mixture, and of its deep part alone."""
        weights, full = self.weights, self.in_features + 1
        self._weight = torch.zeros(self.out_features, full).to(weights)
        deep, total, at = torch.zeros_like(self._weight), torch.zeros_like(weights[0]), 0
        for group in self.groups:
            share = weights[at : at + len(group.lam)]
            at += len(group.lam)
            part = (share[..., None] * group.posterior.mean).sum(0)
            self._weight[:, : group.width] += part
            if group.width == full:
                deep += part
                total = total + share.sum(0)
        self._deep = deep / total[:, None]

    def _map(self, change: Callable[[Group], Posterior]) -> None:
        self.groups = tuple(replace(group, posterior=change(group)) for group in self.groups)
        self._mix()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadBank:
        """Follow a move to another device, but keep the dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

        def moved(value: Tensor) -> Tensor:
            return fn(value).to(value.dtype)

        self.scores = moved(self.scores)
        self.groups = tuple(
            replace(
                group,
                lam=moved(group.lam),
                eta=moved(group.eta),
                posterior=replace(
                    group.posterior,
                    mean=moved(group.posterior.mean),
                    spread=moved(group.posterior.spread),
                ),
                noise=Noise(moved(group.noise.shape), moved(group.noise.rate)),
            )
            for group in self.groups
        )
        self._mix()
        return self
