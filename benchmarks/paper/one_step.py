"""One step on the last layer: what a solve gains over a gradient step, against a bound.

Loss L(W) = |Y - Phi W'|^2 / 2 + beta |W|^2 / 2 with features Phi (n, d); H = Phi'Phi + beta I has
eigenvalues s_1 >= ... >= s_d > 0 and condition number kappa = s_1 / s_d. With W* the minimiser
and e_i the error of W along eigenvector i, the excess L(W) - L(W*) is sum_i s_i e_i^2 / 2.

A gradient step of size 1 / s_1 = 1 / L, the largest for which the loss is sure to fall, leaves
e_i (1 - s_i / s_1), and so of the excess at most the share

    (1 - 1 / kappa)^2,

reached when the error lies along the last eigenvector. Every further step leaves as much again:
to get to a share q takes log q / (2 log(1 - 1 / kappa)) steps, about kappa log(1 / q) / 2. The
solve leaves none, at once, whatever kappa. The proximal solve with lambda leaves e_i lambda /
(s_i + lambda) (beta = 0 here), and so at most (1 + s_d / lambda)^-2 of the excess.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kalmanhead.head import KalmanHead

ROWS, WIDTH = 128, 16


def features(kappa: float, seed: int) -> Tensor:
    """Random features (n, d) whose Gram has eigenvalues from 1 down to 1 / kappa."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(ROWS + WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    left, _ = torch.linalg.qr(drawn[:ROWS])
    right, _ = torch.linalg.qr(drawn[ROWS:])
    values = torch.logspace(0, -math.log10(kappa) / 2, WIDTH, dtype=torch.float64)
    return left * values @ right.T


def excess(w: Tensor, best: Tensor, hessian: Tensor) -> float:
    error = w - best
    return float((error @ hessian * error).sum() / 2)


def shares_left(kappa: float, start: str, seed: int) -> dict[str, Any]:
    """Shares of the excess that one step of each kind leaves, beside their bounds."""
    phi = features(kappa, seed)
    generator = torch.Generator().manual_seed(500 + seed)
    best = torch.randn(1, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    # Noise outside of the features' range, so that the best W is known exactly.
    noise -= phi @ torch.linalg.lstsq(phi, noise).solution
    y, hessian = phi @ best.T + noise, phi.T @ phi
    values, vectors = torch.linalg.eigh(hessian)
    if start == "worst":
        w = best + vectors[:, :1].T
    else:
        w = best + torch.randn(1, WIDTH, generator=generator, dtype=torch.float64)
    before, largest, smallest = excess(w, best, hessian), float(values[-1]), float(values[0])
    stepped = w - (w @ phi.T - y.T) @ phi / largest
    lam = math.sqrt(largest * smallest)
    solved = {name: after_solve(phi, y, w, name, lam) for name in ("ridge", "reset")}
    bound = (1 - smallest / largest) ** 2
    return {
        "kappa": kappa,
        "start": start,
        "seed": seed,
        "gradient": excess(stepped, best, hessian) / before,
        "gradient_bound": bound,
        "solve": excess(solved["ridge"], best, hessian) / before,
        "proximal": excess(solved["reset"], best, hessian) / before,
        "proximal_bound": (1 + smallest / lam) ** -2,
        "gradient_steps_to_a_hundredth": math.ceil(math.log(0.01) / math.log(bound)),
    }


def after_solve(phi: Tensor, y: Tensor, w: Tensor, transition: str, lam: float) -> Tensor:
    """W after one update of the engine's head: unregularised (`ridge`), or proximal (`reset`)."""
    precision = lam if transition == "reset" else 1e-16
    head = KalmanHead(WIDTH, 1, bias=False, transition=transition, prior_precision=precision)
    if transition == "reset":
        head.set_weight(w)
    head.update(phi, y)
    return head.weight


def violated(row: dict[str, Any]) -> int:
    """How many of the two bounds a step got past."""
    pairs = ((row["gradient"], row["gradient_bound"]), (row["proximal"], row["proximal_bound"]))
    # Eigenvalues are known to 1e-16 of the largest, and the bounds are reached.
    slack = 1e-12 + 1e-15 * row["kappa"]
    return sum(share > bound * (1 + slack) for share, bound in pairs)
