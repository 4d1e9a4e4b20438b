"""Row weights under which squared errors become relative squared errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]

# Share of the usual mean square that is added to a row's own, so that a row of zeros, whose
# relative error is infinite, weighs as much as this allows and no more.
FLOOR = 0.01


class RelativeWeights:
    """Weighs each row by the inverse of its targets' mean square, in units of the usual one.

    With w = s / (q + 0.01 s), where q is the mean square of a row's targets in their own units and
    s its running mean, the weighted sum of squares is, up to a factor, the sum of squared relative
    L2 errors ||e||^2 / ||y||^2. A row of the usual size has a weight near 1, a row of zeros 100.

    Examples
    --------
    >>> weigh = RelativeWeights()
    >>> weigh.follow(torch.tensor([[1.0], [1.0]]), None)
    >>> weigh(torch.tensor([[1.0], [10.0], [0.0]]), None).round(decimals=3).tolist()
    [0.99, 0.01, 100.0]
    """

    def __init__(self) -> None:
        self.usual, self.rows = 0.0, 0.0

    def __call__(self, y: Tensor, weight: Tensor | None) -> Tensor:
        """Weights (n,) for targets (n, ...), times the rows' own; NaN targets do not count."""
        size = mean_squares(y)
        usual = self.usual if self.usual > 0 else 1.0
        weights = usual / (size + FLOOR * usual)
        return weights if weight is None else weights * weight.to(weights)

    def follow(self, y: Tensor, weight: Tensor | None) -> None:
        """Take a batch into the running mean."""
        size = mean_squares(y)
        weights = torch.ones_like(size) if weight is None else weight.to(size)
        weights = weights * (~torch.isnan(y)).flatten(1).any(1)
        total = float(weights.sum())
        if total > 0:
            self.rows += total
            now = float((weights * size).sum()) / total
            self.usual += (now - self.usual) * total / self.rows

    def state(self) -> State:
        """Plain values."""
        return {"usual": self.usual, "rows": self.rows}

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned."""
        self.usual, self.rows = float(state["usual"]), float(state["rows"])


def mean_squares(y: Tensor) -> Tensor:
    """Mean square of each row's targets that are there, (n, ...) -> (n,), float64; 0 of none."""
    flat = y.detach().flatten(1).to(torch.float64)
    return torch.nan_to_num(flat.square().nanmean(1))
