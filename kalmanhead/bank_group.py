"""Heads of one block of features: what they are, what they believe, how they learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kalmanhead.bank_rows import BankRows
from kalmanhead.errors import ConfigError
from kalmanhead.posterior import Posterior, condition, condition_sums

# By block: the heads in it, each a prior precision lambda and a drift rate eta.
Grid = Mapping[str, Sequence[tuple[float, float]]]

BLOCKS = ("level", "linear", "deep", "proximal")
# Precisions are in units of the largest feature's mean square. Rate 1 is `reset`, the paper's
# proximal head, and 0 is `static`. The first head of the first block that uses all features
# drives the backbone.
DEFAULT_GRID: Grid = {
    "level": ((0.01, 1.0), (0.01, 0.1), (0.01, 0.01), (0.01, 0.0)),
    "linear": ((0.1, 0.01), (0.1, 0.0), (10.0, 0.01), (10.0, 0.0)),
    "deep": ((10.0, 0.001), (1.0, 0.0)),
}
# Fields bring thousands of rows a batch. What is remembered of them holds the head to features
# that the backbone has left behind, so there only heads of a short memory stay stable.
FIELD_GRID: Grid = {
    "level": ((0.01, 1.0), (0.01, 0.0)),
    "linear": ((10.0, 0.0),),
    "proximal": ((100.0, 1.0), (30.0, 1.0), (300.0, 1.0)),
    "deep": ((1.0, 0.1),),
}
# Rows at the start from which the size of the features is taken.
SIZING_ROWS = 1000
# A grid that extends itself goes on in these steps, as far as these precisions.
STEP, LEAST, MOST = 10.0, 1e-4, 1e8


@dataclass(frozen=True)
class Group:
    """Heads of one block: what they are, and what they believe of the weights.

    Attributes
    ----------
    block, width:
        Name of the block and number of leading features it uses.
    lam, eta:
        Prior precision and drift rate of each head, (K,).
    posterior:
        Batched beliefs; proximal heads carry no covariance and are `diagonal` in form.
    """

    block: str
    width: int
    lam: Tensor
    eta: Tensor
    posterior: Posterior

    def __len__(self) -> int:
        """How many heads."""
        return self.lam.shape[0]

    @property
    def remembers(self) -> bool:
        """Whether a covariance is carried from batch to batch."""
        return self.posterior.form == "dense"

    def prior(self, variance: Tensor, first: bool) -> Posterior:
        """Belief before a batch, P- = (1 - eta) P + eta V with V = diag(variance) / lambda.

        `variance`, (d,) with d at least the width, is the prior's for lambda = 1.
        """
        own = variance[: self.width] / self.lam[:, None]
        if first or not self.remembers:
            return Posterior(self.posterior.mean, own, "diagonal")
        spread = self.posterior.spread * (1 - self.eta)[:, None, None]
        spread.diagonal(dim1=-2, dim2=-1).add_(self.eta[:, None] * own)
        return replace(self.posterior, spread=spread)

    def condition(self, batch: BankRows, variance: Tensor, first: bool) -> Learnt:
        """Learn from a batch. A missing target is each head's own prediction: it moves nothing."""
        prior, keep = self.prior(variance, first), self.remembers
        if batch.summed:
            gram, cross = batch.sums
            gram, cross = gram[: self.width, : self.width], cross[: self.width]
            posterior = condition_sums(prior, gram, cross, keep_covariance=keep)
            rows, targets = batch.judged
            block = rows[:, : self.width]
            innovation, leverage = targets - block @ prior.mean.mT, prior.variance_of(block)
        else:
            block, targets = batch.rows[:, : self.width], batch.targets
            if not batch.complete:
                targets = torch.where(torch.isnan(targets), block @ prior.mean.mT, targets)
            update = condition(prior, block, targets, batch.weights, keep_covariance=keep)
            posterior, innovation, leverage = update.posterior, update.innovation, update.leverage
            if batch.weights is not None:  # a row of weight w was taken as sqrt(w) times itself
                own = torch.where(batch.weights > 0, batch.weights, 1.0)
                innovation, leverage = innovation / own.sqrt()[:, None], leverage / own
        if not keep:
            posterior = replace(self.posterior, mean=posterior.mean)
        return Learnt(replace(self, posterior=posterior), innovation, leverage)

    def loosened(self, variance: Tensor) -> Posterior:
        """What is believed with the covariance back at `prior`."""
        if not self.remembers:
            return self.posterior
        spread = self.prior(variance, first=True).spread
        return replace(self.posterior, spread=torch.diag_embed(spread))

    def extended(self, edge: int) -> Group:
        """Group whose precision at the other end has moved on beyond head `edge`, at this end.

        The new head starts from what the one at the edge has learnt.
        """
        beyond = STEP if self.lam[edge] == self.lam.max() else 1 / STEP
        far = self.far(edge)
        lam, mean = self.lam.clone(), self.posterior.mean.clone()
        lam[far] = lam[edge] * beyond
        mean[far] = mean[edge]
        return replace(self, lam=lam, posterior=replace(self.posterior, mean=mean))

    def state(self) -> dict[str, Tensor]:
        """What must be kept to go on exactly."""
        mean, spread = self.posterior.mean, self.posterior.spread
        return {"lam": self.lam, "eta": self.eta, "mean": mean, "spread": spread}

    def loaded(self, state: dict[str, Tensor]) -> Group:
        """The same with what `state` returned; eta is no part of what is learnt."""
        lam, mean, spread = (state[name].to(self.lam).clone() for name in ("lam", "mean", "spread"))
        return replace(self, lam=lam, posterior=Posterior(mean, spread, self.posterior.form))

    def moved(self, fn: Callable[[Tensor], Tensor]) -> Group:
        """The same elsewhere, in the same dtype."""
        lam, eta, mean, spread = (
            fn(value).to(value.dtype)
            for value in (self.lam, self.eta, self.posterior.mean, self.posterior.spread)
        )
        return replace(
            self, lam=lam, eta=eta, posterior=Posterior(mean, spread, self.posterior.form)
        )

    def far(self, edge: int) -> int:
        """Head at the other end of the precisions."""
        top = bool(self.lam[edge] == self.lam.max())
        return int(self.lam.argmin() if top else self.lam.argmax())

    def can_extend(self, edge: int) -> bool:
        """Whether the grid may go on beyond a head: the first one, which may drive, stays."""
        lam = float(self.lam[edge])
        top, bottom = lam == float(self.lam.max()), lam == float(self.lam.min())
        if self.remembers or top == bottom or self.far(edge) == 0:
            return False
        return lam < MOST if top else lam > LEAST


