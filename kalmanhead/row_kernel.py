"""A learner's arithmetic for one row at a time, compiled, on the memory of the learner's tensors.

A call into torch costs more than the arithmetic of a single row. So what must happen on every row
(features, prediction, one rank-one update a head) is done here, on arrays that share their memory
with the tensors of the learner's bank and backbones. What may wait for a few rows (scores, noise,
scales, the average's standing) is collected and done by the learner's own parts in `settle`.

Shapes: m models (the newest, and the averaged one if there is one), p inputs, D features behind
the constant, K heads of a group, k outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kalmanhead.backbones import MLP
from kalmanhead.bank import HeadBank
from kalmanhead.bank_group import SIZING_ROWS, Group
from kalmanhead.layout import target_weights
from kalmanhead.learner import OnlineLearner
from kalmanhead.outliers import ALARM, CALM
from kalmanhead.renewal import renew
from kalmanhead.row_compiled import (
    blend,
    condition,
    condition_proximal,
    features,
    forecast,
    hold,
    standardise,
    surprises,
)
from kalmanhead.row_layers import Descent, Layers
from kalmanhead.scaling import LARGEST_INPUT, LARGEST_TARGET

Floats = NDArray[np.float64]

# Rows are pending one by one at the start, as everything is news then, and one more for every so
# many rows that were learnt from, up to a most.
ROWS_FOR_ONE, MOST_PENDING = 32, 128
# What has changed must not wait: with three rows in a row that were off by so many deviations (or
# somewhat more of them among others) it begins anew.
SURPRISE = 4.0
BELIEF = ALARM, CALM


@contextmanager
def own_modes() -> Iterator[None]:
    """Torch's modes as the row path needs them, whatever the caller's are."""
    with torch.inference_mode(False), torch.no_grad(), on_cpu():
        yield


def on_cpu() -> AbstractContextManager[object]:
    """New tensors on the CPU, whatever the caller's default; where that is it already, for free."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


class GroupRows:
    """Heads of one group, conditioned on single rows.

    Parameters
    ----------
    group:
        Its mean, and its covariance if it remembers one, are written into.
    shares:
        Part of each head in the mixture, (K, k).
    power:
        Size of the features, in which the prior precisions are given.
    """

    def __init__(self, group: Group, shares: Floats, power: float) -> None:
        self.width, self.remembers, self.heads = group.width, group.remembers, len(group)
        self.mean, self.shares = group.posterior.mean.numpy(), shares
        self.lam, self.eta = group.lam.numpy()[:, None], group.eta.numpy()[:, None]
        if self.remembers:
            self.spread = group.posterior.spread.numpy()
            self.kept = 1 - self.eta[:, 0]
        self.size(power)

    def size(self, power: float) -> None:
        """Take the prior's variances for features of this size."""
        variance = np.full(self.width, 1 / power)
        variance[0] = 1.0
        self.prior = variance / self.lam
        self.added = self.eta * self.prior

    def start(self) -> None:
        """Put the covariance to the prior, before any row."""
        if self.remembers:
            self.spread[...] = self.prior[:, None, :] * np.eye(self.width)

    def symmetrise(self) -> None:
        """Take away what the rounding of many updates made unsymmetric."""
        if self.remembers:
            self.spread[...] = (self.spread + self.spread.swapaxes(1, 2)) / 2

    def forecast(self, phi: Floats, mixed: Floats) -> Floats:
        """What each head says of phi (m, D), (K, k); its part of the mixture is added to mixed."""
        said = np.empty(self.shares.shape)
        forecast(self.mean, self.shares, phi, said, mixed)
        return said

    def condition(
        self,
        phi: Floats,  # (m, D)
        target: Floats,  # (k,)
        said: Floats,  # (K, k)
        weight: float,
        innovation: Floats,  # (K, k)
        leverage: Floats,  # (K,)
    ) -> None:
        """Learn from a row; target less what was said, and phi' P- phi, go into the last two."""
        row = (phi, target, said, weight, innovation, leverage)
        if self.remembers:
            condition(self.mean, self.spread, self.kept, self.added, *row)
        else:
            condition_proximal(self.mean, self.prior, *row)


