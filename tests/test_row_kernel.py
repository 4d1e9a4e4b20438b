"""Row by row in numpy: the same as the learner's own torch path, to rounding."""

import copy
import math

import numba
import numpy as np
import pytest
import torch

from kalmanhead import row_kernel
from kalmanhead.backbones import MLP
from kalmanhead.errors import NumericalError
from kalmanhead.losses import squared_loss
from kalmanhead.optimizers import adam, sgd
from kalmanhead.optimizers import descend as torch_descend
from kalmanhead.row_compiled import compiled, standardise
from kalmanhead.row_config import RowConfig
from kalmanhead.row_kernel import RowKernel
from kalmanhead.row_layers import Descent, Layers
from kalmanhead.scaling import LARGEST_INPUT

CONFIGS = {
    "bank": {"width": 6},
    "bank without average": {"width": 6, "average": 0.0},
    "deeper": {"width": 5, "depth": 3},
    "without skip": {"width": 6, "skip": False},
    "drift": {"width": 6, "head": "drift", "eta": 0.1, "lam": 3.0},
    "static": {"width": 6, "head": "static", "skip": True},
    "reset": {"width": 6, "head": "reset"},
    "linear bank": {"backbone": "linear"},
    "linear static": {"backbone": "linear", "head": "static"},
}


def rows(n, k, seed=0):
    rng = np.random.default_rng(seed)
    for i in range(n):
        x = rng.normal(size=4) * [1, 10, 0.1, 1] + 3
        y = np.array([x[0] * x[1], 100 - x[2], np.sin(x[3])])[:k] + 0.1 * rng.normal(size=k)
        if k > 1 and i % 5 == 3:
            y[i % k] = math.nan
        yield x, y, 2.0 if i % 7 == 5 else 1.0


def build(name, k, one_hot=False):
    return RowConfig(**CONFIGS[name]).build(4, k, one_hot)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("k", [1, 3])
