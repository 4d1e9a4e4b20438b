"""Measures of fields: errors relative to the truth in L2 and H1, by wave number, and by step.

Fields are (n, c, *grid), arrays or tensors of any real dtype on any device; vectors (n, c) count as
fields of one point. All is computed in float64, for each pair of sample and channel by itself.
Where the truth is zero throughout, or missing (NaN), a relative error is undefined: NaN, to be left
out. Where the error is NaN or overflows it is of unknown size: infinity, which no mean hides.

Derivatives and spectra take the grid to be periodic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalmanhead.errors import ConfigError

Array = NDArray[np.float64]
Values = NDArray[np.floating] | Tensor
Lengths = float | tuple[float, ...]

THRESHOLD = 0.3


def relative_l2(
    prediction: Values,  # (n, c, *grid)
    target: Values,  # the same; NaN where missing
) -> Array:
    """||prediction - y|| / ||y|| over the grid, (n, c); missing points are left out of both.

    Its mean over samples and channels is the nRMSE of PDEBench (Takamoto et al., NeurIPS 2022,
    arXiv 2210.07182; `metric_func` in pdebench/models/metrics.py): the number of points cancels.

    Raises
    ------
    ConfigError
        The two shapes differ.

    Examples
    --------
    >>> relative_l2(np.array([[[1.0, 1.0]], [[1.0, 0.0]]]), np.array([[[1.0, 2.0]], [[0.0, 0.0]]]))
    array([[0.4472136],
           [      nan]])
    """
    p, y = pair(prediction, target)
    present = np.isfinite(y)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.where(present, p - y, 0.0) ** 2
        return relative(l2_norms(squares), l2_norms(np.where(present, y, 0.0) ** 2))


def nrmse(prediction: Values, target: Values) -> float:
    """Root mean square of the error over that of the target, sqrt(mean e^2) / sqrt(mean y^2).

    The means are over all samples and points that have a target, so large fields rule; the ratio is
    taken for each channel and averaged over them. The deviation from zero, not from the mean,
    divides. PDEBench takes this ratio for each sample and averages it: see `relative_l2`.
    NaN where every channel's target is zero.

    Examples
    --------
    >>> nrmse(np.array([[[1.0, 1.0]], [[0.0, 0.0]]]), np.array([[[1.0, 2.0]], [[0.0, 2.0]]]))
    0.7453559924999299
    """
    p, y = pair(prediction, target)
    present = np.isfinite(y)
    axes = (0, *range(2, y.ndim))
    with np.errstate(over="ignore", invalid="ignore"):
        squared_error = (np.where(present, p - y, 0.0) ** 2).sum(axes)
        return mean_defined(relative_rms(squared_error, (np.where(present, y, 0.0) ** 2).sum(axes)))


def relative_h1(prediction: Values, target: Values, length: Lengths = 1.0) -> Array:
    """sqrt((||e||^2 + ||grad e||^2) / (||y||^2 + ||grad y||^2)) with e = prediction - y, (n, c).

    The gradient is spectral. neuraloperator's `H1Loss.rel` (neuralop/losses/data_losses.py) has
    the same norm with central differences, on a side of 2 pi by default. A target of which a
    point is missing has no gradient: undefined.

    Parameters
    ----------
    prediction, target:
        (n, c, *grid).
    length:
        Side of the domain, or one for each axis: the unit in which slopes are measured.

    Examples
    --------
    >>> x = np.arange(16) / 16
    >>> y = np.sin(2 * np.pi * x)[None, None]
    >>> relative_h1(y + 0.1 * np.sin(6 * np.pi * x), y).round(4)  # 0.1 in L2
    array([[0.2967]])
    """
    p, y = pair(prediction, target)
    with np.errstate(over="ignore", invalid="ignore"):
        errors, norms = h1_norms(p - y, length), h1_norms(y, length)
    return relative(errors, np.nan_to_num(norms, nan=0.0, posinf=0.0))


def error_spectrum(prediction: Values, target: Values) -> tuple[Array, Array, Array]:
    """Energy of the error and of the truth by wave number; see `energy_spectrum`.

    Samples and channels in which anything is not finite are left out of both.

    Returns
    -------
    wave_numbers, error, truth:
        (shells,) each.
    """
    p, y = pair(prediction, target)
    whole = (np.isfinite(p) & np.isfinite(y)).all(tuple(range(2, y.ndim)))
    p, y = p[whole][:, None], y[whole][:, None]
    wave_numbers, truth = energy_spectrum(y)
    return wave_numbers, energy_spectrum(p - y)[1], truth


def energy_spectrum(values: Values) -> tuple[Array, Array]:
    """Mean square of fields by wave number: by Parseval's equation it sums to their mean square.

    In several dimensions a shell holds the modes whose |k| rounds to it, the corners included;
    k counts waves on the grid's side along each axis.

    Returns
    -------
    wave_numbers, energy:
        (shells,) each, from 0 on; energy is a mean over samples and channels, NaN without any.

    Examples
    --------
    >>> x = 2 * np.pi * np.arange(8) / 8
    >>> k, energy = energy_spectrum((1 + np.sin(2 * x))[None, None])
    >>> k, energy.round(6)
    (array([0., 1., 2., 3., 4.]), array([1. , 0. , 0.5, 0. , 0. ]))
    """
    u = as_array(values)
    grid = u.shape[2:]
    waves = _wave_numbers(grid)
    shell = np.rint(np.sqrt(sum(k**2 for k in waves))).astype(int)
    if u.size == 0:
        return np.arange(shell.max() + 1.0), np.full(shell.max() + 1, np.nan)
    energy = _mode_energy(u).mean((0, 1)) * _twins(grid) / math.prod(grid) ** 2
    summed = np.bincount(shell.ravel(), weights=energy.ravel()).astype(np.float64)
    return np.arange(float(len(summed))), summed


@dataclass(frozen=True)
class RolloutErrors:
    """Errors of a roll-out.

    Attributes
    ----------
    relative_l2:
        (steps,), mean over samples and channels; infinity once a prediction is not finite.
    threshold:
        What `steps_until` waits for.
    """

    relative_l2: Array
    threshold: float = THRESHOLD

    @property
    def steps_until(self) -> int | None:
        """First step, from 1 on, whose error is beyond the threshold; None if there is none."""
        beyond = np.flatnonzero(self.relative_l2 > self.threshold)
        return int(beyond[0]) + 1 if beyond.size else None


def rollout_errors(
    predicted: Values,  # (n, steps, c, *grid)
    truth: Values,  # the same
    threshold: float = THRESHOLD,
) -> RolloutErrors:
    """Relative L2 error of each step of `kalmanhead.engine.rollout`.

    Raises
    ------
    ConfigError
        The two shapes differ, or have no axis of steps.

    Examples
    --------
    >>> truth = np.ones((1, 3, 1, 8))
    >>> errors = rollout_errors(truth * np.array([1.1, 1.2, 1.4])[:, None, None], truth)
    >>> errors.relative_l2.round(2), errors.steps_until
    (array([0.1, 0.2, 0.4]), 3)
    """
    if tuple(predicted.shape) != tuple(truth.shape) or len(truth.shape) < 3:
        raise ConfigError(
            f"roll-outs of shape {tuple(predicted.shape)} against a truth of "
            f"{tuple(truth.shape)}: give (n, steps, channels, *grid) twice"
        )
    n, steps = truth.shape[:2]
    flat = (n * steps, *truth.shape[2:])
    each = relative_l2(predicted.reshape(flat), truth.reshape(flat)).reshape(n, steps, -1)
    by_step = [mean_defined(each[:, step]) for step in range(steps)]
    return RolloutErrors(np.array(by_step), threshold)


def relative(errors: Array, norms: Array) -> Array:
    """Quotient: NaN, for undefined, where the norm is zero; infinity for errors of unknown size."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = errors / norms
    return np.where(norms > 0.0, np.where(np.isfinite(ratio), ratio, np.inf), np.nan)


