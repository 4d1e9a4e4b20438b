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
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import erf
from torch import Tensor

from kalmanhead.backbones import MLP
from kalmanhead.bank import HeadBank
from kalmanhead.bank_group import SIZING_ROWS, Group
from kalmanhead.learner import OnlineLearner
from kalmanhead.scaling import LARGEST_INPUT, LARGEST_TARGET

Floats = NDArray[np.float64]

# Rows are pending one by one at the start, as everything is news then, and one more for every so
# many rows that were learnt from, up to a most.
ROWS_FOR_ONE, MOST_PENDING = 32, 64


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
        self.shares = shares
        self.lam, self.eta = group.lam.numpy()[:, None], group.eta.numpy()[:, None]
        self.drifts = self.remembers and bool(self.eta.any())
        if self.remembers:
            self.spread = group.posterior.spread.numpy()
            heads, d = self.spread.shape[:2]
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

    def forecasts(self, phi: Floats) -> Floats:
        """What each head says of features phi, (D,) -> (K, k)."""
        return self.mean @ phi[: self.width]

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
        gain = self.spread @ block
        leverage = gain @ block
        scale = (leverage + 1 / weight)[:, None]
        self.mean += innovation[:, :, None] * (gain / scale)[:, None, :]
        gain /= np.sqrt(scale)
        # As a product with itself, the correction is symmetric to the last bit.
        self.spread -= gain[:, :, None] * gain[:, None, :]
        return np.asarray(leverage)


class Layers:
    """An MLP of one or several models side by side, on single rows.

    Parameters
    ----------
    models:
        Of the same sizes. Their parameters are moved into common memory.
    """

    def __init__(self, models: list[MLP]) -> None:
        self.weights, self.biases = [], []
        for layers in zip(*(model.layers for model in models), strict=True):
            self.weights.append(_together([layer.weight for layer in layers]))
            self.biases.append(_together([layer.bias for layer in layers]))

    def __call__(self, z: Floats) -> Floats:
        """Features of scaled inputs, (p,) -> (m, width); the activation is gelu."""
        a = self.weights[0] @ z + self.biases[0]
        a *= erf(a * math.sqrt(0.5)) + 1
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            a = (weight @ a[:, :, None])[:, :, 0]
            a *= 0.5
            a += bias
            a *= erf(a * math.sqrt(0.5)) + 1
        a *= 0.5
        return np.asarray(a)


@dataclass
class Pending:
    """What rows said that the learner has not taken note of yet; one entry a row in each list.

    The scales have taken note of a stream's first row at once: `rows` and `targets` are without.
    """

    rows: list[Floats] = field(default_factory=list)
    targets: list[Floats] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    scaled: list[Floats] = field(default_factory=list)
    innovations: list[Floats] = field(default_factory=list)
    leverages: list[Floats] = field(default_factory=list)
    forecasts: list[Floats] = field(default_factory=list)

    def __len__(self) -> int:
        """How many rows."""
        return len(self.weights)


@dataclass(frozen=True)
class _Seen:
    """A row that was predicted: if it is learnt from next, nothing need be computed again."""

    row: Floats
    phi: Floats  # (m, D)
    forecasts: list[Floats]  # of each group awake, (K, k)
    outputs: Floats  # of the newest and the averaged model, (m, k), scaled


