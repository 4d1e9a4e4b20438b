"""Measures of fields and roll-outs, against hand-computed sines and dense float64 numpy."""

import math
import warnings

import numpy as np
import pytest
import torch
from oracles import field_errors, h1_norm

from kalmanhead.errors import ConfigError
from kalmanhead.fields import (
    energy_spectrum,
    error_spectrum,
    mean_defined,
    nrmse,
    relative_h1,
    relative_l2,
    rollout_errors,
)

GRIDS = [(16,), (15,), (8, 6), (7, 9), (5, 8), (4, 6, 5)]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def wave(grid, *k):
    axes = np.meshgrid(*(np.arange(n) / n for n in grid), indexing="ij")
    return np.sin(2 * np.pi * sum(number * x for number, x in zip(k, axes, strict=True)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_against_dense_sums(grid):
    y = normal(6, 2, *grid)
    y[1, 0], y[2, 1].flat[3], y[3, 0] = 0.0, math.nan, math.nan
    p = y + 0.3 * normal(6, 2, *grid, seed=1)
    expected = field_errors(p, y)
    assert nrmse(p, y) == pytest.approx(expected["nrmse"], rel=1e-12)
    assert mean_defined(relative_l2(p, y)) == pytest.approx(expected["relative_l2"], rel=1e-12)
    assert mean_defined(relative_h1(p, y)) == pytest.approx(expected["relative_h1"], rel=1e-12)
    assert np.isnan(relative_l2(p, y)).sum() == 2
    assert np.isnan(relative_h1(p, y)).sum() == 3


@pytest.mark.parametrize("length", [1.0, 2 * math.pi, 10.0])
@pytest.mark.parametrize("points", [32, 33])
def test_h1_of_sines(points, length):
    """||sin(2 pi k x / L)||_H1^2 is (1 + (2 pi k / L)^2) / 2 a point."""
    y = wave((points,), 2)[None, None]
    p = y + 0.05 * wave((points,), 7)
    slopes = [1 + (2 * math.pi * k / length) ** 2 for k in (7, 2)]
    expected = 0.05 * math.sqrt(slopes[0] / slopes[1])
    np.testing.assert_allclose(relative_h1(p, y, length), [[expected]], rtol=1e-12)
    np.testing.assert_allclose(relative_l2(p, y), [[0.05]], rtol=1e-12)
    # The gradient does not see a constant.
    shifted = relative_h1(y + 0.5, y, length)
    np.testing.assert_allclose(shifted, [[0.5 / math.sqrt(slopes[1] / 2)]], rtol=1e-12)


def test_h1_on_a_rectangle_has_a_length_for_each_axis():
    y = wave((16, 32), 0, 3)[None, None]
    error = 0.1 * wave((16, 32), 2, 1)
    squares = [
        1 + (2 * math.pi) ** 2 * (first**2 / 4 + second**2 / 9)
        for first, second in ((2, 1), (0, 3))
    ]
    found = relative_h1(y + error, y, (2.0, 3.0))
    np.testing.assert_allclose(found, [[0.1 * math.sqrt(squares[0] / squares[1])]], rtol=1e-12)
    for wrong in ((1.0,), (1.0, 0.0), -1.0, math.nan):
        with pytest.raises(ConfigError, match="give one positive number, or one for each of 2"):
            relative_h1(y, y, wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_all_dtypes(dtype):
    y, noise = (torch.from_numpy(normal(3, 2, 8, 6, seed=seed)).to(dtype) for seed in (0, 1))
    p = (y + noise).requires_grad_()
    plain = [v.detach().double().numpy() for v in (p, y)]
    for measure in (relative_l2, relative_h1, nrmse):
        np.testing.assert_array_equal(measure(p, y), measure(*plain))
    expected = field_errors(*plain)
    assert nrmse(p, y) == pytest.approx(expected["nrmse"])
    for ours, theirs in zip(error_spectrum(p, y), error_spectrum(*plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_zero_and_missing_targets_are_undefined_and_unknown_errors_infinite():
    y = np.ones((5, 1, 8))
    p = y.copy()
    y[0], y[1] = 0.0, math.nan
    p[2, 0, 0], p[3, 0, 0], p[4] = math.nan, math.inf, 1e200
    expected = [math.nan, math.nan, math.inf, math.inf, math.inf]
    np.testing.assert_array_equal(relative_l2(p, y)[:, 0], expected)
    np.testing.assert_array_equal(relative_h1(p, y)[:, 0], expected)
    assert nrmse(p, y) == math.inf
    assert math.isnan(nrmse(p[:2], y[:2]))
    assert math.isnan(mean_defined(relative_l2(p[:2], y[:2])))


def test_shapes_that_differ():
    for measure in (relative_l2, relative_h1, nrmse, error_spectrum):
        with pytest.raises(ConfigError, match=r"\(4, 1, 8\) and targets \(4, 8\) must have the"):
            measure(np.ones((4, 1, 8)), np.ones((4, 8)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_spectra_sum_to_the_mean_square(grid):
    y, p = normal(3, 2, *grid), normal(3, 2, *grid, seed=1)
    k, error, truth = error_spectrum(p, y)
    np.testing.assert_array_equal(k, np.arange(len(k)))
    assert error.sum() == pytest.approx(((p - y) ** 2).mean(), rel=1e-12)
    assert truth.sum() == pytest.approx((y**2).mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("grid", "k", "shell"),
    [((16,), (3,), 3), ((16,), (0,), 0), ((8, 8), (3, -3), 4), ((12, 16), (1, 2), 2),
     ((12, 9), (-4, 0), 4)],
)  # fmt: skip
def test_a_wave_lies_in_its_shell(grid, k, shell):
    y = (1.0 + 0 * wave(grid, *k) if not any(k) else wave(grid, *k))[None, None]
    _, error, truth = error_spectrum(1.1 * y, y)
    expected = np.zeros(len(truth))
    expected[shell] = 0.5 if any(k) else 1.0
    np.testing.assert_allclose(truth, expected, atol=1e-15)
    np.testing.assert_allclose(error, 0.01 * expected, atol=1e-15)


def test_spectra_leave_out_what_is_not_finite():
    y = normal(3, 1, 8)
    p = y + 1.0
    expected = error_spectrum(p[2:], y[2:])
    y[0, 0, 1], p[1, 0, 1] = math.nan, math.inf
    for ours, theirs in zip(error_spectrum(p, y), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    k, error, truth = error_spectrum(p[:2], y[:2])
    assert (len(k), np.isnan(error).all(), np.isnan(truth).all()) == (5, True, True)
    assert energy_spectrum(np.ones((1, 1, 1)))[1] == [1.0]


def test_errors_by_step():
    truth = normal(4, 5, 2, 8)
    factors = np.array([0.1, 0.2, 0.29, 0.31, 0.1])
    predicted = truth * (1 + factors[:, None, None])
    errors = rollout_errors(predicted, torch.from_numpy(truth))
    np.testing.assert_allclose(errors.relative_l2, factors, rtol=1e-12)
    assert errors.steps_until == 4
    assert rollout_errors(predicted, truth, 0.15).steps_until == 2
    assert rollout_errors(predicted, truth, 0.5).steps_until is None
    predicted[0, 2] = math.inf
    assert rollout_errors(predicted, truth, 0.5).steps_until == 3
    truth[:, 1], truth[0, 0] = 0.0, math.nan  # nothing to measure, and one sample missing
    errors = rollout_errors(predicted, truth, 0.5).relative_l2
    np.testing.assert_allclose(errors, [0.1, math.nan, math.inf, 0.31, 0.1])
    with pytest.raises(ConfigError, match=r"give \(n, steps, channels, \*grid\) twice"):
        rollout_errors(truth, truth[:, :3])


def test_the_oracle_knows_the_norm_of_a_sine():
    assert h1_norm(wave((64,), 3)) ** 2 == pytest.approx(32 * (1 + 36 * math.pi**2))
