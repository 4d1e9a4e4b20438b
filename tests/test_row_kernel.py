"""Row by row in numpy: the same as the learner's own torch path, to rounding."""

import math

import numpy as np
import pytest
import torch

from kalmanhead import row_kernel
from kalmanhead.row_kernel import RowKernel
from kalmanhead.row_model import RowConfig

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
    for x, y, weight in rows(250, k):
        theirs = plain.step(*(torch.tensor(v)[None] for v in (x, y)), torch.tensor([weight]))
        ours = kernel.learn(x, y, weight)
        if kernel.learner.average is not None:
            kernel.follow_backbone()
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
    for x, y, weight in rows(3000, 1):
        kernel.learn(x, y, weight)
        held.append(len(kernel.pending))
    assert max(held[:31]) == 0
    assert 0 < max(held[:200]) <= 7
    assert max(held) == row_kernel.MOST_PENDING - 1
    assert kernel.bank.rows_seen + sum(kernel.pending.weights) == sum(w for *_, w in rows(3000, 1))


def test_covariances_stay_symmetric_and_positive():
    kernel = RowKernel(build("bank", 1))
    rng = np.random.default_rng(0)
    for _ in range(5000):
        x = rng.normal(size=4)
        x[3] = x[2] * (1 + 1e-9)  # all but collinear
        kernel.learn(x, x[:1], 1.0)
    for group in kernel.bank.groups:
        spread = group.posterior.spread
        assert torch.equal(spread, spread.mT)
        assert (torch.linalg.eigvalsh(spread) > 0).all()