def relative_rms(squared_error: Array, squared_target: Array) -> Array:
    """The ratio of `nrmse` of each channel, from sums over the same entries."""
    return relative(np.sqrt(squared_error), np.sqrt(squared_target))


def mean_defined(values: Array) -> float:
    """Mean of those that are defined; NaN if none is."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else math.nan


def l2_norms(squares: Array) -> Array:
    """Roots of the sums over the grid, (n, c, *grid) -> (n, c)."""
    return np.sqrt(np.add.reduce(squares.reshape(*squares.shape[:2], -1), axis=2))


def h1_norms(values: Array, length: Lengths = 1.0) -> Array:
    """Square root of the sums over the grid of u^2 + |grad u|^2, (n, c, *grid) -> (n, c).

    By Parseval's equation the sum over modes of (1 + |2 pi k / length|^2) |u_k|^2, so that no
    derivative is formed. The highest mode of an even grid counts as |k| = points / 2.
    """
    n, c, *grid = values.shape
    weights = _h1_weights(tuple(grid), length)
    return np.sqrt(_mode_energy(values).reshape(n, c, -1) @ weights)


def pair(prediction: Values, target: Values) -> tuple[Array, Array]:
    """Both as float64 arrays.

    Raises
    ------
    ConfigError
        The two shapes differ.
    """
    if tuple(prediction.shape) != tuple(target.shape) or len(target.shape) < 1:
        raise ConfigError(
            f"predictions {tuple(prediction.shape)} and targets {tuple(target.shape)} "
            "must have the same shape, rows first"
        )
    return as_array(prediction), as_array(target)


def as_array(values: Values) -> Array:
    """(n, c, *grid) in float64 on the CPU; vectors (n,) and (n, c) get a grid of one point."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.dtype == torch.bfloat16:  # which numpy does not have
            values = values.float()
        values = values.numpy()
    # numpy casts a small array in a tenth of the time that torch takes.
    array = np.asarray(values).astype(np.float64, copy=False)
    channels = array.shape[1] if array.ndim > 1 else 1
    return array if array.ndim > 2 else array.reshape(len(array), channels, 1)


