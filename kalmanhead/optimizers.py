"""Optimisers for the backbone, made once its parameters are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from kalmanhead.errors import ConfigError, NumericalError, kind_and_line

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


# Beyond it a step does not fit float32, in which torch's optimisers hold theirs.
LARGEST_RATE = 1e30
# Of its rate at the start, what an annealed optimiser goes down to.
LEAST_SHARE = 0.1


def adam(lr: float = 3e-3) -> OptimizerFactory:
    """Adam with this learning rate (see `checked`), as an argument for `OnlineLearner`."""
    rate = checked(lr)
    return lambda parameters: torch.optim.Adam(parameters, lr=rate)


def sgd(lr: float = 1e-2, momentum: float = 0.9) -> OptimizerFactory:
    """SGD with momentum and this rate (see `checked`), as an argument for `OnlineLearner`."""
    rate = checked(lr)
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum)


def annealed(make: OptimizerFactory, batches: float) -> OptimizerFactory:
    """The same optimiser with a rate that falls as 1 / sqrt(1 + steps / batches), to a tenth.

    Small batches need it on long streams, where the noise of a constant rate is what is left of
    the error; the floor is for streams that never stand still. What is needed to go on lies in the
    optimiser's own state.
    """
    if not batches > 0:
        raise ConfigError(
            f"anneal is {batches!r}: give a number of batches, or 0 for a rate as it is"
        )

    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            group |= {"anneal": float(batches), "initial_lr": group["lr"], "steps": 0}
        return optimizer

    return made


def _anneal(optimizer: torch.optim.Optimizer) -> None:
    """Bring the rate of a step up to its number."""
    for group in optimizer.param_groups:
        if "anneal" in group:
            fallen = 1 / math.sqrt(1 + group["steps"] / group["anneal"])
            group["lr"] = group["initial_lr"] * max(LEAST_SHARE, fallen)
            group["steps"] += 1


def checked(lr: float) -> float:
    """A learning rate.

    Raises
    ------
    ConfigError
        It is no number from 0 to 1e30.
    """
    if not isinstance(lr, int | float) or not 0 <= lr <= LARGEST_RATE:
        raise ConfigError(f"lr is {lr!r}: give a learning rate from 0 to {LARGEST_RATE:g}")
    return float(lr)


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


def descend(
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    parameters: list[nn.Parameter],
    clip: float | None,
) -> None:
    """One step down the gradient of a loss; nothing moves where it is not finite.

    Raises
    ------
    NumericalError
        The loss or its gradient is not finite.
    """
    if not math.isfinite(loss.detach()):
        raise NumericalError(
            "the backbone's loss is not finite: its weights have diverged; lower the learning "
            "rate or clip the gradient"
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not math.isfinite(norm):
        raise NumericalError(
            "the backbone's gradient is not finite: look for values of an extreme size in this "
            "batch; nothing was learnt from it"
        )
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    _anneal(optimizer)
    optimizer.step()
