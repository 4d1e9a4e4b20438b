"""Cross-entropy in closed form: it never rises, and learns what gradients would."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from kalmanhead.backbones import MLP
from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.learner import OnlineLearner
from kalmanhead.losses import cross_entropy
from kalmanhead.optimizers import adam
from kalmanhead.posterior import condition
from kalmanhead.softmax import SoftmaxHead


def labelled(n, d, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, d, generator=generator, dtype=torch.float64)
    w = 2 * torch.randn(d, k, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    labels = (phi @ w + torch.randn(n, k, generator=generator)).argmax(1)
    return phi, nn.functional.one_hot(labels, k).to(torch.float64)


def proximal_loss(head, prior, phi, y, weight=None):
    """Cross-entropy plus a quarter of |W - W-|^2 in the metric of P-."""
    rows = torch.cat([torch.ones_like(phi[:, :1]), phi], 1)
    entropy = -(y * (rows @ head.weight.mT).log_softmax(1)).sum(1)
    change = head.weight - prior.mean
    pull = (change @ torch.linalg.inv(prior.covariance) * change).sum()
    return float((entropy if weight is None else weight * entropy).sum() + pull / 4)


@pytest.mark.parametrize("curvature", ["bound", "adaptive"])
@pytest.mark.parametrize("transition", ["reset", "drift", "static"])
@pytest.mark.parametrize("n", [5, 60])
def test_the_proximal_cross_entropy_never_rises(curvature, transition, n):
    head = SoftmaxHead(6, 4, transition=transition, prior_precision=0.3, curvature=curvature)
    head.update(*labelled(40, 6, 4))
    before = copy.deepcopy(head)
    phi, y = labelled(n, 6, 4, seed=1)
    prior = before._prior(float(n))
    losses = [proximal_loss(before, prior, phi, y)]
    for sweeps in range(1, 12):
        tried = copy.deepcopy(before)
        tried.sweeps = sweeps
        tried.update(phi, y)
        losses.append(proximal_loss(tried, prior, phi, y))
    assert all(b <= a + 1e-9 * abs(a) for a, b in itertools.pairwise(losses))
    assert losses[-1] < losses[0]


def test_many_sweeps_reach_the_minimum():
    head = SoftmaxHead(3, 3, transition="reset", prior_precision=1.0, sweeps=400)
    phi, y = labelled(50, 3, 3)
    prior = head._prior(50.0)
    head.update(phi, y)
    w = head.weight.clone().requires_grad_()
    rows = torch.cat([torch.ones_like(phi[:, :1]), phi], 1)
    loss = -(y * (rows @ w.mT).log_softmax(1)).sum() + (w - prior.mean).square().sum() / 4
    (gradient,) = torch.autograd.grad(loss, w)
    assert float(gradient.abs().max()) < 1e-6


def test_one_sweep_under_the_bound_is_one_solve_for_twice_the_residual():
    head = SoftmaxHead(4, 3, transition="reset", prior_precision=2.0, curvature="bound")
    head.set_weight(torch.randn(3, 4, generator=torch.Generator().manual_seed(3)))
    phi, y = labelled(20, 4, 3)
    prior, rows = head._prior(20.0), head._rows(phi)
    logits = rows @ head.weight.mT
    expected = condition(prior, rows, logits + 2 * (y - logits.softmax(1))).posterior.mean
    head.update(phi, y)
    torch.testing.assert_close(head.weight, expected, rtol=1e-10, atol=1e-12)


def test_weights_and_missing_labels():
    heads = [SoftmaxHead(4, 3, sweeps=3) for _ in range(2)]
    phi, y = labelled(20, 4, 3)
    heads[0].update(torch.cat([phi, phi[:5]]), torch.cat([y, y[:5]]))
    gaps = torch.cat([y, torch.full((3, 3), math.nan, dtype=torch.float64)])
    weight = torch.tensor([2.0] * 5 + [1.0] * 15 + [1.0] * 3)
    heads[1].update(torch.cat([phi, 9 * phi[:3]]), gaps, weight)
    torch.testing.assert_close(heads[0].weight, heads[1].weight, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(heads[0].covariance, heads[1].covariance, rtol=1e-9, atol=1e-12)
    before = heads[0].weight
    heads[0].update(phi[:2], torch.full((2, 3), math.nan))
    assert torch.equal(heads[0].weight, before)


def test_probabilities_are_humble_at_first_and_sum_to_one():
    head = SoftmaxHead(4, 3)
    phi, y = labelled(500, 4, 3)
    assert torch.allclose(head.predict_proba(phi), torch.full((500, 3), 1 / 3).double())
    for rows, told in zip(phi.split(20), y.split(20), strict=True):
        head.update(rows, told)
    shares = head.predict_proba(phi)
    torch.testing.assert_close(shares.sum(1), torch.ones(500).double())
    assert float((shares.argmax(1) == y.argmax(1)).double().mean()) > 0.75
    humble, sure = head.predict_proba(5 * phi).amax(1), head(5 * phi).softmax(1).amax(1)
    assert bool((humble <= sure).all())
    assert float(humble.mean()) < float(sure.mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"classes": 1}, "classes is 1"), ({"sweeps": 0}, "sweeps is 0"), ({"curvature": "no"}, "no")],
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        SoftmaxHead(3, **{"classes": 3, **options})


def test_what_is_no_probability_or_not_finite_is_refused_and_nothing_changes():
    head = SoftmaxHead(2, 2)
    head.update(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))
    before = head.weight
    for y in ([[0.0, 0.0]], [[2.0, -1.0]]):
        with pytest.raises(ConfigError, match="no probabilities"):
            head.update(torch.ones(1, 2), torch.tensor(y))
    with pytest.raises(NumericalError):
        head.update(torch.tensor([[math.inf, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert torch.equal(head.weight, before)


def test_a_learner_of_classes_goes_on_exactly_and_is_told_to_leave_scales():
    def build(**options):
        head = SoftmaxHead(16, 3)
        return OnlineLearner(MLP(4, width=16, seed=0), head, adam(3e-3), **options)

    learner, phi, y = build(scale_y=False), *labelled(600, 4, 3)
    parts = list(zip(phi.float().split(20), y.float().split(20), strict=True))
    early = [float(cross_entropy(learner.step(*part), part[1], None)) for part in parts]
    assert sum(early[-10:]) / 10 < 0.6 * early[0]
    other = build(scale_y=False)
    other.load_state(copy.deepcopy(learner.state()))
    for part in parts:
        learner.learn(*part)
        other.learn(*part)
    assert torch.equal(learner.predict(parts[0][0]), other.predict(parts[0][0]))
    with pytest.raises(ConfigError, match="scale_y=False"):
        build().learn(*parts[0])
