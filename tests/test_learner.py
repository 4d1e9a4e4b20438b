"""The learner: order of solve and step, envelope theorem, scalers, modes, missing values."""

import copy
import math

import pytest
import torch
from torch import nn

from kalmanhead.bank import HeadBank
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.head import KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.losses import squared_loss
from kalmanhead.optimizers import adam, sgd
from kalmanhead.scaler import RunningScaler
from kalmanhead.scaling import Scaling
from kalmanhead.trained_head import TrainedHead


def network(d_in=3, width=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(d_in, width, dtype=dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return nn.Sequential(layer, nn.Tanh())


def data(count=5, n=16, d=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(n, d, generator=generator, dtype=dtype)
        yield x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:]


HEADS = {
    "kalman": lambda: KalmanHead(8, 1, prior_precision=3.0),
    "trained": lambda: TrainedHead(8, 1),
}


@pytest.mark.parametrize("lam", [0.5, 20.0])
def test_gradient_at_the_solved_head_is_the_gradient_of_the_eliminated_loss(lam):
    """Envelope theorem: autograd through the proximal solve, against W held fixed."""
    net = network(dtype=torch.float64)
    x, y = next(data(dtype=torch.float64))
    before = torch.randn(1, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def objective(weight, phi):
        return (y - phi @ weight.T).square().sum() + lam * (weight - before).square().sum()

    phi = torch.cat([torch.ones(16, 1, dtype=torch.float64), net(x)], 1)
    normal = phi.T @ phi + lam * torch.eye(9, dtype=torch.float64)
    solved = torch.linalg.solve(normal, phi.T @ y + lam * before.T).T
    through = torch.autograd.grad(objective(solved, phi), list(net.parameters()))

    head = KalmanHead(8, 1, prior_precision=lam)
    head.set_weight(before[:, 1:], before[:, 0])
    features = net(x)
    head.update(features, y)
    torch.testing.assert_close(head.weight, solved.detach(), rtol=1e-9, atol=1e-9)
    held = torch.autograd.grad((y - head(features)).square().sum(), list(net.parameters()))
    for a, b in zip(through, held, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["head-first", "backbone-first"])
def test_orders_are_what_they_say(order):
    net, x, y = network(), *next(data())
    learner = OnlineLearner(
        copy.deepcopy(net), KalmanHead(8, 1), sgd(0.1), order=order, scale_x=False, scale_y=False
    )
    learner.learn(x, y)
    learner.learn(x, y)
    head, optimizer = KalmanHead(8, 1), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        if order == "head-first":
            head.update(net(x), y)
        optimizer.zero_grad()
        squared_loss(head(net(x)), y, None).backward()
        optimizer.step()
        if order == "backbone-first":
            head.update(net(x), y)
    torch.testing.assert_close(learner.head.weight, head.weight)
    for a, b in zip(learner.backbone.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("order", ["head-first", "backbone-first"])
def test_step_predicts_what_predict_would_have(head, order):
    learner = OnlineLearner(network(), HEADS[head](), order=order)
    for x, y in data():
        expected = learner.predict(x)
        torch.testing.assert_close(learner.step(x, y), expected, rtol=0, atol=0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("order", ["head-first", "backbone-first"])
@pytest.mark.parametrize("optimizer", [adam(1e-2), sgd(1e-2)])
def test_state_goes_on_exactly(head, order, optimizer):
    def make():
        return OnlineLearner(network(), HEADS[head](), optimizer, order=order, clip=1.0)

    whole, first, second = make(), make(), make()
    batches = list(data(6))
    for i, (x, y) in enumerate(batches):
        whole.learn(x, y)
        if i < 3:
            first.learn(x, y)
    second.load_state(copy.deepcopy(first.state()))
    for x, y in batches[3:]:
        second.learn(x, y)
    assert torch.equal(second.predict(batches[0][0]), whole.predict(batches[0][0]))
    other = OnlineLearner(network(width=9), KalmanHead(9, 1), optimizer)
    with pytest.raises(ConfigError, match="build the learner with the options"):
        other.load_state(first.state())


@pytest.mark.parametrize("head", HEADS)
def test_missing_and_non_finite_values(head):
    learner = OnlineLearner(network(), HEADS[head]())
    for x, y in data(3):
        learner.learn(x, y)
    x, y = next(data(1, seed=9))
    before = learner.predict(x)
    for bad in (torch.nan, torch.inf):
        broken = x.clone()
        broken[4, 1] = bad
        with pytest.raises(ConfigError, match="row 4, column 1"):
            learner.learn(broken, y)
    with pytest.raises(ConfigError, match="y holds infinity in row 0"):
        learner.learn(x, y * torch.inf)
    learner.learn(x[:0], y[:0])
    assert torch.equal(learner.predict(x), before)
    learner.learn(x, torch.where(torch.arange(16)[:, None] == 3, torch.nan, y))
    assert torch.isfinite(learner.predict(x)).all()
    assert not torch.equal(learner.predict(x), before)


def test_a_row_without_target_is_as_if_it_were_not_there():
    (x, y), (x2, y2) = data(2)
    holed, cut = (OnlineLearner(network(), KalmanHead(8, 1), scale_x=False) for _ in range(2))
    for learner in (holed, cut):
        learner.learn(x, y)
    missing = y2.clone()
    missing[5:] = torch.nan
    holed.learn(x2, missing)
    cut.learn(x2[:5], y2[:5])
    torch.testing.assert_close(holed.predict(x), cut.predict(x))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_units_of_inputs_and_targets_do_not_matter(scale):
    plain, scaled = (OnlineLearner(network(), KalmanHead(8, 1), skip=False) for _ in range(2))
    for x, y in data(6, dtype=torch.float64):
        plain.learn(x, y)
        scaled.learn(x * scale - 7 * scale, y * scale + 1e3 * scale)
    got = scaled.predict(x * scale - 7 * scale)
    torch.testing.assert_close((got - 1e3 * scale) / scale, plain.predict(x), rtol=1e-3, atol=1e-3)


def test_target_scale_may_move_without_moving_predictions():
    learner = OnlineLearner(network(), TrainedHead(8, 1), sgd(0.0))
    batches = list(data(3))
    learner.learn(*batches[0])
    before = learner.predict(batches[0][0])
    learner.learn(batches[1][0], batches[1][1] * 100 + 40)
    assert learner.scaling.y.scale > 5
    fresh = Scaling(inputs=True, targets=False, center=True)
    fresh.begin(*batches[0])
    fresh.x.update(batches[0][0])
    learner.scaling.x = fresh.x
    torch.testing.assert_close(learner.predict(batches[0][0]), before, rtol=1e-4, atol=1e-4)


def test_batchnorm_features_are_those_that_predictions_are_made_from():
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh())
    learner = OnlineLearner(net, KalmanHead(8, 1, prior_precision=1e-6), sgd(0.0), scale_x=False)
    for x, y in data(3):
        learner.learn(x, y)
        assert not learner.training
        assert not net.training
    x, y = next(data(1, seed=5))
    learner.learn(x, y)
    assert learner.mode_matters
    with torch.no_grad():
        phi = net(x)
    reference = torch.cat([torch.ones(16, 1), phi], 1).double()
    solution = torch.linalg.lstsq(reference, y.double()).solution
    best = (reference @ solution - y).square().mean()
    assert (learner.predict(x) - y).square().mean() < best * 1.05


def test_dropout_does_not_touch_predictions():
    learner = OnlineLearner(nn.Sequential(network(), nn.Dropout(0.5)), KalmanHead(8, 1))
    for x, y in data(3):
        learner.learn(x, y)
    assert torch.equal(learner.predict(x), learner.predict(x))


def test_skip_puts_a_linear_model_beside_the_backbone():
    learner = OnlineLearner(
        network(), KalmanHead(11, 1, transition="static", prior_precision=1e-6), sgd(0.0), skip=True
    )
    for x, _ in data(30, n=32):
        learner.learn(x, x @ torch.tensor([[1.0], [-2.0], [3.0]]) + 4)
    prediction = learner.predict(x)
    torch.testing.assert_close(
        prediction.float(), x @ torch.tensor([[1.0], [-2.0], [3.0]]) + 4, rtol=0.05, atol=0.1
    )


def test_divergence_is_named():
    learner = OnlineLearner(network(), TrainedHead(8, 1), sgd(1e30))
    with pytest.raises(NumericalError, match="lower the learning rate"):
        _ = [learner.learn(x, y) for x, y in data(10)]


def test_weight_two_is_the_row_twice():
    x, y = next(data())
    one, two = (
        OnlineLearner(network(), KalmanHead(8, 1), sgd(0.1), scale_x=False, scale_y=False)
        for _ in range(2)
    )
    one.learn(x, y, torch.full((16,), 2.0))
    two.learn(torch.cat([x, x]), torch.cat([y, y]))
    torch.testing.assert_close(one.head.weight, two.head.weight)


def test_scaler_against_numpy_on_hard_values():
    generator = torch.Generator().manual_seed(0)
    values = torch.stack(
        [
            1000 + 0.05 * torch.randn(800, generator=generator),
            1e6 * torch.randn(800, generator=generator),
            torch.full((800,), 3.0),
        ],
        1,
    )
    scaler = RunningScaler(3)
    for part in values.split(8):
        scaler.update(part)
    expected = values.double().numpy()
    torch.testing.assert_close(scaler.shift, torch.as_tensor(expected.mean(0)), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        scaler.scale[:2], torch.as_tensor(expected.std(0)[:2]), rtol=1e-9, atol=0
    )
    assert 0.045 < scaler.scale[0] < 0.055
    assert scaler.scale[2] == 1
    assert (scaler(values)[:, 2] == 0).all()
    torch.testing.assert_close(scaler.inverse(scaler(values)).float(), values, rtol=1e-5, atol=1e-5)


def test_scaler_is_per_channel_for_fields_and_skips_missing():
    generator = torch.Generator().manual_seed(0)
    field = torch.randn(5, 2, 7, generator=generator) * torch.tensor([1.0, 1000.0])[:, None]
    field[0, 0, :3] = torch.nan
    scaler = RunningScaler(2)
    scaler.update(field[:2])
    scaler.update(field[2:])
    expected = [c[~torch.isnan(c)].double().std(correction=0) for c in field.movedim(1, 0)]
    torch.testing.assert_close(scaler.scale, torch.stack(expected))


@pytest.mark.parametrize(
    ("options", "message"), [({"order": "both"}, "choose head-first"), ({"clip": 0}, "clip is 0")]
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        OnlineLearner(network(), KalmanHead(8, 1), **options)


@pytest.mark.parametrize("bias", [True, False])
def test_a_wrapped_model_predicts_as_before_and_comes_back_as_a_plain_one(bias):
    torch_model = nn.Sequential(network(), nn.Linear(8, 1, bias=bias))
    learner = OnlineLearner.wrap(torch_model, adam(1e-2))
    x, y = next(data(1, seed=3))
    torch.testing.assert_close(learner.predict(x), torch_model(x).detach())
    for x, y in data(5):
        learner.learn(x, 30 * y + (7 if bias else 0))
    plain = learner.unwrap()
    torch.testing.assert_close(plain(x).detach().double(), learner.predict(x), rtol=1e-4, atol=1e-4)
    assert type(plain) is nn.Sequential
    scaled = OnlineLearner.wrap(torch_model, scale_x=True)
    scaled.learn(x, y)
    with pytest.raises(ConfigError, match="scale_x and skip off"):
        scaled.unwrap()


def test_a_refused_batch_leaves_everything_as_it_was():
    learner = OnlineLearner(network(), KalmanHead(8, 1), order="backbone-first")
    x, y = next(data())
    with pytest.raises(ConfigError, match="the head has 1 outputs"):
        learner.learn(x, torch.cat([y, y], 1))
    assert learner.scaling.x is None
    learner.learn(x, y)
    before = copy.deepcopy(learner.state())
    with pytest.raises(ConfigError, match="negative"):
        learner.learn(x, y, -torch.ones(16))
    torch.testing.assert_close(learner.state(), before, rtol=0, atol=0)


@pytest.mark.parametrize("tiny", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize(
    "head",
    [
        lambda: KalmanHead(12, 1, prior_precision=10.0),
        lambda: KalmanHead(12, 1, transition="static"),
        lambda: KalmanHead(12, 1, transition="drift", dtype=torch.float32),
        lambda: HeadBank(12, 1, linear_features=4),
        lambda: TrainedHead(12, 1),
    ],
)
def test_a_column_that_starts_to_move_late_does_no_lasting_harm(head, tiny):
    generator = torch.Generator().manual_seed(0)
    learner = OnlineLearner(network(4), head(), adam(1e-2), skip=True)
    errors = []
    for step in range(100):
        x = torch.randn(32, 4, generator=generator, dtype=torch.float64)
        x[:, 3] *= tiny if step < 40 else 1.0
        y = x[:, :1].sin() + x[:, 3:]
        errors.append(float((learner.step(x, y) - y).square().mean().sqrt()))
    # The targets have a deviation of 1.2; one batch is learnt with statistics that do not hold.
    assert max(errors) < 20
    assert errors[50] < 1.2
    assert errors[99] < 0.8


def test_an_annealed_rate_falls_to_a_tenth_and_goes_on_after_a_resume():
    def build(rate=None):
        return build_learner(ModelConfig(width=8, lr=rate, anneal=4.0), (3,), (1,))

    learner, rates = build(), []
    generator = torch.Generator().manual_seed(0)
    parts = [(x, x[:, :1]) for x in torch.randn(500, 8, 3, generator=generator)]
    for x, y in parts[:20]:
        learner.learn(x, y)
        rates.append(learner.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.5e-2 / math.sqrt(1 + i / 4) for i in range(20)])
    other = build()
    other.load_state(copy.deepcopy(learner.state()))
    for x, y in parts[20:]:
        learner.learn(x, y)
        other.learn(x, y)
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(1.5e-3)
    assert torch.equal(learner.predict(parts[0][0]), other.predict(parts[0][0]))


@pytest.mark.parametrize(
    ("options", "anneals"),
    [({}, True), ({"lr": 1e-2}, False), ({"anneal": 0.0}, False), ({"head": "reset"}, False)],
)
def test_the_banks_own_rate_is_annealed_on_vectors(options, anneals):
    learner = build_learner(ModelConfig(**options), (3,), (1,))
    assert ("anneal" in learner.optimizer.param_groups[0]) == anneals


@pytest.mark.parametrize("batches", [-1.0, math.nan])
def test_annealing_over_no_batches_is_refused(batches):
    with pytest.raises(ConfigError, match="anneal is"):
        build_learner(ModelConfig(anneal=batches), (3,), (1,))
