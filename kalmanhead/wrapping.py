"""The last linear layer of a torch model, made a head of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kalmanhead.errors import SplitError
from kalmanhead.head import Head
from kalmanhead.split import HeadSplit, split_head
from kalmanhead.tap import SplitBackbone


class ProvedLater(SplitBackbone):
    """The backbone of a model that could not be traced: proved on the first input it meets.

    Until then nothing is learnt or predicted, so a wrong guess of the last layer does no harm.
    """

    def __init__(self, split: HeadSplit) -> None:
        assert isinstance(split.backbone, SplitBackbone)
        super().__init__(split.backbone.model, split.backbone.tap)
        self.unproved: HeadSplit | None = split

    def forward(self, *args: Any) -> Tensor:
        """Features under the last layer, once it is sure that it is the last.

        Raises
        ------
        SplitError
            The layer that was registered last is not the model's output.
        """
        if self.unproved is not None:
            path = self.unproved.path
            try:
                self.unproved.verify(args)
            except SplitError as error:
                raise SplitError(
                    f"{error} (if {path!r} is not the last layer, give wrap an input to find it: "
                    "example=x)"
                ) from error
            self.unproved = None
        return super().forward(*args)


def take_head(
    model: nn.Module, example: Tensor | None, make: Callable[..., Head]
) -> tuple[nn.Module, Head]:
    """Backbone of a copy of the model, and a head that starts from its last layer.

    Parameters and errors are those of `OnlineLearner.wrap`.
    """
    split = split_head(model, example)
    k, d = split.weight.shape
    head = make(d, k, bias=split.bias is not None, feature_dim=split.feature_dim)
    head.set_weight(split.weight, split.bias)
    return split.backbone if split.verified else ProvedLater(split), head
