"""Full batch alternation on wide two-layer networks: a linear rate, foretold by two kernels.

f(x) = W phi(x), phi(x) = relu(A x) / sqrt(m), entries of A and W0 drawn from N(0, 1), n points
on the unit sphere. One step of the alternation takes the residuals r = y - f in turn through

    the proximal solve     r -> lambda (K + lambda I)^-1 r,    K = Phi Phi'  (n, n)
    the backbone's step    r -> (I - alpha Theta) r,           Theta = J J', J = df / dA

the first exactly, the second to first order. As the width m grows A moves ever less, K and Theta
stay what they were at the start and tend to the arc-cosine kernels, so that these products foretell
the loss |r|^2 / n step by step; with k and t their smallest eigenvalues it falls at every step by
(lambda / (k + lambda))^2 (1 - alpha t)^2 at least. For plain gradient descent on both layers the
factor is I - alpha (K + Theta), the neural tangent kernel. Without lambda the first solve alone
ends it once K has full rank.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kalmanhead.head import KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import sgd

POINTS, INPUTS, LAMBDA = 24, 12, 0.3
THINNED = 4  # of the losses that are kept for the picture
FLOOR = 1e-26  # of the loss, where rounding takes over


class Wide(nn.Module):
    """relu(A x) / sqrt(m) in float64."""

    feature_dim = -1

    def __init__(self, inputs: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.out_features = width
        start = torch.randn(width, inputs, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(start)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight.T) / math.sqrt(self.out_features)


def points(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(POINTS, INPUTS, generator=generator, dtype=torch.float64)
    y = torch.randn(POINTS, 1, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True), y


def empirical_kernels(backbone: Wide, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """K and Theta of a network, (n, n) each."""
    phi = backbone(x).detach()
    slopes = (x @ backbone.weight.detach().T > 0).double() * w  # (n, m)
    return phi @ phi.T, (slopes @ slopes.T / backbone.out_features) * (x @ x.T)


def limit_kernels(x: Tensor) -> tuple[Tensor, Tensor]:
    """K and Theta at infinite width: the arc-cosine kernels of unit vectors."""
    cosine = (x @ x.T).clamp(-1, 1)
    angle = torch.arccos(cosine)
    zeroth = (math.pi - angle) / (2 * math.pi)
    first = (torch.sin(angle) + (math.pi - angle) * cosine) / (2 * math.pi)
    return first, zeroth * cosine


def foretold(k: Tensor, theta: Tensor, alpha: float, residuals: Tensor) -> list[float]:
    """Losses that the two kernels foretell, by the solve and the step in turn."""
    one = torch.eye(len(k)).to(k)
    step = (one - alpha * theta) @ torch.linalg.inv(k + LAMBDA * one) * LAMBDA
    losses: list[float] = []
    while not losses or losses[-1] > FLOOR:
        losses.append(float(residuals.square().mean()))
        residuals = step @ residuals
    return losses


def guaranteed(k: Tensor, theta: Tensor, alpha: float) -> float:
    """What the smallest eigenvalues alone guarantee: the product of both steps' norms."""
    solve = LAMBDA / (LAMBDA + float(torch.linalg.eigvalsh(k)[0]))
    return -2 * math.log(solve * (1 - alpha * float(torch.linalg.eigvalsh(theta)[0])))


def foretold_by_descent(k: Tensor, theta: Tensor) -> float:
    """Rate of gradient descent on both layers with step 1 / L."""
    values = torch.linalg.eigvalsh(k + theta)
    return -2 * math.log(float(1 - values[0] / values[-1]))


def fitted(losses: list[float]) -> tuple[float, float]:
    """Rate per step and R^2 of a straight line through log loss, over the later half."""
    kept = torch.tensor([math.log(v) for v in losses if v > FLOOR], dtype=torch.float64)
    kept = kept[len(kept) // 2 :]
    steps = torch.arange(len(kept), dtype=torch.float64)
    steps, kept = steps - steps.mean(), kept - kept.mean()
    slope = float(steps @ kept / (steps @ steps))
    left = float((kept - slope * steps).square().sum() / kept.square().sum())
    return -slope, 1 - left


def alternate(width: int, seed: int, steps: int) -> dict[str, Any]:
    """The engine's own alternation on the full batch, and what the kernels foretell of it."""
    x, y = points(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    backbone = Wide(INPUTS, width, generator)
    w = torch.randn(1, width, generator=generator, dtype=torch.float64)
    own, limit = empirical_kernels(backbone, w, x), limit_kernels(x)
    alpha = 0.5 / float(torch.linalg.eigvalsh(own[1])[-1])
    residuals = y - backbone(x).detach() @ w.T
    at_once = loss_of_one_exact_solve(backbone(x).detach(), y)
    start = backbone.weight.detach().clone()
    losses = learn(backbone, w, alpha, x, y, steps)
    rate, straight = fitted(losses)
    return {
        "width": width,
        "seed": seed,
        "loss_left": losses[-1] / losses[0],
        "losses": losses[::THINNED],
        "rate": rate,
        "r_squared": straight,
        "foretold": fitted(foretold(*own, alpha, residuals))[0],
        "foretold_by_limit": fitted(foretold(*limit, alpha, residuals))[0],
        "guaranteed": guaranteed(*own, alpha),
        "gradient_descent": foretold_by_descent(*own),
        "smallest_eigenvalues": [float(torch.linalg.eigvalsh(kernel)[0]) for kernel in own],
        "loss_after_one_exact_solve": at_once,
        "moved": float((backbone.weight.detach() - start).norm() / start.norm()),
    }


def learn(backbone: Wide, w: Tensor, alpha: float, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """Losses before each step, until they are down to rounding."""
    head = KalmanHead(w.shape[1], 1, bias=False, prior_precision=LAMBDA)
    head.set_weight(w)
    # The engine's loss is the mean of squares, with gradient -2 J' r / n.
    step = sgd(alpha * POINTS / 2, momentum=0.0)
    learner = OnlineLearner(backbone, head, step, scale_x=False, scale_y=False)
    losses = [float((learner.predict(x) - y).square().mean())]
    while len(losses) <= steps and losses[-1] > FLOOR:
        learner.learn(x, y)
        losses.append(float((learner.predict(x) - y).square().mean()))
    return losses


def loss_of_one_exact_solve(phi: Tensor, y: Tensor) -> float:
    head = KalmanHead(phi.shape[1], 1, bias=False, prior_precision=1e-12, transition="ridge")
    head.update(phi, y)
    return float((head(phi) - y).square().mean())
