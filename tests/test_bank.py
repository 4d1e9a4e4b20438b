"""The bank: one head of it is a KalmanHead, all of them are a mixture that finds the best."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from kalmanhead.bank import HeadBank
from kalmanhead.bank_group import DEFAULT_GRID
from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.head import KalmanHead
from kalmanhead.tending import EXTEND_AFTER, NAP, PATIENCE

LEVEL_OR_DEEP = {"level": ((0.01, 1.0),), "deep": ((1.0, 0.0),)}


def batches(count=6, n=16, d=5, k=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(d, k, generator=generator, dtype=dtype)
    for _ in range(count):
        phi = torch.randn(n, d, generator=generator, dtype=dtype)
        yield phi, phi @ w + 0.1 * torch.randn(n, k, generator=generator, dtype=dtype) + 1


def learnt(bank, data):
    for phi, y in data:
        bank.update(phi, y)
    return bank


@pytest.mark.parametrize("lam", [0.5, 20.0])
@pytest.mark.parametrize(
    ("block", "eta", "single"),
    [("deep", 0.0, "static"), ("deep", 0.3, "drift"), ("proximal", 1.0, "reset")],
)
def test_a_bank_of_one_is_a_kalman_head(block, eta, single, lam):
    """The largest feature has mean square 1 in every batch: lambda means the same to both."""
    data = [(phi / phi.square().mean(0).max().sqrt(), y) for phi, y in batches()]
    bank = HeadBank(5, 2, grid={block: ((lam, eta),)}, noise_memory=500)
    head = KalmanHead(5, 2, transition=single, eta=eta, prior_precision=lam, noise_memory=500)
    learnt(bank, data)
    learnt(head, data)
    torch.testing.assert_close(bank.weight, head.weight)
    ours, theirs = bank.predict_dist(data[0][0]), head.predict_dist(data[0][0])
    torch.testing.assert_close(ours.mean, theirs.mean)
    torch.testing.assert_close(ours.dof, theirs.dof)
    if single != "drift":
        torch.testing.assert_close(
            bank.groups[0].posterior.covariance[0], head.posterior.covariance
        )


def test_weights_are_a_distribution_for_every_output_and_find_who_foresees():
    bank = learnt(HeadBank(5, 2, linear_features=2), batches(30))
    torch.testing.assert_close(bank.weights.sum(0), torch.ones(2, dtype=torch.float64))
    assert bank.leaders(1)[0][0].startswith(("deep", "proximal"))
    noise = torch.randn(480, 1, generator=torch.Generator().manual_seed(1))
    level = HeadBank(5, 1, linear_features=2, grid=LEVEL_OR_DEEP)
    walk = noise.cumsum(0)
    phi = torch.randn(480, 5, generator=torch.Generator().manual_seed(2))
    for i in range(480):
        level.update(phi[i : i + 1], walk[i : i + 1])
    name, weight = level.leaders(1)[0]
    assert name == "level lam=0.01 eta=1"
    assert weight > 0.9


def test_a_head_that_was_wrong_for_long_comes_back():
    bank = HeadBank(3, 1, grid=LEVEL_OR_DEEP)
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        phi = torch.randn(8, 3, generator=generator)
        y = phi[:, :1] if step < 200 else torch.full((8, 1), 5.0)
        bank.update(phi, y + 0.1 * torch.randn(8, 1, generator=generator))
        if step == 199:
            assert bank.leaders(1)[0][0].startswith("deep")
    assert bank.leaders(1)[0][0].startswith("level")


def test_one_outlier_does_not_put_another_head_in_charge():
    bank = learnt(HeadBank(5, 2), batches(30))
    before = bank.weights
    phi, y = next(batches(1, n=1, seed=3))
    bank.update(phi, y + 1e4)
    assert (bank.weights - before).abs().max() < 0.2


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_units_of_the_features_do_not_matter(scale):
    plain, scaled = HeadBank(5, 2), HeadBank(5, 2)
    for phi, y in batches():
        plain.update(phi, y)
        scaled.update(phi * scale, y)
    torch.testing.assert_close(plain(phi), scaled(phi * scale), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plain.weights, scaled.weights, rtol=1e-6, atol=1e-6)


def test_the_gradient_sees_the_driver_alone():
    bank = HeadBank(5, 2, linear_features=2, grid={**LEVEL_OR_DEEP, "proximal": ((9.0, 1.0),)})
    learnt(bank, batches(3))
    phi, _ = next(batches(1, seed=4))
    deep = bank.groups[1].posterior.mean[0]
    torch.testing.assert_close(bank.for_gradient(phi), phi @ deep[:, 1:].T + deep[:, 0])
    assert not torch.equal(bank.for_gradient(phi), bank(phi))


def test_the_spread_holds_the_disagreement_between_heads():
    bank = learnt(HeadBank(5, 2, grid=LEVEL_OR_DEEP), batches(1))
    bank.standing = replace(bank.standing, scores=torch.zeros_like(bank.standing.scores))
    bank.rescale_targets(torch.ones(2), torch.zeros(2))
    phi, _ = next(batches(1, seed=4))
    means = [g.posterior.mean[0] for g in bank.groups]
    level, deep = means[0][:, 0].expand(16, 2), phi @ means[1][:, 1:].T + means[1][:, 0]
    disagreement = ((level - deep) / 2).square()
    assert (bank.predict_dist(phi).scale.square() > disagreement).all()
    torch.testing.assert_close(bank.predict_dist(phi).mean, (level + deep) / 2)


def test_state_goes_on_exactly():
    data = list(batches(8))
    whole = learnt(HeadBank(5, 2, linear_features=2), data)
    first = learnt(HeadBank(5, 2, linear_features=2), data[:4])
    second = HeadBank(5, 2, linear_features=2)
    second.load_state(copy.deepcopy(first.state()))
    learnt(second, data[4:])
    assert torch.equal(second.weight, whole.weight)
    assert torch.equal(second.standing.scores, whole.standing.scores)
    for other in (HeadBank(5, 2), HeadBank(6, 2, linear_features=2), HeadBank(5, 1)):
        with pytest.raises(ConfigError, match="build the head with the options"):
            other.load_state(first.state())
    with pytest.raises(ConfigError, match="bank of other heads"):
        HeadBank(5, 2).load_state(KalmanHead(5, 2).state())


def test_fields_are_rows_and_count_as_samples():
    generator = torch.Generator().manual_seed(0)
    phi, y = (torch.randn(4, c, 6, generator=generator) for c in (3, 1))
    grid = LEVEL_OR_DEEP
    field, flat = HeadBank(3, 1, feature_dim=1, grid=grid), HeadBank(3, 1, grid=grid)
    field.update(phi, y)
    flat.update(phi.movedim(1, -1).reshape(-1, 3), y.movedim(1, -1).reshape(-1, 1))
    for ours, theirs in zip(field.groups, flat.groups, strict=True):
        torch.testing.assert_close(ours.posterior.mean, theirs.posterior.mean)
    assert 0 < field.weights.std() < flat.weights.std()
    assert field.predict_dist(phi).scale.shape == y.shape


def test_missing_targets_weights_and_empty_batches():
    bank = learnt(HeadBank(5, 2), batches(3))
    before = copy.deepcopy(bank.state())
    phi, y = next(batches(1, seed=5))
    bank.update(phi[:0], y[:0])
    bank.update(phi, torch.full_like(y, torch.nan))
    bank.update(phi, y, torch.zeros(16))
    torch.testing.assert_close(bank.state(), before, rtol=0, atol=0)
    holed = y.clone()
    holed[3] = torch.nan
    cut, weighed = (copy.deepcopy(bank) for _ in range(2))
    bank.update(phi, holed)
    keep = [i for i in range(16) if i != 3]
    cut.update(phi[keep], y[keep])
    weighed.update(phi, y, (torch.arange(16) != 3).double())
    for other in (cut, weighed):
        torch.testing.assert_close(bank.weight, other.weight)
        torch.testing.assert_close(bank.weights, other.weights)
    with pytest.raises((ConfigError, NumericalError)):
        bank.update(phi * torch.nan, y)
    assert torch.isfinite(bank.weight).all()


def test_rescaling_keeps_predictions():
    bank = learnt(HeadBank(5, 2, linear_features=3), batches(4))
    phi, _ = next(batches(1, seed=6))
    before = bank.predict_dist(phi)
    ratio, offset = torch.tensor([2.0, 0.1]), torch.tensor([-3.0, 5.0])
    bank.rescale_targets(ratio, offset)
    after = bank.predict_dist(phi)
    torch.testing.assert_close(after.mean, before.mean * ratio + offset)
    torch.testing.assert_close(after.scale, before.scale * ratio)
    ratio, offset = torch.tensor([2.0, 0.5, 1.0]).double(), torch.tensor([1.0, -2.0, 0.0]).double()
    moved = phi.clone()
    moved[:, :3] = (phi[:, :3] - offset) / ratio
    bank.rescale_inputs(ratio, offset)
    torch.testing.assert_close(bank(moved), bank.predict_dist(moved).mean)
    torch.testing.assert_close(bank.predict_dist(moved).mean, after.mean)


def test_moving_to_another_dtype_keeps_the_state_in_float64():
    bank = learnt(HeadBank(5, 2), batches(1)).float()
    assert bank.weight.dtype == torch.float64
    phi, y = next(batches(1))
    bank.update(phi.float(), y.float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_features": 6}, "linear_features is 6"),
        ({"discount": 0.0}, "give a discount"),
        ({"share": 1.0}, "a share in"),
        ({"grid": {"cubic": ((1.0, 0.0),)}}, "block 'cubic' is unknown"),
        ({"grid": {"deep": ((1.0, 1.5),)}}, "rates from 0 to 1"),
        ({"grid": {"deep": ((-1.0, 0.5),)}}, "precisions above 0"),
        ({"grid": {"deep": (1.0, 0.5)}}, "pairs of a precision"),
        ({"grid": {"deep": ((1.0, 0.5, 0.1),)}}, "pairs of a precision"),
        ({"grid": {"deep": ()}}, "pairs of a precision"),
        ({"grid": {"level": DEFAULT_GRID["level"]}}, "no deep or proximal heads"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        HeadBank(5, 1, **options)


def test_units_are_taken_from_the_start_alone():
    """A prior that grew with the features would let them grow for ever."""
    bank = learnt(HeadBank(5, 2), batches(70))
    power = bank.power
    for phi, y in batches(3, seed=9):
        bank.update(1000 * phi, y)
    assert bank.power == power
    assert 0.5 < power < 2


def test_a_block_that_does_not_matter_sleeps_and_wakes_when_it_does():
    generator = torch.Generator().manual_seed(0)
    bank = HeadBank(3, 1, linear_features=1)
    level = [group.block for group in bank.groups].index("level")

    def learn(batches, target):
        for _ in range(batches):
            phi = torch.randn(8, 3, generator=generator)
            noise = 0.1 * torch.randn(8, 1, generator=generator)
            bank.update(phi, target(phi) + noise)

    learn(PATIENCE + 2 * NAP, lambda phi: phi[:, 1:2])
    asleep = bank.tending.awake(bank.batches | 2)
    assert not asleep[level]
    assert asleep[bank.driving]
    before = bank.groups[level].posterior.mean.clone()
    learned = bank.batches
    while bank.batches % NAP > 1 or bank.batches == learned:
        at = bank.batches
        learn(1, lambda phi: phi[:, 1:2])
        moved = not torch.equal(bank.groups[level].posterior.mean, before)
        assert moved == (at % NAP <= 1)
        before = bank.groups[level].posterior.mean.clone()
    learn(4 * NAP, lambda phi: torch.full((8, 1), 5.0))
    assert bank.tending.awake(2)[level]


def test_the_grid_goes_on_beyond_its_edge():
    """Features of no use at all: the larger lambda, the better."""
    grid = {"proximal": ((1.0, 1.0), (0.1, 1.0), (10.0, 1.0))}
    bank = HeadBank(8, 1, grid=grid)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4 * EXTEND_AFTER):
        bank.update(
            torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)
        )
    lam = bank.groups[0].lam
    assert lam[0] == 1, "the driver stays"
    assert sorted(lam.tolist())[1:] != [1.0, 10.0]
    assert lam.max() >= 100
    other = HeadBank(8, 1, grid=grid)
    other.load_state(copy.deepcopy(bank.state()))
    assert torch.equal(other.groups[0].lam, lam)
    assert torch.equal(other.weight, bank.weight)


def test_the_best_head_alone_can_predict():
    bank = learnt(HeadBank(5, 2, mixing="best"), batches(30))
    means = torch.cat([nn.functional.pad(g.posterior.mean, (0, 6 - g.width)) for g in bank.groups])
    for output in range(2):
        leader = int(bank.weights[:, output].argmax())
        assert torch.equal(bank.weight[output], means[leader, output])


def test_what_was_shared_out_has_no_say():
    """Heads that are far off keep a door open, but move neither the mean nor the spread."""
    bank = learnt(HeadBank(5, 1, linear_features=2), batches(60, k=1))
    phi, _ = next(batches(1, k=1, seed=7))
    assert bank.weights.min() > 1e-4
    assert bank.predict_dist(phi).scale.max() < 0.12


def test_effective_lambda_and_memory():
    grid = {"deep": ((1.0, 0.1), (100.0, 0.1))}
    bank = HeadBank(3, 1, grid=grid, share=0.0)
    assert bank.effective_precision == pytest.approx(10)
    assert bank.effective_memory == 0
    learnt(bank, batches(40, d=3, k=1))
    assert bank.effective_memory == pytest.approx(16 / 0.1)
    fields = HeadBank(3, 1, grid={"deep": ((1.0, 0.0),)}, feature_dim=1)
    fields.update(torch.randn(4, 3, 10), torch.randn(4, 1, 10))
    assert fields.effective_memory == 4
