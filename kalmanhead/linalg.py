"""Dense linear algebra that says when it had to help: Cholesky with a reported jitter, roots."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from kalmanhead.errors import NumericalError


def symmetrise(matrix: Tensor) -> Tensor:
    """Return the symmetric part of a matrix, (..., d, d); exactly symmetric, bit for bit."""
    return (matrix + matrix.mT) / 2


def row_major(values: Tensor) -> Tensor:
    """The same values with the last dimension contiguous, strides of single rows included.

    `Tensor.contiguous` leaves the strides of dimensions of size 1 as they are, but they too
    decide in which order a product is summed.
    """
    strides, step = [], 1
    for size in reversed(values.shape):
        strides.append(step)
        step *= max(size, 1)
    if values.stride() == tuple(reversed(strides)):
        return values
    return values.clone(memory_format=torch.contiguous_format)


def safe_cholesky(matrix: Tensor, name: str = "matrix") -> Tensor:
    """Lower Cholesky factor; a matrix on the edge of definiteness gets a jitter that is reported.

    The jitter is relative to each matrix's mean diagonal, starts at the dtype's rounding error
    and grows tenfold up to the root of it. Matrices of a batch that factorise as they are stay
    untouched.

    Parameters
    ----------
    matrix:
        Symmetric, (..., d, d).
    name:
        What the matrix is called in the warning and in the error.

    Returns
    -------
    Tensor
        Lower triangular L with matrix = L L', (..., d, d).

    Raises
    ------
    NumericalError
        The matrix holds NaN or infinity, or stays indefinite under the largest jitter.

    Examples
    --------
    >>> safe_cholesky(torch.tensor([[4.0]]))
    tensor([[2.]])
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed.any():
        return factor
    if not torch.isfinite(matrix).all():
        raise NumericalError(
            f"{name} holds NaN or infinity: look for such values, or for an overflow, in the "
            "features that were learnt"
        )
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(-1)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    relative = torch.finfo(matrix.dtype).eps
    while relative <= torch.finfo(matrix.dtype).eps ** 0.5:
        jitter = torch.where(failed != 0, relative * scale, 0.0)
        factor, still = torch.linalg.cholesky_ex(matrix + jitter[..., None, None] * identity)
        if not still.any():
            warnings.warn(
                f"{name} was not positive definite; added {relative:.1e} of its mean diagonal",
                RuntimeWarning,
                stacklevel=2,
            )
            return factor
        failed = failed | still
        relative *= 10
    raise NumericalError(
        f"{name} is not positive definite, even with {relative / 10:.1e} of its mean diagonal "
        "added: raise the prior precision (lambda) or standardise the features"
    )


def covariance_root(covariance: Tensor) -> Tensor:
    """Lower factor F of a covariance, P = F F', (..., d, d); all-zero rows stay all-zero.

    A feature with zero variance is switched off; it is not allowed to gain variance through a
    jitter, so it is taken out of the factorisation and put back as a row of zeros.
    """
    off = covariance.diagonal(dim1=-2, dim2=-1) == 0
    if not off.any():
        return safe_cholesky(covariance, "the covariance P")
    factor = safe_cholesky(
        covariance + torch.diag_embed(off.to(covariance.dtype)), "the covariance P"
    )
    return torch.where(off[..., None], 0.0, factor)


def qr_root(rows: Tensor) -> Tensor:
    """Upper factor R with R' R = A' A, from A, (..., m, d) with m >= d, without squaring A."""
    return torch.linalg.qr(rows, mode="r").R


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """L^-1 B for lower L, (..., d, d), and B, (..., d, m)."""
    return torch.linalg.solve_triangular(factor, right, upper=False)


def cholesky_solve(factor: Tensor, right: Tensor) -> Tensor:
    """(L L')^-1 B for lower L, (..., d, d), and B, (..., d, m)."""
    return torch.linalg.solve_triangular(factor.mT, solve_lower(factor, right), upper=True)


def log_determinant(factor: Tensor) -> Tensor:
    """Return log det(L L') from a triangular L, (..., d, d) -> (...)."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
