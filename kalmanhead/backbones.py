"""Backbones: everything before the last linear layer.

Every backbone has `out_features` (d) and `feature_dim`: -1 where features lie in the last
dimension, x (n, d_in) -> phi (n, d); 1 where they lie behind the rows, x (n, channels, *grid) ->
phi (n, d, *grid). Weights come from a local generator; the global seed is never touched.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kalmanhead.errors import ConfigError, kind_and_line
from kalmanhead.spectral import SpectralConv

BACKBONES = ("auto", "linear", "mlp", "fno")

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is unknown: choose from {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _linear(d_in: int, d_out: int, generator: torch.Generator) -> nn.Linear:
    """torch.nn.Linear with its usual initial distribution, drawn from the generator."""
    # Built without storage first: the layer's own initialisation would draw from the global seed.
    layer = nn.Linear(d_in, d_out, device="meta", dtype=torch.float32).to_empty(device="cpu")
    bound = 1 / math.sqrt(d_in)
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer


class LinearBackbone(nn.Module):
    """The identity: with a linear head on top, the whole model is linear.

    Parameters
    ----------
    in_features:
        Features or channels of the input.
    feature_dim:
        -1 for x (n, in_features), 1 for x (n, in_features, *grid).

    Raises
    ------
    ConfigError
        If in_features is less than 1.

    Examples
    --------
    >>> LinearBackbone(3)(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, in_features: int, feature_dim: int = -1) -> None:
        super().__init__()
        _require_positive(in_features=in_features)
        self.in_features = in_features
        self.out_features = in_features
        self.feature_dim = feature_dim

    def forward(self, x: Tensor) -> Tensor:
        """The input itself."""
        return x


class MLP(nn.Module):
    """Linear layers, each followed by the activation, the last one too; float32.

    Parameters
    ----------
    in_features:
        Features or channels of the input.
    width, depth:
        Features of each layer, and the number of layers.
    activation:
        gelu, relu, silu, tanh or identity.
    feature_dim:
        -1 for x (n, in_features) -> (n, width); 1 for fields, x (n, in_features, *grid) ->
        (n, width, *grid), where every grid point is treated alone.
    seed:
        Seed of the weights; None draws one.

    Raises
    ------
    ConfigError
        If a size is less than 1 or the activation is unknown.

    Examples
    --------
    >>> MLP(3, width=8, seed=0)(torch.ones(2, 3)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        width: int = 64,
        depth: int = 2,
        activation: str = "gelu",
        *,
        feature_dim: int = -1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _require_positive(in_features=in_features, width=width, depth=depth)
        _activation(activation)
        self.in_features = in_features
        self.out_features = width
        self.feature_dim = feature_dim
        self.activation = activation
        generator = _generator(seed)
        sizes = [in_features] + [width] * depth
        self.layers = nn.ModuleList(_linear(a, b, generator) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Features of x."""
        activation = _activation(self.activation)
        x = x.movedim(self.feature_dim, -1)
        for layer in self.layers:
            x = activation(layer(x))
        return x.movedim(-1, self.feature_dim)


