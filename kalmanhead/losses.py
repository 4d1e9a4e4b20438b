"""What backbones descend on, by the outputs of a head."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_loss(prediction: Tensor, target: Tensor, weight: Tensor | None) -> Tensor | None:
    """Mean of squared errors over the targets that are there; None if there are none.

    Under weights it is the weighted sum over the number of targets with a positive weight, so
    that a row of weight 2 pulls as two rows do.
    """
    error = prediction - target.to(prediction.dtype)
    missing = torch.isnan(target)
    squares = torch.where(missing, 0.0, error).square()
    counted = ~missing
    if weight is not None:
        shaped = weight.to(squares).view((-1,) + (1,) * (squares.dim() - 1))
        squares, counted = squares * shaped, counted & (shaped > 0)
    total = counted.sum()
    if int(total) == 0:
        return None
    return squares.sum() / total


def cross_entropy(prediction: Tensor, target: Tensor, weight: Tensor | None) -> Tensor | None:
    """Mean of -log softmax over rows, weighted by class probabilities; None without any row.

    Parameters
    ----------
    prediction, target:
        Logits and probabilities of the classes, (n, k): 0 and 1 for a label, NaN where it is
        missing.
    weight:
        Of the rows, (n,), as for `squared_loss`.
    """
    missing = torch.isnan(target).any(1)
    told = torch.where(missing[:, None], 0.0, target).to(prediction.dtype)
    rows, counted = -(told * prediction.log_softmax(1)).sum(1), ~missing
    if weight is not None:
        rows, counted = rows * weight.to(rows), counted & (weight > 0)
    total = counted.sum()
    return None if int(total) == 0 else rows.sum() / total