def test_the_same_as_the_learner(name, k, monkeypatch):
    """With the backbone at rest, and settled after each row, as a batch of one row is."""
    monkeypatch.setattr(row_kernel, "ROWS_FOR_ONE", 10**9)
    plain, inner = build(name, k), build(name, k)
    for learner in (plain, inner):
        for group in () if learner.optimizer is None else learner.optimizer.param_groups:
            group["lr"] = 0.0
    kernel = RowKernel(inner)
    for x, y, weight in rows(120, k):
        theirs = plain.step(*(torch.tensor(v)[None] for v in (x, y)), torch.tensor([weight]))
        ours = kernel.learn(x, y, weight)
        kernel.step_backbone(x[None], y[None], np.array([weight]))
        np.testing.assert_allclose(ours, theirs[0], rtol=1e-7, atol=1e-7)
    kernel.settle()
    for ours, theirs in zip(inner.head.groups, plain.head.groups, strict=True):
        torch.testing.assert_close(ours.posterior.mean, theirs.posterior.mean)
        if theirs.remembers:
            torch.testing.assert_close(ours.posterior.spread, theirs.posterior.spread)
    torch.testing.assert_close(inner.head.weights, plain.head.weights)
    torch.testing.assert_close(
        inner.head.standing.noise.variance, plain.head.standing.noise.variance
    )
    assert inner.head.power == pytest.approx(plain.head.power)
    assert inner.head.tending.state() == plain.head.tending.state()
    x, _, _ = next(rows(1, k, seed=1))
    x = torch.tensor(x)[None]
    for ours, theirs in zip(
        vars(inner.predict_dist(x)).values(), vars(plain.predict_dist(x)).values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_predicts_what_the_learner_would(name):
    learner = build(name, 3)
    kernel = RowKernel(learner)
    for x, y, weight in rows(150, 3):
        kernel.learn(x, y, weight)
        learner.head.remix()
        theirs = learner.predict(torch.tensor(x)[None])[0]
        np.testing.assert_allclose(kernel.predict(x), theirs, rtol=1e-9, atol=1e-9)


def test_rows_are_settled_one_by_one_at_the_start_and_by_the_score_later():
    kernel = RowKernel(build("bank", 1))
    held = []
    for x, y, weight in rows(5000, 1):
        kernel.learn(x, y, weight)
        held.append(len(kernel.pending))
    assert max(held[:31]) == 0
    assert 0 < max(held[:200]) <= 7
    assert max(held) == row_kernel.MOST_PENDING - 1
    assert kernel.bank.rows_seen + sum(noted.weight for noted in kernel.pending) == sum(
        w for *_, w in rows(5000, 1)
    )


def test_covariances_stay_symmetric_and_positive():
    kernel = RowKernel(build("bank", 1))
    rng = np.random.default_rng(0)
    for _ in range(5000):
        x = rng.normal(size=4)
        x[3] = x[2] * (1 + 1e-9)  # all but collinear
        kernel.learn(x, x[:1], 1.0)
    kernel.settle()
    for group in kernel.bank.groups:
        spread = group.posterior.spread
        assert torch.equal(spread, spread.mT)
        assert (torch.linalg.eigvalsh(spread) > 0).all()


@pytest.mark.parametrize("make", [adam(1e-2), sgd(1e-2)])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("depth", [1, 3])
def test_gradients_and_steps_are_those_of_torch(make, clip, depth):
    ours = MLP(4, width=6, depth=depth, seed=0).double()
    theirs = copy.deepcopy(ours)
    layers = Layers([ours])
    optimizers = make(ours.parameters()), make(theirs.parameters())
    descent = Descent(optimizers[0])
    w = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()
    for x, *_ in rows(8, 1):
        z = torch.tensor(np.stack([x, -x, x**2])) / 10
        h, passed = layers.forward(z.numpy())
        np.testing.assert_allclose(layers(z[1].numpy())[0], h[1], rtol=1e-12)
        phi = theirs(z)
        np.testing.assert_allclose(h, phi.detach(), rtol=1e-9, atol=1e-12)
        loss = squared_loss(phi @ w, torch.ones(3, 2).double(), None)
        torch_descend(optimizers[1], loss, list(theirs.parameters()), clip)
        error = 2 * (h @ w.numpy() - 1) / 6
        gradient = layers.backward(passed, error @ w.numpy().T)
        descent.step(layers.vectors[0], gradient, clip)
        descent = Descent(optimizers[0])  # goes on from the state
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-9)
    mine, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_a_backbone_that_diverges_is_named_and_stays():
    learner = build("bank", 1)
    kernel = RowKernel(learner)
    for x, y, weight in rows(5, 1):
        kernel.learn(x, y, weight)
    before = copy.deepcopy(learner.backbone.state_dict())
    learner.head.groups[learner.head.driving].posterior.mean.mul_(1e300)
    with pytest.raises(NumericalError, match="lower the learning rate"):
        kernel.step_backbone(x[None] * 1e9, y[None], np.ones(1))
    torch.testing.assert_close(dict(learner.backbone.state_dict()), dict(before))


def test_models_side_by_side_share_memory_with_torch():
    models = [MLP(3, width=4, seed=seed).double() for seed in (0, 1)]
    layers = Layers(models)
    z = np.array([0.1, -2.0, 3.0])
    for model, features in zip(models, layers(z), strict=True):
        np.testing.assert_allclose(features, model(torch.tensor(z)[None])[0].detach(), rtol=1e-12)
    with torch.no_grad():
        models[1].layers[0].weight.zero_()
        models[1].layers[0].bias.zero_()
    np.testing.assert_allclose(layers(z)[1], models[1](torch.tensor(z)[None])[0].detach())


def test_without_a_folder_for_compiled_code_it_is_compiled_all_the_same(monkeypatch):
    njit = numba.njit

    def nowhere(*, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", nowhere)
    assert compiled(lambda x: 1 / x)(4.0) == 0.25
    assert compiled(lambda x: 1 / x)(0.0) == math.inf  # as numpy has it


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e308, 31.0, -31.0, math.nan, 0.5])
def test_rows_are_scaled_one_by_one_as_all_together(value):
    kernel = RowKernel(build("bank", 1))
    for x, y, weight in rows(30, 1):
        kernel.learn(x, y, weight)
    row = np.array([value, 1.0, 2.0, 3.0])
    z = np.empty(4)
    standardise(row, kernel.shift, kernel.steepness, LARGEST_INPUT, 0.0, z)
    np.testing.assert_allclose(z, kernel._scaled(row[None])[0], rtol=1e-15)
