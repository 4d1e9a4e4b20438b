"""Backbones: shapes, seeds, freedom from the grid, factories and their errors."""

import sys

import pytest
import torch
from torch import nn

from kalmanhead.backbones import FNO, MLP, LinearBackbone, load_factory, make_backbone
from kalmanhead.errors import ConfigError
from kalmanhead.spectral import SpectralConv

CASES = [
    ("auto", (3,), MLP, -1, 64),
    ("auto", (2, 32), FNO, 1, 64),
    ("auto", (2, 12, 10), FNO, 1, 64),
    ("linear", (3,), LinearBackbone, -1, 3),
    ("linear", (2, 32), LinearBackbone, 1, 2),
    ("mlp", (3,), MLP, -1, 64),
    ("mlp", (2, 32), MLP, 1, 64),
    ("mlp", (2, 4, 5, 6), MLP, 1, 64),
    ("fno", (2, 32), FNO, 1, 64),
    ("fno", (2, 12, 10), FNO, 1, 64),
]


@pytest.mark.parametrize(("name", "shape", "kind", "feature_dim", "d"), CASES)
def test_every_backbone_says_what_it_gives(name, shape, kind, feature_dim, d):
    backbone = make_backbone(name, shape, len(shape) - 1, seed=0)
    assert type(backbone) is kind
    assert (backbone.feature_dim, backbone.out_features) == (feature_dim, d)
    phi = backbone(torch.randn(5, *shape, generator=torch.Generator().manual_seed(1)))
    assert phi.shape == ((5, d) if feature_dim == -1 else (5, d, *shape[1:]))
    assert phi.dtype == torch.float32
    assert bool(torch.isfinite(phi).all())


