"""The belief about the last layer's weights, and how rows of data change it.

Layout: features Phi (n, d), targets Y (n, k), mean W (..., k, d), covariance P (..., d, d).
Leading dimensions are a bank of heads that see the same rows. P is in units of the noise
variance, so that one P serves all k outputs: W_j ~ N(mean_j, sigma_j^2 P).

The model of a batch is Y = Phi W' + E, with row i of E distributed N(0, sigma_j^2 / w_i), and
conditioning (the Kalman filter's measurement update) is

    P = (P-^-1 + Phi' R^-1 Phi)^-1,    W = W- + (Y - Phi W-')' R^-1 Phi P,    R = diag(1 / w).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kalmanhead.linalg import (
    cholesky_solve,
    covariance_root,
    log_determinant,
    row_major,
    safe_cholesky,
    solve_lower,
    symmetrise,
)

Form = Literal["diagonal", "dense", "root"]
Method = Literal["auto", "primal", "dual"]


@dataclass(frozen=True)
class Posterior:
    """Mean and covariance of the last layer's weights; an immutable value.

    Attributes
    ----------
    mean:
        W, (..., k, d).
    spread:
        The covariance P in units of the noise variance, by `form`: `diagonal` holds variances
        (..., d); `dense` holds P (..., d, d); `root` holds any F (..., d, d) with P = F F'.
        A zero variance switches a feature off exactly.
    form:
        How `spread` is to be read.
    """

    mean: Tensor
    spread: Tensor
    form: Form = "dense"

    def __post_init__(self) -> None:
        # As they come back from a checkpoint: another layout is summed in another order, and a
        # resumed run would round otherwise than one that was never stopped.
        for name in ("mean", "spread"):
            object.__setattr__(self, name, row_major(getattr(self, name)))

    @property
    def covariance(self) -> Tensor:
        """P as a dense symmetric matrix, (..., d, d)."""
        if self.form == "diagonal":
            return torch.diag_embed(self.spread)
        if self.form == "root":
            return symmetrise(self.spread @ self.spread.mT)
        return self.spread

    def variance_of(self, phi: Tensor) -> Tensor:
        """Quadratic form phi' P phi of each row, (n, d) -> (..., n), in units of the noise."""
        if self.form == "diagonal":
            return self.spread @ phi.square().mT
        if self.form == "root":
            return (phi @ self.spread).square().sum(-1)
        # Rounding can leave a tiny negative number where P is almost singular along phi.
        return ((phi @ self.spread) * phi).sum(-1).clamp_min(0)


@dataclass(frozen=True)
class Update:
    """What conditioning gives: the new belief, and how well the old one had foreseen the rows.

    Attributes
    ----------
    posterior:
        The belief after the rows.
    innovation:
        R^-1/2 (Y - Phi W-'), what the rows brought that was not foreseen, (..., n, k).
    leverage:
        Diagonal of R^-1/2 Phi P- Phi' R^-1/2, (..., n): how unsure W was along each row.
    whitened:
        The innovation in independent parts of unit variance, (..., m, k).
    factor:
        Triangular factor whose squared diagonal multiplies up to det R^-1/2 S R^-1/2, where
        S = R + Phi P- Phi' is the covariance of the innovation in units of the noise variance.
    """

    posterior: Posterior
    innovation: Tensor
    leverage: Tensor
    whitened: Tensor
    factor: Tensor

    @property
    def quadratic(self) -> Tensor:
        """The form innovation' S^-1 innovation of each output, (..., k)."""
        return self.whitened.square().sum(-2)

    @property
    def log_determinant(self) -> Tensor:
        """Log det of R^-1/2 S R^-1/2, (...)."""
        return log_determinant(self.factor)


