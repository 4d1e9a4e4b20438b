"""The last linear layer of a torch model, made a head of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from kalmanhead.errors import SplitError
from kalmanhead.head import Head
from kalmanhead.split import split_head


def take_head(
    model: nn.Module, example: Tensor | None, make: Callable[..., Head]
) -> tuple[nn.Module, Head]:
    """Backbone of a copy of the model, and a head that starts from its last layer.

    Parameters and errors are those of `OnlineLearner.wrap`.
    """
    split = split_head(model, example)
    if not split.verified:
        raise SplitError(
            f"that {split.path} is the last thing {type(model).__name__} does could not be "
            "proved by tracing it: give wrap an example input (example=x)"
        )
    k, d = split.weight.shape
    head = make(d, k, bias=split.bias is not None, feature_dim=split.feature_dim)
    head.set_weight(split.weight, split.bias)
    return split.backbone, head
