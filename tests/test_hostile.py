"""Hostile and unlucky use of the Python interface: one line of explanation, nothing lost."""

import copy
import math
import pickle
import warnings

import command
import numpy as np
import pytest
import torch
import zarr
from torch import nn

from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import ConfigError, KalmanHeadError, NumericalError
from kalmanhead.head import KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import adam
from kalmanhead.streams import open_source
from kalmanhead.streams.pde import Burgers

HEADS = ("reset", "drift", "static", "adam")


def learner(head="reset", **options):
    config = ModelConfig(backbone="mlp", width=8, head=head, device="cpu", **options)
    return build_learner(config, (3,), (1,))


def batch(n=8, seed=0, d=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


X, Y = batch()
REFUSED = {
    "numpy": (X.numpy(), Y, None),
    "list": (X.tolist(), Y, None),
    "dict": ({"x": X}, Y, None),
    "complex": (X.to(torch.complex64), Y, None),
    "vector of targets": (X, Y[:, 0], None),
    "other width": (X[:, :2], Y, None),
    "other outputs": (X, Y.expand(-1, 2), None),
    "weight of another length": (X, Y, torch.ones(3)),
    "negative weight": (X, Y, -torch.ones(8)),
    "list of weights": (X, Y, [1.0] * 8),
    "x beyond squares": (X * 1e200, Y, None),
    "y beyond squares": (X, Y * 1e200, None),
    "x NaN": (X * math.nan, Y, None),
    "y infinite in float32": (X, (Y / 0).float(), None),
}


@pytest.mark.parametrize("order", ["head-first", "backbone-first"])
@pytest.mark.parametrize("head", ["reset", "adam"])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("first", [True, False])
def test_a_refused_batch_changes_nothing(case, head, order, first):
    model = learner(head, order=order)
    if not first:
        model.learn(*batch(seed=1))
    before = copy.deepcopy(model.state())
    with pytest.raises(ConfigError) as caught:
        model.learn(*REFUSED[case])
    assert "\n" not in str(caught.value)
    command.assert_same(model.state(), before)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64", "uint8", "bool", "float32"])
def test_every_real_dtype_is_learnt_from(head, dtype):
    model = learner(head)
    for seed in range(3):
        x, y = (t.mul(3).to(getattr(torch, dtype)) for t in batch(seed=seed))
        model.learn(x, y)
    assert torch.isfinite(model.predict(x)).all()


def test_a_head_does_not_round_its_outputs_to_the_integers_of_its_inputs():
    head = KalmanHead(3, 1)
    head.update(X, Y)
    whole = torch.ones(2, 3, dtype=torch.int64)
    torch.testing.assert_close(head(whole), head(whole.double()))


def test_a_head_without_features_learns_the_mean():
    head = KalmanHead(0, 1, transition="static", prior_precision=1e-9)
    head.update(torch.zeros(4, 0), torch.tensor([[1.0], [2.0], [3.0], [6.0]]))
    torch.testing.assert_close(head(torch.zeros(1, 0)), torch.tensor([[3.0]]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_learning_does_not_depend_on_the_callers_gradient_mode(mode):
    plain, inside = learner(), learner()
    for seed in range(3):
        plain.learn(*batch(seed=seed))
        with mode():
            inside.learn(*batch(seed=seed))
    command.assert_same(inside.state(), plain.state())


def test_no_gradient_reaches_the_caller():
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner().learn(x, y)
    assert x.grad is None
    assert y.grad is None


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_backbone_may_change_its_dtype_on_the_way(head, dtype):
    model = learner(head)
    model.learn(X, Y)
    model.to(dtype)
    for seed in range(3):
        model.learn(*batch(seed=seed))
    assert torch.isfinite(model.predict(X)).all()
    with pytest.raises(ConfigError, match="float16"):
        model.half().learn(X, Y)


def test_a_single_row_passes_batch_normalisation():
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    for n in (1, 8):
        model = OnlineLearner.wrap(net)
        for rows in (n, 1, 8):
            model.learn(*batch(rows))
        assert torch.isfinite(model.predict(X)).all()


def test_train_mode_does_not_make_predictions_random():
    model = OnlineLearner.wrap(nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1)))
    model.learn(X, Y)
    model.train()
    assert torch.equal(model.predict(X), model.predict(X))


def test_a_backbone_frozen_later_leaves_the_head_learning():
    model = learner()
    model.backbone.requires_grad_(False)
    model.learn(X, Y)
    assert model.head.weight.abs().sum() > 0


@pytest.mark.parametrize("head", HEADS)
def test_pickle_and_state_dict_hold_everything(head):
    model, fresh = learner(head), learner(head, seed=1)
    model.learn(X, Y)
    fresh.load_state_dict(model.state_dict())
    copies = [fresh, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for seed in range(3):
        for one in (model, *copies):
            one.learn(*batch(seed=seed))
    for one in copies:
        command.assert_same(one.state(), model.state())


@pytest.mark.parametrize(
    ("head", "options"),
    [("static", {}), ("adam", {}), ("reset", {"optimizer": "sgd"}), ("reset", {"width": 9})],
)
def test_a_foreign_state_changes_nothing(head, options):
    other = build_learner(
        ModelConfig(**{"backbone": "mlp", "width": 8, "head": head, "device": "cpu", **options}),
        (3,), (1,),
    )  # fmt: skip
    other.learn(X, Y)
    model = learner()
    model.learn(*batch(seed=4))
    before = copy.deepcopy(model.state())
    for state in (other.state(), {}, None):
        with pytest.raises(KalmanHeadError):
            model.load_state(state)
        command.assert_same(model.state(), before)


def test_arguments_that_make_no_sense_are_named():
    with pytest.raises(ConfigError, match="make no learner"):
        OnlineLearner(abs, KalmanHead(3, 1))
    with pytest.raises(ConfigError, match="optimizer"):
        OnlineLearner(nn.Linear(3, 3), KalmanHead(3, 1), "adam")
    with pytest.raises(ConfigError, match=r"lr is -1\.0: give a learning rate from 0"):
        OnlineLearner(nn.Linear(3, 3), KalmanHead(3, 1), adam(-1.0))
    with pytest.raises(ConfigError, match="the optimizer cannot be made"):
        OnlineLearner(nn.Linear(3, 3), KalmanHead(3, 1), lambda p: torch.optim.Adam(p, lr=-1.0))
    with pytest.raises(ConfigError, match="the head expects 4"):
        OnlineLearner(nn.Identity(), KalmanHead(4, 1)).learn(X, Y)
    with pytest.raises(ConfigError, match="transition"):
        KalmanHead(3, 1, transition=None)
    with pytest.raises(ConfigError, match="device"):
        KalmanHead(3, 1, device="bogus")
    with pytest.raises(ConfigError, match="whole numbers"):
        KalmanHead(3.5, 1)
    with pytest.raises(ConfigError, match="level"):
        learner().predict_dist(X).interval(1.5)


def test_a_solve_that_overflows_is_undone():
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    nn.init.constant_(net[0].weight, 1e37)
    model = OnlineLearner.wrap(net, average=0.9)
    model.learn(X * 1e-37, Y)
    before = copy.deepcopy(model.state())
    with pytest.raises(NumericalError):
        model.learn(X * 100, Y)
    command.assert_same(model.state(), before)


def test_streams_treat_numbers_whose_squares_overflow_as_bad_rows():
    x, y = batch(20)
    x[7, 1] = 1e200
    stream = open_source((x, y), batch_size=5, on_bad="skip")
    assert sum(b.bad_rows for b in stream) == 1
    with pytest.raises(KalmanHeadError, match="row 7"):
        list(open_source((x, y), batch_size=5))


def test_a_source_without_columns_is_named():
    with pytest.raises(KalmanHeadError, match="rows of x"):
        open_source((np.ones((5, 0)), np.ones((5, 1))))
    with pytest.raises(KalmanHeadError, match="rows of y"):
        open_source((np.ones((5, 2)), np.ones((5, 0))))


@pytest.mark.parametrize("extreme", [{"nu": 1e-300}, {"nu": 1e-9}, {"length": 1e300}])
def test_burgers_refuses_what_it_cannot_resolve(extreme):
    with pytest.raises(ConfigError, match="solver grid"):
        Burgers(**extreme)
    with pytest.raises(ConfigError, match="steps"):
        Burgers(time=1e12, grid=64).sample([0])


def test_predict_does_not_overwrite_its_source(tmp_path):
    source = command.vector_zarr(tmp_path / "v.zarr", 40)
    command.ok("stream", "--source", source, "--run", tmp_path / "r", "--quiet")
    message = command.refused(
        "predict", tmp_path / "r", "--source", source, "--out", source, "--overwrite"
    )
    assert "would overwrite the source" in message
    assert zarr.open_group(source, mode="r")["x"].shape == (40, 3)


@pytest.mark.parametrize("head", [*HEADS, "auto"])
@pytest.mark.parametrize("factor", [1e6, 1e11, 1e20, 1e38, 1e90])
def test_targets_may_jump_by_any_factor(head, factor):
    """What was learnt is of no use then, but the stream must go on and be learnt anew."""
    model = learner(head)
    for seed in range(40):
        model.learn(*batch(16, seed))
    for seed in range(40):
        x, y = batch(16, seed)
        model.learn(x, factor * y)
    error = (model.predict(x).double() / factor - y).abs().mean()
    assert error < 1.5 * (y - y.mean()).abs().mean()


def test_a_head_put_in_the_place_of_another_follows_the_scales():
    model = learner()
    model.learn(X, Y)
    model.head = KalmanHead(8, 1, transition="static")
    model.learn(X, Y)
    before = model.predict(X)
    model.scaling.follow(X, 1000 * Y, None, model.parts, skip=False, express=True)
    torch.testing.assert_close(model.predict(X), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["folder", "run", "group and more", "link", "text"])
def test_overwriting_replaces_nothing_but_data_sets(tmp_path, what):
    source, out = command.vector_zarr(tmp_path / "v.zarr", 40), tmp_path / "out.zarr"
    command.ok("stream", "--source", source, "--run", tmp_path / "r", "--quiet")
    if what == "folder":
        out.mkdir()
        (out / "thesis.txt").write_text("hi")
    elif what == "run":
        command.ok("stream", "--source", source, "--run", out, "--quiet")
    elif what == "group and more":
        command.vector_zarr(out, 10)
        (out / "thesis.txt").write_text("hi")
    elif what == "link":
        out.symlink_to(source, target_is_directory=True)
    else:
        out.write_text("hi")
    before = sorted(path.relative_to(out) for path in out.rglob("*"))
    made = "make", "ks", "--out", out, "--samples", 3, "--grid", 32, "--overwrite"
    predicted = "predict", tmp_path / "r", "--source", source, "--out", out, "--overwrite"
    for arguments in (made, predicted):
        assert str(out) in command.refused(*arguments)
        assert sorted(path.relative_to(out) for path in out.rglob("*")) == before


def test_predict_does_not_overwrite_what_the_run_learnt_from(tmp_path):
    source = command.vector_zarr(tmp_path / "v.zarr", 40)
    new = command.vector_zarr(tmp_path / "new.zarr", 20)
    command.ok("stream", "--source", source, "--run", tmp_path / "r", "--quiet")
    arguments = "predict", tmp_path / "r", "--source", new, "--out", source, "--overwrite"
    assert "what the run learnt from" in command.refused(*arguments)
    assert zarr.open_group(source, mode="r")["x"].shape == (40, 3)
