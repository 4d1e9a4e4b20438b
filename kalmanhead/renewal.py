"""What is given up when a target's world has changed, and what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kalmanhead.layout import as_rows

if TYPE_CHECKING:
    from kalmanhead.learner import OnlineLearner

# By torch's optimisers, averages of gradients as they were.
MOMENTS = frozenset(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"))


@torch.no_grad()
def renew(learner: OnlineLearner, changed: Tensor, y: Tensor, forecast: Tensor) -> None:
    """Take outputs as new whose targets are strange and believed, such as after a jump.

    W and the backbone are kept, since much of what they hold may still be right, but for the level,
    which moves to where the targets are now. The covariances go back to the prior, so that W can
    follow; the noise too; the targets' scale starts from this batch; the optimiser forgets its
    averages of gradients, and a buffer its rows, which show the world as it was.

    Parameters
    ----------
    learner:
        Is changed.
    changed:
        Which outputs, (k,), bool.
    y, forecast:
        Targets of the batch, and what had been foreseen of them, in their own units,
        (n, k, *grid).
    """
    feature_dim = learner.head.feature_dim
    error = as_rows(y.to(torch.float64) - forecast, feature_dim).nanquantile(0.5, dim=0)
    level = torch.where(changed, error / learner.scaling.target_scale(error), 0.0)
    if learner.head.has_bias:
        for part in learner.parts:
            part.rescale_targets(torch.ones_like(level), level)
    learner.scaling.restart_targets(changed, y, learner.parts)
    learner.head.forget_noise(changed)
    if learner.average is not None:
        learner.average.forget_noise(changed)
    if learner.outliers is not None:
        learner.outliers.expect_anything(changed)
    learner.head.loosen()
    if learner.buffer is not None:
        learner.buffer.clear()
    for group in () if learner.optimizer is None else learner.optimizer.param_groups:
        if "anneal" in group:
            group["steps"] = 0
    states = () if learner.optimizer is None else learner.optimizer.state.values()
    for state in states:
        for name in MOMENTS & state.keys():
            if isinstance(state[name], Tensor):
                state[name].zero_()
