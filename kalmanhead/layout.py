"""How features, targets and weights lie in memory, and the checks that they belong together.

Rows first: features are (n, d) or (*, d) as in `torch.nn.Linear` (`feature_dim` -1), or
(n, d, *grid) as in a 1x1 convolution (`feature_dim` 1), where every grid point of every sample
is a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kalmanhead.errors import ConfigError

# A row of a larger weight leaves no digit to the prior.
LARGEST_WEIGHT = 1e12


def as_rows(values: Tensor, feature_dim: int) -> Tensor:
    """Every point of every sample as a row: (n, d, *grid) or (*, d) -> (rows, d)."""
    moved = values.movedim(feature_dim, -1)
    return moved.flatten(0, -2)


def as_outputs(rows: Tensor, like: Tensor, feature_dim: int) -> Tensor:
    """Inverse of `as_rows`: (rows, k) back to the leading and grid dimensions of `like`."""
    moved = like.movedim(feature_dim, -1)
    return rows.reshape(*moved.shape[:-1], rows.shape[-1]).movedim(-1, feature_dim)


def point_weights(weight: Tensor | None, phi: Tensor, feature_dim: int) -> Tensor | None:
    """Weights of samples, (n,), spread over the points of each sample, (rows,)."""
    if weight is None:
        return None
    points = math.prod(phi.movedim(feature_dim, -1).shape[1:-1])
    return weight.repeat_interleave(points)


def target_weights(y: Tensor, weight: Tensor | None, feature_dim: int) -> Tensor:
    """Weight of each target, (rows, k), float64: that of its sample, 0 where it is missing."""
    seen = (~torch.isnan(as_rows(y, feature_dim))).to(torch.float64)
    weights = point_weights(weight, y, feature_dim)
    return seen if weights is None else seen * weights.to(seen)[:, None]


def fill_missing(
    y: Tensor,  # (rows, k)
    prediction: Tensor,  # (rows, k)
    weight: Tensor | None,  # (rows,)
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Targets, weights and learnt rows per output (k,) when NaN marks a missing target.

    A row without any target gets weight 0. A row with some gets its own prediction for the
    missing ones: no innovation, so their weights stay as they are. One P serves all outputs, so
    such a row still narrows P for the output it did not show.
    """
    missing = torch.isnan(y)
    if not missing.any():
        total = y.new_tensor(float(y.shape[0])) if weight is None else weight.sum()
        return y, weight, total.expand(y.shape[1])
    seen = (~missing).to(y.dtype)
    if weight is None:
        weight = torch.ones_like(y[:, 0])
    weight = weight * (~missing.all(1)).to(y.dtype)
    return torch.where(missing, prediction, y), weight, (seen * weight[:, None]).sum(0)


def linear_outputs(mean: Tensor, phi: Tensor, has_bias: bool, feature_dim: int) -> Tensor:
    """Outputs W phi + b in the dtype of phi; mean (k, d) holds the constant's weight first."""
    if not phi.is_floating_point():  # W in integers would be rounded
        phi = phi.to(mean.dtype)
    mean = mean.to(phi.dtype)
    weight, bias = (mean[:, 1:], mean[:, 0]) if has_bias else (mean, None)
    if feature_dim == -1 or phi.dim() == 2:
        return nn.functional.linear(phi, weight, bias)
    outputs = weight @ phi.flatten(2)
    if bias is not None:
        outputs = outputs + bias[:, None]
    return outputs.reshape(phi.shape[0], weight.shape[0], *phi.shape[2:])


def rescaled_weight(mean: Tensor, ratio: Tensor, offset: Tensor, has_bias: bool) -> Tensor:
    """W for targets that are now `ratio * y + offset`."""
    scaled = mean * ratio.to(mean)[:, None]
    if has_bias:
        scaled[..., 0] += offset.to(mean)
    return scaled


def check_sizes(in_features: int, out_features: int, feature_dim: int) -> None:
    """Refuse sizes that make no layer."""
    if not all(isinstance(size, int) for size in (in_features, out_features)):
        raise ConfigError(
            f"a head of {in_features!r} features and {out_features!r} outputs: give whole numbers"
        )
    if in_features < 0 or out_features < 1:
        raise ConfigError(
            f"a head of {in_features} features and {out_features} outputs makes no sense: "
            "give in_features >= 0 and out_features >= 1"
        )
    if feature_dim not in (-1, 1):
        raise ConfigError(f"feature_dim is {feature_dim}: -1 (as Linear) or 1 (as a convolution)")


def check_pair(
    phi: Tensor,
    y: Tensor,
    weight: Tensor | None,
    in_features: int,
    out_features: int,
    feature_dim: int,
) -> None:
    """Refuse features, targets and weights that do not belong together."""
    if phi.is_complex() or y.is_complex():
        raise ConfigError(f"features are {phi.dtype} and targets {y.dtype}: give real numbers")
    rest_phi, rest_y = list(phi.shape), list(y.shape)
    if phi.dim() < 2 or y.dim() < 2 or rest_phi.pop(feature_dim) != in_features:
        raise ConfigError(
            f"features have shape {tuple(phi.shape)}: the head expects {in_features} in "
            f"dimension {feature_dim}"
        )
    if rest_y.pop(feature_dim) != out_features or rest_phi != rest_y:
        raise ConfigError(
            f"targets have shape {tuple(y.shape)} beside features {tuple(phi.shape)}: expected "
            f"{out_features} in dimension {feature_dim} and the same other dimensions"
        )
    if weight is not None:
        check_weight(weight, phi.shape[0])


def check_weight(weight: Tensor, samples: int) -> None:
    """Refuse row weights that are not one non-negative number per sample."""
    if weight.shape != (samples,):
        raise ConfigError(
            f"weight has shape {tuple(weight.shape)}: give one per sample, ({samples},)"
        )
    if not (torch.isfinite(weight).all() and (weight >= 0).all()):
        raise ConfigError("weight holds a negative or non-finite number: 0 leaves a row out")
    if (weight > LARGEST_WEIGHT).any():
        row = int(weight.argmax())
        raise ConfigError(
            f"weight holds {weight[row]:g} in row {row} of the batch: give at most "
            f"{LARGEST_WEIGHT:g}, beyond which a row counts as known exactly"
        )
