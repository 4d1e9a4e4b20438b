"""Learnt noise stays a number, whatever outputs and batches do, and tells of each output alone."""

import math

import pytest
import torch

from kalmanhead.bank import HeadBank
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.noise import BOUNDS, Noise, noise_discount, update_noise

HEADS = ("auto", "reset", "static", "adam")
SECOND_OUTPUT = {"constant": 3.0, "zero": 0.0, "missing": math.nan}


def learner(head, outputs):
    config = ModelConfig(backbone="mlp", width=8, head=head, device="cpu")
    return build_learner(config, (3,), (outputs,))


def inputs(n, seed=0):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("second", SECOND_OUTPUT)
def test_large_batches_with_an_output_that_says_nothing(head, second):
    """In batches of 20,000 rows all that was known before is forgotten at once."""
    model = learner(head, 2)
    for seed in range(4):
        x = inputs(20_000, seed)
        model.learn(x, torch.stack([x[:, 0], torch.full((20_000,), SECOND_OUTPUT[second])], 1))
    dist = model.predict_dist(x[:100])
    if head != "adam":  # four steps are few
        assert (dist.mean[:, 0] - x[:100, 0]).abs().mean() < 0.5
    for value in (dist.mean, dist.scale, *dist.interval()):
        assert torch.isfinite(value).all()


def test_noise_that_has_vanished_is_learnt_again():
    bank = HeadBank(3, 2)
    for seed in range(2000):
        phi = inputs(2048, seed % 20).double()
        bank.update(phi, torch.stack([phi[:, 0], torch.zeros(2048).double()], 1))
    for seed in range(20):
        phi = inputs(2048, seed).double()
        bank.update(phi, phi[:, :2])
    torch.testing.assert_close(bank(phi), phi[:, :2], atol=1e-2, rtol=0)


def test_a_memory_of_one_row():
    bank = HeadBank(3, 2, noise_memory=1.0)
    for seed in range(300):
        phi = inputs(8, seed).double()
        bank.update(phi, torch.stack([phi[:, 0], torch.zeros(8).double()], 1))
    torch.testing.assert_close(bank(phi)[:, 0], phi[:, 0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_an_output_that_was_never_seen_keeps_its_prior(head):
    model = learner(head, 2)
    widths = []
    for seed in range(200):
        x = inputs(32, seed)
        model.learn(x, torch.stack([x[:, 0].sin(), torch.full((32,), math.nan)], 1))
        low, high = model.predict_dist(x).interval()
        widths.append(float((high - low)[:, 1].mean()))
    assert max(widths) < 2 * widths[0]
    assert min(widths) > 1


def test_an_output_forgets_at_the_pace_of_its_own_rows():
    rows = torch.tensor([64.0, 4.0, 0.0])
    expected = torch.exp(-rows / 40)
    torch.testing.assert_close(noise_discount(rows, 40.0, 1000.0), expected)
    noise = Noise(torch.full((3,), 8.0), torch.full((3,), 16.0))
    after = update_noise(noise, torch.zeros(3), torch.zeros(3), noise_discount(rows * 0, 40.0, 9.0))
    assert torch.equal(after.variance, noise.variance)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ratio", [0.0, 1e-200, 1e200])
def test_rates_stay_within_bounds(ratio, dtype):
    noise = Noise(torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype))
    for _ in range(20):
        noise = noise.rescaled(torch.tensor([ratio], dtype=torch.float64))
    assert 0 < noise.variance < math.inf