def condition(
    prior: Posterior,
    phi: Tensor,  # (n, d)
    target: Tensor,  # (n, k)
    weight: Tensor | None = None,  # (n,)
    *,
    method: Method = "auto",
    keep_covariance: bool = True,
) -> Update:
    """Condition the weights on the rows of a batch (measurement update of the Kalman filter).

    With a diagonal prior I / lambda the mean is the proximal solve of arXiv 2510.04606,
    W = (Y' Phi + lambda W-) (Phi' Phi + lambda I)^-1. Two exact routes give the same answer:
    `primal` factorises a d x d matrix, `dual` an n x n one. A root prior, and every float32
    prior, takes the QR route, which never squares the features.

    Parameters
    ----------
    prior:
        The belief before the rows; its leading dimensions are kept.
    phi, target:
        Features (n, d) and targets (n, k), in the dtype of the prior.
    weight:
        Precision of each row, (n,), non-negative; 2 means the row twice and 0 leaves it out.
    method:
        `primal`, `dual`, or `auto` for the cheaper of the two; the QR route takes no notice.
    keep_covariance:
        False skips the new covariance, which then stays the prior's: right where it is going to
        be forgotten anyway.

    Returns
    -------
    Update
        The new posterior and the evidence of the rows. The posterior is `dense` or `root` in
        form; without rows, and without its covariance, it keeps a prior's form.

    Raises
    ------
    NumericalError
        A matrix that must be positive definite is not.

    Examples
    --------
    >>> prior = Posterior(torch.zeros(1, 1), torch.tensor([0.5]), "diagonal")
    >>> update = condition(prior, torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    >>> update.posterior.mean, update.posterior.covariance
    (tensor([[1.0000]]), tensor([[0.3333]]))
    """
    innovation = target - phi @ prior.mean.mT
    if weight is not None:
        root_weight = weight.sqrt()[:, None]
        phi, innovation = phi * root_weight, innovation * root_weight
    if phi.shape[0] == 0:
        nothing = innovation.new_zeros((*innovation.shape[:-2], 0, 0))
        return Update(prior, innovation, innovation[..., 0], innovation, nothing)
    if prior.form == "root" or prior.mean.dtype == torch.float32:
        return _condition_qr(prior, phi, innovation, keep_covariance)
    if method == "auto":
        method = cheaper_method(phi.shape[0], phi.shape[1], prior.form, keep_covariance)
    route = _condition_primal if method == "primal" else _condition_dual
    return route(prior, phi, innovation, keep_covariance)


def forgotten(posterior: Posterior, lost: Tensor, variance: Tensor) -> Posterior:
    """Put leading features behind the constant back to the prior.

    Parameters
    ----------
    posterior:
        The belief; of a `root` the rows of the lost features are cut, which keeps the rest exact.
    lost:
        Which of the leading p features are put back, (p,), bool.
    variance:
        Prior variances of the lost features, (m,), or (K, 1) for a bank.
    """
    mean, spread = posterior.mean.clone(), posterior.spread
    places = 1 + lost.nonzero()[:, 0]
    mean[..., places] = 0
    if posterior.form != "diagonal":
        spread = spread.clone()
        spread[..., places, :] = 0
        if posterior.form == "dense":
            spread[..., :, places] = 0
            spread[..., places, places] = variance.to(spread)
        else:
            spread = torch.linalg.qr(
                torch.cat([spread, _columns(places, spread, variance.sqrt())], -1).mT, mode="r"
            ).R.mT
    return Posterior(mean, spread, posterior.form)


def _columns(places: Tensor, like: Tensor, values: Tensor) -> Tensor:
    """Columns that hold `values` at `places`, (..., d, len(places))."""
    columns = torch.zeros(*like.shape[:-1], len(places)).to(like)
    columns[..., places, torch.arange(len(places))] = values.to(like)
    return columns


def reexpressed(posterior: Posterior, ratio: Tensor, offset: Tensor) -> Posterior:
    """The same belief about features of which the p behind the constant have changed units.

    Parameters
    ----------
    posterior:
        The belief; a `diagonal` spread is a prior, meant for features as they are, and stays.
    ratio, offset:
        Features were `ratio * new + offset`, (p,): the old are A times the new, so that the mean
        becomes W A and the covariance A' P A.
    """
    mean, spread, form = posterior.mean, posterior.spread, posterior.form
    mean = change_rows(mean.mT, ratio, offset).mT
    if form != "diagonal":
        spread = change_rows(spread, ratio, offset)
    if form == "dense":
        spread = symmetrise(change_rows(spread.mT, ratio, offset))
    return Posterior(mean, spread, form)


