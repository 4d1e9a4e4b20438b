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
