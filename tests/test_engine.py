"""The loop: what is scored, what is learnt when, what a checkpoint of it holds."""

import copy
import warnings

import numpy as np
import pytest
import torch
from command import assert_same

from kalmanhead import checkpoint
from kalmanhead.batch import Batch, Cursor
from kalmanhead.config import HEADS, ModelConfig, build_learner
from kalmanhead.engine import Progress, evaluate, learn_stream, rollout
from kalmanhead.errors import ConfigError
from kalmanhead.fields import rollout_errors
from kalmanhead.streams import open_source


def arrays(rows=100, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    return x, np.sin(x[:, :1]) + 0.1 * rng.normal(size=(rows, 1))


@pytest.mark.parametrize("head", HEADS)
def test_cutting_a_run_anywhere_changes_no_bit(head, tmp_path):
    def make():
        return build_learner(ModelConfig(head=head, width=8, skip=True), (3,), (1,))

    def stream():
        return open_source(arrays(), batch_size=16, epochs=2, seed=3)

    whole, end = make(), Progress()
    assert learn_stream(whole, stream(), end)
    first, progress = make(), Progress()
    assert not learn_stream(first, stream(), progress, max_batches=5)
    state = {"learner": first.state(), "progress": progress.state()}
    checkpoint.save(tmp_path / "c.safetensors", state, kind="run")
    loaded = checkpoint.load(tmp_path / "c.safetensors")
    second, resumed = make(), Progress()
    second.load_state(loaded["learner"])
    resumed.load_state(loaded["progress"])
    assert learn_stream(second, stream().iterate(resumed.cursor), resumed)
    x = torch.as_tensor(arrays()[0])
    assert torch.equal(second.predict(x), whole.predict(x))
    keep = ("rows", "batches", "prequential", "recent")
    assert {k: resumed.summary()[k] for k in keep} == {k: end.summary()[k] for k in keep}
    assert end.rows == 200


def test_every_row_is_scored_before_it_is_learnt():
    learner = build_learner(ModelConfig(backbone="linear", head="static"), (1,), (1,))
    x = torch.ones(4, 1)
    progress = Progress()
    seen = []
    batches = [Batch(x, torch.full((4, 1), 5.0)), Batch(x, torch.full((4, 1), 5.0))]
    learn_stream(
        learner, batches, progress, on_batch=[lambda p, b, y: seen.append(float(y.mean()))]
    )
    assert seen[0] == 0
    # The only target seen so far is the mean that the scaler puts back.
    assert seen[1] == pytest.approx(5, abs=1e-12)


def test_a_target_with_a_lead_is_learnt_only_when_its_time_has_come():
    learner = build_learner(ModelConfig(backbone="linear", head="static", lam=1e-6), (1,), (1,))
    series = np.zeros((40, 1))
    series[20:] = 100.0
    stream = open_source(series, batch_size=1, lead=5)
    predictions = []
    learn_stream(
        learner, stream, Progress(), on_batch=[lambda p, b, y: predictions.extend(y[:, 0].tolist())]
    )
    # The value 100 is first seen at time 20, so nothing may foresee it in rows 15 ... 19.
    assert np.abs(predictions[:20]).max() < 1e-6
    assert len(predictions) == 35


def test_the_loop_stops_when_asked_and_closes_its_source():
    closed = []

    def batches():
        try:
            while True:
                yield Batch(torch.ones(2, 1), torch.ones(2, 1), cursor=Cursor(0, 2))
        finally:
            closed.append(True)

    learner = build_learner(ModelConfig(backbone="linear"), (1,), (1,))
    progress = Progress()
    asked = iter([False, False, True])
    assert not learn_stream(learner, batches(), progress, should_stop=lambda: next(asked))
    assert progress.batches == 3
    assert closed == [True]


def test_evaluating_learns_nothing():
    learner = build_learner(ModelConfig(width=8), (3,), (1,))
    learn_stream(learner, open_source(arrays(), 20), Progress())
    before = copy.deepcopy(learner.state())
    metrics = evaluate(learner, open_source(arrays(seed=1), 20), field=False)
    assert metrics.summary()["rows"] == 100
    torch.testing.assert_close(learner.state(), before, rtol=0, atol=0)


def test_bad_rows_are_counted():
    x, y = arrays()
    x[[3, 50], 1] = np.nan
    progress = Progress()
    learner = build_learner(ModelConfig(width=8), (3,), (1,))
    learn_stream(learner, open_source((x, y), 16, on_bad="skip"), progress)
    assert progress.summary()["bad_rows"] == 2
    assert progress.rows == 98


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "lasso"}, "head 'lasso' is unknown"),
        ({"optimizer": "rmsprop"}, "choose adam or sgd"),
        ({"order": "both"}, "head-first or backbone-first"),
        ({"head": "reset", "dtype": "float16"}, "float64 or float32"),
        ({"device": "tpu"}, "choose auto or one of cpu"),
        ({"backbone": "transformer"}, "transformer"),
        ({"lr": -1.0}, "lr is -1"),
        ({"head": "reset", "lam": -1.0}, "must be positive"),
        ({"lam": 1.0}, "lam is not for head auto"),
        ({"lambda_scale": "mean"}, "lambda_scale is not for head auto"),
        ({"head": "adam", "dtype": "float32"}, "dtype is not for head adam"),
        ({"head": "reset", "eta": 0.5}, "choose head drift"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        build_learner(ModelConfig(**options), (3,), (1,))


def linear_learner(matrix, rows=60):
    """Knows y = A x to rounding."""
    learner = build_learner(
        ModelConfig(backbone="linear", head="ridge", lam=1e-12), (len(matrix),), (len(matrix),)
    )
    x = np.random.default_rng(0).normal(size=(rows, len(matrix)))
    for _ in range(2):
        learner.learn(torch.from_numpy(x), torch.from_numpy(x @ matrix.T))
    return learner


def test_a_rollout_of_a_linear_map_is_its_powers():
    turn = 0.3
    matrix = 0.9 * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    learner = linear_learner(matrix)
    x0 = np.array([[1.0, 0.0], [0.5, -2.0], [0.0, 1.0]])
    predicted = rollout(learner, torch.from_numpy(x0), 6)
    expected = np.stack([x0 @ np.linalg.matrix_power(matrix, j).T for j in range(1, 7)], 1)
    np.testing.assert_allclose(predicted, expected, atol=1e-7)
    assert rollout_errors(predicted[:, :, None], expected[:, :, None]).relative_l2.max() < 1e-6
    assert rollout_errors(predicted[:, :, None], expected[:, :, None]).steps_until is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rollout_that_diverges_says_so_without_a_warning(dtype):
    class Explosion(torch.nn.Module):
        def predict(self, x):
            return x * torch.tensor(1e20, dtype=x.dtype)

    x0 = torch.ones(3, 1, 8, dtype=dtype)
    x0[2, 0, 1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predicted = rollout(Explosion(), x0, 20)
        errors = rollout_errors(predicted[:2], torch.ones(2, 20, 1, 8))
    assert predicted.shape == (3, 20, 1, 8)
    assert predicted.dtype == dtype
    assert predicted[2].isnan().all()  # the others are not held up by a state that is gone
    assert errors.relative_l2[0] == pytest.approx(1e20)
    assert errors.relative_l2[-1] == np.inf
    assert errors.steps_until == 1


def test_a_rollout_changes_nothing_and_is_predict_by_predict():
    learner = build_learner(ModelConfig(width=4, modes=3), (2, 16), (2, 16), 1)
    x = torch.randn(20, 2, 16, generator=torch.Generator().manual_seed(0))
    learner.learn(x, x.roll(1, -1))
    before = copy.deepcopy(learner.state())
    first = learner.predict(x[:3])
    expected = torch.stack([first, learner.predict(first)], 1)
    assert torch.equal(rollout(learner, x[:3], 2), expected)
    assert_same(learner.state(), before)


def test_rollouts_that_cannot_be():
    learner = build_learner(ModelConfig(backbone="linear"), (3,), (2,))
    learner.learn(torch.ones(4, 3), torch.ones(4, 2))
    with pytest.raises(ConfigError, match=r"inputs are \(3,\), predictions \(2,\); learn from u"):
        rollout(learner, torch.ones(1, 3), 4)
    with pytest.raises(ConfigError, match="steps is 0: a roll-out has at least 1"):
        rollout(learner, torch.ones(1, 3), 0)