def change_rows(matrix: Tensor, ratio: Tensor, offset: Tensor) -> Tensor:
    """Rows of A' M for the A of `reexpressed`, of M (..., d, m)."""
    ratio, offset, p = ratio.to(matrix), offset.to(matrix), ratio.shape[0]
    constant, moved, rest = matrix[..., :1, :], matrix[..., 1 : p + 1, :], matrix[..., p + 1 :, :]
    return torch.cat([constant + offset[None] @ moved, ratio[:, None] * moved, rest], -2)


def cheaper_method(n: int, d: int, form: Form, keep_covariance: bool) -> Method:
    """Route with the fewer multiplications for n rows and d features.

    Counted per route: the Gram or cross product, the factorisation, the solves, and the new
    covariance. A dense prior costs the primal route one more factorisation.
    """
    dual = n * n * d + n**3 / 3
    primal = n * d * d + d**3 / 3
    if form == "dense":
        dual += n * d * d
        primal += d**3 / 3 + n * d * d
    if keep_covariance:
        dual += n * d * d + n * n * d
        primal += 2 * d**3
    return "primal" if primal <= dual else "dual"


def _condition_dual(
    prior: Posterior, phi: Tensor, innovation: Tensor, keep_covariance: bool
) -> Update:
    """S = I + Phi P- Phi', gain = P- Phi' S^-1, P = P- - gain S gain'; phi is already weighted."""
    crossed = phi * prior.spread[..., None, :] if prior.form == "diagonal" else phi @ prior.spread
    projected = crossed @ phi.mT
    leverage = projected.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    identity = torch.eye(phi.shape[0], dtype=phi.dtype, device=phi.device)
    factor = safe_cholesky(projected + identity, "the innovation covariance S")
    if not keep_covariance:
        whitened = solve_lower(factor, innovation)
        step = torch.linalg.solve_triangular(factor.mT, whitened, upper=True)
        posterior = Posterior(prior.mean + step.mT @ crossed, prior.spread, prior.form)
        return Update(posterior, innovation, leverage, whitened, factor)
    k = innovation.shape[-1]
    solved = solve_lower(factor, torch.cat([innovation, crossed], -1))
    whitened, half_gain = solved[..., :k], solved[..., k:]
    covariance = prior.covariance - half_gain.mT @ half_gain
    posterior = Posterior(prior.mean + whitened.mT @ half_gain, symmetrise(covariance))
    return Update(posterior, innovation, leverage, whitened, factor)


def _condition_primal(
    prior: Posterior, phi: Tensor, innovation: Tensor, keep_covariance: bool
) -> Update:
    """With P- = F F' and G = Phi F: M = I + G' G, W = W- + (F M^-1 G' E)', P = F M^-1 F'.

    Written in the whitened variable, so that a prior with zero variances needs no inverse.
    """
    if prior.form == "diagonal":
        root, gram, right = _whitened_sums(prior, phi.mT @ phi, phi.mT @ innovation)
        leverage = prior.variance_of(phi)
    else:
        root = covariance_root(prior.spread)
        whitened_phi = phi @ root
        gram = symmetrise(whitened_phi.mT @ whitened_phi)
        right = whitened_phi.mT @ innovation
        leverage = whitened_phi.square().sum(-1)
    posterior, step, factor = _solved(prior, root, gram, right, keep_covariance)
    whitened = torch.cat([innovation - phi @ (root @ step), step], -2)
    return Update(posterior, innovation, leverage, whitened, factor)


def condition_sums(
    prior: Posterior, gram: Tensor, cross: Tensor, *, keep_covariance: bool = True
) -> Posterior:
    """`condition` where the rows are known by their sums alone, so that many heads share one pass.

    Parameters
    ----------
    prior:
        The belief before the rows, `diagonal` or `dense`, in float64.
    gram, cross:
        Phi' R^-1 Phi, (d, d), and Phi' R^-1 Y, (d, k).
    keep_covariance:
        As in `condition`.

    Raises
    ------
    NumericalError
        A matrix that must be positive definite is not.

    Examples
    --------
    >>> prior = Posterior(torch.zeros(1, 1), torch.tensor([0.5]), "diagonal")
    >>> condition_sums(prior, torch.tensor([[1.0]]), torch.tensor([[3.0]])).mean
    tensor([[1.0000]])
    """
    root, gram, right = _whitened_sums(prior, gram, cross - gram @ prior.mean.mT)
    return _solved(prior, root, gram, right, keep_covariance)[0]


