"""An MLP in numpy, on the memory of torch's: features of single rows, gradient steps on a few.

The parameters and the optimiser's state stay torch's own, so checkpoints, growth and everything
else that knows of them go on as they are; only the arithmetic is done here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import erf
from torch import Tensor

from kalmanhead.backbones import MLP
from kalmanhead.errors import NumericalError

Floats = NDArray[np.float64]


class Layers:
    """An MLP with gelu, or several of the same sizes side by side.

    Parameters
    ----------
    models:
        m of them. Their parameters are moved into common memory; the first one is trained.
    """

    def __init__(self, models: list[MLP]) -> None:
        self.first = models[0]
        layers = list(zip(*(model.layers for model in models), strict=True))
        self.weights = [_together([layer.weight for layer in same]) for same in layers]
        self.biases = [_together([layer.bias for layer in same]) for same in layers]

    def __call__(self, z: Floats) -> Floats:
        """Features of one row, (p,) -> (m, width)."""
        a = self.weights[0] @ z
        a += self.biases[0]
        a *= erf(a * math.sqrt(0.5)) + 1  # twice gelu
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            a = (weight @ a[:, :, None])[:, :, 0]
            a *= 0.5
            a += bias
            a *= erf(a * math.sqrt(0.5)) + 1
        a *= 0.5
        return np.asarray(a)

    def forward(self, z: Floats) -> tuple[Floats, list[tuple[Floats, Floats, Floats]]]:
        """Features (n, width) of rows (n, p) by the first model, and what `backward` needs."""
        passed, h = [], z
        for weight, bias in zip(self.weights, self.biases, strict=True):
            a = h @ weight[0].T + bias[0]
            half = 0.5 * (1 + erf(a * math.sqrt(0.5)))
            slope = half + a * np.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
            passed.append((h, slope, weight[0]))
            h = a * half
        return h, passed

    def backward(
        self, passed: list[tuple[Floats, Floats, Floats]], gradient: Floats
    ) -> list[Floats]:
        """Gradients of all parameters, in their order, from that of the features, (n, width)."""
        gradients: list[Floats] = []
        for h, slope, weight in reversed(passed):
            inner = gradient * slope
            gradients += [inner.sum(0), inner.T @ h]
            gradient = inner @ weight
        return gradients[::-1]


def descend(optimizer: torch.optim.Optimizer, gradients: list[Floats], clip: float | None) -> None:
    """One step of torch's Adam, or SGD with momentum, on its own parameters and state.

    Raises
    ------
    NumericalError
        A gradient is not finite.
    """
    norm = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in gradients))
    if not math.isfinite(norm):
        raise NumericalError(
            "the backbone's gradient is not finite: its weights have diverged; lower the learning "
            "rate or clip the gradient"
        )
    if clip is not None:
        scale = min(1.0, clip / (norm + 1e-6))
        gradients = [gradient * scale for gradient in gradients]
    options = optimizer.param_groups[0]
    step = _adam if isinstance(optimizer, torch.optim.Adam) else _sgd
    for parameter, gradient in zip(options["params"], gradients, strict=True):
        step(parameter.detach().numpy(), gradient, optimizer.state[parameter], options)


def _adam(value: Floats, gradient: Floats, state: dict[str, Any], options: dict[str, Any]) -> None:
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros(value.shape, dtype=torch.float64)
        state["exp_avg_sq"] = torch.zeros(value.shape, dtype=torch.float64)
    state["step"] += 1
    step, (fast, slow) = float(state["step"]), options["betas"]
    mean, square = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
    mean += (1 - fast) * (gradient - mean)
    square *= slow
    square += (1 - slow) * gradient * gradient
    root = np.sqrt(square)
    root /= math.sqrt(1 - slow**step)
    root += options["eps"]
    value -= options["lr"] / (1 - fast**step) * mean / root


def _sgd(value: Floats, gradient: Floats, state: dict[str, Any], options: dict[str, Any]) -> None:
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros(value.shape, dtype=torch.float64)
    momentum = state["momentum_buffer"].numpy()
    momentum *= options["momentum"]
    momentum += gradient
    value -= options["lr"] * momentum


def _together(parameters: list[Tensor]) -> Floats:
    """Parameters of several models, moved into one array; they keep sharing its memory."""
    common = torch.stack([parameter.detach() for parameter in parameters])
    for parameter, own in zip(parameters, common, strict=True):
        parameter.data = own
    return common.numpy()
