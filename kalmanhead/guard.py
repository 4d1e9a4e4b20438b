"""What a learner makes sure of before it learns: values, modes, features, the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kalmanhead.batch import LARGEST_VALUE
from kalmanhead.errors import ConfigError, kind_and_line
from kalmanhead.head import Head
from kalmanhead.layout import check_weight

_TOO_LARGE = f"a number beyond {LARGEST_VALUE:g}"


def check_batch(x: Tensor, y: Tensor, weight: Tensor | None, outputs: int) -> None:
    """Refuse a batch that nothing can be learnt from, before anything changes."""
    _check_values(x, y, weight)
    if y.shape[1] != outputs:
        raise ConfigError(f"y has shape {tuple(y.shape)}: the head has {outputs} outputs")


def as_inputs(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Inputs on the device; truth values become numbers."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.is_complex():
        what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x)
        raise ConfigError(f"x is {what}: give a real tensor, (n, d_in) or (n, channels, *grid)")
    x = x.to(device)
    return x.to(dtype) if x.dtype == torch.bool else x


def check_trainable(trained: list[nn.Parameter]) -> None:
    """Refuse weights whose small steps would vanish."""
    if trained and trained[0].dtype == torch.float16:
        raise ConfigError(
            "a float16 backbone cannot be trained, its small steps vanish: use bfloat16, "
            "float32 or float64"
        )


def _check_values(x: Tensor, y: Tensor, weight: Tensor | None) -> None:
    for name, values in (("x", x), ("y", y), ("weight", weight)):
        if values is None and name == "weight":
            continue
        if not isinstance(values, Tensor) or values.is_complex():
            what = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(f"{name} is {what}: give a real torch.Tensor")
    if x.dim() < 2 or y.dim() < 2 or x.shape[0] != y.shape[0]:
        raise ConfigError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}: give (n, ...) each, with the "
            "same n and at least two dimensions"
        )
    if not _is_small(x):
        bad = ~(x.double().abs() <= LARGEST_VALUE)
        what = "NaN or infinity" if not torch.isfinite(x).all() else _TOO_LARGE
        raise ConfigError(f"x holds {what} in {_first_bad(bad)}")
    if not _is_small(y) and (bad := y.double().abs() > LARGEST_VALUE).any():
        what = "infinity" if torch.isinf(y).any() else _TOO_LARGE
        raise ConfigError(f"y holds {what} in {_first_bad(bad)}; a missing target is NaN")
    if weight is not None:
        check_weight(weight, x.shape[0])


def _is_small(values: Tensor) -> bool:
    """Whether all values are finite and of a size whose square is too."""
    if values.numel() == 0 or values.dtype == torch.bool:
        return True
    low, high = (float(end) for end in values.detach().aminmax())
    return low >= -LARGEST_VALUE and high <= LARGEST_VALUE


def owned(values: Tensor, device: torch.device) -> Tensor:
    """A tensor apart from the caller's graph, in a dtype and mode that can be computed with."""
    values = values.detach().to(device)
    if values.dtype == torch.bool:
        values = values.to(torch.float32)
    return values.clone() if values.is_inference() else values


def _first_bad(bad: Tensor) -> str:
    row, column, *_ = bad.nonzero()[0].tolist()
    return f"row {row}, column {column} of the batch: clean or drop that row"


def acts_by_mode(backbone: nn.Module, x: Tensor) -> bool:
    """Whether a backbone gives other features in training than in evaluation mode.

    Normalisation by batch and dropout are known by type; anything else shows by comparing.
    """
    by_type = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    if any(isinstance(module, by_type) for module in backbone.modules()):
        return True
    with torch.no_grad():
        backbone.eval()
        evaluated = run_backbone(backbone, x)
        backbone.train()
        trained = backbone(x)
        backbone.eval()
    return not torch.equal(evaluated, trained)


@contextmanager
def training_mode(backbone: nn.Module, *, single: bool) -> Iterator[None]:
    """Training mode for a while; with a single row, but for the layers that normalise by batch.

    A single row, as the last batch of an epoch may be, has no variance to normalise by.
    """
    backbone.train()
    if single:
        for module in backbone.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
    try:
        yield
    finally:
        backbone.eval()


def run_backbone(backbone: nn.Module, x: Tensor) -> Tensor:
    """Features of x, or an error in our words where the backbone fails on it."""
    try:
        phi = backbone(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if "memory" in str(error):
            raise
        raise ConfigError(
            f"the backbone fails on inputs of shape {tuple(x.shape)} ({kind_and_line(error)}): "
            "give the inputs that it was made for"
        ) from error
    if not isinstance(phi, Tensor):
        raise ConfigError(
            f"the backbone returns a {type(phi).__name__}: wrap it so that it returns a tensor"
        )
    return phi


def check_width(phi: Tensor, head: Head) -> Tensor:
    """Features, after making sure that the head can take them."""
    width, axis = head.in_features, head.feature_dim
    if phi.dim() < 2 or phi.shape[axis] != width:
        raise ConfigError(
            f"the features have shape {tuple(phi.shape)}, the head expects {width} in "
            f"dimension {axis}: build the head with as many"
        )
    return phi
