"""Pieces that the spectral solvers share: random fields and the time stepper ETDRK4.

The transforms are numpy's: they run on one thread and row by row, so that a solver that feeds a
learner does not fight it for processors, and a row does not depend on those beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Coefficients = tuple[Array, Array, Array, Array, Array, Array]


def random_fields(
    seed: int, rows: Sequence[int], grid: int, length: float, zero_mean: bool
) -> Array:
    """Periodic fields drawn from N(0, 625 (-Laplacian + 25 I)^-2) on [0, length).

    Row i comes from a generator seeded by (seed, index), so it is the same in any batch; fields
    on a coarse grid are spectral truncations of those on a fine one.

    Returns
    -------
    numpy.ndarray
        (n, grid), float64.

    Examples
    --------
    >>> random_fields(0, [3, 7], 64, 1.0, zero_mean=True).shape
    (2, 64)
    """
    modes = grid // 2  # k = 0 ... grid/2 - 1: the Nyquist mode has no phase
    k = 2 * math.pi / length * np.arange(modes)
    deviation = 25.0 / (k**2 + 25.0) / math.sqrt(length)
    # Modes k > 0 stand for two orthonormal functions, sqrt(2) cos and sqrt(2) sin, and irfft
    # doubles them; the constant mode is real and counted once.
    deviation[1:] /= math.sqrt(2.0)
    deviation[0] *= 0.0 if zero_mean else 1.0
    spectrum = np.zeros((len(rows), modes), dtype=np.complex128)
    for place, index in enumerate(rows):
        normal = np.random.default_rng([seed, index]).standard_normal((modes, 2))
        spectrum[place] = deviation * normal.view(np.complex128)[:, 0]
    return np.asarray(np.fft.irfft(spectrum, n=grid, norm="forward"))


def etdrk4(
    v: Array,  # (n, *modes)
    nonlinear: Callable[[Array], Array],
    coefficients: Coefficients,
    steps: int,
) -> Array:
    """Step v_t = L v + N(v) by ETDRK4, in the letters of Kassam and Trefethen, section 3.

    Parameters
    ----------
    v:
        Spectrum, (n, *modes), complex128.
    nonlinear:
        N, from such an array to another.
    coefficients:
        Of `etdrk4_coefficients`, each of a shape that broadcasts with v.
    steps:
        Number of steps.

    Returns
    -------
    numpy.ndarray
        The spectrum after them, (n, *modes).

    Examples
    --------
    >>> decay = etdrk4_coefficients(np.array([-1.0]), 0.5)
    >>> u = etdrk4(np.ones((1, 1)), lambda v: 0 * v, decay, 2)
    >>> bool(np.isclose(u.item(), math.exp(-1)))
    True
    """
    E, E2, Q, f1, f2, f3 = coefficients
    for _ in range(steps):
        Nv = nonlinear(v)
        half = E2 * v
        a = half + Q * Nv
        Na = nonlinear(a)
        b = half + Q * Na
        Nb = nonlinear(b)
        c = E2 * a + Q * (2 * Nb - Nv)
        v = E * v + f1 * Nv + 2 * f2 * (Na + Nb) + f3 * nonlinear(c)
    return v


def etdrk4_coefficients(
    L: Array,  # (m,)
    h: float,
    points: int = 32,
) -> Coefficients:
    """Coefficients E, E2, Q, f1, f2, f3 of ETDRK4 for a real diagonal linear part.

    The divided differences cancel badly for small h L, so each is the mean over a circle of
    radius 1 around h L; L is real, so the upper half of the circle is enough.

    Parameters
    ----------
    L:
        Diagonal of the linear part, (m,), real float64.
    h:
        Time step.
    points:
        Points on the half circle.

    Returns
    -------
    tuple of numpy.ndarray
        Six arrays of shape (m,).

    Examples
    --------
    >>> E, *_, f1, f2, f3 = etdrk4_coefficients(np.zeros(1), 0.6)
    >>> [round(6 * float(f[0]) / 0.6, 6) for f in (f1, f2, f3)]  # the classical Runge-Kutta weights
    [1.0, 1.0, 1.0]
    """
    angle = (np.arange(points) + 0.5) / points
    z = h * L[:, None] + np.exp(1j * math.pi * angle)
    ez = np.exp(z)
    Q = h * ((np.exp(z / 2) - 1) / z).mean(1).real
    f1 = h * ((-4 - z + ez * (4 - 3 * z + z**2)) / z**3).mean(1).real
    f2 = h * ((2 + z + ez * (z - 2)) / z**3).mean(1).real
    f3 = h * ((-4 - 3 * z - z**2 + ez * (4 - z)) / z**3).mean(1).real
    return np.exp(h * L), np.exp(h * L / 2), Q, f1, f2, f3