class FNO(nn.Module):
    """Fourier neural operator (Li et al., arXiv 2010.08895) on periodic grids; float32.

    x (n, in_channels, *grid) -> phi (n, width, *grid). The weights know nothing of the grid: what
    was trained on 64 points evaluates on 256. Frequencies at or above the Nyquist frequency of a
    coarse grid are left out.

    Parameters
    ----------
    in_channels:
        Channels of the input.
    grid_dims:
        1 or 2.
    width:
        Channels of every layer, and features d.
    modes:
        Frequencies kept in each dimension: 0 ... modes - 1 and, in the first of two dimensions,
        their negatives.
    layers:
        Fourier layers.
    coordinates:
        Append the position in [0, 1) of each grid point to the input, a channel for each
        dimension. The equation may then differ from place to place.
    activation:
        gelu, relu, silu, tanh or identity.
    seed:
        Seed of the weights; None draws one.

    Raises
    ------
    ConfigError
        If a size is less than 1, grid_dims is neither 1 nor 2, or the activation is unknown.

    Examples
    --------
    >>> fno = FNO(1, grid_dims=1, width=8, seed=0)
    >>> fno(torch.ones(2, 1, 64)).shape, fno(torch.ones(2, 1, 50)).shape
    (torch.Size([2, 8, 64]), torch.Size([2, 8, 50]))
    """

    def __init__(
        self,
        in_channels: int,
        grid_dims: int = 1,
        width: int = 64,
        modes: int = 16,
        layers: int = 4,
        *,
        coordinates: bool = False,
        activation: str = "gelu",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _require_positive(in_channels=in_channels, width=width, modes=modes, layers=layers)
        _activation(activation)
        if grid_dims not in (1, 2):
            raise ConfigError(f"an fno needs a grid of 1 or 2 dimensions, got {grid_dims}")
        self.in_channels = in_channels
        self.grid_dims = grid_dims
        self.out_features = width
        self.feature_dim = 1
        self.coordinates = coordinates
        self.activation = activation
        generator = _generator(seed)
        lifted = in_channels + (grid_dims if coordinates else 0)
        self.lifting = _linear(lifted, width, generator)
        self.spectral = nn.ModuleList(
            SpectralConv(width, modes, grid_dims, generator) for _ in range(layers)
        )
        self.skips = nn.ModuleList(_linear(width, width, generator) for _ in range(layers))
        self.last = _linear(width, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the fields x."""
        if x.ndim != self.grid_dims + 2 or x.shape[1] != self.in_channels:
            axes = ", ".join(["points"] * self.grid_dims)
            raise ConfigError(
                f"fno expects x (n, {self.in_channels}, {axes}), got {tuple(x.shape)}"
            )
        activation = _activation(self.activation)
        h = x.movedim(1, -1)
        if self.coordinates:
            h = torch.cat([h, _positions(h)], dim=-1)
        h = self.lifting(h)
        for spectral, skip in zip(self.spectral, self.skips, strict=True):
            h = activation(spectral(h) + skip(h))
        return activation(self.last(h)).movedim(-1, 1)


def _positions(h: Tensor) -> Tensor:
    """Positions in [0, 1) of the grid points of h (n, *grid, c), as (n, *grid, grid_dims)."""
    axes = [torch.arange(m, dtype=h.dtype, device=h.device) / m for m in h.shape[1:-1]]
    grids = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return grids.expand(h.shape[0], *grids.shape)


def make_backbone(
    name: str,
    x_shape: Sequence[int],
    grid_dims: int,
    *,
    width: int | None = None,
    depth: int | None = None,
    modes: int | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Build a backbone by name.

    Parameters
    ----------
    name:
        auto, linear, mlp or fno; auto is an mlp for vectors and an fno for fields.
    x_shape:
        Shape of one row of x, without the rows: (d_in,) or (channels, *grid).
    grid_dims:
        Number of grid dimensions, 0 for vectors.
    width, depth, modes:
        Features, layers, and kept frequencies (fno only); None leaves the default.
    seed:
        Seed of the weights; None draws one.

    Returns
    -------
    torch.nn.Module
        A module with `out_features` and `feature_dim`.

    Raises
    ------
    ConfigError
        If the name is unknown or the combination makes no sense.

    Examples
    --------
    >>> make_backbone("auto", (3,), 0, width=16, seed=0).out_features
    16
    """
    if name not in BACKBONES:
        raise ConfigError(f"backbone {name!r} is unknown: choose from {', '.join(BACKBONES)}")
    if len(x_shape) != 1 + grid_dims or grid_dims < 0:
        raise ConfigError(f"a row of shape {tuple(x_shape)} has no {grid_dims} grid dimensions")
    if name == "auto":
        name = "mlp" if grid_dims == 0 else "fno"
    if name == "fno" and grid_dims not in (1, 2):
        raise ConfigError(
            f"backbone fno needs a grid of 1 or 2 dimensions, not {grid_dims}: "
            "choose from linear, mlp"
        )
    options = {"width": width, "depth": depth, "modes": modes}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    allowed = {"linear": (), "mlp": ("width", "depth"), "fno": ("width", "depth", "modes")}[name]
    for key in given:
        if key not in allowed:
            raise ConfigError(f"backbone {name} takes no {key}: leave it out or choose another")
    feature_dim = -1 if grid_dims == 0 else 1
    if name == "linear":
        return LinearBackbone(x_shape[0], feature_dim)
    if name == "mlp":
        return MLP(x_shape[0], feature_dim=feature_dim, seed=seed, **given)
    if "depth" in given:
        given["layers"] = given.pop("depth")
    return FNO(x_shape[0], grid_dims, seed=seed, **given)


def load_factory(spec: str) -> Callable[[Sequence[int], Sequence[int]], nn.Module]:
    """A user's own model, from `path.to:factory`.

    The module is imported as Python would from the current directory. The factory is called with
    the shapes of one row of x and of y if it takes two positional arguments, else with none, and
    returns the whole model, its last linear layer included.

    Parameters
    ----------
    spec:
        Importable module, a colon, and the name of a callable in it.

    Returns
    -------
    callable
        `build(x_shape, y_shape) -> torch.nn.Module`; raises ConfigError if the factory fails or
        returns something else.

    Raises
    ------
    ConfigError
        If the spelling is wrong, or the module or the callable cannot be had.

    Examples
    --------
    >>> load_factory("torch.nn:Identity")((3,), (1,))
    Identity()
    """
    module_name, colon, attribute = spec.partition(":")
    names = [*module_name.split("."), *attribute.split(".")]
    if not colon or not all(part.isidentifier() for part in names):
        raise ConfigError(f"{spec!r} is no factory: write path.to:factory")
    found: Any = _import(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{spec!r}: {module_name} has no {attribute}: check the spelling")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{spec!r} is a {type(found).__name__}: name a function or class that makes a model"
        )
    factory = found
    shaped = _takes_shapes(factory)

    def build(x_shape: Sequence[int], y_shape: Sequence[int]) -> nn.Module:
        try:
            model = factory(tuple(x_shape), tuple(y_shape)) if shaped else factory()
        except Exception as error:
            raise ConfigError(f"{spec!r} failed: {kind_and_line(error)}") from error
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{spec!r} returned a {type(model).__name__}: it must return a torch.nn.Module"
            )
        return model

    return build


def _import(name: str) -> Any:
    """Import a module, with the current directory importable meanwhile."""
    sys.path.insert(0, "")
    # A folder may have got its file after Python last looked into it.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"module {name} is not found: run from its folder or install it"
            ) from error
        raise ConfigError(f"importing {name} failed: {kind_and_line(error)}") from error
    except Exception as error:
        raise ConfigError(f"importing {name} failed: {kind_and_line(error)}") from error
    finally:
        if "" in sys.path:
            sys.path.remove("")


def _takes_shapes(factory: Callable[..., Any]) -> bool:
    """Whether the factory can be called with two positional arguments."""
    try:
        inspect.signature(factory).bind((), ())
    except (TypeError, ValueError):
        return False
    return True