def _mode_energy(values: Array) -> Array:
    """|u_k|^2 of the modes that a real transform over the grid keeps."""
    with np.errstate(invalid="ignore"):
        modes = np.fft.rfftn(values, axes=range(2, values.ndim))
        return modes.real**2 + modes.imag**2


def _wave_numbers(grid: tuple[int, ...]) -> list[Array]:
    """Whole wave numbers of the kept modes along each axis, to be broadcast."""
    axes = [np.rint(np.fft.fftfreq(points) * points) for points in grid[:-1]]
    axes.append(np.arange(grid[-1] // 2 + 1.0))
    return list(np.meshgrid(*axes, indexing="ij", sparse=True))


def _twins(grid: tuple[int, ...]) -> Array:
    """How many modes each kept one stands for: two where its conjugate is left out."""
    twins = np.full(grid[-1] // 2 + 1, 2.0)
    twins[0] = 1.0
    if grid[-1] % 2 == 0:
        twins[-1] = 1.0
    return twins


@lru_cache(maxsize=16)
def _h1_weights(grid: tuple[int, ...], length: Lengths) -> Array:
    sides = length if isinstance(length, tuple) else (length,) * len(grid)
    if len(sides) != len(grid) or not min(sides) > 0:
        raise ConfigError(
            f"length is {length}: give one positive number, or one for each of {len(grid)} axes"
        )
    waves = _wave_numbers(grid)
    slopes = sum((2 * np.pi * k / side) ** 2 for k, side in zip(waves, sides, strict=True))
    return ((1.0 + slopes) * _twins(grid) / math.prod(grid)).ravel()