class Noted(NamedTuple):
    """A row that was learnt from, for the parts of the learner that take note of it later."""

    row: Floats
    target: Floats
    weight: float
    scaled: Floats  # targets, (k,)
    errors: Floats  # of what was foreseen of them, strange ones held, (k,)
    innovation: Floats  # of each head awake, (heads, k)
    leverage: Floats  # (heads,)
    outputs: Floats  # as they were foreseen by the newest and the averaged model, (m, k)
    surprise: bool


class _Seen(NamedTuple):
    """A row that was predicted: if it is learnt from next, nothing need be computed again."""

    row: Floats
    phi: Floats  # (m, D)
    forecasts: list[Floats]  # of each group awake, (K, k)
    outputs: Floats  # of the newest and the averaged model, (m, k), scaled
    mixture: Floats  # of both together, (k,), scaled
    prediction: Floats  # the same in the outputs' own units


class RowKernel:
    """One row at a time for a learner with a bank, an MLP or no backbone, in float64.

    Parameters
    ----------
    learner:
        Its tensors are written into by `learn`.
    pending:
        What an earlier kernel of this learner had not settled yet.
    began:
        Batches of the learner when its newest name came, or the last change: what is new is
        settled row by row.
    """

    def __init__(
        self, learner: OnlineLearner, pending: list[Noted] | None = None, began: int = 0
    ) -> None:
        self.learner = learner
        assert isinstance(learner.head, HeadBank)
        self.bank = learner.head
        models = [learner.backbone]
        if learner.average is not None:
            models.append(learner.average.backbone)
        mlps = [model for model in models if isinstance(model, MLP)]
        self.layers = Layers(mlps) if mlps else None
        optimizer = learner.optimizer
        self.descent = None if self.layers is None or optimizer is None else Descent(optimizer)
        self.models, self.skip = len(models), learner.skip
        if self.layers is None:  # the features are the inputs
            inputs = self.bank.in_features // (2 if self.skip else 1)
            self.sizes, self.vectors = np.array([inputs]), np.empty((self.models, 0))
        else:
            self.sizes, self.vectors = self.layers.sizes, self.layers.vectors
        self.average_weight = np.empty((self.bank.out_features, 0))
        self.average_share = np.empty(0)
        self.pending, self.began = [] if pending is None else pending, began
        self.alarm, self.renewed = 0.0, False
        for noted in self.pending:
            self.alarm = CALM * self.alarm + noted.surprise
        self._seen: _Seen | None = None
        self._follow()

    def predict(self, row: Floats) -> Floats:
        """Outputs in their own units, (p,) -> (k,); NaN in a row is its column's mean.

        If the same array is learnt from next, its features are not computed again: leave it as
        it is.
        """
        if self._seen is None or self._seen.row is not row:
            self._seen = self._foresee(row)
        return self._seen.prediction

    def learn(self, row: Floats, target: Floats, weight: float) -> Floats:
        """Condition every head on a row, (p,), with targets (k,); what `predict` had said.

        NaN is a missing target, of which at least one must be there; the weight is positive. A
        strange target is put at its forecast in the array.
        """
        first, self.renewed = self.learner.batches == 0, False
        if first:
            self._begin(row, target)
        prediction = self.predict(row)
        seen = self._seen
        assert seen is not None
        scaled = np.empty_like(target)
        standardise(target, self.center, self.steps, LARGEST_TARGET, math.nan, scaled)
        errors = scaled - seen.mixture
        if self.learner.outliers is not None and not first:
            scales = (self.unit, self.center)
            belief = (self.reach, self.strange, self.changed, *BELIEF)
            if hold(target, scaled, errors, seen.mixture, *belief, *scales):
                seen = self._renew(row, target, prediction)
                standardise(target, self.center, self.steps, LARGEST_TARGET, math.nan, scaled)
                errors = scaled - seen.mixture
        if self.bank.rows_seen < SIZING_ROWS:
            self._size(seen.phi[0], weight)
        if first:
            for group in self.awake:
                group.start()
        innovation = np.empty((self.heads, len(scaled)))
        leverage = np.empty(self.heads)
        for group, place, said in zip(self.awake, self.places, seen.forecasts, strict=True):
            group.condition(seen.phi, scaled, said, weight, innovation[place], leverage[place])
        surprise = surprises(innovation, leverage, self.variance, self.leader, SURPRISE)
        self.alarm = CALM * self.alarm + surprise
        self.pending.append(
            Noted(row, target, weight, scaled, errors, innovation, leverage, seen.outputs, surprise)
        )
        self._seen = None
        vars(self.learner)["batches"] += 1  # a module's own way of setting costs 5 us
        if self.alarm > ALARM:
            self.began = self.learner.batches
        known = self.learner.batches - self.began
        if len(self.pending) >= min(MOST_PENDING, 1 + known // ROWS_FOR_ONE):
            self._settle()
        return np.zeros_like(target) if first else prediction

    def _settle(self) -> None:
        """Let the learner's parts take note of the rows since the last time."""
        *columns, _ = zip(*self.pending, strict=True)
        rows, targets, weights, scaled, errors, innovation, leverage, outputs = (
            torch.from_numpy(np.array(values)) for values in columns
        )
        self.pending, self.alarm = [], 0.0
        for group in self.awake:
            group.symmetrise()
        learner, bank = self.learner, self.bank
        weight = None if bool((weights == 1).all()) else weights
        with own_modes():
            first = bank.rows_seen == 0
            seen = target_weights(scaled, weight, -1)
            bank.take_note(innovation.transpose(0, 1), leverage.mT, seen, self.awake_flags)
            if not first:  # of which nothing could be foreseen, and the scales are taken already
                if learner.outliers is not None:
                    learner.outliers.follow(errors, seen)
                if learner.average is not None:
                    learner.average.score(outputs[:, 0], outputs[:, -1], scaled, weight)
                skip = learner.leads_with_inputs
                learner.scaling.follow(
                    rows, targets, weight, learner.parts, skip=skip, express=True
                )
            self._follow()

    def settle(self) -> None:
        """Leave nothing pending, as a learner that is to be changed from outside must be."""
        if self.pending:
            self._settle()
        self.bank.remix()

    def _renew(self, row: Floats, target: Floats, prediction: Floats) -> _Seen:
        """Take changed outputs as new; the row as it is foreseen after that."""
        changed, self.renewed = torch.from_numpy(self.changed), True
        self.settle()
        with own_modes():
            said = torch.from_numpy(prediction)[None]
            renew(self.learner, changed, torch.from_numpy(target)[None], said)
        self.began = self.learner.batches
        self._follow()
        return self._foresee(row)

    def step_backbone(self, rows: Floats, targets: Floats, weights: Floats) -> None:
        """One gradient step on rows (n, p), targets (n, k) and weights (n,); then the average's.

        The loss is `squared_loss`, at today's scales and at the driver's W of today.

        Raises
        ------
        NumericalError
            The backbone has diverged; it stays as it was.
        """
        if self.layers is None or self.descent is None:
            return
        z, y = self._scaled(rows), self._scaled_targets(targets)
        h, passed = self.layers.forward(z)
        driver = self.bank.groups[self.bank.driving].posterior.mean[0].numpy()
        tail = driver[:, -h.shape[1] :]
        outputs = h @ tail.T + driver[:, 0]
        if self.learner.skip:
            outputs += z @ driver[:, 1 : 1 + z.shape[1]].T
        missing = np.isnan(y)
        error = np.where(missing, 0.0, outputs - y)
        error *= 2 * weights[:, None] / max(1, missing.size - int(missing.sum()))
        with np.errstate(over="ignore", invalid="ignore"):  # `descend` names it
            gradient = self.layers.backward(passed, error @ tail)
        self._seen = None
        vectors, average = self.layers.vectors, self.learner.average
        self.descent.step(vectors[0], gradient, self.learner.clip)
        if average is not None:
            new = average.step()
            vectors[1] += new * (vectors[0] - vectors[1])
            self.average_weight += new * (self._mixture() - self.average_weight)

    def _mixture(self) -> Floats:
        """W of the bank's mixture, (k, D)."""
        mixture = self.rest.copy()
        for group in self.awake:
            mixture[:, : group.width] += (group.shares[:, :, None] * group.mean).sum(0)
        return mixture

    def _scaled(self, rows: Floats) -> Floats:
        """Rows (n, p) in standardised units; what is missing is 0 there, the mean."""
        z = np.clip((rows - self.shift) * self.steepness, -LARGEST_INPUT, LARGEST_INPUT)
        return np.where(np.isnan(z), 0.0, z)

    def _scaled_targets(self, targets: Floats) -> Floats:
        """Targets (n, k) in standardised units, held within a million deviations."""
        scaled = (targets - self.center) / self.unit
        return np.clip(scaled, -LARGEST_TARGET, LARGEST_TARGET)

    def _begin(self, row: Floats, target: Floats) -> None:
        """Take the first scales from the first row, as nothing is known of them before."""
        x, y = torch.from_numpy(row)[None], torch.from_numpy(target)[None]
        learner = self.learner
        with own_modes():
            learner.scaling.begin(x, y)
            learner.scaling.follow(x, y, None, learner.parts, skip=False, express=False)
        self._follow()

    def _foresee(self, row: Floats) -> _Seen:
        """Features and forecasts of a row."""
        phi = np.empty((self.models, self.rest.shape[1]))
        scales = (self.shift, self.steepness, LARGEST_INPUT)
        features(row, *scales, self.vectors, self.sizes, self.skip, phi)
        mixed = np.zeros(len(self.rest))
        said = [group.forecast(phi, mixed) for group in self.awake]
        outputs = np.empty((self.models, len(mixed)))
        blend(phi, mixed, self.rest, self.average_weight, self.average_share, outputs)
        return _Seen(row, phi, said, outputs, mixed, mixed * self.unit + self.center)

    def _size(self, phi: Floats, weight: float) -> None:
        """Let the size of the features follow, as `next_power` does."""
        seen = self.bank.rows_seen + sum(noted.weight for noted in self.pending)
        if seen >= SIZING_ROWS or len(phi) == 1:
            return
        now = float(np.square(phi[1:]).max())
        power = self.bank.power + (now - self.bank.power) * weight / (seen + weight)
        self.bank.power = power if power > 0 else 1.0
        for group in self.awake:
            group.size(self.bank.power)

    def _follow(self) -> None:
        """Take over what the learner's parts have changed."""
        learner, bank = self.learner, self.bank
        shares = bank.shares.numpy()
        starts = np.cumsum([0] + [len(group) for group in bank.groups])
        self.awake_flags = bank.tending.awake(bank.batches)
        self.awake: list[GroupRows] = []
        self.places: list[slice] = []  # of each group awake among the heads awake
        self.rest = np.zeros((bank.out_features, bank.in_features + 1))  # W of all that sleep
        self.heads = 0
        for group, up, start in zip(bank.groups, self.awake_flags, starts, strict=False):
            part = shares[start : start + len(group)]
            if up:
                self.awake.append(GroupRows(group, part, bank.power))
                self.places.append(slice(self.heads, self.heads + len(group)))
                self.heads += len(group)
            else:
                mean = group.posterior.mean.numpy()
                self.rest[:, : group.width] += (part[:, :, None] * mean).sum(0)
        self._seen = None
        x, y = learner.scaling.x, learner.scaling.y
        inputs, outputs = int(self.sizes[0]), bank.out_features
        self.shift = np.zeros(inputs) if x is None else x.shift.numpy()
        self.steepness = np.ones(inputs) if x is None else 1 / x.scale.numpy()
        self.unit = np.ones(outputs) if y is None else y.scale.numpy()
        self.steps = 1 / self.unit
        awake = np.repeat(self.awake_flags, np.diff(starts))
        self.variance = bank.standing.noise.variance.numpy()[awake]
        self.leader = shares[awake].argmax(0)
        self.center = np.zeros(outputs) if y is None else y.shift.numpy()
        if learner.outliers is not None:
            self.reach = learner.outliers.reach.numpy()
            self.strange = learner.outliers.strange.numpy()
            self.changed = np.zeros(outputs, dtype=bool)
        if learner.average is not None:
            self.average_share = learner.average.standing.shares[1].numpy()
            self.average_weight = learner.average.weight.numpy()