class RowKernel:
    """One row at a time for a learner with a bank, an MLP or no backbone, in float64.

    Parameters
    ----------
    learner:
        Its tensors are written into by `learn`.
    pending:
        What an earlier kernel of this learner had not settled yet.
    """

    def __init__(self, learner: OnlineLearner, pending: Pending | None = None) -> None:
        self.learner = learner
        assert isinstance(learner.head, HeadBank)
        self.bank = learner.head
        models = [learner.backbone]
        if learner.average is not None:
            models.append(learner.average.backbone)
        mlps = [model for model in models if isinstance(model, MLP)]
        self.layers = Layers(mlps) if mlps else None
        self.models = len(models)
        self.pending = Pending() if pending is None else pending
        self._seen: _Seen | None = None
        self._follow()

    def predict(self, row: Floats) -> Floats:
        """Outputs in their own units, (p,) -> (k,); NaN in a row is its column's mean."""
        if self._seen is None or not (self._seen.row == row).all():
            self._seen = self._foresee(row)
        outputs = self._seen.outputs
        mixed = outputs[0]
        if self.models == 2:
            mixed = mixed + self.average_share * (outputs[1] - mixed)
        return mixed if self.unit is None else mixed * self.unit + self.center

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
        scaled = target
        if self.unit is not None:
            scaled = (target - self.center) / self.unit
            np.clip(scaled, -LARGEST_TARGET, LARGEST_TARGET, out=scaled)
        missing = np.isnan(scaled)
        phi, innovations, leverages = seen.phi[0], [], []
        if self.bank.rows_seen < SIZING_ROWS:
            self._size(phi, weight)
        if first:
            for group in self.awake:
                group.start()
        for group, forecast in zip(self.awake, seen.forecasts, strict=True):
            innovation = scaled - forecast
            if missing.any():
                innovation[:, missing] = 0.0
            innovations.append(innovation)
            leverages.append(group.condition(phi, innovation, weight))
        self._seen = None
        self.learner.batches += 1
        held = self.pending
        if not first:
            held.rows.append(row)
            held.targets.append(target)
        held.weights.append(weight)
        held.scaled.append(scaled)
        held.innovations.append(np.concatenate(innovations))
        held.leverages.append(np.concatenate(leverages))
        held.forecasts.append(seen.outputs)
        if len(held) >= min(MOST_PENDING, 1 + self.learner.batches // ROWS_FOR_ONE):
            self._settle()
        return np.zeros_like(target) if first else prediction

    def _settle(self) -> None:
        """Let the learner's parts take note of the rows since the last time."""
        held, self.pending = self.pending, Pending()
        weight = torch.tensor(held.weights, dtype=torch.float64)
        scaled = torch.from_numpy(np.array(held.scaled))
        seen = (~torch.isnan(scaled)).to(torch.float64) * weight[:, None]
        self.bank.take_note(
            torch.from_numpy(np.stack(held.innovations, 1)),
            torch.from_numpy(np.stack(held.leverages, 1)),
            seen,
            self.awake_flags,
        )
        learner, plain = self.learner, bool((weight == 1).all())
        if held.rows:  # else it is the stream's first, of which nothing could be foreseen
            if learner.average is not None:
                newest, average = torch.from_numpy(np.stack(held.forecasts, 1))
                learner.average.score(newest, average, scaled, None if plain else weight)
            learner.scaling.follow(
                torch.from_numpy(np.array(held.rows)),
                torch.from_numpy(np.array(held.targets)),
                None if plain else weight,
                learner.parts,
                skip=learner.leads_with_inputs,
                express=True,
            )
        self._follow()

    def settle(self) -> None:
        """Leave nothing pending, as a learner that is to be changed from outside must be."""
        if len(self.pending):
            self._settle()
        self.bank.remix()

    def follow_backbone(self) -> None:
        """Follow a step of the backbone, with the average if there is one."""
        if self.learner.average is not None:
            self.bank.remix()
            self.learner.average.follow(self.learner.backbone, self.bank)
            self.average_weight = self.learner.average.weight.numpy()
        self._seen = None

    def _begin(self, row: Floats, target: Floats) -> None:
        """Take the first scales from the first row, as nothing is known of them before."""
        x, y = torch.from_numpy(row)[None], torch.from_numpy(target)[None]
        learner = self.learner
        learner.scaling.begin(x, y)
        learner.scaling.follow(x, y, None, learner.parts, skip=False, express=False)
        self._follow()

    def _foresee(self, row: Floats) -> _Seen:
        """Features and forecasts of a row."""
        z = (row - self.shift) * self.steepness
        np.maximum(z, -LARGEST_INPUT, out=z)
        np.minimum(z, LARGEST_INPUT, out=z)
        if math.isnan(z.sum()):
            z[np.isnan(z)] = 0.0
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
        outputs = np.empty((self.models, self.bank.out_features))
        outputs[0] = self.rest @ newest
        for group, forecast in zip(self.awake, forecasts, strict=True):
            outputs[0] += (group.shares * forecast).sum(0)
        if self.models == 2:
            outputs[1] = self.average_weight @ phi[1]
        return _Seen(row, phi, forecasts, outputs)

    def _size(self, phi: Floats, weight: float) -> None:
        """Let the size of the features follow, as `next_power` does."""
        seen = self.bank.rows_seen + sum(self.pending.weights)
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
        self.awake, self.rest = [], np.zeros((bank.out_features, bank.in_features + 1))
        for group, up, start in zip(bank.groups, self.awake_flags, starts, strict=False):
            part = shares[start : start + len(group)]
            if up:
                self.awake.append(GroupRows(group, part, bank.power))
            else:
                mean = group.posterior.mean.numpy()
                self.rest[:, : group.width] += (part[:, :, None] * mean).sum(0)
        self._seen = None
        x, y = learner.scaling.x, learner.scaling.y
        self.shift = np.zeros(1) if x is None else x.shift.numpy()
        self.steepness = np.ones(1) if x is None else 1 / x.scale.numpy()
        self.unit = None if y is None else y.scale.numpy()
        self.center = None if y is None else y.shift.numpy()
        if learner.average is not None:
            self.average_share = learner.average.standing.shares[1].numpy()
            self.average_weight = learner.average.weight.numpy()


def _together(parameters: list[Tensor]) -> Floats:
    """Parameters of several models, moved into one array; they keep sharing its memory."""
    common = torch.stack([parameter.detach() for parameter in parameters])
    for i, parameter in enumerate(parameters):
        parameter.data = common[i]
    return common.numpy()
