"""Splitting the last linear layer off models of many kinds, and the refusals."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from kalmanhead.errors import SplitError
from kalmanhead.split import merge_head, split_head


class Field(nn.Module):
    """Convolutions on a line, a plane or a space, with a 1x1 convolution last."""

    def __init__(self, dims):
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.first, self.last = conv(2, 6, 3, padding=1), conv(6, 3, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class RegisteredFirst(nn.Module):
    """The layer that runs last is registered first."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(6, 2), nn.Linear(4, 6)

    def forward(self, x):
        if x.shape[0] > 1000:  # control flow on values, which cannot be traced
            x = x * 0
        return self.head(torch.tanh(self.body(x)))


class ChannelMLP(nn.Module):
    """1x1 Conv1d layers that flatten the grid and restore it with the OUTPUT's channels."""

    def __init__(self, d, k, width):
        super().__init__()
        self.out_channels = k
        self.fcs = nn.ModuleList([nn.Conv1d(d, width, 1), nn.Conv1d(width, k, 1)])

    def forward(self, x):
        size, reshaped = list(x.shape), False
        if x.ndim > 3:
            x, reshaped = x.reshape((*size[:2], -1)), True
        for i, fc in enumerate(self.fcs):
            x = fc(x)
            if i < 1:
                x = functional.gelu(x)
        return x.reshape((size[0], self.out_channels, *size[2:])) if reshaped else x


class Operator(nn.Module):
    """Lifting, body, projection, as neural operators are built."""

    def __init__(self):
        super().__init__()
        self.lifting, self.projection = ChannelMLP(2, 5, 7), ChannelMLP(5, 3, 8)

    def forward(self, x):
        return self.projection(torch.tanh(self.lifting(x)))


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.fc(torch.tanh(self.body(x))).squeeze(-1)