def _whitened_sums(prior: Posterior, gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F with P- = F F', F' Phi' Phi F and F' Phi' E; one gram (d, d) serves all heads of a bank."""
    if prior.form == "diagonal":
        deviation = prior.spread.sqrt()
        gram = gram * deviation[..., :, None] * deviation[..., None, :]
        return torch.diag_embed(deviation), gram, deviation[..., None] * cross
    root = covariance_root(prior.spread)
    return root, symmetrise(root.mT @ gram @ root), root.mT @ cross


def _solved(
    prior: Posterior, root: Tensor, gram: Tensor, right: Tensor, keep_covariance: bool
) -> tuple[Posterior, Tensor, Tensor]:
    """Posterior, M^-1 F' Phi' E and the factor of M = I + F' Phi' Phi F."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = safe_cholesky(gram + identity, "the normal matrix I + F' Phi' Phi F")
    step = cholesky_solve(factor, right)
    mean = prior.mean + (root @ step).mT
    if not keep_covariance:
        return Posterior(mean, prior.spread, prior.form), step, factor
    new_root = solve_lower(factor, root.mT)
    return Posterior(mean, symmetrise(new_root.mT @ new_root)), step, factor


def _condition_qr(
    prior: Posterior, phi: Tensor, innovation: Tensor, keep_covariance: bool
) -> Update:
    """With P- = F F': [Phi F; I] = Q R, W = W- + (F R^-1 Q' [E; 0])', new root F R^-1."""
    if prior.form == "dense":
        prior = Posterior(prior.mean, covariance_root(prior.spread), "root")
    if prior.form == "diagonal" and not keep_covariance and phi.shape[0] < phi.shape[1]:
        return _condition_qr_dual(prior, phi, innovation)
    root = torch.diag_embed(prior.spread.sqrt()) if prior.form == "diagonal" else prior.spread
    n, d = phi.shape
    whitened_phi = phi @ root
    identity = torch.eye(d, dtype=phi.dtype, device=phi.device).expand(root.shape)
    q, r = torch.linalg.qr(torch.cat([whitened_phi, identity], -2))
    step = torch.linalg.solve_triangular(r, q[..., :n, :].mT @ innovation, upper=True)
    posterior = Posterior(prior.mean + (root @ step).mT, prior.spread, prior.form)
    if keep_covariance:
        new_root = solve_lower(r.mT, root.mT).mT
        posterior = Posterior(posterior.mean, new_root, "root")
    leverage = whitened_phi.square().sum(-1)
    # The quadratic form is residual plus step, so nothing cancels.
    whitened = torch.cat([innovation - whitened_phi @ step, step], -2)
    return Update(posterior, innovation, leverage, whitened, r)


def _condition_qr_dual(prior: Posterior, phi: Tensor, innovation: Tensor) -> Update:
    """With P- = F F', F diagonal: [F' Phi'; I] = Q R, S = R' R, W = W- + (S^-1 E)' Phi P-.

    For fewer rows than features and a covariance that is not kept: no d x d matrix at all.
    """
    whitened_phi = phi * prior.spread.sqrt()[..., None, :]
    identity = torch.eye(phi.shape[0], dtype=phi.dtype, device=phi.device)
    identity = identity.expand(*whitened_phi.shape[:-2], *identity.shape)
    r = torch.linalg.qr(torch.cat([whitened_phi.mT, identity], -2), mode="r").R
    whitened = torch.linalg.solve_triangular(r.mT, innovation, upper=False)
    solved = torch.linalg.solve_triangular(r, whitened, upper=True)
    mean = prior.mean + solved.mT @ (phi * prior.spread[..., None, :])
    leverage = whitened_phi.square().sum(-1)
    return Update(Posterior(mean, prior.spread, prior.form), innovation, leverage, whitened, r)
