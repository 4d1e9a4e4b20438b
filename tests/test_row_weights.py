"""Row weights: a row of weight 0 is not there, one of weight 2 is there twice."""

import math

import command
import pytest
import torch

from kalmanhead.averaging import Averaging
from kalmanhead.backbones import MLP
from kalmanhead.bank import HeadBank
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import ConfigError
from kalmanhead.head import KalmanHead
from kalmanhead.scaler import RunningScaler

HEADS = ("auto", "reset", "drift", "static", "adam", "sgd")


def learner(head, average=None, **options):
    config = ModelConfig(
        backbone="mlp", width=8, head=head, device="cpu", average=average, **options
    )
    return build_learner(config, (3,), (2,))


def batch(seed, n=12, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64) * scale
    y = torch.stack([x.sum(1).sin(), x[:, 0] * 100], 1)
    return x, y


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("average", [None, 0.9])
def test_a_row_of_weight_zero_is_as_if_it_were_not_there(head, average):
    weighted, cut = learner(head, average), learner(head, average)
    for seed in range(6):
        x, y = batch(seed)
        weight = torch.ones(12)
        weight[[0, 7]] = 0
        x[7], y[0] = 1e6, math.nan
        predicted = weighted.step(x, y, weight)
        kept = weight > 0
        # The backbone runs in float32, which rounds otherwise with another number of rows.
        expected = cut.step(x[kept], y[kept], weight[kept])
        torch.testing.assert_close(predicted[kept], expected, rtol=1e-5, atol=1e-4)
    command.assert_same(weighted.state(), cut.state())


@pytest.mark.parametrize("head", HEADS)
def test_a_batch_of_no_weight_changes_nothing(head):
    model, other = learner(head), learner(head)
    for seed in range(2):
        for own in (model, other):
            own.learn(*batch(seed))
    model.learn(*batch(2), torch.zeros(12))
    command.assert_same(model.state(), other.state())


@pytest.mark.parametrize("head", ["auto", "reset", "drift", "static"])
@pytest.mark.parametrize("average", [None, 0.9])
def test_weight_two_is_the_row_twice(head, average):
    """The gradient's step is left out: it takes the mean over rows, not their sum."""
    weighted, twice = learner(head, average, lr=0.0), learner(head, average, lr=0.0)
    for seed in range(6):
        x, y = batch(seed)
        y[3, 1] = math.nan
        weight = torch.ones(12)
        weight[:6] = 2
        weighted.learn(x, y, weight)
        twice.learn(torch.cat([x, x[:6]]), torch.cat([y, y[:6]]))
    x, _ = batch(9)
    ours, theirs = weighted.predict_dist(x), twice.predict_dist(x)
    for name in ("mean", "scale", "dof"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-4)


def test_weights_of_scales_and_standing():
    """These are sums over rows, so weights and repeats agree to rounding."""
    x, y = batch(0)
    weight = torch.ones(12)
    weight[:6] = 2
    doubled = torch.cat([x, x[:6]])
    ours, theirs = RunningScaler(3), RunningScaler(3)
    ours.update(x, weight)
    theirs.update(doubled)
    torch.testing.assert_close(ours.shift, theirs.shift)
    torch.testing.assert_close(ours.scale, theirs.scale)

    backbone, head = MLP(3, width=4, seed=0), KalmanHead(4, 2)
    once, twice = Averaging(0.9, backbone, head), Averaging(0.9, backbone, head)
    newest, average = y + 1, y - 0.5
    once.score(newest, average, y, weight)
    repeated = [torch.cat([v, v[:6]]) for v in (newest, average, y)]
    twice.score(*repeated, None)
    torch.testing.assert_close(once.standing.scores, twice.standing.scores)
    torch.testing.assert_close(once.moments, twice.moments)

    banks = HeadBank(3, 2), HeadBank(3, 2)
    banks[0].update(x, y, weight)
    banks[1].update(doubled, torch.cat([y, y[:6]]))
    torch.testing.assert_close(banks[0].standing.scores, banks[1].standing.scores)
    torch.testing.assert_close(banks[0].standing.noise.rate, banks[1].standing.noise.rate)


def test_weights_too_large_to_solve_with_are_named():
    model = learner("auto")
    with pytest.raises(ConfigError, match="row 2"):
        model.learn(*batch(0), torch.ones(12).index_fill(0, torch.tensor([2]), 1e30))