class Folded(nn.Module):
    """Rows and points are folded into one for the last layer."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.fc(h.reshape(-1, 6)).reshape(*h.shape[:-1], 2)


class Auxiliary(nn.Module):
    """A side branch runs after the layer that makes the output."""

    def __init__(self):
        super().__init__()
        self.body, self.fc, self.side = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.loss = None

    def forward(self, x):
        h = torch.tanh(self.body(x))
        out = self.fc(h)
        self.loss = self.side(h).mean()
        return out


def mlp(*after, k=2):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, k), *after)


MODELS = {
    "mlp": (mlp, (5, 4), "2", -1),
    "no bias": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 2, bias=False)), (5, 4), "1", -1),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
        (5, 4),
        "2",
        -1,
    ),
    "dropout of rate 0": (lambda: mlp(nn.Dropout(0.0), nn.Identity()), (5, 4), "2", -1),
    "points last layer": (mlp, (5, 7, 4), "2", -1),
    "line": (lambda: Field(1), (5, 2, 9), "last", 1),
    "plane": (lambda: Field(2), (5, 2, 4, 3), "last", 1),
    "space": (lambda: Field(3), (2, 2, 3, 4, 2), "last", 1),
    "registered first": (RegisteredFirst, (5, 4), "head", -1),
    "operator on a line": (Operator, (5, 2, 9), "projection.fcs.1", 1),
    "operator on a plane": (Operator, (5, 2, 4, 3), "projection.fcs.1", 1),
    "folded": (Folded, (5, 7, 4), "fc", -1),
    "auxiliary": (Auxiliary, (5, 4), "fc", -1),
    "linear": (lambda: nn.Linear(4, 2), (5, 4), "", -1),
    "convolution": (lambda: nn.Conv1d(4, 2, 1), (5, 4, 3), "", 1),
    "double": (lambda: mlp().double(), (5, 4), "2", -1),
    "wrapped": (lambda: nn.DataParallel(mlp()), (5, 4), "2", -1),
    "nested": (lambda: nn.Sequential(nn.Tanh(), nn.Sequential(mlp())), (5, 4), "1.0.2", -1),
}


def applied(split, phi):
    out = torch.movedim(phi, split.feature_dim, -1) @ split.weight.T
    out = out if split.bias is None else out + split.bias
    return torch.movedim(out, -1, split.feature_dim)


def made(name):
    build, shape, path, feature_dim = MODELS[name]
    torch.manual_seed(0)
    model = build()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    return model, x, path, feature_dim


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_of_the_backbone_is_the_model(name):
    model, x, path, feature_dim = made(name)
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    split = split_head(model, x)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert (split.path, split.feature_dim, split.verified) == (path, feature_dim, True)
    assert (split.backbone.out_features, split.backbone.feature_dim) == (
        split.weight.shape[1],
        feature_dim,
    )
    phi = split.backbone.eval()(x)
    torch.testing.assert_close(applied(split, phi), model.eval()(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_found_without_an_example_is_the_same_once_verified(name):
    model, x, path, _ = made(name)
    split = split_head(model)
    if not split.verified and split.path != path:
        # The order of registration misled: verification must say so.
        with pytest.raises(SplitError):
            split.verify(x)
        return
    split = split.verify(x)
    assert split.path == path
    torch.testing.assert_close(applied(split, split.backbone.eval()(x)), model.eval()(x))


@pytest.mark.parametrize(
    "name", ["mlp", "line", "linear", "nested", "dropout of rate 0", "batch norm", "auxiliary"]
)
def test_a_traced_model_needs_no_example(name):
    assert split_head(made(name)[0]).verified


@pytest.mark.parametrize("name", MODELS)
def test_merging_gives_the_model_back(name):
    model, x, *_ = made(name)
    split = split_head(model, x)
    merged = merge_head(split, split.weight, split.bias)
    torch.testing.assert_close(merged.eval()(x), model.eval()(x))
    inner = getattr(model, "module", model)
    assert type(merged) is type(inner)
    assert list(merged.state_dict()) == list(inner.state_dict())
    changed = merge_head(split.backbone, split.weight * 2, torch.ones(len(split.weight)))
    expected = 2 * (split.backbone.eval()(x).movedim(split.feature_dim, -1) @ split.weight.T) + 1
    torch.testing.assert_close(changed.eval()(x), expected.movedim(-1, split.feature_dim))


def test_gradients_reach_the_backbone_and_the_head_has_no_parameters_there():
    model, x, *_ = made("operator on a plane")
    split = split_head(model, x)
    assert not split.weight.requires_grad
    split.backbone(x).square().sum().backward()
    names = [name for name, p in split.backbone.named_parameters() if p.grad is not None]
    assert len(names) == 6
    assert len(list(split.backbone.parameters())) == 6


def test_a_copied_and_reloaded_backbone_works():
    model, x, *_ = made("mlp")
    split = split_head(model, x)
    other = copy.deepcopy(split.backbone)
    other.load_state_dict(split.backbone.state_dict())
    torch.testing.assert_close(other(x), split.backbone(x))


@pytest.mark.parametrize("with_example", [True, False])
def test_a_squeezed_single_output_keeps_its_dimension_in_the_split(with_example):
    torch.manual_seed(0)
    model, x = Squeezed(), torch.randn(5, 4)
    split = split_head(model, x if with_example else None)
    assert (split.squeezed, split.verified) == (True, True)
    torch.testing.assert_close(applied(split, split.backbone(x))[:, 0], model(x))
    torch.testing.assert_close(merge_head(split, split.weight, split.bias)(x), model(x))


class Then(nn.Module):
    """A body, a layer and then a function of its output and the input."""

    def __init__(self, function):
        super().__init__()
        self.body, self.fc, self.function = nn.Linear(4, 6), nn.Linear(6, 4), function

    def forward(self, x):
        return self.function(self.fc(torch.tanh(self.body(x))), x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(4, 6), nn.Linear(6, 4)
        self.fc.weight = self.embedding.weight

    def forward(self, x):
        return self.fc(self.embedding(x.long().clamp(0, 3)))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(torch.tanh(self.fc(x)))


class WeightUsed(Twice):
    def forward(self, x):
        return self.fc(torch.tanh(x @ self.fc.weight))


def shared_storage():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].weight.data = model[0].weight.data
    return nn.Sequential(nn.Linear(4, 6), *model)


def hooked():
    model = mlp()
    model[2].register_forward_hook(lambda m, a, out: out * 2)
    return model


REFUSED = {
    "no layer": (lambda: nn.Sequential(nn.Tanh()), "no Linear or 1x1 convolution"),
    "activation": (lambda: mlp(nn.Softplus()), r"'3' \(Softplus\) comes after the last"),
    "in-place": (lambda: mlp(nn.ReLU(inplace=True)), r"'3' \(ReLU\) comes after the last"),
    "norm": (lambda: mlp(nn.LayerNorm(2)), r"'3' \(LayerNorm\) comes after the last"),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), r"'3' \(Dropout\) comes after the last"),
    "function": (lambda: Then(lambda h, x: torch.sigmoid(h)), "comes after the last"),
    "clamp": (lambda: Then(lambda h, x: h.clamp(-50, 50)), "comes after the last"),
    "residual": (lambda: Then(lambda h, x: h + x), "comes after the last"),
    "in-place sum": (lambda: Then(lambda h, x: h.add_(x) * 1), "comes after|used twice"),
    "tuple": (lambda: Then(lambda h, x: (h, x)), "returns a tuple: wrap it"),
    "sum": (lambda: Then(lambda h, x: h.sum(-1)), "comes after|end the model with"),
    "tied": (Tied, "shares its weight with 'embedding.weight': untie"),
    "shared storage": (shared_storage, "shares its weight with '1.weight'"),
    "twice": (Twice, "used twice"),
    "weight used": (WeightUsed, "used elsewhere too|fails without its last layer"),
    "parametrised": (
        lambda: nn.Sequential(nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))),
        "parametrised weight: make it plain first",
    ),
    "hooked": (hooked, "has forward hooks"),
}


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_split_is_refused_in_one_line(name, with_example):
    build, message = REFUSED[name]
    with pytest.raises(SplitError, match=message) as caught:
        split_head(build(), torch.randn(5, 4) if with_example else None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("conv", "message"),
    [
        (nn.Conv1d(4, 2, 3, padding=1), r"kernel \(3,\)"),
        (nn.Conv1d(4, 2, 1, stride=2), r"stride \(2,\)"),
        (nn.Conv1d(4, 2, 1, padding=1), r"padding \(1,\)"),
        (nn.Conv1d(4, 4, 1, groups=2), "groups 2"),
        (nn.ConvTranspose1d(4, 2, 1), "ConvTranspose1d: end the model with"),
    ],
)
@pytest.mark.parametrize("with_example", [True, False])
def test_a_convolution_that_is_not_pointwise_is_refused(conv, message, with_example):
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh(), conv)
    with pytest.raises(SplitError, match=message):
        split_head(model, torch.randn(2, 4, 8) if with_example else None)


def test_a_layer_without_weights_yet_is_refused():
    with pytest.raises(SplitError, match="run the model once"):
        split_head(nn.Sequential(nn.Tanh(), nn.LazyLinear(2)))


def test_what_is_no_model_and_what_does_not_run_are_refused():
    with pytest.raises(SplitError, match="is no torch"):
        split_head(lambda x: x)
    with pytest.raises(SplitError, match="fails on the example: RuntimeError"):
        split_head(mlp(), torch.randn(5, 3))


def test_an_unverified_guess_is_found_out():
    split = split_head(RegisteredFirst())
    assert (split.path, split.verified) == ("body", False)
    with pytest.raises(SplitError):
        split.verify(torch.randn(5, 4))


def test_merging_refuses_what_does_not_fit():
    split = split_head(mlp(), torch.randn(5, 4))
    with pytest.raises(SplitError, match=r"must have shapes \(2, 6\) and \(2,\), got"):
        merge_head(split, torch.zeros(2, 5), None)
    with pytest.raises(SplitError, match="did not come from split_head"):
        merge_head(nn.Tanh(), torch.zeros(2, 6), None)
