"""Rows kept for the backbone, and the row weights of relative errors."""

import copy

import pytest
import torch

from kalmanhead.backbones import MLP
from kalmanhead.buffer import Buffer
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.head import KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import adam
from kalmanhead.relative import FLOOR, RelativeWeights


def numbered(start, count):
    x = torch.arange(start, start + count, dtype=torch.float64)[:, None]
    return x, -x, None


def kept(buffer):
    return sorted(int(v) for v in buffer.rows[0][:, 0])


@pytest.mark.parametrize("kind", ["reservoir", "recent"])
@pytest.mark.parametrize("batch", [1, 3, 7, 50])
def test_a_buffer_holds_different_rows_and_whole_ones(kind, batch):
    buffer = Buffer(10, kind)
    for start in range(0, 100, batch):
        buffer.add(*numbered(start, batch))
        seen = start + batch
        assert len(buffer) == min(10, seen)
        assert len(set(kept(buffer))) == len(buffer)
        assert max(kept(buffer)) < seen
    x, y, _ = buffer.rows
    assert torch.equal(y, -x)
    if kind == "recent":
        assert kept(buffer) == list(range(buffer.seen - 10, buffer.seen))


def test_a_reservoir_is_a_uniform_sample():
    counts = torch.zeros(60)
    for seed in range(2000):
        buffer = Buffer(12, seed=seed)
        for start in range(0, 60, 5):
            buffer.add(*numbered(start, 5))
        counts[buffer.rows[0][:, 0].long()] += 1
    expected = 2000 * 12 / 60
    chi_square = float(((counts - expected) ** 2 / expected).sum()) / (1 - 12 / 60)
    assert chi_square < 95.6  # the 99.8 % quantile for 59 degrees of freedom


def test_draws_are_rows_that_are_kept_with_their_weights():
    buffer = Buffer(20, "recent")
    x, y, _ = numbered(0, 30)
    buffer.add(x, y, torch.arange(30.0) + 1)
    for _ in range(20):
        x, y, weight = buffer.draw(6)
        assert len(x) == 6
        assert bool((x >= 10).all())
        assert torch.equal(y, -x)
        assert torch.equal(weight, x[:, 0].float() + 1)
    assert len(buffer.draw(100)[0]) == 20


@pytest.mark.parametrize("kind", ["reservoir", "recent"])
def test_what_was_kept_comes_back(kind):
    buffer = Buffer(16, kind, seed=3)
    for start in range(0, 12, 4):
        buffer.add(*numbered(start, 4))
    for count in (3, 30, 8):  # growing, growing and replacing, replacing only
        before = copy.deepcopy(buffer.state())
        undo = buffer.mark()
        buffer.add(*numbered(100, count))
        buffer.add(*numbered(200, count))
        buffer.draw(5)
        undo()
        after = buffer.state()
        assert after["seen"] == before["seen"]
        assert torch.equal(after["generator"], before["generator"])
        assert all(torch.equal(a, b) for a, b in zip(after["rows"], before["rows"], strict=True))
        buffer.add(*numbered(300, count))


@pytest.mark.parametrize("kind", ["reservoir", "recent"])
def test_a_buffer_goes_on_from_its_state(kind):
    one, other = Buffer(16, kind, seed=1), Buffer(16, kind, seed=2)
    one.add(*numbered(0, 25))
    other.load_state(copy.deepcopy(one.state()))
    for start in (30, 60):
        for buffer in (one, other):
            buffer.add(*numbered(start, 9))
        assert torch.equal(one.draw(7)[0], other.draw(7)[0])
    with pytest.raises(ConfigError, match="the saved buffer has capacity 16, this one 8"):
        Buffer(8, kind).load_state(one.state())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "buffer is 0: give a number of rows"),
        ((2.5,), "buffer is 2.5"),
        ((5, "lifo"), "buffer kind 'lifo' is unknown: choose reservoir or recent"),
    ],
)
def test_senseless_buffers_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Buffer(*arguments)


def test_rows_of_another_shape_are_refused_and_nothing_is_lost():
    config = ModelConfig(backbone="fno", width=4, depth=1, modes=2, buffer=50)
    learner = build_learner(config, (1, 16), (1, 16), 1)
    x = torch.randn(6, 1, 16, generator=torch.Generator().manual_seed(0))
    learner.learn(x, x.cumsum(-1))
    before = copy.deepcopy(learner.state())
    with pytest.raises(ConfigError, match=r"holds rows of shape \(1, 16\), these are \(1, 32\)"):
        learner.learn(torch.zeros(2, 1, 32), torch.zeros(2, 1, 32))
    assert torch.equal(learner.state()["head"]["groups"][0]["mean"],
                       before["head"]["groups"][0]["mean"])  # fmt: skip
    learner.learn(x, x.cumsum(-1))


def stream(count, n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(n, 3, generator=generator)
        yield x, torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)


def make(buffer, lr=1e-2, order="head-first", **options):
    return OnlineLearner(
        MLP(3, width=8, seed=0),
        KalmanHead(8, 2, transition="static"),
        adam(lr),
        buffer=buffer,
        order=order,
        **options,
    )


@pytest.mark.parametrize("order", ["head-first", "backbone-first"])
def test_the_head_learns_each_batch_once_whatever_is_kept(order):
    plain, buffered = make(None, lr=0.0, order=order), make(Buffer(20), lr=0.0, order=order)
    for x, y in stream(10):
        torch.testing.assert_close(plain.step(x, y), buffered.step(x, y))
    torch.testing.assert_close(plain.head.weight, buffered.head.weight)


