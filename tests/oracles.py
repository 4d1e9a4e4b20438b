"""Dense float64 numpy answers, written without the code under test."""

from math import lgamma, log, pi

import numpy as np


def ridge(phi, y, precision, mean=None, weight=None):
    """Weighted ridge pulled to `mean`: weights (k, d) and covariance (d, d)."""
    n, d = phi.shape
    weight = np.ones(n) if weight is None else weight
    mean = np.zeros((y.shape[1], d)) if mean is None else mean
    lam = np.diag(np.broadcast_to(precision, (d,)))
    normal = phi.T @ (weight[:, None] * phi) + lam
    right = phi.T @ (weight[:, None] * y) + lam @ mean.T
    return np.linalg.solve(normal, right).T, np.linalg.inv(normal)


def kalman(phi, y, mean, covariance, weight):
    """Textbook gain form, one row at a time (weight > 0)."""
    for row, target, w in zip(phi, y, weight, strict=True):
        s = row @ covariance @ row + 1 / w
        gain = covariance @ row / s
        mean = mean + np.outer(target - mean @ row, gain)
        covariance = covariance - np.outer(gain, gain) * s
    return mean, covariance


def log_student_t(y, location, scale_matrix, dof):
    """Log density of the multivariate Student t with a dense scale matrix."""
    n = len(y)
    residual = y - location
    quadratic = residual @ np.linalg.solve(scale_matrix, residual)
    return (
        lgamma((dof + n) / 2)
        - lgamma(dof / 2)
        - n / 2 * log(dof * pi)
        - np.linalg.slogdet(scale_matrix)[1] / 2
        - (dof + n) / 2 * np.log1p(quadratic / dof)
    )


def field_errors(prediction, target):
    """Relative errors of fields (n, c, *grid), NaN where missing: what `Metrics` has of them."""
    n, c = target.shape[:2]
    seen = np.isfinite(target)
    error, y = np.where(seen, prediction - target, 0.0), np.where(seen, target, 0.0)
    errors, norms = (np.linalg.norm(v.reshape(n, c, -1), axis=2) for v in (error, y))
    sides = [np.sqrt((v.swapaxes(0, 1).reshape(c, -1) ** 2).sum(1)) for v in (error, y)]
    h1 = [
        h1_norm(error[i, j]) / h1_norm(y[i, j])
        for i in range(n)
        for j in range(c)
        if seen[i, j].all() and (y[i, j] != 0).any()
    ]
    return {
        "nrmse": (sides[0] / sides[1])[sides[1] > 0].mean(),
        "relative_l2": (errors[norms > 0] / norms[norms > 0]).mean(),
        "relative_l2_ratio": errors.sum() / norms.sum(),
        "relative_h1": np.mean(h1),
    }


def h1_norm(u, length=1.0):
    """Root of the sum of u^2 and of its squared slopes, by a dense matrix of differentiation."""
    total = (u**2).sum()
    for axis, points in enumerate(u.shape):
        k = np.arange(points)
        k = np.where(k < (points + 1) // 2, k, k - points)
        waves = np.exp(2j * pi * np.outer(np.arange(points), k) / points)
        slope = waves @ np.diag(2j * pi * k / length) @ waves.conj().T / points
        total += (np.abs(np.tensordot(slope, np.moveaxis(u, axis, 0), 1)) ** 2).sum()
    return np.sqrt(total)
