"""A learner's arithmetic for one row at a time, in numpy on the memory of the learner's tensors.

A call into torch costs more than the arithmetic of a single row. So what must happen on every row
(features, prediction, one rank-one update a head) is done here, on arrays that share their memory
with the tensors of the learner's bank and backbones. What may wait for a few rows (scores, noise,
scales, the average's standing) is collected and done by the learner's own parts in `settle`.

Shapes: m models (the newest, and the averaged one if there is one), p inputs, D features behind
the constant, K heads of a group, k outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.blas import dger

from kalmanhead.backbones import MLP
from kalmanhead.bank import HeadBank
from kalmanhead.bank_group import SIZING_ROWS, Group
from kalmanhead.layout import target_weights
from kalmanhead.learner import OnlineLearner
from kalmanhead.row_layers import Descent, Layers
from kalmanhead.scaling import LARGEST_INPUT, LARGEST_TARGET

Floats = NDArray[np.float64]

# Rows are pending one by one at the start, as everything is news then, and one more for every so
# many rows that were learnt from, up to a most.
ROWS_FOR_ONE, MOST_PENDING = 32, 128


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
        self.width, self.remembers = group.width, group.remembers
        self.mean = group.posterior.mean.numpy()
        # All heads see the same features: one product of a tall matrix serves all of them.
        heads, outputs, _ = self.mean.shape
        self.tall_mean = self.mean.reshape(heads * outputs, self.width)
        self.shares, self.flat_shares = shares, np.ascontiguousarray(shares[:, 0])
        self.lam, self.eta = group.lam.numpy()[:, None], group.eta.numpy()[:, None]
        self.drifts = self.remembers and bool(self.eta.any())
        if self.remembers:
            self.spread = group.posterior.spread.numpy()
            d = self.width
            self.means = [mean.T for mean in self.mean]  # in BLAS's order, as these
            self.spreads = [spread.T for spread in self.spread]
            self.tall_spread = self.spread.reshape(heads * d, d)
            self.diagonal = self.spread.reshape(heads, d * d)[:, :: d + 1]
            self.kept = 1 - self.eta[:, :, None]
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
            self.spread[...] = 0.0
            self.diagonal[...] = self.prior

    def symmetrise(self) -> None:
        """Take away what the rounding of many updates made unsymmetric."""
        if self.remembers:
            self.spread[...] = (self.spread + self.spread.swapaxes(1, 2)) / 2

    def forecasts(self, phi: Floats) -> Floats:
        """What each head says of features phi, (D,) -> (K, k)."""
        return np.asarray((self.tall_mean @ phi[: self.width]).reshape(self.mean.shape[:2]))

    def mixed(self, forecasts: Floats) -> Floats:
        """What the forecasts (K, k) add to the mixture, (k,)."""
        if forecasts.shape[1] == 1:
            return np.asarray(self.flat_shares @ forecasts)
        return np.asarray((self.shares * forecasts).sum(0))

    def condition(self, phi: Floats, innovation: Floats, weight: float) -> Floats:
        """Time update, then measurement update; the leverages phi' P- phi, (K,).

        With c = P- phi and s = c' phi + 1 / weight: W += innovation c' / s, P = P- - c c' / s.
        """
        block = phi[: self.width]
        if not self.remembers:
            gain = self.prior * block
            leverage = gain @ block
            gain /= (leverage + 1 / weight)[:, None]
            self.mean += innovation[:, :, None] * gain[:, None, :]
            return np.asarray(leverage)
        if self.drifts:
            self.spread *= self.kept
            self.diagonal += self.added
        gain = (self.tall_spread @ block).reshape(self.diagonal.shape)
        leverage = gain @ block
        rest = 1 / weight
        for mean, spread, c, e, own in zip(
            self.means, self.spreads, gain, innovation, leverage.tolist(), strict=True
        ):
            dger(1 / (own + rest), c, e, a=mean, overwrite_a=1)
            dger(-1 / (own + rest), c, c, a=spread, overwrite_a=1)
        return np.asarray(leverage)


class Noted(NamedTuple):
    """A row that was learnt from, for the parts of the learner that take note of it later."""

    row: Floats
    target: Floats
    weight: float
    scaled: Floats  # targets, (k,)
    innovation: Floats  # of each head awake, (heads, k)
    leverage: Floats  # (heads,)
    outputs: Floats  # as they were foreseen by the newest and the averaged model, (m, k)


class _Seen(NamedTuple):
    """A row that was predicted: if it is learnt from next, nothing need be computed again."""

    row: Floats
    phi: Floats  # (m, D)
    forecasts: list[Floats]  # of each group awake, (K, k)
    outputs: Floats  # of the newest and the averaged model, (m, k), scaled
    prediction: Floats  # of both together, (k,), in the outputs' own units


class RowKernel:
    """One row at a time for a learner with a bank, an MLP or no backbone, in float64.

    Parameters
    ----------
    learner:
        Its tensors are written into by `learn`.
    pending:
        What an earlier kernel of this learner had not settled yet.
    """

    def __init__(self, learner: OnlineLearner, pending: list[Noted] | None = None) -> None:
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
        self.models = len(models)
        self.pending = [] if pending is None else pending
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

        NaN is a missing target, of which at least one must be there; the weight is positive.
        """
        first = self.learner.batches == 0
        if first:
            self._begin(row, target)
        prediction = self.predict(row)
        seen = self._seen
        assert seen is not None
        scaled = self._scaled_targets(target)
        some_missing = math.isnan(np.vdot(scaled, scaled))
        phi = seen.phi[0]
        if self.bank.rows_seen < SIZING_ROWS:
            self._size(phi, weight)
        if first:
            for group in self.awake:
                group.start()
        innovations, leverages = [], []
        for group, forecast in zip(self.awake, seen.forecasts, strict=True):
            innovation = scaled - forecast
            if some_missing:
                innovation[:, np.isnan(scaled)] = 0.0
            innovations.append(innovation)
            leverages.append(group.condition(phi, innovation, weight))
        several = len(leverages) > 1
        self.pending.append(
            Noted(
                row,
                target,
                weight,
                scaled,
                np.concatenate(innovations) if several else innovations[0],
                np.concatenate(leverages) if several else leverages[0],
                seen.outputs,
            )
        )
        self._seen = None
        vars(self.learner)["batches"] += 1  # a module's own way of setting costs 5 us
        if len(self.pending) >= min(MOST_PENDING, 1 + self.learner.batches // ROWS_FOR_ONE):
            self._settle()
        return np.zeros_like(target) if first else prediction

    def _settle(self) -> None:
        """Let the learner's parts take note of the rows since the last time."""
        rows, targets, weights, scaled, innovation, leverage, outputs = (
            torch.from_numpy(np.array(values)) for values in zip(*self.pending, strict=True)
        )
        self.pending = []
        for group in self.awake:
            group.symmetrise()
        learner, bank = self.learner, self.bank
        weight = None if bool((weights == 1).all()) else weights
        with torch.inference_mode(False), torch.no_grad():
            first = bank.rows_seen == 0
            seen = target_weights(scaled, weight, -1)
            bank.take_note(innovation.transpose(0, 1), leverage.mT, seen, self.awake_flags)
            if not first:  # of which nothing could be foreseen, and the scales are taken already
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
        mixture = np.zeros_like(self.average_weight) if self.rest is None else self.rest.copy()
        for group in self.awake:
            mixture[:, : group.width] += (group.shares[:, :, None] * group.mean).sum(0)
        return mixture

    def _scaled(self, rows: Floats) -> Floats:
        """Rows in standardised units, (p,) or (n, p); what is missing is 0 there, the mean."""
        z = (rows - self.shift) * self.steepness
        if not np.vdot(z, z) <= LARGEST_INPUT**2:  # seldom: some value is too large or missing
            np.clip(z, -LARGEST_INPUT, LARGEST_INPUT, out=z)
            z[np.isnan(z)] = 0.0
        return np.asarray(z)

    def _scaled_targets(self, targets: Floats) -> Floats:
        """Targets in standardised units, held within a million deviations."""
        scaled = (targets - self.center) / self.unit
        if not np.vdot(scaled, scaled) <= LARGEST_TARGET**2:
            np.clip(scaled, -LARGEST_TARGET, LARGEST_TARGET, out=scaled)
        return np.asarray(scaled)

    def _begin(self, row: Floats, target: Floats) -> None:
        """Take the first scales from the first row, as nothing is known of them before."""
        x, y = torch.from_numpy(row)[None], torch.from_numpy(target)[None]
        learner = self.learner
        with torch.inference_mode(False):
            learner.scaling.begin(x, y)
            learner.scaling.follow(x, y, None, learner.parts, skip=False, express=False)
        self._follow()

    def _foresee(self, row: Floats) -> _Seen:
        """Features and forecasts of a row."""
        z = self._scaled(row)
        p, skip = len(z), self.learner.skip
        phi = np.empty((self.models, self.bank.in_features + 1))
        phi[:, 0] = 1.0
        if skip or self.layers is None:
            phi[:, 1 : p + 1] = z
        if self.layers is not None:
            phi[:, 1 + skip * p :] = self.layers(z)
        elif skip:
            phi[:, 1 + p :] = z
        newest = phi[0]
        forecasts = [group.forecasts(newest) for group in self.awake]
        mixed = 0.0 if self.rest is None else self.rest @ newest
        for group, forecast in zip(self.awake, forecasts, strict=True):
            mixed = mixed + group.mixed(forecast)
        outputs = np.empty((self.models, self.bank.out_features))
        outputs[0] = mixed
        if self.models == 2:
            outputs[1] = average = self.average_weight @ phi[1]
            average -= mixed
            average *= self.average_share
            mixed = mixed + average
        return _Seen(row, phi, forecasts, outputs, mixed * self.unit + self.center)

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
        self.rest: Floats | None = None  # W of all that sleep, (k, D)
        if not all(self.awake_flags):
            self.rest = np.zeros((bank.out_features, bank.in_features + 1))
        for group, up, start in zip(bank.groups, self.awake_flags, starts, strict=False):
            part = shares[start : start + len(group)]
            if up:
                self.awake.append(GroupRows(group, part, bank.power))
            elif self.rest is not None:
                mean = group.posterior.mean.numpy()
                self.rest[:, : group.width] += (part[:, :, None] * mean).sum(0)
        self._seen = None
        x, y = learner.scaling.x, learner.scaling.y
        self.shift = np.zeros(1) if x is None else x.shift.numpy()
        self.steepness = np.ones(1) if x is None else 1 / x.scale.numpy()
        self.unit = np.ones(1) if y is None else y.scale.numpy()
        self.center = np.zeros(1) if y is None else y.shift.numpy()
        if learner.average is not None:
            self.average_share = learner.average.standing.shares[1].numpy()
            self.average_weight = learner.average.weight.numpy()
