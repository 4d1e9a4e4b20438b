"""The envelope identity: no backpropagation through the solve.

With W*(theta) the minimiser over W of J(W, theta), the gradient of J(W*(theta), theta) with W
eliminated is dJ/dtheta at W = W* held fixed, since dJ/dW is 0 there. J has to be all that was
minimised:

    ridge:     J = |Y - Phi W'|^2 + beta |W|^2
    proximal:  J = |Y - Phi W'|^2 + lambda |W - W_t|^2

At fixed W only the first term depends on theta, so that the gradient of the squared error at
fixed W is what is to be taken, and what the engine takes when it solves first. Of the squared
error alone, W eliminated, it is not the gradient: the penalty moves with W*. With backbone first
(Algorithm 1) it is taken at W_t, and is another one by design.
"""

import torch
from torch import Tensor, nn

from kalmanhead.head import KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import sgd

FORMS = ("ridge", "reset")


def random_case(seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor, float]:
    """A network, a batch, W_t and a penalty, of random sizes."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, inputs, d, k = (int(torch.randint(2, 30, (), generator=generator)) for _ in range(4))
    backbone = nn.Sequential(nn.Linear(inputs, d), nn.Tanh(), nn.Linear(d, d), nn.GELU()).double()
    for parameter in backbone.parameters():
        parameter.data = drawn(*parameter.shape) / parameter.shape[-1] ** 0.5
    penalty = float(10 ** (4 * torch.rand((), generator=generator) - 2))
    return backbone, drawn(n, inputs), drawn(n, k), drawn(k, d), penalty


def gradient(backbone: nn.Module, loss: Tensor) -> Tensor:
    parts = torch.autograd.grad(loss, list(backbone.parameters()))
    return torch.cat([part.flatten() for part in parts])


def eliminated(
    backbone: nn.Module, x: Tensor, y: Tensor, centre: Tensor, penalty: float, whole: bool
) -> Tensor:
    """Gradient through the solve, of the whole objective or of its squared error alone."""
    phi = backbone(x)
    gram = phi.T @ phi + penalty * torch.eye(phi.shape[1]).to(phi)
    w = torch.linalg.solve(gram, phi.T @ y + penalty * centre.T).T
    loss = (y - phi @ w.T).square().sum()
    return gradient(backbone, loss + penalty * (w - centre).square().sum() if whole else loss)


def by_engine(
    backbone: nn.Module, x: Tensor, y: Tensor, start: Tensor, penalty: float, form: str
) -> Tensor:
    """The gradient that the engine left after one batch, solved first; a step of size 0."""
    head = KalmanHead(
        start.shape[1], len(start), bias=False, transition=form, prior_precision=penalty
    )
    if form == "reset":
        head.set_weight(start)
    learner = OnlineLearner(backbone, head, sgd(0.0), scale_x=False, scale_y=False)
    learner.learn(x, y)
    found = [p.grad.flatten() for p in backbone.parameters() if p.grad is not None]
    return torch.cat(found) * y.numel()  # the engine's loss is a mean


def differences(form: str, seed: int) -> dict[str, float | str | int]:
    """Relative differences from the engine's gradient, at fixed W, of both through the solve."""
    backbone, x, y, w, penalty = random_case(seed)
    centre = w if form == "reset" else torch.zeros_like(w)
    fixed = by_engine(backbone, x, y, w, penalty, form)
    apart = {
        name: float((eliminated(backbone, x, y, centre, penalty, whole) - fixed).norm())
        for name, whole in (("whole_objective", True), ("squared_error_alone", False))
    }
    size = float(fixed.norm())
    return {"form": form, "seed": seed, **{name: value / size for name, value in apart.items()}}
