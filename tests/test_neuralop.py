"""The Fourier neural operators of the package neuraloperator, wrapped and on the command line."""

import copy

import pytest
import torch
from command import call, lines, ok, zarr_of

from kalmanhead.checkpoint import load, save
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import adam

models = pytest.importorskip("neuralop.models", reason="neuraloperator is not installed")

POINTS, BATCH = 12, 10
VARIANTS = {  # grid dimensions and options
    "line": (1, {}),
    "plane": (2, {}),
    "padded": (2, {"domain_padding": 0.25}),
    "normed": (1, {"norm": "instance_norm"}),
    "factorised": (2, {"factorization": "tucker", "rank": 0.4}),
    "dropout inside": (1, {"channel_mlp_dropout": 0.1}),
}
FACTORY = """
import torch
from neuralop.models import FNO


def make(x_shape, y_shape):
    torch.manual_seed(0)
    return FNO(
        n_modes=(4,) * (len(x_shape) - 1), in_channels=x_shape[0], out_channels=y_shape[0],
        hidden_channels=8, n_layers=2,
    )
"""


def operator(dims, **options):
    torch.manual_seed(0)
    modes = (4,) * dims
    return models.FNO(
        n_modes=modes, in_channels=2, out_channels=1, hidden_channels=8, n_layers=2, **options
    )


def fields(dims, rows=BATCH, seed=0):
    """Pairs of a toy operator: one channel is shifted, the other squared."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, *[POINTS] * dims, generator=generator)
    return x, torch.roll(x[:, :1], 1, dims=-1) + x[:, 1:].square()


def learnt(learner, dims, batches, first=0):
    for seed in range(first, first + batches):
        learner.learn(*fields(dims, seed=seed))
    return learner


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shown", [False, True], ids=["by itself", "by example"])
def test_an_operator_is_wrapped_learns_and_comes_back(name, shown):
    dims, options = VARIANTS[name]
    model, (x, y) = operator(dims, **options), fields(dims, seed=99)
    layer = model.projection.fcs[-1]
    learner = OnlineLearner.wrap(model, adam(1e-2), example=x if shown else None)
    assert learner.head.in_features == layer.in_channels
    model.eval()
    torch.testing.assert_close(learner.predict(x), model(x).detach())
    before = (learner.predict(x) - y).square().mean()
    learnt(learner, dims, 20)
    assert (learner.predict(x) - y).square().mean() < 0.9 * before
    merged = learner.unwrap().eval()
    assert type(merged) is models.FNO
    assert list(merged.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        plain = merged(x).double()
    torch.testing.assert_close(plain, learner.predict(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["line", "plane"])
def test_its_state_goes_through_a_checkpoint_and_on(name, tmp_path):
    dims, options = VARIANTS[name]
    model, (x, _) = operator(dims, **options), fields(dims, seed=99)
    learner = learnt(OnlineLearner.wrap(copy.deepcopy(model), adam(1e-2)), dims, 3)
    save(tmp_path / "half.safetensors", {"learner": learner.state()}, kind="half")
    again = OnlineLearner.wrap(model, adam(1e-2))
    again.load_state(load(tmp_path / "half.safetensors", kind="half")["learner"])
    assert again.predict(x).equal(learner.predict(x))
    learnt(learner, dims, 3, first=3)
    learnt(again, dims, 3, first=3)
    assert again.predict(x).equal(learner.predict(x))


@pytest.mark.parametrize("dims", [1, 2])
def test_the_command_line_takes_a_factory_of_one(dims, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"operator{dims}"  # a module is imported once in a process
    (tmp_path / f"{name}.py").write_text(FACTORY, encoding="utf-8")
    x, y = fields(dims, rows=40)
    zarr_of(tmp_path / "f.zarr", x=x.numpy(), y=y.numpy())
    options = ["--backbone", f"module:{name}:make", "--dims", dims, "--batch-size", BATCH]
    result = call("stream", "--source", "f.zarr", "--run", "run", *options, "--epochs", 5)
    assert result.code == 0, result
    errors = [line["rmse"] for line in lines(tmp_path / "run")]
    assert len(errors) == 20
    assert errors[-1] < errors[1]
    ok("predict", "run", "--source", "f.zarr", "--out", "p.zarr", "--trust-code")
