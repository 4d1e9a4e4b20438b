"""An MLP on the memory of torch's, compiled: features of single rows, gradient steps on a few.

The parameters and the optimiser's state stay torch's own, so checkpoints, growth and everything
else that knows of them go on as they are; only the arithmetic is done here. To keep the calls
simple, the parameters of a model are moved into one vector, and so are the moments.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalmanhead.backbones import MLP
from kalmanhead.errors import NumericalError
from kalmanhead.row_compiled import adam, backward, features, forward

Floats = NDArray[np.float64]
Passed = tuple[Floats, Floats]  # values and slopes of all layers

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
        for model, vector, (_, places) in zip(models, common, pieces, strict=True):
            for parameter, (start, shape) in zip(model.parameters(), places, strict=True):
                parameter.data = vector[start : start + math.prod(shape)].view(shape)
        shapes = [shape for _, shape in pieces[0][1][::2]]
        self.sizes = np.array([shapes[0][1], *[many for many, _ in shapes]])

    def __call__(self, z: Floats) -> Floats:
        """Features of one row, (p,) -> (m, width)."""
        phi = np.empty((len(self.vectors), 1 + self.sizes[-1]))
        unscaled = (np.zeros_like(z), np.ones_like(z), math.inf)
        features(z, *unscaled, self.vectors, self.sizes, False, phi)
        return phi[:, 1:]

    def forward(self, z: Floats) -> tuple[Floats, Passed]:
        """Features (n, width) of rows (n, p) by the first model, and what `backward` needs."""
        values, slopes = forward(self.vectors[0], self.sizes, z)
        return values[-len(z) * self.sizes[-1] :].reshape(len(z), -1), (values, slopes)

    def backward(self, passed: Passed, gradient: Floats) -> Floats:
        """Gradient of all parameters, (size,), from that of the features, (n, width)."""
        return np.asarray(
            backward(self.vectors[0], self.sizes, *passed, np.ascontiguousarray(gradient))
        )


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
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
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
        options = self.options
        adam(
            values,
            gradient,
            *self.moments,
            options["lr"],
            *options["betas"],
            options["eps"],
            float(self.steps[0]),
        )


def _one_piece(tensors: list[Tensor]) -> tuple[Tensor, list[tuple[int, tuple[int, ...]]]]:
    """All values as one new vector, and where each tensor begins in it, with its shape."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return vector, [
        (start, tuple(tensor.shape)) for start, tensor in zip(starts, tensors, strict=False)
    ]
