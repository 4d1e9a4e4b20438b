"""A model without its last layer: a tap in the layer's place catches the features."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from kalmanhead.errors import SplitError

_CONVS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


class HeadTap(nn.Module):
    """Stands where the last layer was: keeps the features, passes on zeros of the output's shape.

    What the model does after the layer (a reshape, a squeeze) so meets the shapes it expects.
    """

    def __init__(self, layer: nn.Linear | _ConvNd) -> None:
        super().__init__()
        self.out_features, self.in_features = (int(m) for m in layer.weight.shape[:2])
        self.grid_dims = layer.weight.ndim - 2  # 0 for Linear
        self.dtype = layer.weight.dtype
        self.features: Tensor | None = None
        self.probe: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Zeros of the layer's output shape, or random values while the split is verified."""
        if self.features is not None:
            raise SplitError("the last layer is used twice in one pass: it cannot be split off")
        self.features = features
        shape = list(features.shape)
        shape[self.feature_dim] = self.out_features
        if self.probe is None:
            return features.new_zeros(shape)
        self.probe = torch.randn(shape, dtype=features.dtype).to(features.device) * 100
        return self.probe.clone()

    @property
    def feature_dim(self) -> int:
        """Dimension of the features."""
        return 1 if self.grid_dims else -1

    def layer(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """A layer like the one that was here, with this weight (k, d) and bias (k,)."""
        k, d = self.out_features, self.in_features
        # Built without storage first: initialisation would draw from the global seed.
        has_bias = bias is not None
        made: nn.Linear | _ConvNd
        if self.grid_dims:
            made = _CONVS[self.grid_dims](d, k, 1, bias=has_bias, device="meta", dtype=self.dtype)
        else:
            made = nn.Linear(d, k, bias=has_bias, device="meta", dtype=self.dtype)
        made.to_empty(device=weight.device)
        with torch.no_grad():
            made.weight.copy_(weight.reshape(made.weight.shape))
            if bias is not None and made.bias is not None:
                made.bias.copy_(bias)
        return made


class SplitBackbone(nn.Module):
    """A model without its last layer; `out_features` (d) and `feature_dim` say what it gives.

    The model still runs to its end, on zeros, so that features come in the grid of the model's
    output where that only reshapes what the layer gave.
    """

    def __init__(self, model: nn.Module, tap: HeadTap) -> None:
        super().__init__()
        self.model = model
        # By name: the tap is part of the model and may not be registered twice.
        self._tap_path = next(p for p, m in model.named_modules() if m is tap)
        self.out_features = tap.in_features
        self.feature_dim = tap.feature_dim

    @property
    def tap(self) -> HeadTap:
        """The module in the last layer's place."""
        tap = self.model.get_submodule(self._tap_path)
        assert isinstance(tap, HeadTap)
        return tap

    def forward(self, *args: Any) -> Tensor:
        """Features under the last layer, (n, ..., d) or (n, d, *grid)."""
        features, output, _ = self.run(*args)
        return self.arranged(features, output)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Parameters, buffers and extra state, as torch has them, and nothing else.

        Some models (those of neuraloperator) add the arguments they were built with, functions
        among them, which no checkpoint holds.
        """
        there = set(options.get("destination") or ())
        found: dict[str, Any] = super().state_dict(*args, **options)
        for key in found.keys() - there:
            if not isinstance(found[key], Tensor) and not key.endswith("_extra_state"):
                del found[key]
        return found

    def run(self, *args: Any) -> tuple[Tensor, Any, Tensor | None]:
        """Features, the model's output and the probe that went in its last layer's place."""
        tap = self.tap
        tap.features = None
        try:
            output = self.model(*args)
            features, probe = tap.features, tap.probe
        finally:
            tap.features = None
        if features is None:
            raise SplitError("the last layer was not called: give an example input to find it")
        return features, output, probe

    def arranged(self, features: Tensor, output: Any) -> Tensor:
        """Features in the grid of the model's output."""
        axis, k = self.feature_dim, self.tap.out_features
        if not isinstance(output, Tensor):
            raise SplitError(
                f"the model returns a {type(output).__name__}: wrap it so that it returns a tensor"
            )
        given = list(features.shape)
        given[axis] = k
        if list(output.shape) == given or is_squeezed(given, output, axis):
            return features
        wanted = list(output.shape)
        keeps_rows = axis == -1 or wanted[:1] == given[:1]
        if (
            len(wanted) > 1
            and wanted[axis] == k
            and keeps_rows
            and math.prod(wanted) == math.prod(given)
        ):
            wanted[axis] = self.out_features
            return features.reshape(wanted)
        raise SplitError(
            f"the last layer gives shape {tuple(given)} but the model {tuple(output.shape)}: "
            "end the model with the layer, and rearrange its output outside"
        )


def is_squeezed(given: list[int], output: Tensor, axis: int) -> bool:
    """Whether the output is that of a layer with k = 1 whose feature dimension was dropped."""
    if given[axis] != 1:
        return False
    alone = given[:axis] + given[axis:][1:]
    return list(output.shape) in (alone, [m for m in given if m != 1])
