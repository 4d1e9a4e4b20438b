"""Wrapping models that cannot be traced: proved on the first batch, or refused on it."""

import copy

import pytest
import torch
from torch import nn

from kalmanhead.checkpoint import load, save
from kalmanhead.errors import SplitError
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import adam


class ByValue(nn.Module):
    """Control flow on values, which cannot be traced; `registered` orders the two layers."""

    def __init__(self, registered, after=None):
        super().__init__()
        layers = {"body": nn.Linear(4, 6), "fc": nn.Linear(6, 2)}
        for name in registered:
            self.add_module(name, layers[name])
        self.after = after

    def forward(self, x):
        if x.sum() > 1e9:
            x = x * 0
        out = self.fc(torch.tanh(self.body(x)))
        return out if self.after is None else self.after(out)


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, generator=generator)
    return x, x[:, :2] * x[:, 2:]


@pytest.mark.parametrize("average", [None, 0.9])
def test_a_model_that_cannot_be_traced_is_proved_on_the_first_batch(average):
    torch.manual_seed(0)
    model, (x, y) = ByValue(["body", "fc"]), batch()
    learner = OnlineLearner.wrap(model, adam(1e-2), average=average)
    shown = OnlineLearner.wrap(model, adam(1e-2), average=average, example=x)
    random = torch.random.get_rng_state()
    torch.testing.assert_close(learner.predict(x), model(x))
    assert torch.equal(torch.random.get_rng_state(), random)
    for _ in range(3):
        learner.learn(x, y)
        shown.learn(x, y)
    assert learner.predict(x).equal(shown.predict(x))
    if average is None:  # with one, predictions are of both models
        plain = learner.unwrap()(x)
        torch.testing.assert_close(plain, learner.predict(x), check_dtype=False)
    assert learner.backbone.unproved is None
    again = copy.deepcopy(learner)
    assert again.predict(x).equal(learner.predict(x))


@pytest.mark.parametrize(
    ("model", "targets"),
    [(ByValue(["fc", "body"]), 6), (ByValue(["body", "fc"], torch.sigmoid), 2)],
    ids=["registered in another order", "something follows"],
)
def test_a_wrong_guess_is_refused_on_the_first_batch_and_changes_nothing(model, targets):
    x, _ = batch()
    learner = OnlineLearner.wrap(model)
    before = copy.deepcopy(learner.state())
    for _ in range(2):  # the second time as well
        with pytest.raises(SplitError, match="give wrap an input to find it: example=x"):
            learner.learn(x, torch.zeros(20, targets))
        with pytest.raises(SplitError, match="example=x"):
            learner.predict(x)
    after = learner.state()
    assert after["batches"] == before["batches"] == 0
    assert after["head"]["mean"].equal(before["head"]["mean"])


class Annotated(nn.Sequential):
    """Adds how it was built to its state, as neuraloperator's models do."""

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        state["_metadata"] = {"activation": torch.tanh}
        return state


def test_what_a_model_adds_to_its_state_does_not_get_into_checkpoints(tmp_path):
    x, y = batch()
    model = Annotated(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))
    learner, again = (OnlineLearner.wrap(model, adam(1e-2)) for _ in range(2))
    learner.learn(x, y)
    save(tmp_path / "a.safetensors", {"learner": learner.state()}, kind="a")
    again.load_state(load(tmp_path / "a.safetensors", kind="a")["learner"])
    assert again.predict(x).equal(learner.predict(x))
    assert "_metadata" in learner.unwrap().state_dict()
    again = OnlineLearner.wrap(model, adam(1e-2))
    again.load_state_dict(learner.state_dict())
    assert again.predict(x).equal(learner.predict(x))
