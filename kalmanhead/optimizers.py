"""Optimisers for the backbone, made once its parameters are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from kalmanhead.errors import ConfigError, kind_and_line

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(lr: float = 3e-3) -> OptimizerFactory:
    """Adam with this learning rate, as an argument for `OnlineLearner`."""
    return lambda parameters: torch.optim.Adam(parameters, lr=lr)


def sgd(lr: float = 1e-2, momentum: float = 0.9) -> OptimizerFactory:
    """SGD with momentum, as an argument for `OnlineLearner`."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def make_optimizer(make: OptimizerFactory, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of these parameters.

    Raises
    ------
    ConfigError
        What should make it is no function, or refuses its arguments.
    """
    if not callable(make):
        raise ConfigError(
            f"optimizer is a {type(make).__name__}: give what makes one, such as adam(3e-3) or "
            "lambda parameters: torch.optim.Adam(parameters)"
        )
    try:
        return make(trained)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the optimizer cannot be made: {kind_and_line(error)}") from error
