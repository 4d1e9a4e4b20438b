"""The loops of the row path, compiled by numba: a row's arithmetic costs less than a call of numpy.

All arrays are float64 in rows; what a function writes into is named in its first line. Compiled
code is kept beside this file, or in the user's cache, so only the first use waits for it.

Shapes: m models (the newest, and the averaged one if there is one), p inputs, D features with the
constant, w of them in a group, K heads of a group, k outputs, n rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

SQRT_HALF = math.sqrt(0.5)
ROOT_TWO_PI = math.sqrt(2 * math.pi)

Compiled = Callable[..., Any]


def compiled(function: Compiled) -> Compiled:
    """Compile at the first call, and keep the code where a folder for it can be written."""
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # no such folder
        return numba.njit(error_model="numpy")(function)


@compiled
def holds(values, limit):  # type: ignore[no-untyped-def]
    """Whether all of values (p,) are numbers within +-limit."""
    return np.all(np.abs(values) <= limit)


@compiled
def surprises(innovation, leverage, variance, leader, deviations):  # type: ignore[no-untyped-def]
    """Whether the leading head of some output was off by more than so many deviations.

    innovation and variance of the noise are (heads, k), leverage (heads,), leader (k,).
    """
    for j in range(len(leader)):
        h = leader[j]
        if innovation[h, j] ** 2 > deviations**2 * variance[h, j] * (1 + leverage[h]):
            return True
    return False


@compiled
def standardise(values, shift, steepness, limit, absent, z):  # type: ignore[no-untyped-def]
    """Write into z (p,) (values - shift) * steepness within +-limit, or `absent` where NaN."""
    for i in range(len(values)):
        z[i] = (values[i] - shift[i]) * steepness[i]
        if math.isnan(z[i]):
            z[i] = absent
        elif abs(z[i]) > limit:
            z[i] = math.copysign(limit, z[i])


@compiled
def hold(target, scaled, errors, forecast, reach, strange, changed, alarm, calm, unit, center):  # type: ignore[no-untyped-def]
    """`Outliers.hold` for the targets of a row, (k,): write into the first three, strange, changed.

    Whether some target is strange and believed.
    """
    any_changed = False
    for j in range(len(scaled)):
        error = scaled[j] - forecast[j]
        believed, beyond = strange[j] > alarm, abs(error) > reach[j]
        changed[j] = believed and beyond
        any_changed |= changed[j]
        strange[j] = calm * strange[j] + beyond
        errors[j] = error
        if beyond and not believed:
            errors[j] = math.copysign(reach[j], error)
            scaled[j] = forecast[j]
            target[j] = scaled[j] * unit[j] + center[j]
    return any_changed


@compiled
def features(row, shift, steepness, limit, vectors, sizes, skip, phi):  # type: ignore[no-untyped-def]
    """Write into phi (m, D) the constant, the scaled inputs if `skip`, and each model's features.

    vectors (m, size) hold weight and bias of layer after layer, of widths `sizes`; a model of one
    size has no layer, and its features are the scaled inputs.
    """
    z = np.empty_like(row)
    standardise(row, shift, steepness, limit, 0.0, z)
    start = 1 + (len(z) if skip else 0)
    for i in range(len(phi)):
        phi[i, 0] = 1.0
        if skip:
            phi[i, 1:start] = z
        a, at = z, 0
        for j in range(len(sizes) - 1):
            many, few = sizes[j + 1], sizes[j]
            weight = vectors[i, at : at + many * few].reshape(many, few)
            bias = vectors[i, at + many * few : at + many * few + many]
            at += many * few + many
            a = np.dot(weight, a)
            for r in range(many):
                u = a[r] + bias[r]
                a[r] = 0.5 * u * (1 + math.erf(u * SQRT_HALF))
        phi[i, start:] = a


@compiled
def forecast(mean, shares, phi, said, mixed):  # type: ignore[no-untyped-def]
    """Write into said (K, k) what heads W (K, k, w) say of phi (m, D); add their mixture to mixed.

    Shares are (K, k), mixed (k,).
    """
    heads, outputs, width = mean.shape
    values = np.dot(mean.reshape(heads * outputs, width), phi[0, :width])
    for h in range(heads):
        for j in range(outputs):
            said[h, j] = values[h * outputs + j]
            mixed[j] += shares[h, j] * said[h, j]


@compiled
def blend(phi, mixed, rest, average, share, outputs):  # type: ignore[no-untyped-def]
    """Write into outputs (m, k) what each model says, and into mixed (k,) what both do together.

    mixed is the mixture of the heads awake, rest (k, D) the W of those that sleep, average (k, D)
    that of the averaged model, whose share is (k,).
    """
    for j in range(len(mixed)):
        outputs[0, j] = mixed[j] = mixed[j] + np.dot(rest[j], phi[0])
        if len(phi) > 1:
            outputs[1, j] = np.dot(average[j], phi[1])
            mixed[j] += share[j] * (outputs[1, j] - mixed[j])


@compiled
def innovate(target, said, innovation):  # type: ignore[no-untyped-def]
    """Write target (k,) less what was said (K, k) into innovation (K, k); 0 where NaN."""
    for h in range(len(said)):
        for j in range(len(target)):
            innovation[h, j] = 0.0 if math.isnan(target[j]) else target[j] - said[h, j]


@compiled
def condition(mean, spread, kept, added, phi, target, said, weight, innovation, leverage):  # type: ignore[no-untyped-def]
    """Time update, then measurement update, of W (K, k, w) and P (K, w, w), written into both.

    P- = kept P + diag(added) with kept (K,) and added (K, w). With c = P- phi, e the innovation
    and s = c' phi + 1 / weight: W += e c' / s, P = P- - c c' / s. e, target less what was said,
    goes to innovation (K, k), and c' phi to leverage (K,).
    """
    innovate(target, said, innovation)
    heads, outputs, width = mean.shape
    block = phi[0, :width]
    for h in range(heads):
        P, c = spread[h], np.dot(spread[h], block)
        for i in range(width):
            c[i] = kept[h] * c[i] + added[h, i] * block[i]
        leverage[h] = np.dot(c, block)
        s = leverage[h] + 1 / weight
        for j in range(outputs):
            step = innovation[h, j] / s
            for i in range(width):
                mean[h, j, i] += step * c[i]
        for i in range(width):
            step = c[i] / s
            for q in range(width):
                P[i, q] = kept[h] * P[i, q] - step * c[q]
            P[i, i] += added[h, i]


@compiled
def condition_proximal(mean, prior, phi, target, said, weight, innovation, leverage):  # type: ignore[no-untyped-def]
    """`condition` of heads that remember no P: P- = diag(prior), (K, w), for every row."""
    innovate(target, said, innovation)
    heads, outputs, width = mean.shape
    block = phi[0, :width]
    for h in range(heads):
        c = prior[h] * block
        leverage[h] = np.dot(c, block)
        s = leverage[h] + 1 / weight
        for j in range(outputs):
            step = innovation[h, j] / s
            for i in range(width):
                mean[h, j, i] += step * c[i]


@compiled
def forward(vector, sizes, z):  # type: ignore[no-untyped-def]
    """Values and slopes of all layers for z (n, p), each (n * (p + widths),), layer by layer."""
    n, total = len(z), sizes.sum()
    values, slopes = np.empty(n * total), np.empty(n * total)
    values[: n * sizes[0]] = z.copy().reshape(n * sizes[0])
    at, place = 0, 0
    for j in range(len(sizes) - 1):
        many, few = sizes[j + 1], sizes[j]
        h = values[place : place + n * few].reshape(n, few)
        weight = vector[at : at + many * few].reshape(many, few)
        bias = vector[at + many * few : at + many * few + many]
        at, place = at + many * few + many, place + n * few
        a = np.dot(h, weight.T)
        for i in range(n):
            for r in range(many):
                u = a[i, r] + bias[r]
                half = 0.5 * (1 + math.erf(u * SQRT_HALF))
                values[place + i * many + r] = u * half
                slopes[place + i * many + r] = half + u * math.exp(-0.5 * u * u) / ROOT_TWO_PI
    return values, slopes


@compiled
def backward(vector, sizes, values, slopes, gradient):  # type: ignore[no-untyped-def]
    """Gradient of all parameters, (size,), from that of the features, (n, width)."""
    n = len(gradient)
    result = np.empty_like(vector)
    at, place = len(vector), len(values)
    for j in range(len(sizes) - 2, -1, -1):
        many, few = sizes[j + 1], sizes[j]
        at, place = at - many * few - many, place - n * many
        inner = gradient * slopes[place : place + n * many].reshape(n, many)
        h = values[place - n * few : place].reshape(n, few)
        result[at : at + many * few] = np.dot(inner.T, h).reshape(many * few)
        for r in range(many):
            result[at + many * few + r] = inner[:, r].sum()
        gradient = np.dot(inner, vector[at : at + many * few].reshape(many, few))
    return result


@compiled
def adam(values, gradient, mean, square, rate, fast, slow, eps, step):  # type: ignore[no-untyped-def]
    """A step of Adam, written into values, mean and square, (size,) each."""
    first, second = 1 - fast**step, math.sqrt(1 - slow**step)
    for i in range(len(values)):
        mean[i] += (1 - fast) * (gradient[i] - mean[i])
        square[i] = slow * square[i] + (1 - slow) * gradient[i] * gradient[i]
        values[i] -= rate / first * mean[i] / (math.sqrt(square[i]) / second + eps)
