"""A plain last linear layer behind the same face as the Kalman filter: the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kalmanhead.errors import ConfigError
from kalmanhead.layout import (
    as_rows,
    check_pair,
    check_sizes,
    linear_outputs,
    rescaled_weight,
    target_weights,
)
from kalmanhead.losses import squared_loss
from kalmanhead.noise import Noise, Predictive, noise_discount, update_noise

State = dict[str, Any]


class TrainedHead(nn.Module):
    """A plain last linear layer trained by the learner's optimiser: the baseline of every table.

    Same face as `KalmanHead`; `update` learns the noise only. Initial values are those of
    `torch.nn.Linear`, drawn from a local generator.

    Parameters
    ----------
    in_features, out_features, bias, feature_dim, noise_memory:
        As for `KalmanHead`.
    seed:
        Of the initial weights.
    dtype, device:
        Of the weights; the noise is float64.

    Raises
    ------
    ConfigError
        A size that makes no sense.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        feature_dim: int = -1,
        noise_memory: float = 10_000.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features, out_features, feature_dim)
        self.in_features, self.out_features = in_features, out_features
        self.has_bias, self.feature_dim = bias, feature_dim
        self.noise_memory = noise_memory
        generator = torch.Generator().manual_seed(seed)
        bound = in_features**-0.5 if in_features else 0.0
        start = torch.rand(out_features, in_features + int(bias), generator=generator)
        self.mean = nn.Parameter(((2 * start - 1) * bound).to(dtype=dtype, device=device))
        ones = torch.ones(out_features, dtype=torch.float64, device=device)
        self.noise = Noise(ones, ones)
        self.rows_seen = 0.0

    @property
    def weight(self) -> Tensor:
        """W, (k, d); the constant's weight comes first."""
        return self.mean

    def forward(self, phi: Tensor) -> Tensor:
        """Predictions W phi: (*, d) -> (*, k), or (n, d, *grid) -> (n, k, *grid)."""
        return linear_outputs(self.mean, phi, self.has_bias, self.feature_dim)

    def for_gradient(self, phi: Tensor) -> Tensor:
        """Outputs from which the backbone's gradient is taken: those of `forward`."""
        return self(phi)

    loss = staticmethod(squared_loss)

    @torch.no_grad()
    def update(self, phi: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Learn the noise from one batch; the weights belong to the optimiser."""
        check_pair(phi, y, weight, self.in_features, self.out_features, self.feature_dim)
        residual = as_rows(y - self(phi), self.feature_dim).to(self.noise.rate)
        seen = target_weights(y, weight, self.feature_dim).to(residual)
        counted = seen.sum(0)
        total = float(counted.max()) if len(seen) else 0.0
        squares = (seen * torch.where(seen > 0, residual, 0.0).square()).sum(0)
        discount = noise_discount(counted, self.rows_seen, self.noise_memory)
        self.noise = update_noise(self.noise, squares, counted, discount)
        self.rows_seen += total

    @torch.no_grad()
    def predict_dist(self, phi: Tensor) -> Predictive:
        """Student t with the residuals' scale; it knows nothing of the weights' uncertainty."""
        mean = self(phi).to(self.noise.rate)
        shape = [1] * mean.dim()
        shape[self.feature_dim] = -1
        scale = self.noise.variance.sqrt().view(shape).expand(mean.shape)
        return Predictive(mean, scale, (2 * self.noise.shape).view(shape).expand(mean.shape))

    @torch.no_grad()
    def set_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start from given weights, (k, in_features), and bias, (k,)."""
        if self.has_bias:
            self.mean[:, 0] = 0 if bias is None else bias
        self.mean[:, int(self.has_bias) :] = weight

    @torch.no_grad()
    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W and the noise for targets that are now `ratio * y + offset`, both (k,)."""
        self.mean.copy_(rescaled_weight(self.mean, ratio, offset, self.has_bias))
        self.noise = self.noise.rescaled(ratio)

    def forget_noise(self, lost: Tensor) -> None:
        """Put the noise of outputs back to the prior, where `lost`, (k,), says so."""
        self.noise = self.noise.forgotten(lost)

    def loosen(self) -> None:
        """There is no covariance."""

    @torch.no_grad()
    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W for leading features that were `ratio * new + offset`, both (p,)."""
        p = ratio.shape[0]
        self.mean[:, 0] += self.mean[:, 1 : p + 1] @ offset.to(self.mean)
        self.mean[:, 1 : p + 1] *= ratio.to(self.mean)

    @torch.no_grad()
    def forget_inputs(self, lost: Tensor) -> None:
        """Put the weights of leading features back to 0, where `lost`, (p,), says so."""
        self.mean[:, 1 : lost.shape[0] + 1][:, lost] = 0

    def state(self) -> State:
        """What must be kept to go on exactly."""
        return {
            "mean": self.mean.detach(),
            "noise_shape": self.noise.shape,
            "noise_rate": self.noise.rate,
            "rows_seen": self.rows_seen,
        }

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Go on from what `state` returned.

        Raises
        ------
        ConfigError
            The state belongs to a head of another shape.
        """
        if state["mean"].shape != self.mean.shape:
            raise ConfigError(
                f"the saved head has weights {tuple(state['mean'].shape)}, this one "
                f"{tuple(self.mean.shape)}: build the head with the options it was saved under"
            )
        self.mean.copy_(state["mean"])
        self.rows_seen = state["rows_seen"]
        shape, rate = (state[name].to(self.noise.rate) for name in ("noise_shape", "noise_rate"))
        self.noise = Noise(shape.clone(), rate.clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrainedHead:
        """Follow a move to another device; the noise keeps its dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.noise = self.noise.moved(fn)
        return self
