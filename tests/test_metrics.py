"""Prequential metrics against plain float64 numpy, over awkward scales, splits and resumes."""

import json
import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import field_errors

from kalmanhead.checkpoint import load, save
from kalmanhead.errors import CheckpointError, ConfigError
from kalmanhead.metrics import Metrics
from kalmanhead.noise import Predictive


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def dense(prediction, target, field=False):
    """The same measures from all rows at once."""
    p, y = (
        np.asarray(v.double()).reshape(v.shape[0], v.shape[1], -1) for v in (prediction, target)
    )
    seen = np.isfinite(y)
    error = np.where(seen, p - y, 0.0)
    r2 = []
    for j in range(y.shape[1]):
        values = y[:, j][seen[:, j]]
        sst = ((values - values.mean()) ** 2).sum() if values.size else 0.0
        if sst > 0:
            r2.append(1 - (error[:, j] ** 2).sum() / sst)
    measures = {
        "rmse": math.sqrt((error**2).sum() / seen.sum()),
        "mae": np.abs(error).sum() / seen.sum(),
        "r2": np.mean(r2) if r2 else None,
    }
    if field:
        measures.update(field_errors(*(np.asarray(v.double()) for v in (prediction, target))))
    return measures


def feed(metrics, prediction, target, sizes):
    for p, y in zip(prediction.split(sizes), target.split(sizes), strict=True):
        metrics.update(p, y)
    return metrics


def test_large_offset_in_float32_keeps_its_variance():
    y = 1000 + 0.05 * torch.randn(4000, 1, generator=generator())
    p = y + 0.01 * torch.randn(4000, 1, generator=generator(1))
    r2 = feed(Metrics(), p, y, [8] * 500).summary()["prequential"]["r2"]
    assert r2 == pytest.approx(dense(p, y)["r2"], rel=1e-9)
    assert r2 == pytest.approx(0.96, abs=0.01)


def test_unequal_batches_are_weighted_by_rows():
    p, y = torch.zeros(20, 1), torch.full((20, 1), 2.0)
    p[16:] = 1.0  # so that a mean of means would differ
    summary = feed(Metrics(), p, y, [8, 8, 4]).summary()
    assert summary["prequential"]["rmse"] ** 2 == pytest.approx((16 * 4 + 4 * 1) / 20)
    even = feed(Metrics(), torch.zeros(20, 1), y, [8, 8, 4]).summary()
    assert even["prequential"]["rmse"] ** 2 == pytest.approx(4.0)


def test_mean_of_ratios_and_ratio_of_means_are_both_named():
    y = torch.zeros(2, 1, 4)
    y[0, 0, 0], y[1, 0, 0] = 1.0, 100.0
    p = y.clone()
    p[0, 0, 1], p[1, 0, 1] = 1.0, 1.0
    measures = feed(Metrics(field=True), p, y, [1, 1]).summary()["prequential"]
    assert measures["relative_l2"] == pytest.approx((1 / 1 + 1 / 100) / 2)
    assert measures["relative_l2_ratio"] == pytest.approx(2 / 101)


def test_zero_target_fields_are_left_out_and_counted():
    y = torch.randn(6, 1, 8, 8, generator=generator())
    y[2] = 0.0
    p = y + 0.1
    summary = feed(Metrics(field=True), p, y, [4, 2]).summary()
    assert summary["zero_targets"] == 1
    assert summary["prequential"] == pytest.approx(dense(p, y, field=True))
    nothing = Metrics(field=True)
    nothing.update(torch.ones(3, 1, 4), torch.zeros(3, 1, 4))
    assert nothing.summary()["zero_targets"] == 3
    measures = nothing.summary()["prequential"]
    assert {measures[name] for name in ("nrmse", "relative_l2", "relative_h1")} == {None}
    assert measures["rmse"] == 1.0


