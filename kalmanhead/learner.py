"""The learner: scalers, backbone and head in the order in which a batch goes through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kalmanhead.errors import ConfigError, NumericalError, SplitError
from kalmanhead.head import Head, KalmanHead
from kalmanhead.layout import check_weight, rescaled_weight
from kalmanhead.noise import Predictive
from kalmanhead.scaler import RunningScaler
from kalmanhead.split import merge_head, split_head

State = dict[str, Any]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Order = Literal["head-first", "backbone-first"]


def adam(lr: float = 3e-3) -> OptimizerFactory:
    """Adam with this learning rate, as an argument for `OnlineLearner`."""
    return lambda parameters: torch.optim.Adam(parameters, lr=lr)


def sgd(lr: float = 1e-2, momentum: float = 0.9) -> OptimizerFactory:
    """SGD with momentum, as an argument for `OnlineLearner`."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


@dataclass(frozen=True)
class _Pass:
    """One batch in scaled units, with the features that the backbone made of it."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    phi: Tensor


class OnlineLearner(nn.Module):
    """Learns from batches as they come: the head in closed form, the backbone by gradient steps.

    Inputs and targets are standardised by running statistics. When those of the targets move,
    W is re-expressed, so that its predictions stay what they were.

    Parameters
    ----------
    backbone:
        Everything before the last linear layer: x (n, d_in) or (n, channels, *grid) to features
        in the head's `feature_dim`.
    head:
        `KalmanHead` or another head.
    optimizer:
        Makes the optimiser from the parameters that gradients train (`adam(3e-3)` by default).
    skip:
        Put the scaled inputs before the backbone's features, so that the head holds a linear
        model of the inputs as well.
    order:
        `head-first` solves W on the batch, then steps the backbone at the new W: one forward
        pass. `backbone-first` (Algorithm 1 of arXiv 2510.04606) steps the backbone at the old W,
        then solves W on the batch's new features.
    scale_x, scale_y:
        Standardise inputs and targets.
    targets_in_units:
        Whether the head's initial weights are meant for targets in their own units, as those of
        a trained model are, and not for standardised ones.
    clip:
        Largest norm of the backbone's gradient, None for no limit.

    Raises
    ------
    ConfigError
        An unknown order, or a clip that is no positive number.

    Notes
    -----
    Predictions are made in evaluation mode, so the features for the solve are taken in that mode
    too: with BatchNorm, features taken in training mode would fit W to other features than it
    predicts from. A backbone that acts the same in both modes gets by with one pass.

    Examples
    --------
    >>> from kalmanhead.backbones import MLP
    >>> from kalmanhead.head import KalmanHead
    >>> learner = OnlineLearner(MLP(2, width=32, seed=0), KalmanHead(32, 1), adam(1e-2))
    >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    >>> for _ in range(100):
    ...     learner.learn(x, x[:, :1] * x[:, 1:])
    >>> bool((learner.predict(x) - x[:, :1] * x[:, 1:]).abs().mean() < 0.1)
    True
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: Head,
        optimizer: OptimizerFactory | None = None,
        *,
        skip: bool = False,
        order: Order = "head-first",
        scale_x: bool = True,
        scale_y: bool = True,
        targets_in_units: bool = False,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        if order not in ("head-first", "backbone-first"):
            raise ConfigError(f"order is {order!r}: choose head-first or backbone-first")
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip is {clip}: give a norm above 0, or None for no limit")
        self.backbone, self.head = backbone, head
        self.skip, self.order, self.clip = skip, order, clip
        self.scale_x, self.scale_y = scale_x, scale_y
        self.targets_in_units = targets_in_units
        self.trained = [p for p in self.parameters() if p.requires_grad]
        make = optimizer if optimizer is not None else adam()
        self.optimizer = make(self.trained) if self.trained else None
        self.x_scaler: RunningScaler | None = None
        self.y_scaler: RunningScaler | None = None
        self.mode_matters: bool | None = None
        self.batches = 0
        self.dtype = next((p.dtype for p in backbone.parameters()), torch.float32)
        self.eval()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Predicted targets in their own units, (n, k) or (n, k, *grid); changes nothing."""
        return self._targets(self.head(self._features(self._scaled_x(x))))

    @torch.no_grad()
    def predict_dist(self, x: Tensor) -> Predictive:
        """Predictive distribution of the targets in their own units; changes nothing."""
        scaled = self.head.predict_dist(self._features(self._scaled_x(x)))
        if self.y_scaler is None:
            return scaled
        unit = self.y_scaler.scale.view((-1,) + (1,) * (scaled.scale.dim() - 2))
        return Predictive(self._targets(scaled.mean), scaled.scale * unit, scaled.dof)

    def learn(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Learn from one batch.

        Parameters
        ----------
        x, y:
            Inputs (n, d_in) or (n, channels, *grid) and targets (n, k) or (n, k, *grid); NaN in
            y is a missing target, from which nothing is learnt.
        weight:
            Row weights, (n,).

        Raises
        ------
        ConfigError
            Shapes that do not fit, non-finite values, a negative weight; nothing has been learnt.
        NumericalError
            The backbone has diverged, or the solve gave no finite weights.
        """
        self.step(x, y, weight)

    def step(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Predict, then learn: the prediction that `predict` would have given, in one pass.

        Arguments and errors as for `learn`; returns what `predict` returns.
        """
        check_values(x, y, weight)
        if y.shape[1] != self.head.out_features:
            raise ConfigError(
                f"y has shape {tuple(y.shape)}: the head has {self.head.out_features} outputs"
            )
        if x.shape[0] == 0:
            return torch.empty_like(y)
        if self.batches == 0:
            # Nothing is known of the scales yet: what was predicted must not have seen them.
            prediction = self.predict(x)
            self.x_scaler, self.y_scaler = self._new_scalers(x, y)
            self._follow_scales(x, y, start=not self.targets_in_units)
            self._learn(self._pass(x, y, weight))
        else:
            batch = self._pass(x, y, weight)
            with torch.no_grad():
                features = self._features(batch.x) if self.mode_matters else batch.phi
                prediction = self._targets(self.head(features))
            self._learn(batch)
            self._follow_scales(x, y)
        self.batches += 1
        return prediction

    @classmethod
    def wrap(
        cls,
        model: nn.Module,
        optimizer: OptimizerFactory | None = None,
        *,
        example: Tensor | None = None,
        head: Callable[..., Head] | None = None,
        **options: Any,
    ) -> OnlineLearner:
        """Learner of a torch model whose last Linear or 1x1 convolution becomes the head.

        Parameters
        ----------
        model:
            Any module that ends with a linear layer. It is copied and stays as it is.
        optimizer:
            As for the learner.
        example:
            An input, to find the last layer by running the model instead of tracing it.
        head:
            Called as head(in_features, out_features, bias=..., feature_dim=...); `KalmanHead` by
            default. It starts from the layer's weights.
        options:
            Further arguments of `OnlineLearner`. Inputs are not scaled unless asked for, since
            a model that was trained expects them as they were.

        Raises
        ------
        SplitError
            The model does not end with a linear layer that can be taken off.
        """
        split = split_head(model, example)
        if not split.verified:
            raise SplitError(
                f"that {split.path} is the last thing {type(model).__name__} does could not be "
                "proved by tracing it: give wrap an example input (example=x)"
            )
        k, d = split.weight.shape
        make = head if head is not None else KalmanHead
        made = make(d, k, bias=split.bias is not None, feature_dim=split.feature_dim)
        made.set_weight(split.weight, split.bias)
        defaults = {"scale_x": False, "targets_in_units": True}
        return cls(split.backbone, made, optimizer, **{**defaults, **options})

    def unwrap(self) -> nn.Module:
        """Give back the plain model of a learner that `wrap` made: a copy, last layer filled in.

        Raises
        ------
        ConfigError
            The learner scales or skips inputs, which the plain model does not.
        SplitError
            The learner was not made by `wrap`.
        """
        if self.x_scaler is not None or self.skip:
            raise ConfigError("unwrap needs a learner with scale_x and skip off: wrap it so")
        weight = self.head.weight.detach()
        if self.y_scaler is not None:
            scale, shift = self.y_scaler.scale, self.y_scaler.shift
            weight = rescaled_weight(weight, scale, shift, self.head.has_bias)
        weight = weight.to(self.dtype)
        if not self.head.has_bias:
            return merge_head(self.backbone, weight, None)
        return merge_head(self.backbone, weight[:, 1:], weight[:, 0])

    def state(self) -> State:
        """Everything that is needed to go on exactly: plain values and tensors.

        They are the learner's own, so save or copy them before the next batch.
        """
        return {
            "backbone": self.backbone.state_dict(),
            "head": self.head.state(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "x_scaler": None if self.x_scaler is None else self.x_scaler.state(),
            "y_scaler": None if self.y_scaler is None else self.y_scaler.state(),
            "mode_matters": self.mode_matters,
            "batches": self.batches,
        }

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned.

        Raises
        ------
        ConfigError
            The state belongs to another backbone, head or optimiser.
        """
        try:
            self.backbone.load_state_dict(state["backbone"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"the saved backbone does not fit this one ({reason[:200]}): build the learner "
                "with the options it was saved under"
            ) from error
        self.head.load_state(state["head"])
        self.x_scaler = _restored(state["x_scaler"], True, self.device)
        self.y_scaler = _restored(state["y_scaler"], self.head.has_bias, self.device)
        self.mode_matters, self.batches = state["mode_matters"], state["batches"]

    @property
    def device(self) -> torch.device:
        """Where the head lies."""
        return self.head.weight.device

    def _learn(self, batch: _Pass) -> None:
        """Solve the head and step the backbone, in the learner's order."""
        if self.order == "backbone-first" and self.trained:
            self._step_backbone(batch)
            with torch.no_grad():
                self.head.update(self._features(batch.x), batch.y, batch.weight)
            return
        with torch.no_grad():
            solved = self._features(batch.x) if self.mode_matters else batch.phi
            self.head.update(solved, batch.y, batch.weight)
        self._step_backbone(batch)

    def _step_backbone(self, batch: _Pass) -> None:
        """One gradient step at W held fixed; by the envelope theorem W's change does not count."""
        if self.optimizer is None:
            return
        loss = squared_loss(self.head.for_gradient(batch.phi), batch.y, batch.weight)
        if loss is None:
            return
        if not math.isfinite(loss.detach()):
            raise NumericalError(
                "the backbone's loss is not finite: its weights have diverged; lower the learning "
                "rate or clip the gradient"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
        self.optimizer.step()

    def _pass(self, x: Tensor, y: Tensor, weight: Tensor | None) -> _Pass:
        """Scale a batch and take it through the backbone in training mode, with gradients."""
        scaled_x = self._scaled_x(x)
        scaled_y = y.to(self.device)
        if self.y_scaler is not None:
            scaled_y = self.y_scaler(scaled_y)
        if weight is not None:
            weight = weight.to(self.device)
        if self.mode_matters is None:
            self.mode_matters = acts_by_mode(self.backbone, scaled_x)
        if not self.mode_matters:
            return _Pass(scaled_x, scaled_y, weight, self._features(scaled_x))
        self.backbone.train()
        try:
            return _Pass(scaled_x, scaled_y, weight, self._features(scaled_x))
        finally:
            self.backbone.eval()

    def _new_scalers(
        self, x: Tensor, y: Tensor
    ) -> tuple[RunningScaler | None, RunningScaler | None]:
        x_scaler = RunningScaler(x.shape[1], device=self.device) if self.scale_x else None
        y_scaler = None
        if self.scale_y:
            center = self.head.has_bias
            y_scaler = RunningScaler(y.shape[1], center=center, device=self.device)
        return x_scaler, y_scaler

    def _follow_scales(self, x: Tensor, y: Tensor, start: bool = False) -> None:
        """Take a batch into the statistics and re-express in them what the head has learnt.

        At the start nothing has been learnt: the head's initial weights are meant in the scales
        that come, not in those that are left.
        """
        if self.x_scaler is not None:
            old_shift, old_scale = self.x_scaler.shift, self.x_scaler.scale
            self.x_scaler.update(x.to(self.device))
            if self.skip and self.head.has_bias and not start:
                offset = (self.x_scaler.shift - old_shift) / old_scale
                self.head.rescale_inputs(self.x_scaler.scale / old_scale, offset)
        if self.y_scaler is not None:
            old_shift, old_scale = self.y_scaler.shift, self.y_scaler.scale
            self.y_scaler.update(y.to(self.device))
            new_shift, new_scale = self.y_scaler.shift, self.y_scaler.scale
            if not start:
                offset = (old_shift - new_shift) / new_scale
                self.head.rescale_targets(old_scale / new_scale, offset)

    def _scaled_x(self, x: Tensor) -> Tensor:
        """Inputs as the backbone wants them."""
        x = x.to(self.device)
        if self.x_scaler is not None:
            x = self.x_scaler(x)
        return x.to(self.dtype)

    def _features(self, scaled_x: Tensor) -> Tensor:
        """Features of the head: the scaled inputs, if asked for, and the backbone's."""
        phi: Tensor = self.backbone(scaled_x)
        if not self.skip:
            return phi
        if phi.dim() != scaled_x.dim() or phi.shape[2:] != scaled_x.shape[2:]:
            raise ConfigError(
                f"skip needs features on the grid of the inputs: inputs have shape "
                f"{tuple(scaled_x.shape)}, features {tuple(phi.shape)}; leave skip off"
            )
        return torch.cat([scaled_x, phi], self.head.feature_dim)

    def _targets(self, scaled: Tensor) -> Tensor:
        """Predictions in the target's units."""
        return scaled if self.y_scaler is None else self.y_scaler.inverse(scaled)


def squared_loss(prediction: Tensor, target: Tensor, weight: Tensor | None) -> Tensor | None:
    """Mean of squared errors over the targets that are there; None if there are none.

    Under weights it is the weighted sum over the number of targets with a positive weight, so
    that a row of weight 2 pulls as two rows do.
    """
    error = prediction - target.to(prediction.dtype)
    missing = torch.isnan(error)
    squares = torch.where(missing, 0.0, error).square()
    counted = ~missing
    if weight is not None:
        shaped = weight.to(squares).view((-1,) + (1,) * (squares.dim() - 1))
        squares, counted = squares * shaped, counted & (shaped > 0)
    total = counted.sum()
    if int(total) == 0:
        return None
    return squares.sum() / total


def check_values(x: Tensor, y: Tensor, weight: Tensor | None) -> None:
    """Refuse a batch with values that nothing can be learnt from, before anything changes."""
    if x.dim() < 2 or y.dim() < 2 or x.shape[0] != y.shape[0]:
        raise ConfigError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}: give (n, ...) each, with the "
            "same n and at least two dimensions"
        )
    # A sum is finite only if every entry is; that it may overflow is looked into below.
    if not math.isfinite(x.sum()) and not torch.isfinite(x).all():
        raise ConfigError(f"x holds NaN or infinity in {_first_bad(~torch.isfinite(x))}")
    if not math.isfinite(y.sum()) and torch.isinf(y).any():
        raise ConfigError(
            f"y holds infinity in {_first_bad(torch.isinf(y))}; a missing target is NaN"
        )
    if weight is not None:
        check_weight(weight, x.shape[0])


def _first_bad(bad: Tensor) -> str:
    row, column, *_ = bad.nonzero()[0].tolist()
    return f"row {row}, column {column} of the batch: clean or drop that row"


def acts_by_mode(backbone: nn.Module, x: Tensor) -> bool:
    """Whether a backbone gives other features in training than in evaluation mode.

    Normalisation by batch and dropout are known by type; anything else shows by comparing.
    """
    by_type = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    if any(isinstance(module, by_type) for module in backbone.modules()):
        return True
    with torch.no_grad():
        backbone.eval()
        evaluated = backbone(x)
        backbone.train()
        trained = backbone(x)
        backbone.eval()
    return not torch.equal(evaluated, trained)


def _restored(state: State | None, center: bool, device: torch.device) -> RunningScaler | None:
    if state is None:
        return None
    scaler = RunningScaler(state["count"].shape[0], center=center, device=device)
    scaler.load_state(state)
    return scaler
