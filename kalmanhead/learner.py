"""The learner: scales, backbone and head in the order in which a batch goes through them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kalmanhead.averaging import Averaging
from kalmanhead.buffer import Buffer
from kalmanhead.errors import ConfigError, KalmanHeadError
from kalmanhead.guard import (
    acts_by_mode,
    check_batch,
    check_trainable,
    owned,
    training_mode,
)
from kalmanhead.head import Head, KalmanHead
from kalmanhead.optimizers import OptimizerFactory, adam, descend, make_optimizer
from kalmanhead.outliers import Outliers
from kalmanhead.predictor import Predictor
from kalmanhead.relative import RelativeWeights
from kalmanhead.renewal import renew
from kalmanhead.wrapping import take_head

State = dict[str, Any]
Order = Literal["head-first", "backbone-first"]

# Batches of fields at the start in each of which the averaged model is scored; later in one of 8.
JUDGED_AT_FIRST = 20
# What a learner may have beside backbone, head and scales.
OPTIONS = ("average", "relative", "buffer", "outliers")


@dataclass(frozen=True)
class _Pass:
    """One batch in scaled units, with the features that the backbone made of it."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    phi: Tensor


class OnlineLearner(Predictor):
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
    average:
        Decay of the averaged model that predicts beside the newest (`Averaging`); None for none.
    relative:
        Weigh each row by the inverse of its targets' mean square (`RelativeWeights`), so that W
        and the backbone minimise squared relative errors.
    buffer:
        Rows kept for the backbone: its steps are taken on as many drawn from there as came, while
        the head learns from each batch as it comes. None: both learn from the same batch.
    robust:
        Leave out single targets that lie far beyond all errors (`Outliers`), and start anew where
        they go on (`renew`).

    Raises
    ------
    ConfigError
        An unknown order, a clip that is no positive number, or a decay outside of 0 to 1.

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
        average: float | None = None,
        relative: bool = False,
        buffer: Buffer | None = None,
        robust: bool = False,
    ) -> None:
        super().__init__(backbone, head, skip=skip, scale_x=scale_x, scale_y=scale_y)
        if order not in ("head-first", "backbone-first"):
            raise ConfigError(f"order is {order!r}: choose head-first or backbone-first")
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip is {clip}: give a norm above 0, or None for no limit")
        self.order, self.clip = order, clip
        self.targets_in_units = targets_in_units
        self.relative = RelativeWeights() if relative else None
        self.trained = [p for p in self.parameters() if p.requires_grad]
        make = optimizer if optimizer is not None else adam()
        self.optimizer = make_optimizer(make, self.trained) if self.trained else None
        if average is not None and self.trained:
            self.average = Averaging(average, backbone, head)
        self.buffer = buffer if self.trained else None
        if robust:
            self.outliers = Outliers(head.out_features, head.feature_dim, head.weight.device)
        self.mode_matters: bool | None = None
        self.batches = 0
        self.eval()

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
        self._take(x, y, weight, foresee=False)

    def step(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Predict, then learn: the prediction that `predict` would have given, in one pass.

        Arguments and errors as for `learn`; returns what `predict` returns.
        """
        prediction = self._take(x, y, weight, foresee=True)
        assert prediction is not None
        return prediction

    def _take(self, x: Tensor, y: Tensor, weight: Tensor | None, *, foresee: bool) -> Tensor | None:
        """Learn from a batch; what `predict` would have given, if it is wanted."""
        check_batch(x, y, weight, self.head.out_features)
        check_trainable(self.trained)
        if x.shape[0] == 0:
            return torch.empty_like(y)
        if weight is not None and not bool(weight.all()):
            # Rows of no weight are foreseen, and then it is as if they had not been there.
            prediction, used = self.predict(x) if foresee else None, weight > 0
            self._take(x[used], y[used], weight[used], foresee=False)
            return prediction
        # Gradients are needed whatever mode the caller is in, and none of them is the caller's.
        with torch.inference_mode(False), torch.enable_grad():
            undo = self._snapshot()
            try:
                weight = None if weight is None else owned(weight, self.device)
                return self._step(owned(x, self.device), owned(y, self.device), weight, foresee)
            except KalmanHeadError:
                undo()
                raise

    def _step(self, x: Tensor, y: Tensor, weight: Tensor | None, foresee: bool) -> Tensor | None:
        prediction = None
        first = self.batches == 0
        if first:
            # Nothing is known of the scales yet: what was predicted must not have seen them.
            prediction = self.predict(x) if foresee else None
            self.scaling.begin(x, y)
            self.scaling.follow(x, y, weight, self.parts, skip=False, express=self.targets_in_units)
            if self.relative is not None:
                self.relative.follow(y, weight)
            batch = self._arrived(x, y, weight)
        else:
            # A training pass moves BatchNorm's statistics, so what it says of the batch comes late.
            judged = self.average is not None and self._is_judged
            forecast = self._foresee(x) if self.mode_matters and (foresee or judged) else None
            batch = self._arrived(x, y, weight)
            if forecast is None and (foresee or judged):
                with torch.no_grad():
                    forecast = self._forecast(batch.x, batch.phi)
            if foresee and forecast is not None:
                prediction = self.scaling.unscale_targets(forecast.mixture)
            if self.outliers is not None:
                foreseen = self.head(batch.phi) if forecast is None else forecast.mixture
                held = self.outliers.hold(batch.y, foreseen.detach(), weight)
                if bool(self.outliers.changed.any()):
                    told = self.scaling.unscale_targets(foreseen.detach())
                    renew(self, self.outliers.changed, y, told)
                    batch = replace(batch, y=self.scaling.scale_targets(y))
                elif held is not batch.y:
                    y, batch = self.scaling.unscale_targets(held), replace(batch, y=held)
            if self.average is not None and judged and forecast is not None:
                self.average.score(forecast.newest, forecast.average, batch.y, weight)
        if self.buffer is not None:
            self.buffer.add(x, y, weight)
        self._learn(batch)
        if not first:
            self.scaling.follow(x, y, weight, self.parts, skip=self.leads_with_inputs, express=True)
            if self.relative is not None:
                self.relative.follow(y, weight)
        if self.average is not None:
            self.average.follow(self.backbone, self.head)
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
        backbone, made = take_head(model, example, KalmanHead if head is None else head)
        defaults = {"scale_x": False, "targets_in_units": True}
        return cls(backbone, made, optimizer, **{**defaults, **options})

    def train(self, mode: bool = True) -> OnlineLearner:
        """Stay in evaluation mode: predictions are made in it, and `learn` chooses its own."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnlineLearner:
        """Follow a move of the backbone to another device or dtype, the optimiser's state too."""
        super()._apply(fn, recurse)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        return self

    def get_extra_state(self) -> State:
        """What `state_dict` adds to the parameters to hold all that was learnt."""
        return {key: value for key, value in self.state().items() if key != "backbone"}

    def set_extra_state(self, state: State) -> None:
        """Go on from what `get_extra_state` returned."""
        self.load_state({"backbone": self.backbone.state_dict(), **state})

    def state(self) -> State:
        """Everything that is needed to go on exactly: plain values and tensors.

        They are the learner's own, so save or copy them before the next batch.
        """
        return {
            "backbone": self.backbone.state_dict(),
            "head": self.head.state(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scaling": self.scaling.state(),
            **{name: None if part is None else part.state() for name, part in self._options()},
            "mode_matters": self.mode_matters,
            "batches": self.batches,
        }

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned.

        Raises
        ------
        ConfigError
            The state belongs to another backbone, head or optimiser; nothing has changed then.
        """
        before = copy.deepcopy(self.state())
        try:
            self._load(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._load(before)
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"the saved backbone does not fit this one ({reason[:200]}): build the learner "
                "with the options it was saved under"
            ) from error
        except KalmanHeadError:
            self._load(before)
            raise

    def _load(self, state: State) -> None:
        self.backbone.load_state_dict(state["backbone"])
        if self.optimizer is not None:
            # Another kind of optimiser takes the state without a word and fails at its first step.
            saved, mine = state["optimizer"]["param_groups"], self.optimizer.param_groups
            if any(old.keys() != new.keys() for old, new in zip(saved, mine, strict=True)):
                raise ValueError("it was trained by another kind of optimizer")
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for name, part in self._options():
            # Runs from before there were such parts have none.
            if (state.get(name) is None) != (part is None):
                raise ValueError(f"only one of the two has the part {name}")
        self.head.load_state(state["head"])
        for name, part in self._options():
            if part is not None:
                part.load_state(state[name])
        self.scaling.load_state(state["scaling"], self.device)
        self.mode_matters, self.batches = state["mode_matters"], state["batches"]

    def _options(self) -> Iterator[tuple[str, Any]]:
        """Parts that a learner may have or not, by name; None for those that it does not have."""
        return ((name, getattr(self, name)) for name in OPTIONS)

    def _snapshot(self) -> Callable[[], None]:
        """How to undo a batch that fails; its last act is the optimiser's step, which cannot.

        Nearly free: heads and scales replace their tensors and never write into them.
        """
        head, batches, mode = self.head.state(), self.batches, self.mode_matters
        scaling = self.scaling.state()
        average = None if self.average is None else dict(vars(self.average))
        relative = None if self.relative is None else self.relative.state()
        outliers = None if self.outliers is None else self.outliers.state()
        forget = None if self.buffer is None else self.buffer.mark()
        buffers = [] if mode is False else [(b, b.clone()) for b in self.backbone.buffers()]

        def undo() -> None:
            self.head.load_state(head)
            self.batches, self.mode_matters = batches, mode
            self.scaling.load_state(scaling, self.device)
            if average is not None:
                vars(self.average).update(average)
            if self.relative is not None and relative is not None:
                self.relative.load_state(relative)
            if self.outliers is not None and outliers is not None:
                self.outliers.load_state(outliers)
            if forget is not None:
                forget()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

        return undo

    @property
    def _is_judged(self) -> bool:
        """Whether the average is scored on the next batch.

        For fields its forward pass costs much, and each batch has thousands of points to tell by.
        """
        return (
            self.head.feature_dim == -1 or self.batches < JUDGED_AT_FIRST or self.batches % 8 == 0
        )

    def _learn(self, batch: _Pass) -> None:
        """Solve the head and step the backbone, in the learner's order."""
        if self.order == "backbone-first" and self.trained:
            self._step_backbone(self._drawn(batch))
            with torch.no_grad():
                self.head.update(self._features(batch.x), batch.y, batch.weight)
            return
        with torch.no_grad():
            solved = self._features(batch.x) if self.mode_matters else batch.phi
            self.head.update(solved, batch.y, batch.weight)
        self._step_backbone(self._drawn(batch))

    def _step_backbone(self, batch: _Pass) -> None:
        """One gradient step at W held fixed; by the envelope theorem W's change does not count."""
        if self.optimizer is None:
            return
        loss = self.head.loss(self.head.for_gradient(batch.phi), batch.y, batch.weight)
        if loss is None or not loss.requires_grad:  # no target, or all parameters frozen since
            return
        descend(self.optimizer, loss, self.trained, self.clip)

    def _arrived(self, x: Tensor, y: Tensor, weight: Tensor | None) -> _Pass:
        """A batch as it comes; with a buffer the backbone does not train on it."""
        if self.buffer is None:
            return self._pass(x, y, weight)
        with torch.no_grad():
            return self._pass(x, y, weight, training=False)

    def _drawn(self, batch: _Pass) -> _Pass:
        """What the backbone trains on: the batch, or as many rows of the buffer."""
        if self.buffer is None:
            return batch
        return self._pass(*self.buffer.draw(len(batch.x)))

    def _pass(self, x: Tensor, y: Tensor, weight: Tensor | None, *, training: bool = True) -> _Pass:
        """Scale a batch and take it through the backbone, with gradients in training mode."""
        scaled_x = self._scaled_x(x)
        if self.relative is not None:
            weight = self.relative(y, weight)
        scaled_y = self.scaling.scale_targets(y)
        if self.mode_matters is None:
            self.mode_matters = acts_by_mode(self.backbone, scaled_x)
        if not (self.mode_matters and training):
            return _Pass(scaled_x, scaled_y, weight, self._features(scaled_x))
        with training_mode(self.backbone, single=x.shape[0] == 1 and x.dim() == 2):
            return _Pass(scaled_x, scaled_y, weight, self._features(scaled_x))