def test_no_scale_rules_r2_or_relative_l2():
    scale = torch.tensor([1.0, 1000.0])
    noise, y = torch.randn(2, 400, 2, generator=generator())
    error = noise * torch.tensor([1.0, 0.1])  # the small channel is not predicted at all
    r2 = feed(Metrics(), (y + error) * scale, y * scale, [40] * 10).summary()["prequential"]["r2"]
    assert r2 == pytest.approx((0.0 + 0.99) / 2, abs=0.1)
    field = Metrics(field=True)
    field.update((y + error)[:, :, None] * scale[:, None], y[:, :, None] * scale[:, None])
    unscaled = Metrics(field=True)
    unscaled.update((y + error)[:, :, None], y[:, :, None])
    ours, theirs = (m.summary()["prequential"] for m in (field, unscaled))
    assert ours["relative_l2"] == pytest.approx(theirs["relative_l2"], rel=1e-4)


@pytest.mark.parametrize("value", [0.1, 1000.0, 0.0, 1e-9])
def test_r2_of_a_constant_target_is_undefined(value):
    metrics = feed(Metrics(), torch.zeros(30, 1), torch.full((30, 1), value).double(), [7, 13, 10])
    assert metrics.summary()["prequential"]["r2"] is None


def test_missing_targets_are_left_out_and_counted():
    y = torch.randn(50, 3, generator=generator())
    p = y + torch.randn(50, 3, generator=generator(1))
    y[::7, 0] = math.nan
    y[3] = math.nan
    y[5, 1] = math.inf
    y[:, 2] = math.nan  # an output that never comes
    p[::7, 0] = math.nan  # of no interest where there is no target
    summary = feed(Metrics(), p, y, [16, 16, 16, 2]).summary()
    assert summary["rows"] == 50
    assert summary["missing_targets"] == int((~y.isfinite()).sum())
    assert summary["prequential"] == pytest.approx(dense(p, y))


def test_fields_with_missing_entries():
    y = torch.randn(8, 2, 5, generator=generator())
    p = y + 0.3
    y[0], y[1, 0], y[2, 1, 2] = math.nan, math.nan, math.nan
    summary = feed(Metrics(field=True), p, y, [3, 5]).summary()
    assert summary["zero_targets"] == 0  # absent is not zero
    assert summary["prequential"] == pytest.approx(dense(p, y, field=True))


def believed(mean, scale, dof, y, field):
    """Coverage, half width and believed errors, from all that has a target."""
    mean, scale, dof, y = (np.asarray(v.double()) for v in (mean, scale, dof, y))
    seen = np.isfinite(y)
    half = scale * scipy.stats.t.ppf(0.95, dof)
    variance = np.where(seen, scale**2 * dof / (dof - 2), 0.0)
    expected = {
        "coverage": (abs(y - mean) <= half)[seen].mean(),
        "interval": np.broadcast_to(half, y.shape)[seen].mean(),
        "believed": {"rmse": math.sqrt(variance.sum() / seen.sum())},
    }
    if field:
        norms = np.linalg.norm(np.where(seen, y, 0.0), axis=2)
        expected["believed"]["relative_l2"] = (np.sqrt(variance.sum(2)) / norms).mean()
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(60, 1), (40, 3), (30, 2, 6)], ids=str)
def test_coverage_and_believed_errors(dtype, shape):
    y, noise, spread = torch.randn((3, *shape), generator=generator()).to(dtype)
    field = len(shape) > 2
    dof = torch.linspace(3, 30, shape[1]).to(dtype).view(1, -1, *[1] * (len(shape) - 2))
    predictive = Predictive(y + noise, spread.abs(), dof.expand(shape))
    # Of a vector all may be missing; a field without a target has no relative error.
    y[(3, 0, 1) if field else 3] = math.nan
    y[(5, 1, 2) if field else (5, 0)] = math.inf
    metrics = Metrics(field=field)
    metrics.foresee(predictive, y)
    metrics.update(predictive.mean, y)
    told = metrics.newest()
    expected = believed(predictive.mean, predictive.scale, predictive.dof, y, field)
    assert 0.05 < told["coverage"] < 0.95
    assert told["coverage"] == expected["coverage"]
    assert told["interval"] == pytest.approx(expected["interval"], rel=1e-6)
    assert told["believed"] == pytest.approx(expected["believed"], rel=1e-6)
    calibration = metrics.summary()["calibration"]
    assert calibration["coverage"] == told["coverage"]
    assert calibration["batches"] == 1
    metrics.update(predictive.mean, y)  # nobody asked about this one
    assert not metrics.newest().keys() & {"coverage", "interval", "believed"}
    assert metrics.summary()["calibration"] == calibration


