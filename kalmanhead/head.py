"""The last linear layer as a Kalman filter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from kalmanhead.errors import ConfigError, NumericalError, kind_and_line
from kalmanhead.layout import (
    as_outputs,
    as_rows,
    check_pair,
    check_sizes,
    fill_missing,
    linear_outputs,
    point_weights,
    rescaled_weight,
)
from kalmanhead.losses import squared_loss
from kalmanhead.noise import Noise, Predictive, noise_discount, update_noise
from kalmanhead.posterior import Form, Posterior, Update, condition, forgotten, reexpressed
from kalmanhead.transition import Transition, make_transition

State = dict[str, Any]


class Head(Protocol):
    """What a learner needs of a last layer; every head can stand in for every other."""

    in_features: int
    out_features: int
    feature_dim: int
    has_bias: bool

    @property
    def weight(self) -> Tensor:
        """W, (k, d); the constant's weight comes first."""
        ...

    def __call__(self, phi: Tensor) -> Tensor:
        """Predictions W phi, differentiable in phi and in nothing else that is solved for."""
        ...

    def for_gradient(self, phi: Tensor) -> Tensor:
        """Outputs from which the backbone's gradient is taken."""
        ...

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor | None:
        """What the backbone descends on, of those outputs; None without any target."""
        ...

    def update(self, phi: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Learn from the rows of one batch."""
        ...

    def predict_dist(self, phi: Tensor) -> Predictive:
        """Predictive distribution of the targets of the next batch."""
        ...

    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express what was learnt for targets that are now `ratio * y + offset`."""
        ...

    def forget_noise(self, lost: Tensor) -> None:
        """Put the noise of outputs back to the prior, where `lost`, (k,), says so."""
        ...

    def loosen(self) -> None:
        """Put what is known of how sure W is back to the prior; W itself stays."""
        ...

    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express what was learnt for leading features that were `ratio * new + offset`."""
        ...

    def forget_inputs(self, lost: Tensor) -> None:
        """Put leading features back to the prior, where `lost`, (p,), says so."""
        ...

    def set_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start from given weights, (k, in_features), and bias, (k,)."""
        ...

    def state(self) -> State:
        """What must be kept to go on exactly: plain values and tensors."""
        ...

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned."""
        ...


class KalmanHead(nn.Module):
    """A last linear layer whose weights are solved in closed form on every batch.

    It carries a mean W (k, d) and a covariance P (d, d) from batch to batch; nothing in it is
    trained by gradients. `forward` is differentiable in the features with W held fixed, which by
    the envelope theorem is the gradient of the loss with W eliminated (arXiv 2510.04606).

    Parameters
    ----------
    in_features, out_features:
        Widths of features and targets, the constant not counted.
    bias:
        Put a constant 1 before the features; d = in_features + 1 then.
    transition:
        What is remembered between batches: `reset` (the paper's proximal update), `drift`,
        `forget`, `static`, `ridge`, or a `Transition`.
    eta, gamma:
        Rate of `drift` (default 0.1) and factor of `forget` (default 0.99).
    prior_precision:
        lambda, one number or one per feature, (d,). Infinity switches a feature off exactly.
    lambda_scale:
        `sum` takes lambda as in the paper, against a sum over rows, so that it fades as the
        batch or the grid grows; `mean` takes it against the mean over rows.
    feature_dim:
        -1 for (*, d) as in `torch.nn.Linear`; 1 for (n, d, *grid) as in a 1x1 convolution, where
        every grid point of every sample is a row.
    noise_memory:
        Rows over which the noise variance is averaged, roughly, once so many were seen.
    dtype, device:
        Of the state. float64 whatever the backbone's dtype. A float32 covariance that is
        remembered is kept as a square root.

    Raises
    ------
    ConfigError
        A size, precision or name that makes no sense.

    Examples
    --------
    >>> head = KalmanHead(1, 1, transition="static", prior_precision=1e-6)
    >>> head.update(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> head(torch.tensor([[3.0]])).round(decimals=3)
    tensor([[7.]])
    >>> head.weight.shape, head.covariance.shape
    (torch.Size([1, 2]), torch.Size([2, 2]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        transition: str | Transition = "reset",
        eta: float | None = None,
        gamma: float | None = None,
        prior_precision: float | Tensor = 1.0,
        lambda_scale: Literal["sum", "mean"] = "sum",
        feature_dim: int = -1,
        noise_memory: float = 10_000.0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features, out_features, feature_dim)
        if lambda_scale not in ("sum", "mean"):
            raise ConfigError(f"lambda_scale is {lambda_scale!r}: choose sum or mean")
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"head dtype {dtype} is not supported: use float64 or float32")
        if not noise_memory > 0:
            raise ConfigError(f"noise_memory is {noise_memory}: give a number of rows above 0")
        self.in_features, self.out_features = in_features, out_features
        self.has_bias, self.feature_dim = bias, feature_dim
        self.transition = make_transition(transition, eta=eta, gamma=gamma)
        self.lambda_scale = lambda_scale
        self.noise_memory = noise_memory
        d = in_features + int(bias)
        try:
            precision = torch.as_tensor(prior_precision, dtype=dtype, device=device)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"prior_precision {prior_precision!r} cannot be put on device {device} "
                f"({kind_and_line(error)}): give a number and a device that is there"
            ) from error
        if precision.dim() > 1 or (precision.dim() == 1 and precision.shape[0] != d):
            raise ConfigError(
                f"prior_precision has shape {tuple(precision.shape)}: give one number or one for "
                f"each of the {d} features (the constant first)"
            )
        if not (precision > 0).all():
            raise ConfigError("prior_precision must be positive; infinity switches a feature off")
        self.prior_variance = 1 / precision.expand(d)
        mean = torch.zeros(out_features, d, dtype=dtype, device=device)
        self.posterior = Posterior(mean, *self._initial_spread())
        ones = torch.ones(out_features, dtype=dtype, device=device)
        self.noise = Noise(ones, ones)
        self.rows_seen = 0.0
        self.last_rows = 1.0

    @property
    def weight(self) -> Tensor:
        """W, (k, d); the constant's weight comes first."""
        return self.posterior.mean

    @property
    def covariance(self) -> Tensor:
        """P, (d, d), with which the next batch is met, in units of the noise variance.

        It is taken after the time update: I / lambda under `reset`, P itself under `static`.
        """
        return self._prior(self.last_rows).covariance

    def forward(self, phi: Tensor) -> Tensor:
        """Predictions W phi: (*, d) -> (*, k), or (n, d, *grid) -> (n, k, *grid)."""
        return linear_outputs(self.weight, phi, self.has_bias, self.feature_dim)

    def for_gradient(self, phi: Tensor) -> Tensor:
        """Outputs from which the backbone's gradient is taken: those of `forward`."""
        return self(phi)

    loss = staticmethod(squared_loss)

    @torch.no_grad()
    def update(self, phi: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Learn from one batch: time update, then measurement update, of weights and noise.

        Parameters
        ----------
        phi, y:
            Features and targets of equal leading (and grid) dimensions; NaN in y is a missing
            target.
        weight:
            Row weights, (n,), non-negative: 2 is the row twice, 0 leaves it out.

        Raises
        ------
        ConfigError
            Shapes that do not fit, or a negative or non-finite weight.
        NumericalError
            A feature or an infinite target that cannot be learnt from; the state is untouched.
        """
        check_pair(phi, y, weight, self.in_features, self.out_features, self.feature_dim)
        rows, targets = self._rows(phi), as_rows(y.detach(), self.feature_dim).to(self.weight)
        weights = point_weights(weight, phi, self.feature_dim)
        if weights is not None:
            weights = weights.to(self.weight)
        if rows.shape[0] == 0:
            return
        targets, weights, counted = fill_missing(targets, rows @ self.weight.mT, weights)
        total = float(counted.max())
        if total > 0:
            keep = self.transition.remembers
            prior = self._prior(total)
            update = condition(prior, rows, targets, weights, keep_covariance=keep)
            self._accept(update, counted, total)

    @torch.no_grad()
    def predict_dist(self, phi: Tensor) -> Predictive:
        """Student t for the targets of the next batch, shaped as `forward`'s output."""
        rows = self._rows(phi)
        spread = self._prior(self.last_rows).variance_of(rows)[:, None]
        scale = (self.noise.variance * (1 + spread)).sqrt()
        dof = (2 * self.noise.shape).expand(scale.shape)
        return Predictive(
            *(as_outputs(v, phi, self.feature_dim) for v in (rows @ self.weight.mT, scale, dof))
        )

    @torch.no_grad()
    def set_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start from given weights, (k, in_features), and bias, (k,)."""
        parts = [weight]
        if self.has_bias:
            zero = torch.zeros_like(weight[:, 0])
            parts = [(zero if bias is None else bias)[:, None], weight]
        mean = torch.cat(parts, 1).detach().to(self.weight).clone()
        self.posterior = replace(self.posterior, mean=mean)

    @torch.no_grad()
    def rescale_targets(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W and the noise for targets that are now `ratio * y + offset`, both (k,).

        P is in units of the noise variance and stays; predictions are the same as before.
        """
        mean = rescaled_weight(self.weight, ratio, offset, self.has_bias)
        self.posterior = replace(self.posterior, mean=mean)
        self.noise = self.noise.rescaled(ratio)

    def forget_noise(self, lost: Tensor) -> None:
        """Put the noise of outputs back to the prior, where `lost`, (k,), says so."""
        self.noise = self.noise.forgotten(lost)

    @torch.no_grad()
    def loosen(self) -> None:
        """Put P back to the prior; W itself stays."""
        spread, form = self._initial_spread(self.last_rows)
        self.posterior = Posterior(self.posterior.mean, spread, form)

    @torch.no_grad()
    def rescale_inputs(self, ratio: Tensor, offset: Tensor) -> None:
        """Re-express W and P for leading features that were `ratio * new + offset`, both (p,).

        Needs the constant; predictions are the same as before. A prior that `reset`, `ridge` or
        `drift` returns to is meant for features as they are scaled now, and stays.
        """
        self.posterior = reexpressed(self.posterior, ratio, offset)

    @torch.no_grad()
    def forget_inputs(self, lost: Tensor) -> None:
        """Put leading features back to the prior, where `lost`, (p,), says so."""
        variance = self._variance(self.last_rows)[1 : lost.shape[0] + 1][lost]
        self.posterior = forgotten(self.posterior, lost, variance)

    def state(self) -> State:
        """What must be kept to go on exactly."""
        return {
            "mean": self.posterior.mean,
            "spread": self.posterior.spread,
            "noise_shape": self.noise.shape,
            "noise_rate": self.noise.rate,
            "rows_seen": self.rows_seen,
            "last_rows": self.last_rows,
        }

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned.

        Raises
        ------
        ConfigError
            The state belongs to a head of another shape.
        """
        mine = self.state()
        for name in ("mean", "spread", "noise_shape"):
            if mine[name].shape != state[name].shape:
                raise ConfigError(
                    f"the saved head has {name} of shape {tuple(state[name].shape)}, this one "
                    f"{tuple(mine[name].shape)}: build the head with the options it was saved under"
                )
        self._take({k: v.to(mine[k]).clone() for k, v in state.items() if isinstance(v, Tensor)})
        self.rows_seen, self.last_rows = state["rows_seen"], state["last_rows"]

    def _take(self, tensors: dict[str, Tensor]) -> None:
        self.posterior = Posterior(tensors["mean"], tensors["spread"], self.posterior.form)
        self.noise = Noise(tensors["noise_shape"], tensors["noise_rate"])

    def _initial_spread(self, rows: float = 1.0) -> tuple[Tensor, Form]:
        """Spread before any data: no d x d matrix where none is remembered."""
        variance = self._variance(rows)
        if not self.transition.remembers:
            return variance.clone(), "diagonal"
        if variance.dtype == torch.float32:
            return torch.diag_embed(variance.sqrt()), "root"
        return torch.diag_embed(variance), "dense"

    def _variance(self, rows: float) -> Tensor:
        """Prior variance 1 / lambda of each feature, (d,), for a batch of so many rows."""
        return self.prior_variance / (rows if self.lambda_scale == "mean" else 1.0)

    def _prior(self, rows: float) -> Posterior:
        """Belief before a batch of so many rows."""
        variance = self._variance(rows)
        if self.rows_seen == 0:
            return Posterior(self.weight, variance, "diagonal")
        return self.transition.predict(self.posterior, variance)

    def _accept(self, update: Update, counted: Tensor, total: float) -> None:
        """Take over a belief, after making sure that it is one."""
        posterior = update.posterior
        if not math.isfinite(posterior.mean.sum() + update.quadratic.sum()):
            raise NumericalError(
                "the solve gave NaN or infinity: a feature or a target of this batch is not "
                "finite; nothing was learnt from it"
            )
        if not self.transition.remembers:
            posterior = replace(self.posterior, mean=posterior.mean)
        self.posterior = posterior
        discount = noise_discount(counted, self.rows_seen, self.noise_memory)
        self.noise = update_noise(self.noise, update.quadratic, counted, discount)
        self.rows_seen += total
        self.last_rows = total

    def _rows(self, phi: Tensor) -> Tensor:
        """Features as rows in the dtype of the state, behind the constant, (rows, d)."""
        rows = as_rows(phi.detach(), self.feature_dim).to(self.weight.dtype)
        if not self.has_bias:
            return rows
        return torch.cat([rows.new_ones(rows.shape[0], 1), rows], 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KalmanHead:
        """Follow a move to another device, but keep the dtype: `model.float()` is for backbones."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensors = {k: v for k, v in self.state().items() if isinstance(v, Tensor)}
        self._take({name: fn(value).to(value.dtype) for name, value in tensors.items()})
        self.prior_variance = fn(self.prior_variance).to(self.prior_variance.dtype)
        return self
