"""The averaged model beside the newest, who is trusted when, and intervals of the right width."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from kalmanhead.averaging import Averaging
from kalmanhead.backbones import MLP
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.head import KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.noise import Noise, matching_student_t
from kalmanhead.optimizers import sgd
from kalmanhead.standing import Standing, log_student_t


def stream(batches=60, n=16, d=4, k=1, seed=0, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        x = torch.randn(n, d, generator=generator)
        y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
        yield x, (y + noise * torch.randn(n, k, generator=generator)).expand(n, k).clone()


def learnt(learner, data):
    predictions = [learner.step(x, y) for x, y in data]
    return torch.cat(predictions)


def averaged(average=0.9, **options):
    return build_learner(ModelConfig(width=16, average=average, **options), (4,), (1,))


def test_the_average_is_the_moving_one():
    learner = averaged(0.8)
    weight, first = None, None
    for t, (x, y) in enumerate(stream(12)):
        learner.learn(x, y)
        new = 1 - min(0.8, t / (10 + t))
        now = next(learner.backbone.parameters()).detach().clone()
        first = now if first is None else torch.lerp(first, now, new)
        if t < 2:  # afterwards the scales have moved, and W with them
            weight = learner.head.weight.clone()
    torch.testing.assert_close(next(learner.average.backbone.parameters()), first)
    assert learner.average.weight.shape == weight.shape
    assert not any(p.requires_grad for p in learner.average.backbone.parameters())
    assert not {id(p) for p in learner.parameters()} & {
        id(p) for p in learner.average.backbone.parameters()
    }


@pytest.mark.parametrize("head", ["auto", "reset", "adam"])
def test_it_takes_the_jitter_out(head):
    data = list(stream(300))
    truth = torch.cat([y for _, y in data])
    plain, average = (
        (learnt(averaged(decay, head=head, lr=0.02), data) - truth)[1600:].square().mean()
        for decay in (0.0, 0.95)
    )
    assert average < 0.97 * plain


def test_the_newest_model_leads_where_the_world_moves():
    """Of a random walk only the last value counts, which an average lags behind."""
    learner = averaged(0.95)
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(400, 1, generator=generator).cumsum(0)
    x = torch.randn(400, 4, generator=generator)
    for i in range(400):
        learner.learn(x[i : i + 1], walk[i : i + 1])
    assert learner.average.standing.weights[0] > 0.9


def test_predict_is_what_step_returns_and_changes_nothing():
    learner = averaged()
    data = list(stream(6))
    learnt(learner, data[:5])
    x, y = data[5]
    before = copy.deepcopy(learner.state())
    predicted, told = learner.predict(x), learner.predict_dist(x)
    torch.testing.assert_close(learner.state(), before, rtol=0, atol=0)
    torch.testing.assert_close(told.mean, predicted)
    assert torch.equal(learner.step(x, y), predicted)


def test_a_saved_learner_goes_on_exactly():
    data = list(stream(20))
    whole, first, second = averaged(), averaged(), averaged()
    learnt(whole, data)
    learnt(first, data[:11])
    second.load_state(copy.deepcopy(first.state()))
    learnt(second, data[11:])
    torch.testing.assert_close(second.state(), whole.state(), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="only one of the two has the part average"):
        averaged(0.0).load_state(first.state())
    with pytest.raises(ConfigError, match="only one of the two has the part average"):
        second.load_state(averaged(0.0).state())
    torch.testing.assert_close(second.state(), whole.state(), rtol=0, atol=0)


def test_a_batch_that_fails_leaves_the_average_alone(monkeypatch):
    learner = averaged()
    data = list(stream(8))
    learnt(learner, data[:7])
    before = copy.deepcopy(learner.state())

    def fail(*_):
        raise NumericalError("told to")

    monkeypatch.setattr(learner.head, "update", fail)
    with pytest.raises(NumericalError):
        learner.learn(*data[7])
    torch.testing.assert_close(learner.state(), before, rtol=0, atol=0)


def test_missing_targets_and_rows_of_no_weight_are_not_judged():
    holed, cut, weighed = (averaged() for _ in range(3))
    data = list(stream(8))
    for learner in (holed, cut, weighed):
        learnt(learner, data[:7])
    x, y = data[7]
    keep = torch.arange(16) != 3
    holed.learn(x, torch.where(keep[:, None], y, torch.nan))
    weighed.learn(x, y, keep.float())
    cut.learn(x[keep], y[keep])
    torch.testing.assert_close(holed.average.moments, cut.average.moments)
    # The row of no weight counts for the scale of the targets all the same.
    ours, theirs = ((a.average.moments[1] * a.scaling.y.scale) for a in (weighed, cut))
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(weighed.average.moments[2], cut.average.moments[2])
    before = holed.average.moments
    holed.learn(x, torch.full_like(y, torch.nan))
    assert torch.equal(holed.average.moments, before)


def test_fields_are_averaged_too():
    learner = build_learner(ModelConfig(width=8, modes=4), (1, 16), (2, 16), 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(4, 1, 16, generator=generator)
        predicted = learner.predict(x)
        y = torch.cat([x.roll(1, 2), 100 * x.square()], 1)
        assert torch.equal(learner.step(x, y), predicted)
    told = learner.predict_dist(x)
    assert told.mean.shape == told.scale.shape == (4, 2, 16)
    assert (told.scale[:, 1] > 10 * told.scale[:, 0]).all()


def test_wrapped_models_give_the_averaged_one_back():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    learner = OnlineLearner.wrap(model, sgd(0.05), average=0.9)
    data = list(stream(20))
    learnt(learner, data)
    x = data[0][0]
    plain = learner.unwrap()
    ours = learner.average(learner._features(x, learner.average.backbone))
    torch.testing.assert_close(plain(x), learner.scaling.unscale_targets(ours).float())


@pytest.mark.parametrize("average", [None, 0.9])
def test_batch_norm_does_not_let_a_batch_foresee_itself(average):
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    learner = OnlineLearner.wrap(model, average=average)
    for x, y in stream(5):
        predicted = learner.predict(5 * x + 3)
        assert torch.equal(learner.step(5 * x + 3, y), predicted)


def test_changing_scales_changes_no_prediction():
    head = KalmanHead(5, 2)
    average = Averaging(0.9, MLP(2, width=3), head)
    average.weight = torch.randn(2, 6, dtype=torch.float64)
    phi = torch.randn(7, 5, dtype=torch.float64)
    before = average(phi)
    ratio, offset = torch.tensor([2.0, 0.1]), torch.tensor([-3.0, 5.0])
    average.rescale_targets(ratio, offset)
    torch.testing.assert_close(average(phi), before * ratio + offset)
    average.rescale_inputs(torch.tensor([2.0, 0.5]), torch.tensor([1.0, -1.0]))
    moved = phi.clone()
    moved[:, :2] = (phi[:, :2] - torch.tensor([1.0, -1.0])) / torch.tensor([2.0, 0.5])
    torch.testing.assert_close(average(moved), before * ratio + offset)
    average.forget_inputs(torch.tensor([False, True]))
    assert (average.weight[:, 2] == 0).all()
    assert (average.weight[:, [0, 1, 3]] != 0).all()


@pytest.mark.parametrize("decay", [1.0, -0.5, 2.0])
def test_decays_are_checked(decay):
    with pytest.raises(ConfigError, match="give a decay between 0 and 1"):
        averaged(decay)


@pytest.mark.parametrize("dof", [1.5, 3.0, 8.0])
def test_tails_are_matched_by_low_moments(dof):
    absolute = 7 * stats.t(dof).expect(abs)
    root = np.sqrt(7) * stats.t(dof).expect(lambda t: np.sqrt(abs(t)))
    scale, found = matching_student_t(*torch.tensor([[root], [absolute]], dtype=torch.float64))
    assert float(scale) == pytest.approx(7, rel=1e-3)
    assert float(found) == pytest.approx(dof, rel=2e-3)


@pytest.mark.parametrize("dof", [2.5, 1e6])
def test_intervals_hold_what_they_say_whatever_the_tails(dof):
    noise = stats.t(dof).rvs((6000, 1), random_state=0)
    x = torch.randn(6000, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :1] + 0.5 * torch.as_tensor(noise).float()
    learner, held = averaged(0.95), []
    for a, b in zip(x.split(32), y.split(32), strict=True):
        low, high = learner.predict_dist(a).interval(0.9)
        held.append((low <= b) & (b <= high))
        learner.learn(a, b)
    assert float(torch.cat(held)[1000:].double().mean()) == pytest.approx(0.9, abs=0.02)


def test_the_density_is_a_student_t():
    a, b, leverage = 3.0, 2.0, 0.7
    noise = Noise(*(torch.tensor([[v]], dtype=torch.float64) for v in (a, b)))
    errors = torch.tensor([0.1, 1.0, -5.0], dtype=torch.float64)
    squares = (errors.square() / (1 + leverage)).view(1, 3, 1)
    ours = log_student_t(squares, torch.full((1, 3), leverage), noise).flatten()
    scale = np.sqrt(b / a * (1 + leverage))
    theirs = torch.as_tensor(stats.t(2 * a, scale=scale).logpdf(errors))
    torch.testing.assert_close(ours - ours[0], theirs - theirs[0])


def test_those_asleep_stand_where_the_share_puts_them():
    standing = Standing.start(3, 1, share=0.3)
    seen, counted = torch.ones(4, 1), torch.tensor([4.0])
    errors = torch.tensor([0.1, 3.0]).view(2, 1, 1).expand(2, 4, 1).double()
    after = standing.after(errors, None, seen, counted, 1.0, 4, awake=torch.tensor([0, 2]))
    assert float(after.weights[1]) == pytest.approx(0.1)
    assert float(after.weights[0]) > float(after.weights[2]) > 0.1
    assert torch.equal(after.noise.rate[1], standing.noise.rate[1])
    assert float(after.noise.rate[0]) == pytest.approx(1 + 4 * 0.01 / 2)
    assert float(after.shares[1]) == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(after.shares.sum(0), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_steps_are_not_lost_to_rounding(dtype):
    """In bfloat16 a twentieth of a small change rounds to nothing."""
    backbone = nn.Linear(1, 4).to(dtype)
    nn.init.constant_(backbone.weight, 1.0)
    averaging = Averaging(0.95, backbone, KalmanHead(4, 1))
    nn.init.constant_(backbone.weight, 1.03125)
    for _ in range(400):
        averaging.follow(backbone, KalmanHead(4, 1))
    torch.testing.assert_close(averaging.backbone.weight, backbone.weight)
    saved, again = copy.deepcopy(averaging.state()), Averaging(0.95, backbone, KalmanHead(4, 1))
    again.load_state(saved)
    assert all(torch.equal(*pair) for pair in zip(again.exact, averaging.exact, strict=True))
    assert len(again.exact) == (2 if dtype == torch.bfloat16 else 0)


def test_parameters_that_are_no_real_numbers():
    class Mixed(nn.Linear):
        def __init__(self):
            super().__init__(1, 4)
            self.order = nn.Parameter(torch.arange(4), requires_grad=False)
            self.spectrum = nn.Parameter(torch.zeros(4, dtype=torch.complex64))

    backbone = Mixed()
    averaging = Averaging(0.5, backbone, KalmanHead(4, 1))
    with torch.no_grad():
        backbone.order += 1
        backbone.spectrum += 1j
    for _ in range(100):
        averaging.follow(backbone, KalmanHead(4, 1))
    assert torch.equal(averaging.backbone.order, backbone.order)
    torch.testing.assert_close(averaging.backbone.spectrum, backbone.spectrum)


def test_a_backbone_that_cannot_be_copied_is_named():
    with pytest.raises(ConfigError, match="leave average out"):
        OnlineLearner(nn.LazyLinear(4), KalmanHead(4, 1), average=0.9)