def test_the_backbone_trains_on_what_is_drawn(monkeypatch):
    learner = make(Buffer(40, seed=5))
    drawn, steps = [], []
    draw, step = learner.buffer.draw, learner._step_backbone
    monkeypatch.setattr(learner.buffer, "draw", lambda n: drawn.append(draw(n)) or drawn[-1])
    monkeypatch.setattr(learner, "_step_backbone", lambda b: steps.append(b) or step(b))
    batches = list(stream(12))
    for x, y in batches:
        learner.learn(x, y)
    assert len(drawn) == len(steps) == 12
    last = torch.cat([x for x, _ in batches])
    rows = drawn[-1][0]
    assert len(rows) == 8
    assert bool((rows[:, None] == last[None]).all(2).any(1).all())  # each came in some batch
    assert steps[-1].phi.requires_grad
    assert any(not bool((row == batches[-1][0]).all(1).any()) for row in rows)


def test_a_learner_with_a_buffer_goes_on_exactly():
    one, other = make(Buffer(20)), make(Buffer(20))
    batches = list(stream(14))
    for x, y in batches[:7]:
        one.learn(x, y)
    other.load_state(copy.deepcopy(one.state()))
    for x, y in batches[7:]:
        assert torch.equal(one.step(x, y), other.step(x, y))


def test_a_batch_that_fails_leaves_the_buffer_as_it_was(monkeypatch):
    one, other = make(Buffer(20)), make(Buffer(20))
    batches = list(stream(8))
    for x, y in batches[:5]:
        one.learn(x, y)
        other.learn(x, y)

    def fail(*_):
        raise NumericalError("diverged")

    with monkeypatch.context() as patch:
        patch.setattr(one, "_step_backbone", fail)
        with pytest.raises(NumericalError):
            one.learn(*batches[5])
    for x, y in batches[6:]:
        assert torch.equal(one.step(x, y), other.step(x, y))


def test_a_state_without_a_buffer_is_refused_by_a_learner_with_one():
    with pytest.raises(ConfigError, match="only one of the two has the part buffer"):
        make(Buffer(20)).load_state(make(None).state())


def test_correlated_rows_are_learnt_better_with_a_buffer():
    """Rows come sorted, sweep after sweep: each batch is from a narrow part of the inputs."""
    x = torch.linspace(-3, 3, 256)[:, None]
    y = torch.sin(3 * x)
    errors = []
    for buffer in (None, Buffer(200, seed=0)):
        learner = build_learner(ModelConfig(head="reset", lam=10.0, lr=1e-2), (1,), (1,))
        learner.buffer = buffer
        for _ in range(20):
            for rows in torch.arange(256).split(16):
                learner.learn(x[rows], y[rows])
        errors.append(float((learner.predict(x) - y).square().mean().sqrt()))
    assert errors[1] < 0.5 * errors[0]


def test_relative_weights_make_squares_relative():
    weigh = RelativeWeights()
    y = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    weigh.follow(y, None)
    usual = (12.5 + 0.125) / 3
    torch.testing.assert_close(
        weigh(y, None),
        usual / (torch.tensor([12.5, 0.125, 0.0], dtype=torch.float64) + FLOOR * usual),
    )
    torch.testing.assert_close(weigh(y, torch.tensor([1.0, 2.0, 0.0])), weigh(y, None)
                               * torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))  # fmt: skip


def test_missing_targets_and_unweighted_rows_do_not_count_in_the_usual_size():
    weigh, plain = RelativeWeights(), RelativeWeights()
    y = torch.tensor([[2.0, torch.nan], [torch.nan, torch.nan], [100.0, 100.0]])
    weigh.follow(y, torch.tensor([1.0, 1.0, 0.0]))
    plain.follow(torch.tensor([[2.0, 2.0]]), None)
    assert weigh.state() == plain.state() == {"usual": 4.0, "rows": 1.0}
    weigh.follow(torch.full((3, 2), torch.nan), None)
    assert weigh.state() == plain.state()


def test_the_closed_form_minimises_the_squared_relative_error():
    """Against weighted least squares, on rows whose sizes differ a thousandfold."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    size = 10.0 ** (-3 * torch.rand(200, 1, generator=generator, dtype=torch.float64))
    y = size * (x @ torch.randn(4, 3, generator=generator, dtype=torch.float64) + 1)
    y[7] = 0.0
    config = ModelConfig(backbone="linear", head="static", lam=1e-9, loss="relative")
    learner = build_learner(config, (4,), (3,))
    learner.scaling.targets = learner.scaling.inputs = False
    learner.learn(x, y)
    square = y.square().mean(1)
    root = (1 / (square + FLOOR * square.mean())).sqrt()[:, None]
    phi = torch.cat([torch.ones(200, 1, dtype=torch.float64), x], 1)
    exact = torch.linalg.lstsq(root * phi, root * y).solution
    # The linear backbone works in float32.
    torch.testing.assert_close(learner.predict(x).double(), phi @ exact, rtol=1e-4, atol=1e-5)


def test_a_learner_of_relative_errors_goes_on_exactly():
    def fresh():
        return build_learner(ModelConfig(loss="relative", width=8), (3,), (2,))

    one, other = fresh(), fresh()
    batches = list(stream(10))
    for x, y in batches[:5]:
        one.learn(x, y)
    other.load_state(copy.deepcopy(one.state()))
    for x, y in batches[5:]:
        assert torch.equal(one.step(x, y), other.step(x, y))
    assert one.relative.state() == other.relative.state()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "huber"}, "loss is 'huber': choose squared or relative"),
        ({"buffer": 0}, "buffer is 0"),
        ({"buffer_kind": "recent"}, "buffer_kind is for a buffer"),
        ({"buffer": 5, "buffer_kind": "newest"}, "buffer kind 'newest'"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_learner(ModelConfig(**options), (3,), (1,))
