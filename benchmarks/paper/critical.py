"""The spurious critical point phi = 0: where it holds training, and what gets out of it.

With Phi = 0 the ridge solve gives W* = 0, and the backbone's gradient, W*' times the residuals,
is 0 too: no step is ever taken, at a loss of |Y|^2, the largest that an eliminated W can leave
(W = 0 is always open to it). It is a maximum of the eliminated loss and no trap for anything that
is not exactly there: near it W* is proportional to Phi, so that a perturbation of size epsilon
grows by a factor at every step, and it takes about log(1 / epsilon) steps to get away.

Ways out, each tried from a last layer of the backbone set to 0 (tanh, so that phi = 0 with slope
1 there): a proximal solve leaves W_t as it was, so a random W_0 has a gradient at once; the
backbone's own bias makes features that are constant but not 0. The head's constant does not help:
it takes up the mean of Y, and the deep weights and their gradient stay 0. The usual random
initialisation never starts there.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kalmanhead.head import KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import sgd

ROWS, INPUTS, WIDTH, PENALTY, RATE = 64, 4, 16, 1.0, 0.02
PERTURBED = (1e-12, 1e-8, 1e-4)
STARTS = (
    *("zero features", "zero features, constant in the head"),
    *(f"perturbed by {size:g}" for size in PERTURBED),
    *("proximal, W0 = 0", "proximal, random W0", "bias in the backbone", "usual initialisation"),
)
STUCK = (*STARTS[:2], "proximal, W0 = 0")


def network(start: str, generator: torch.Generator) -> nn.Module:
    """Two tanh layers without bias; the second set by what the start says."""
    first, last = nn.Linear(INPUTS, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
    drawn = [torch.randn(layer.weight.shape, generator=generator) / 2 for layer in (first, last)]
    scale = 0.0
    if start.startswith("perturbed by "):
        scale = float(start.removeprefix("perturbed by "))
    elif start == "usual initialisation":
        scale = 1.0
    with torch.no_grad():
        first.weight.copy_(drawn[0])
        last.weight.copy_(scale * drawn[1])
        last.bias.fill_(0.5 if start == "bias in the backbone" else 0.0)
    return nn.Sequential(first, nn.Tanh(), last, nn.Tanh()).double()


def trained(start: str, seed: int, steps: int) -> dict[str, Any]:
    """Full-batch training from one start: how far the loss came, and when it first moved."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.5
    constant = start.endswith("constant in the head")
    form = "reset" if start.startswith("proximal") else "ridge"
    head = KalmanHead(WIDTH, 1, bias=constant, transition=form, prior_precision=PENALTY)
    if start == "proximal, random W0":
        head.set_weight(torch.randn(1, WIDTH, generator=generator, dtype=torch.float64) / 4)
    backbone = network(start, generator)
    learner = OnlineLearner(backbone, head, sgd(RATE), scale_x=False, scale_y=False)
    losses, largest = [], 0.0
    for _ in range(steps):
        learner.learn(x, y)
        losses.append(float((learner.predict(x) - y).square().mean()))
        largest = max(largest, gradient_norm(backbone))
    level = losses[0] if start in STUCK else float(y.square().mean())
    return {
        "start": start,
        "seed": seed,
        "loss_left": losses[-1] / float(y.square().mean()),
        "largest_gradient": largest,
        "steps_to_move": next((i + 1 for i, v in enumerate(losses) if v < 0.9 * level), None),
    }


def gradient_norm(backbone: nn.Module) -> float:
    parts: list[Tensor] = [p.grad.norm() for p in backbone.parameters() if p.grad is not None]
    return float(torch.stack(parts).norm())