def test_coverage_is_of_the_last_batches_by_their_targets():
    metrics = Metrics()
    ones = torch.ones(4, 1)
    for i in range(40):  # far outside, then rows inside beside missing ones
        y = torch.full((4, 1), 99.0 if i < 30 else 0.0)
        y[2 + i // 35 :] = math.nan
        metrics.foresee(Predictive(0 * y.nan_to_num(), ones, 9 * ones), y)
        metrics.update(ones, y)
    calibration = metrics.summary()["calibration"]
    # Of 32 batches 22 lie outside; those of 3 targets come last.
    assert calibration["coverage"] == pytest.approx((5 * 2 + 5 * 3) / (27 * 2 + 5 * 3))
    assert calibration["batches"] == 32


def test_an_infinite_variance_is_believed_to_be_nothing():
    metrics = Metrics()
    ones = torch.ones(4, 1)
    metrics.foresee(Predictive(ones, ones, 2 * ones), ones)
    metrics.update(ones, ones)
    newest = metrics.newest()
    assert (newest["believed"], newest["coverage"]) == ({"rmse": None}, 1.0)
    missing = torch.full((4, 1), math.nan)
    metrics.foresee(Predictive(ones, ones, 9 * ones), missing)
    metrics.update(ones, missing)
    newest = metrics.newest()
    assert (newest["believed"], newest["coverage"]) == ({"rmse": None}, None)
    assert newest["interval"] is None
    assert metrics.summary()["calibration"]["coverage"] == 1.0


def test_a_state_from_before_coverage():
    old = feed(Metrics(), torch.zeros(9, 1), torch.ones(9, 1), [4, 5]).state()
    del old["calibration"]
    metrics = Metrics()
    metrics.load_state(old)
    assert metrics.summary()["rows"] == 9
    assert metrics.summary()["calibration"] is None
    with pytest.raises(CheckpointError, match="cannot be read"):
        metrics.load_state({**old, "calibration": [[1.0, 2.0]]})


def test_a_state_from_before_h1():
    y, noise = torch.randn(2, 9, 1, 8, generator=generator())
    old, new = (feed(Metrics(field=True), y + noise, y, [4, 5]).state() for _ in range(2))
    for tally in (old["closed"], old["open"], *old["window"]):
        tally["field"] = tally["field"][:5].clone()
    metrics, whole = Metrics(field=True), Metrics(field=True)
    metrics.load_state(old)
    whole.load_state(new)
    before = whole.summary()["prequential"]
    assert metrics.summary()["prequential"] == {**before, "relative_h1": None}
    metrics.update(y[:4] + noise[:4], y[:4])
    expected = field_errors((y + noise)[:4].double().numpy(), y[:4].double().numpy())
    assert metrics.summary()["prequential"]["relative_h1"] == pytest.approx(expected["relative_h1"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_field_that_is_not_finite_is_not_hidden(value):
    y = torch.randn(4, 1, 8, generator=generator())
    p = y.clone()
    p[1, 0, 3] = value
    metrics = Metrics(field=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.update(p, y)
        measures = metrics.summary()["prequential"]
    assert [name for name, found in measures.items() if found is not None] == []


def test_a_nan_prediction_is_not_hidden():
    metrics = Metrics()
    metrics.update(torch.tensor([[math.nan], [1.0]]), torch.tensor([[1.0], [2.0]]))
    assert metrics.summary()["prequential"] == {"rmse": None, "mae": None, "r2": None}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12, 1), (12, 4), (12, 2, 6), (12, 2, 3, 4)], ids=str)
def test_dtypes_and_shapes(dtype, shape):
    y, noise = torch.randn((2, *shape), generator=generator()).to(dtype)
    y.requires_grad_()
    field = len(shape) > 2
    measures = feed(Metrics(field=field), y + noise, y, [5, 7]).summary()["prequential"]
    expected = dense((y + noise).detach(), y.detach(), field)
    assert measures == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_splits_change_nothing(sizes, window, field):
    rows = sum(sizes)
    shape = (rows, 2, 3) if field else (rows, 2)
    y, noise = torch.randn((2, *shape), generator=generator(), dtype=torch.float64)
    y += 1e4
    metrics = feed(Metrics(window, field), y + noise, y, sizes)
    whole = Metrics(window, field)
    whole.update(y + noise, y)
    ours, theirs = metrics.summary(), whole.summary()
    assert ours["rows"] == theirs["rows"] == rows
    for name, value in theirs["prequential"].items():
        expected = None if value is None else pytest.approx(value, rel=1e-6)
        assert ours["prequential"][name] == expected


@pytest.mark.parametrize("size", [1, 7, 32, 100, 250])
def test_recent_covers_the_window(size):
    y, noise = torch.randn(2, 3000, 2, generator=generator())
    p = y + noise * torch.linspace(0, 3, 3000)[:, None]
    metrics = Metrics(window_rows=200)
    sizes = [size] * (3000 // size) + ([3000 % size] if 3000 % size else [])
    recent = feed(metrics, p, y, sizes).summary()["recent"]
    candidates = [dense(p[-rows:], y[-rows:]) for rows in range(200, 200 + 2 * max(size, 10) + 1)]
    assert any(recent == pytest.approx(candidate, rel=1e-9) for candidate in candidates)


def test_memory_is_bounded():
    metrics = Metrics(window_rows=1000)
    for _ in range(3000):
        metrics.update(torch.zeros(1, 1), torch.ones(1, 1))
    assert len(metrics.state()["window"]) <= 21


@pytest.mark.parametrize("cut", [0, 1, 5, 17, 30])
@pytest.mark.parametrize("field", [False, True])
def test_a_resume_goes_on_bit_for_bit(tmp_path, cut, field):
    shape = (30, 8, 2, 3) if field else (30, 8, 2)
    y, noise = torch.randn((2, *shape), generator=generator())
    straight, first, second = (Metrics(50, field) for _ in range(3))
    one = torch.ones(shape[1:])

    def learn(metrics, i):
        if i % 3 == 0:
            metrics.foresee(Predictive(y[i] + noise[i], one, 5 * one), y[i])
        metrics.update(y[i] + noise[i], y[i])

    for i in range(30):
        learn(straight, i)
    for i in range(cut):
        learn(first, i)
    save(tmp_path / "m", first.state(), kind="metrics")
    second.load_state(load(tmp_path / "m"))
    for i in range(cut, 30):
        learn(second, i)
        learn(first, i)  # must not share memory with its saved state
    assert straight.summary() == second.summary() == first.summary()
    save(tmp_path / "a", straight.state(), kind="metrics")
    save(tmp_path / "b", second.state(), kind="metrics")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_state_that_does_not_fit_is_refused_and_changes_nothing():
    metrics = feed(Metrics(), torch.zeros(9, 1), torch.ones(9, 1), [4, 5])
    before = metrics.summary()
    with pytest.raises(CheckpointError, match="window_rows=5, field=True"):
        metrics.load_state(Metrics(5, True).state())
    for wrong in ({}, {**metrics.state(), "window": [{"rows": 1}]}, None):
        with pytest.raises(CheckpointError, match="cannot be read"):
            metrics.load_state(wrong)
    assert metrics.summary() == before


def test_empty():
    metrics = Metrics()
    empty = metrics.summary()
    assert empty["rows"] == 0
    assert empty["prequential"] == empty["recent"] == {"rmse": None, "mae": None, "r2": None}
    metrics.update(torch.zeros(0, 3), torch.zeros(0, 3))
    assert metrics.summary() == empty


def test_summary_is_plain_json():
    metrics = Metrics(window_rows=10, field=True)
    metrics.update(torch.ones(20, 2, 4), torch.randn(20, 2, 4, generator=generator()))
    summary = metrics.summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert {type(v) for v in summary["recent"].values()} == {float}


def test_shapes_that_do_not_fit():
    metrics = Metrics()
    with pytest.raises(ConfigError, match=r"\(4, 1\) and targets \(4,\) must have the same shape"):
        metrics.update(torch.zeros(4, 1), torch.zeros(4))
    metrics.update(torch.zeros(4, 1), torch.zeros(4, 1))
    with pytest.raises(ConfigError, match="2 outputs, earlier ones had 1"):
        metrics.update(torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(ConfigError, match="window_rows must be at least 1"):
        Metrics(window_rows=0)
