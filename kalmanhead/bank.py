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
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kalmanhead.bank_group import DEFAULT_GRID, FIELD_GRID, Grid, Group, make_group, next_power
from kalmanhead.bank_rows import BankRows, rows_of
from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.layout import (
    as_outputs,
    check_pair,
    check_sizes,
    linear_outputs,
    rescaled_weight,
)
from kalmanhead.losses import squared_loss
from kalmanhead.noise import Noise, Predictive, noise_discount
from kalmanhead.posterior import Posterior, forgotten, reexpressed
from kalmanhead.standing import Standing
from kalmanhead.tending import Tending

State = dict[str, Any]


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
        By block (`level`, `linear`, `deep`, `proximal`): the heads in it, each a prior precision
        and a drift rate. None for `DEFAULT_GRID`, or `FIELD_GRID` with `feature_dim` 1.
    mixing:
        `soft` predicts by the mixture of all heads, `best` by the leader of each output.
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
    the block's width, so the deep heads that remember are what bounds it. A block that has not
    mattered for long sleeps, but for two batches of every 16.

    The backbone follows the gradient of one head, the driver, throughout: a mixture that changes
    hands, or whose memory is long, trains it worse (docs/decisions.md has the figures).

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
        mixing: Literal["soft", "best"] = "soft",
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
        if mixing not in ("soft", "best"):
            raise ConfigError(f"mixing is {mixing!r}: choose soft or best")
        if grid is None:
            grid = FIELD_GRID if feature_dim == 1 else DEFAULT_GRID
        self.in_features, self.out_features = in_features, out_features
        self.linear_features, self.feature_dim = linear_features, feature_dim
        self.mixing, self.noise_memory = mixing, noise_memory
        self.groups = tuple(
            make_group(block, self._width(block), out_features, pairs, device)
            for block, pairs in grid.items()
            if block != "linear" or linear_features
        )
        full = [i for i, group in enumerate(self.groups) if group.width == in_features + 1]
        if not full:
            raise ConfigError("the grid has no deep or proximal heads: give the backbone a use")
        self.driving = full[0]
        heads = sum(len(group) for group in self.groups)
        self.standing = Standing.start(heads, out_features, device, discount=discount, share=share)
        self.power, self.rows_seen = 1.0, 0.0
        self.samples_seen, self.batches = 0.0, 0
        self.tending = Tending(len(self.groups), self.driving)
        self._weight = self._mix(self.groups, self.standing)

    @property
    def weight(self) -> Tensor:
        """W of the mixture, (k, d); the constant's weight comes first."""
        return self._weight

    @property
    def weights(self) -> Tensor:
        """Weight of each head for each output, (heads, k); the heads in order of `names`."""
        return self.standing.weights

    @property
    def names(self) -> list[str]:
        """What each head is."""
        return [
            f"{group.block} lam={lam:g} eta={eta:g}"
            for group in self.groups
            for lam, eta in zip(group.lam.tolist(), group.eta.tolist(), strict=True)
        ]

    @property
    def shares(self) -> Tensor:
        """Part of each head in the mixture of each output, (heads, k)."""
        return self._shares(self.standing)

    def leaders(self, count: int = 3) -> list[tuple[str, float]]:
        """Heads with the largest weights, averaged over outputs, largest first."""
        weights = self.weights.mean(1)
        names = self.names
        return [(names[i], float(weights[i])) for i in weights.argsort(descending=True)[:count]]

    @property
    def effective_precision(self) -> float:
        """Lambda of one head in the bank's place: the weighted geometric mean."""
        lam = torch.cat([group.lam for group in self.groups])
        return float((self.weights.mean(1) @ lam.log()).exp())

    @property
    def effective_memory(self) -> float:
        """Samples that the heads' covariances remember, weighted; at most those seen."""
        eta = torch.cat([group.eta for group in self.groups])
        if self.batches == 0:
            return 0.0
        samples = (self.samples_seen / self.batches / eta).clamp_max(self.samples_seen)
        return min(float(self.weights.mean(1) @ samples), float(self.samples_seen))

    def forward(self, phi: Tensor) -> Tensor:
        """Predictions of the mixture: (*, d) -> (*, k), or (n, d, *grid) -> (n, k, *grid)."""
        return linear_outputs(self._weight, phi, True, self.feature_dim)

    def for_gradient(self, phi: Tensor) -> Tensor:
        """Outputs of the head that drives the backbone."""
        driver = self.groups[self.driving].posterior.mean[0]
        return linear_outputs(driver, phi, True, self.feature_dim)

    loss = staticmethod(squared_loss)

    @torch.no_grad()
    def update(self, phi: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Learn from one batch: every head conditions on it, and is scored by its foresight.

        Parameters and errors are those of `KalmanHead.update`.
        """
        check_pair(phi, y, weight, self.in_features, self.out_features, self.feature_dim)
        batch = BankRows(phi, y, weight, self.feature_dim, self.batches)
        if not bool(batch.seen.any()):
            return
        power = next_power(self.power, batch.rows, batch.weights, self.rows_seen)
        awake = self.tending.awake(self.batches)
        prior, first = self._prior_variance(power), self.rows_seen == 0
        learnt = [
            group.condition(batch, prior, first) if up else None
            for group, up in zip(self.groups, awake, strict=True)
        ]
        groups = tuple(new.group if new else g for g, new in zip(self.groups, learnt, strict=True))
        updates = [news for news in learnt if news is not None]
        innovation = torch.cat([update.innovation for update in updates])
        leverage = torch.cat([update.leverage for update in updates])
        samples = float(batch.seen.view(batch.samples, -1).amax(1).sum())
        self._judge(groups, innovation, leverage, batch.heard, awake, samples, batch.points, 1)
        self.power = power
        self._extend()

    @torch.no_grad()
    def take_note(
        self, innovation: Tensor, leverage: Tensor, seen: Tensor, awake: list[bool]
    ) -> None:
        """Judge the heads by rows on which each was conditioned elsewhere, one after the other.

        Parameters
        ----------
        innovation, leverage:
            What the heads of the groups awake foresaw of each row: (heads, n, k) and (heads, n).
        seen:
            Weight of each target, 0 where it is missing, (n, k).
        awake:
            Which groups had been conditioned.
        """
        samples = float(seen.amax(1).sum())
        self._judge(self.groups, innovation, leverage, seen, awake, samples, 1, len(seen))

    def remix(self) -> None:
        """Follow groups whose means were written into."""
        self._weight = self._mix(self.groups, self.standing)

    def _judge(
        self,
        groups: tuple[Group, ...],
        innovation: Tensor,
        leverage: Tensor,
        seen: Tensor,
        awake: list[bool],
        samples: float,
        points: int,
        batches: int,
    ) -> None:
        """Take groups over that have learnt, with what their foresight says of them."""
        counted = seen.sum(0)
        standing = self.standing.after(
            innovation,
            leverage,
            seen,
            counted,
            noise_discount(counted, self.rows_seen, self.noise_memory),
            samples,
            points,
            None if all(awake) else self._heads(awake),
        )
        mixture = self._mix(groups, standing)
        if not math.isfinite(mixture.sum()):
            raise NumericalError(
                "the solve gave NaN or infinity: a feature or a target of this batch is not "
                "finite; nothing was learnt from it"
            )
        self.groups, self.standing, self._weight = groups, standing, mixture
        self.rows_seen += float(counted.max())
        self.samples_seen += samples
        self.batches += batches
        largest = self.weights.amax(1).tolist()
        self.tending.follow(groups, largest, standing.share, batches)

    @torch.no_grad()
    def predict_dist(self, phi: Tensor) -> Predictive:
        """Student t with the mixture's mean and spread, the heads' disagreement included."""
        rows = rows_of(phi, self.feature_dim)
        mean = rows @ self._weight.mT
        variance, first = self._prior_variance(self.power), self.rows_seen == 0
        apart, leverage = [], []
        for group in self.groups:
            block = rows[:, : group.width]
            apart.append((block @ group.posterior.mean.mT - mean).square())
            leverage.append(group.prior(variance, first).variance_of(block))
        noise = self.standing.noise
        spread = noise.variance[:, None] * (1 + torch.cat(leverage)[..., None])
        weights = self.shares[:, None]
        square = (weights * (spread + torch.cat(apart))).sum(0)
        dof = (weights * 2 * noise.shape[:, None]).sum(0).expand_as(mean)
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
        self.standing = self.standing.rescaled(ratio)
        self._map(
            lambda group: replace(
                group.posterior,
                mean=rescaled_weight(group.posterior.mean, ratio, offset, True),
            )
        )

    def forget_noise(self, lost: Tensor) -> None:
        """Put the noise of outputs back to the prior, where `lost`, (k,), says so."""
        self.standing = self.standing.forgotten(lost)

    def loosen(self) -> None:
        """Put every P back to the prior; W itself stays."""
        variance = self._prior_variance(self.power)
        self._map(lambda group: group.loosened(variance))

    @torch.no_grad()
    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W and P for leading features that were `ratio * new + offset`, both (p,)."""
        self._map(
            lambda group: (
                reexpressed(group.posterior, ratio, offset)
                if group.width > ratio.shape[0]
                else group.posterior
            )
        )

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
        return {
            "groups": [group.state() for group in self.groups],
            "standing": self.standing.state(),
            "power": self.power,
            "rows_seen": self.rows_seen,
            "samples_seen": self.samples_seen,
            "batches": self.batches,
            "tending": self.tending.state(),
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
            # A grid of proximal heads may have extended itself.
            and (not group.remembers or torch.equal(old["lam"].to(group.lam), group.lam))
            and torch.equal(old["eta"].to(group.eta), group.eta)
            for old, group in zip(saved, self.groups, strict=True)
        )
        if not fits:
            raise ConfigError(
                "the saved head is a bank of other heads or shapes, or none: build the head with "
                "the options it was saved under"
            )
        pairs = zip(self.groups, saved, strict=True)
        self.groups = tuple(group.loaded(old) for group, old in pairs)
        self.standing = self.standing.loaded(state["standing"])
        for name in ("power", "rows_seen", "samples_seen", "batches"):
            setattr(self, name, state[name])
        self.tending.load_state(state["tending"])
        self._weight = self._mix(self.groups, self.standing)

    def _width(self, block: str) -> int:
        return {"level": 1, "linear": 1 + self.linear_features}.get(block, 1 + self.in_features)

    def _prior_variance(self, power: float) -> Tensor:
        """Prior variances for lambda = 1, (d,): 1 / power for all features but the constant."""
        variance = torch.full_like(self._weight[0], 1 / power)
        variance[0] = 1.0
        return variance

    def _heads(self, awake: list[bool]) -> Tensor:
        """Numbers of the heads whose groups are awake."""
        sizes = torch.tensor([len(group) for group in self.groups])
        flags = torch.tensor(awake).repeat_interleave(sizes)
        return flags.nonzero()[:, 0].to(self._weight.device)

    def _extend(self) -> None:
        """Let the grid go on beyond a head at its edge that has led for long."""
        beyond = self.tending.beyond(self.groups)
        if beyond is None:
            return
        i, edge, far = beyond
        start = sum(len(group) for group in self.groups[:i])
        self.groups = (*self.groups[:i], self.groups[i].extended(edge), *self.groups[i + 1 :])
        noise = self.standing.noise
        shape, rate = noise.shape.clone(), noise.rate.clone()
        shape[start + far], rate[start + far] = shape[start + edge], rate[start + edge]
        self.standing = replace(self.standing, noise=Noise(shape, rate))
        self._weight = self._mix(self.groups, self.standing)

    def _shares(self, standing: Standing) -> Tensor:
        """Part of each head in the mixture, (heads, k)."""
        if self.mixing == "soft":
            return standing.shares
        best = nn.functional.one_hot(standing.scores.argmax(0), standing.scores.shape[0])
        return best.mT.to(standing.scores)

    def _mix(self, groups: tuple[Group, ...], standing: Standing) -> Tensor:
        """W of the mixture, (k, d)."""
        sizes = [len(group) for group in groups]
        shares = torch.split(self._shares(standing), sizes)
        mixture = standing.scores.new_zeros(self.out_features, self.in_features + 1)
        for group, share in zip(groups, shares, strict=True):
            mixture[:, : group.width] += (share[..., None] * group.posterior.mean).sum(0)
        return mixture

    def _map(self, change: Callable[[Group], Posterior]) -> None:
        self.groups = tuple(replace(group, posterior=change(group)) for group in self.groups)
        self._weight = self._mix(self.groups, self.standing)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadBank:
        """Follow a move to another device, but keep the dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.standing = self.standing.moved(fn)
        self.groups = tuple(group.moved(fn) for group in self.groups)
        self._weight = self._mix(self.groups, self.standing)
        return self