class Learnt(NamedTuple):
    """A group after a batch, and how well it had foreseen the rows that judge it."""

    group: Group
    innovation: Tensor  # (K, judges, k)
    leverage: Tensor  # (K, judges)


def make_group(
    block: str,
    width: int,
    outputs: int,
    pairs: Sequence[tuple[float, float]],
    device: torch.device | str | None,
) -> Group:
    """Heads of these prior precisions and drift rates, before any data.

    Raises
    ------
    ConfigError
        An unknown block, or precisions and rates out of range.
    """
    if block not in BLOCKS:
        raise ConfigError(f"block {block!r} is unknown: choose {', '.join(BLOCKS)}")
    try:
        lam, eta = (
            torch.tensor(column, dtype=torch.float64, device=device)
            for column in zip(*pairs, strict=True)
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"grid of {block}: give pairs of a precision and a rate") from error
    if not ((lam > 0) & (eta >= 0) & (eta <= 1)).all():
        raise ConfigError(f"grid of {block}: give precisions above 0 and rates from 0 to 1")
    mean = torch.zeros(len(pairs), outputs, width).to(lam)
    variance = (1 / lam)[:, None].expand(-1, width)
    if block == "proximal":
        posterior = Posterior(mean, variance.clone(), "diagonal")
    else:
        posterior = Posterior(mean, torch.diag_embed(variance), "dense")
    return Group(block, width, lam, eta, posterior)


def next_power(power: float, rows: Tensor, weights: Tensor | None, seen: float) -> float:
    """Size of the features after a batch, so that units do not matter.

    It is the mean square of the largest of them, averaged over the first batches, and stays from
    then on: a prior that grew with the features would let them grow for ever.

    Parameters
    ----------
    power:
        The size before.
    rows:
        Features behind the constant, (rows, d).
    weights:
        Of the rows, (rows,); None for 1.
    seen:
        Summed weight of all rows before.
    """
    if rows.shape[1] == 1 or seen >= SIZING_ROWS:
        return power
    if weights is None:
        now, count = rows[:, 1:].square().mean(0), float(len(rows))
    else:
        count = float(weights.sum())
        now = weights @ rows[:, 1:].square() / count
    power = power + (float(now.max()) - power) * count / (seen + count)
    return power if power > 0 else 1.0
