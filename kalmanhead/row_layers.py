"""An MLP in numpy, on the memory of torch's: features of single rows, gradient steps on a few.

The parameters and the optimiser's state stay torch's own, so checkpoints, growth and everything
else that knows of them go on as they are; only the arithmetic is done here. To keep the number of
calls small, the parameters of a model are moved into one vector, and so are the moments.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import erf
from torch import Tensor

from kalmanhead.backbones import MLP
from kalmanhead.errors import NumericalError

Floats = NDArray[np.float64]
Passed = list[tuple[Floats, Floats, Floats]]

SQRT_HALF = math.sqrt(0.5)
MOMENTS = {torch.optim.Adam: ("exp_avg", "exp_avg_sq"), torch.optim.SGD: ("momentum_buffer",)}


class Layers:
    """An MLP with gelu, or several of the same sizes side by side.

    Parameters
    ----------
    models:
        m of them. Their parameters are moved into common memory; the first one is trained.

    Attributes
    ----------
    vectors:
        All parameters of each model, (m, size).
    """

    def __init__(self, models: list[MLP]) -> None:
        pieces = [_one_piece(list(model.parameters())) for model in models]
        common = torch.stack([vector for vector, _ in pieces])
        self.vectors = common.numpy()
        stacks = []
        for (start, shape), *others in zip(*(places for _, places in pieces), strict=True):
            size = math.prod(shape)
            stacks.append(common[:, start : start + size].view(len(models), *shape))
            assert all(place == (start, shape) for place in others)
        for i, model in enumerate(models):
            for parameter, stack in zip(model.parameters(), stacks, strict=True):
                parameter.data = stack[i]
        self.weights = [stack.numpy() for stack in stacks[::2]]
        self.biases = [stack.numpy() for stack in stacks[1::2]]

    def __call__(self, z: Floats) -> Floats:
        """Features of one row, (p,) -> (m, width)."""
        a = self.weights[0] @ z
        a += self.biases[0]
        a *= erf(a * SQRT_HALF) + 1  # twice gelu
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            a = (weight @ a[:, :, None])[:, :, 0]
            a *= 0.5
            a += bias
            a *= erf(a * SQRT_HALF) + 1
        a *= 0.5
        return np.asarray(a)

    def forward(self, z: Floats) -> tuple[Floats, Passed]:
        """Features (n, width) of rows (n, p) by the first model, and what `backward` needs."""
        passed, h = [], z
        for weight, bias in zip(self.weights, self.biases, strict=True):
            a = h @ weight[0].T
            a += bias[0]
            half = erf(a * SQRT_HALF)
            half += 1
            half *= 0.5
            slope = a * a
            slope *= -0.5
            np.exp(slope, out=slope)
            slope *= a
            slope /= math.sqrt(2 * math.pi)
            slope += half
            passed.append((h, slope, weight[0]))
            h = a * half
        return h, passed

    def backward(self, passed: Passed, gradient: Floats) -> Floats:
        """Gradient of all parameters, (size,), from that of the features, (n, width)."""
        parts: list[Floats] = []
        for i, (h, slope, weight) in reversed(list(enumerate(passed))):
            inner = gradient * slope
            parts += [inner.sum(0), (inner.T @ h).ravel()]
            if i:
                gradient = inner @ weight
        return np.concatenate(parts[::-1])


class Descent:
    """Steps of torch's Adam, or SGD with momentum, on a model's parameters in one vector.

    Parameters
    ----------
    optimizer:
        Of all the parameters of a model. Its state is moved into vectors of the same order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.options = optimizer.param_groups[0]
        parameters = self.options["params"]
        self.moments: list[Floats] = []
        for name in MOMENTS[type(optimizer)]:
            states = [optimizer.state[parameter] for parameter in parameters]
            before = [
                torch.zeros_like(parameter) if state.get(name) is None else state[name]
                for parameter, state in zip(parameters, states, strict=True)
            ]
            vector, places = _one_piece(before)
            for state, (start, shape) in zip(states, places, strict=True):
                state[name] = vector[start : start + math.prod(shape)].view(shape)
            self.moments.append(vector.numpy())
        self.steps: list[NDArray[np.float32]] = []
        if isinstance(optimizer, torch.optim.Adam):
            for state in states:
                state.setdefault("step", torch.tensor(0.0))
            self.steps = [state["step"].numpy() for state in states]

    def step(self, values: Floats, gradient: Floats, clip: float | None) -> None:
        """Step from values (size,), in place, down a gradient of at most this norm.

        Raises
        ------
        NumericalError
            The gradient is not finite; nothing has moved.
        """
        norm = math.sqrt(float(np.vdot(gradient, gradient)))
        if not math.isfinite(norm):
            raise NumericalError(
                "the backbone's gradient is not finite: its weights have diverged; lower the "
                "learning rate or clip the gradient"
            )
        if clip is not None:
            gradient = gradient * min(1.0, clip / (norm + 1e-6))
        if self.steps:
            self._adam(values, gradient)
        else:
            momentum = self.moments[0]
            momentum *= self.options["momentum"]
            momentum += gradient
            values -= self.options["lr"] * momentum

    def _adam(self, values: Floats, gradient: Floats) -> None:
        for count in self.steps:
            count += 1
        step, (fast, slow) = float(self.steps[0]), self.options["betas"]
        mean, square = self.moments
        mean += (1 - fast) * (gradient - mean)
        square *= slow
        gradient = gradient * gradient
        gradient *= 1 - slow
        square += gradient
        root = np.sqrt(square)
        root /= math.sqrt(1 - slow**step)
        root += self.options["eps"]
        change = mean / root
        change *= self.options["lr"] / (1 - fast**step)
        values -= change


def _one_piece(tensors: list[Tensor]) -> tuple[Tensor, list[tuple[int, tuple[int, ...]]]]:
    """All values as one new vector, and where each tensor begins in it, with its shape."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return vector, [
        (start, tuple(tensor.shape)) for start, tensor in zip(starts, tensors, strict=False)
    ]