@pytest.mark.parametrize(("name", "shape"), [("mlp", (3,)), ("fno", (1, 16)), ("fno", (1, 8, 8))])
def test_a_seed_decides_the_weights_and_the_global_seed_is_left_alone(name, shape):
    before = torch.random.get_rng_state()

    def weights(seed):
        backbone = make_backbone(name, shape, len(shape) - 1, width=4, seed=seed)
        return torch.cat([p.detach().flatten() for p in backbone.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
    assert not torch.equal(weights(None), weights(None))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert weights(3).dtype == torch.float32


def test_an_mlp_on_a_field_treats_every_point_alone():
    field = torch.randn(2, 3, 7)
    pointwise, rows = MLP(3, 8, feature_dim=1, seed=0), MLP(3, 8, seed=0)
    expected = torch.stack([rows(field[..., j]) for j in range(7)], dim=-1)
    torch.testing.assert_close(pointwise(field), expected)


def dense_spectral(weight, h):
    """The definition, by full complex transforms in float64."""
    axes = tuple(range(1, h.ndim - 1))
    f = torch.fft.fftn(h.to(torch.complex128), dim=axes, norm="forward")
    w = torch.view_as_complex(weight.detach().to(torch.float64))
    modes = w.shape[-3]
    out = torch.zeros_like(f)
    keep = [min(modes, (m + 1) // 2) for m in h.shape[1:-1]]
    if len(axes) == 1:
        for k in range(keep[0]):
            out[:, k] = (1 if k == 0 else 2) * (f[:, k] @ w[k])
    else:
        for k1 in range(1 - keep[0], keep[0]):
            for k2 in range(keep[1]):
                out[:, k1, k2] = (1 if k2 == 0 else 2) * (f[:, k1, k2] @ w[k1 + modes - 1, k2])
    return torch.fft.ifftn(out, dim=axes, norm="forward").real


@pytest.mark.parametrize("grid", [(1,), (2,), (5,), (8,), (33,), (6, 9), (3, 20), (16, 2), (1, 1)])
def test_spectral_convolution_is_its_definition(grid):
    generator = torch.Generator().manual_seed(0)
    layer = SpectralConv(3, 4, len(grid), generator).double()
    h = torch.randn(2, *grid, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(layer(h), dense_spectral(layer.weight, h), atol=1e-12, rtol=0)


def band_limited(grid, top):
    """Two rows of sums of waves up to frequency `top`, the same functions on any grid."""
    axes = [torch.arange(m, dtype=torch.float64) / m for m in grid]
    x = torch.meshgrid(*axes, indexing="ij")
    phase = sum((i + 1) * axis for i, axis in enumerate(x))
    waves = [
        torch.sin(2 * torch.pi * phase + s) + torch.cos(2 * torch.pi * top * x[0]) for s in (0, 1)
    ]
    return torch.stack(waves)[:, None]


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("coordinates", [False, True])
def test_a_linear_fno_gives_the_same_features_on_any_grid(dims, coordinates):
    coarse, factor = (64,) if dims == 1 else (16, 16), 4 if dims == 1 else 2
    # A position is not band-limited: there the spectral layers must see the lowest mode alone.
    modes = 8 if not coordinates else 1
    fno = FNO(1, dims, 8, modes, coordinates=coordinates, activation="identity", seed=0).double()
    fine = tuple(factor * m for m in coarse)
    low, high = fno(band_limited(coarse, 3)), fno(band_limited(fine, 3))
    shared = high[(..., *[slice(None, None, factor)] * dims)]
    if coordinates:  # the mean position of m points is (m - 1) / 2m
        low, shared = low - low.mean(dim=-1, keepdim=True), shared - shared.mean(-1, keepdim=True)
    torch.testing.assert_close(low, shared, atol=1e-10, rtol=0)


def test_a_gelu_fno_nearly_gives_the_same_features_on_a_finer_grid():
    fno = FNO(1, seed=0)
    low, high = (fno(band_limited((m,), 3).float()) for m in (64, 256))
    torch.testing.assert_close(low, high[..., ::4], atol=1e-3, rtol=0)


def test_an_fno_learns_with_plain_real_weights():
    fno = FNO(1, width=4, modes=4, seed=0)
    fno(torch.randn(2, 1, 16)).square().sum().backward()
    for parameter in fno.parameters():
        assert not parameter.is_complex()
        assert parameter.grad is not None
        assert bool(parameter.grad.abs().sum() > 0)


def test_an_fno_first_run_in_inference_mode_can_still_be_trained():
    fno = FNO(1, width=4, modes=3, seed=0)
    x = torch.randn(2, 1, 38)
    with torch.inference_mode():
        fno(x)
    fno(x).sum().backward()
    gradients = [p.grad for p in fno.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert any((g != 0).any() for g in gradients)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("cnn", (3,), 0), {}, "'cnn' is unknown: choose from auto, linear, mlp, fno"),
        (("fno", (3,), 0), {}, "needs a grid of 1 or 2 dimensions, not 0: choose from linear, mlp"),
        (("auto", (1, 4, 4, 4), 3), {}, "not 3"),
        (("mlp", (3, 4), 0), {}, r"\(3, 4\) has no 0 grid dimensions"),
        (("mlp", (3,), 0), {"modes": 4}, "mlp takes no modes"),
        (("linear", (3,), 0), {"width": 4}, "linear takes no width"),
        (("mlp", (3,), 0), {"width": 0}, "width must be at least 1, got 0"),
        (("fno", (1, 8), 1), {"depth": 0}, "layers must be at least 1"),
    ],
)
def test_senseless_backbones_are_refused_in_one_line(arguments, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_backbone(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_wrong_activations_and_shapes_are_refused():
    with pytest.raises(ConfigError, match="activation 'sin' is unknown: choose from gelu"):
        MLP(3, activation="sin")
    with pytest.raises(ConfigError, match=r"expects x \(n, 1, points\), got \(2, 3, 8\)"):
        FNO(1, width=4)(torch.zeros(2, 3, 8))


MODULE = """
import torch
def shaped(x_shape, y_shape):
    return torch.nn.Linear(x_shape[0], y_shape[0])
def plain():
    return torch.nn.Linear(1, 2)
def failing():
    raise ValueError("no luck")
def three(a, b, c): ...
def number():
    return 3
class Zoo:
    small = shaped
value = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "factories_of_a_test.py").write_text(MODULE)
    (tmp_path / "breaks_on_import.py").write_text("import math\nmath.nothing\n")
    (tmp_path / "needs_another.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("factories_of_a_test", "breaks_on_import", "needs_another"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "shape"), [("shaped", (5, 3)), ("plain", (2, 1)), ("Zoo.small", (5, 3))]
)
def test_a_factory_is_found_in_the_current_directory(user_module, name, shape):
    path = list(sys.path)
    model = load_factory(f"factories_of_a_test:{name}")((3,), (5,))
    assert isinstance(model, nn.Linear)
    assert tuple(model.weight.shape) == shape
    assert sys.path == path


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("factories_of_a_test", "is no factory: write path.to:factory"),
        ("a b:c", "is no factory"),
        ("x:", "is no factory"),
        ("not_there_at_all:make", "module not_there_at_all is not found"),
        ("breaks_on_import:make", "importing breaks_on_import failed: AttributeError"),
        ("needs_another:make", "importing needs_another failed: ModuleNotFoundError"),
        ("factories_of_a_test:missing", "has no missing: check the spelling"),
        ("factories_of_a_test:value", "is a int: name a function or class"),
        ("factories_of_a_test:failing", "failed: ValueError: no luck"),
        ("factories_of_a_test:three", "failed: TypeError"),
        ("factories_of_a_test:number", "returned a int: it must return a torch.nn.Module"),
    ],
)
def test_every_fault_of_a_factory_is_named(user_module, spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_factory(spec)((3,), (5,))
    assert "\n" not in str(caught.value)
