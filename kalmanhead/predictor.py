"""What predicts: scales, backbone, head and, beside them, the averaged model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kalmanhead.averaging import Averaging, Forecast
from kalmanhead.backbones import LinearBackbone
from kalmanhead.errors import ConfigError
from kalmanhead.guard import as_inputs, check_width, run_backbone
from kalmanhead.head import Head
from kalmanhead.layout import rescaled_weight
from kalmanhead.noise import Predictive
from kalmanhead.outliers import Outliers
from kalmanhead.scaling import Scaled, Scaling
from kalmanhead.split import merge_head


class Predictor(nn.Module):
    """Takes inputs through scales, backbone and head; learns nothing by itself.

    Parameters and errors are those of `OnlineLearner`.
    """

    def __init__(
        self, backbone: nn.Module, head: Head, *, skip: bool, scale_x: bool, scale_y: bool
    ) -> None:
        super().__init__()
        if not isinstance(backbone, nn.Module) or not hasattr(head, "update"):
            raise ConfigError(
                f"a {type(backbone).__name__} and a {type(head).__name__} make no learner: give a "
                "torch.nn.Module as backbone, then a head such as KalmanHead"
            )
        self.backbone, self.head, self.skip = backbone, head, skip
        self.scaling = Scaling(inputs=scale_x, targets=scale_y, center=head.has_bias)
        self.average: Averaging | None = None
        self.outliers: Outliers | None = None
        self.dtype = next((p.dtype for p in backbone.parameters()), torch.float32)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Predicted targets in their own units, (n, k) or (n, k, *grid); changes nothing."""
        return self.scaling.unscale_targets(self._foresee(x).mixture)

    @torch.no_grad()
    def predict_dist(self, x: Tensor) -> Predictive:
        """Predictive distribution of the targets in their own units; changes nothing."""
        scaled_x = self._scaled_x(x)
        phi = self._features(scaled_x)
        scaled = self.head.predict_dist(phi)
        if self.average is not None:
            scaled = self.average.calibrated(scaled, self._forecast(scaled_x, phi).mixture)
        mean = self.scaling.unscale_targets(scaled.mean)
        return Predictive(mean, self.scaling.unscale_spread(scaled.scale), scaled.dof)

    def unwrap(self) -> nn.Module:
        """Plain model of a learner that `wrap` made, averaged if it averages; a copy, head put in.

        Raises
        ------
        ConfigError
            The learner scales or skips inputs, which the plain model does not.
        SplitError
            The learner was not made by `wrap`.
        """
        if self.scaling.inputs or self.skip:
            raise ConfigError("unwrap needs a learner with scale_x and skip off: wrap it so")
        weight, backbone = self.head.weight.detach(), self.backbone
        if self.average is not None:
            weight, backbone = self.average.weight, self.average.backbone
        if self.scaling.y is not None:
            scale, shift = self.scaling.y.scale, self.scaling.y.shift
            weight = rescaled_weight(weight, scale, shift, self.head.has_bias)
        weight = weight.to(self.dtype)
        if not self.head.has_bias:
            return merge_head(backbone, weight, None)
        return merge_head(backbone, weight[:, 1:], weight[:, 0])

    @property
    def parts(self) -> list[Scaled]:
        """All that knows of scaled units."""
        return [
            self.head,
            *(part for part in (self.average, self.outliers) if part is not None),
        ]

    @property
    def leads_with_inputs(self) -> bool:
        """Whether the head's leading features are the scaled inputs."""
        return self.skip or isinstance(self.backbone, LinearBackbone)

    @property
    def device(self) -> torch.device:
        """Where the head lies."""
        return self.head.weight.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Predictor:
        """Follow a move to another device or dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = next((p.dtype for p in self.backbone.parameters()), self.dtype)
        self.scaling.to(self.device)
        for part in (self.average, self.outliers):
            if part is not None:
                part.moved(fn)
        return self

    def _scaled_x(self, x: Tensor) -> Tensor:
        """Inputs as the backbone wants them."""
        x = as_inputs(x, self.device, self.dtype)
        known = x.shape[1] if self.scaling.x is None else self.scaling.x.count.shape[0]
        if x.shape[1] != known:
            raise ConfigError(
                f"x has shape {tuple(x.shape)}: {known} inputs were learnt from, give as many"
            )
        return self.scaling.scale_inputs(x).to(self.dtype)

    @torch.no_grad()
    def _foresee(self, x: Tensor) -> Forecast:
        """Predictions for a batch, in evaluation mode."""
        scaled_x = self._scaled_x(x)
        return self._forecast(scaled_x, self._features(scaled_x))

    def _forecast(self, scaled_x: Tensor, phi: Tensor) -> Forecast:
        """Predictions where the newest backbone's features are known."""
        newest = self.head(phi)
        if self.average is None:
            return Forecast(newest, newest, newest)
        average = self.average(self._features(scaled_x, self.average.backbone))
        return Forecast(newest, average, self.average.mix(newest, average))

    def _features(self, scaled_x: Tensor, backbone: nn.Module | None = None) -> Tensor:
        """Features of the head: the scaled inputs, if asked for, and the backbone's."""
        phi = run_backbone(self.backbone if backbone is None else backbone, scaled_x)
        if not self.skip:
            return check_width(phi, self.head)
        if phi.dim() != scaled_x.dim() or phi.shape[2:] != scaled_x.shape[2:]:
            raise ConfigError(
                f"skip needs features on the grid of the inputs: inputs have shape "
                f"{tuple(scaled_x.shape)}, features {tuple(phi.shape)}; leave skip off"
            )
        return check_width(torch.cat([scaled_x, phi], self.head.feature_dim), self.head)
