"""What a run tells of its own beliefs: its bank of heads, its intervals, and their picture."""

import json

import numpy as np
import pytest
import torch
from command import lines, newest, ok, vector_zarr

from kalmanhead import checkpoint
from kalmanhead.cli import foresight
from kalmanhead.cli.curve import curve_figure, is_drawn
from kalmanhead.cli.table import number
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.engine import Progress
from kalmanhead.streams import open_source

FAST = ("--width", 8, "--batch-size", 20)


@pytest.fixture
def source(tmp_path):
    return vector_zarr(tmp_path / "data.zarr")


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def every(request, monkeypatch):
    """Look at every point of the curve, so that short runs are enough."""
    if "sparing" not in request.node.name:
        monkeypatch.setattr(foresight, "EVERY", 1)


def test_looking_is_sparing_early_on(source, run):
    ok("stream", "--source", source, "--run", run, "--width", 8, "--batch-size", 3)
    looked = [record["batch"] for record in lines(run) if "coverage" in record]
    assert looked == [32, 64]


def test_a_bank_tells_what_it_amounts_to(source, run):
    result = ok("stream", "--source", source, "--run", run, *FAST, "--json").json
    for record in lines(run):
        assert [len(pair) for pair in record["heads"]] == [2, 2, 2]
        assert type(record["lambda"]) is type(record["memory"]) is float
        assert record["lambda"] > 0
        assert 0 < record["memory"] <= record["rows"] * (1 + 1e-12)  # but for rounding
    assert all(result[key] == lines(run)[-1][key] for key in ("heads", "lambda", "memory"))
    learner = build_learner(ModelConfig(width=8), (3,), (1,))
    learner.load_state(newest(run)["learner"])
    told = result["lambda"], result["memory"]
    assert told == (learner.head.effective_precision, learner.head.effective_memory)
    shown = ok("show", run).out
    assert f"leading heads: {result['heads'][0][0]} (" in shown
    assert f"effective lambda {number(result['lambda'])}, memory " in shown
    assert f"memory {number(result['memory'])} rows" in shown


def test_a_single_head_amounts_to_nothing_else(source, run):
    result = ok("stream", "--source", source, "--run", run, *FAST, "--head", "static", "--json")
    for told in (result.json, *lines(run)):
        assert told["heads"] is None
        assert not told.keys() & {"lambda", "memory"}
    assert "effective lambda" not in result.out + ok("show", run).out


def newest_path(run):
    return max((run / "checkpoints").iterdir())


def test_a_checkpoint_from_before_lambda_and_coverage(source, run):
    ok("stream", "--source", source, "--run", run, *FAST)
    tree = newest(run)
    del tree["lambda"], tree["memory"], tree["progress"]["metrics"]["calibration"]
    checkpoint.save(newest_path(run), tree, kind="run")
    shown = ok("show", run).out
    assert "leading heads" in shown
    assert "effective" not in shown
    assert "interval" not in shown
    assert ok("resume", run, "--epochs", 2, "--json").json["calibration"]["batches"] == 10
    assert "effective lambda" in ok("show", run).out


@pytest.mark.parametrize("most", [foresight.MOST_TARGETS, 2])
@pytest.mark.parametrize("head", ["auto", "static", "adam"])
def test_coverage_is_foreseen(source, run, head, most, monkeypatch):
    monkeypatch.setattr(foresight, "MOST_TARGETS", most)
    options = ["--width", 8, "--batch-size", 3, "--head", head, "--json"]
    result = ok("stream", "--source", source, "--run", run, *options).json
    learner = build_learner(ModelConfig(width=8, head=head), (3,), (1,))
    seen, records = [], lines(run)
    for record, batch in zip(records, open_source(source, 3), strict=True):
        assert ("coverage" in record) == ("prequential" in record) == is_drawn(record["batch"])
        if is_drawn(record["batch"]):
            predictive, y = learner.predict_dist(batch.x[:most]), batch.y[:most]
            low, high = predictive.interval(0.9)
            seen.append((((low <= y) & (y <= high)).double(), (high - low) / 2))
            assert record["coverage"] == seen[-1][0].mean()
            assert record["interval"] == pytest.approx(float(seen[-1][1].mean()))
            believed = float(predictive.variance.mean().sqrt())
            assert record["believed"]["rmse"] == (
                pytest.approx(believed) if np.isfinite(believed) else None
            )
        learner.learn(batch.x, batch.y)
    assert len(seen) < len(records) == 67
    held, half_widths = (torch.cat(parts).mean() for parts in zip(*seen[-32:], strict=True))
    calibration = result["calibration"]
    assert calibration["coverage"] == pytest.approx(float(held))
    assert calibration["interval"] == pytest.approx(float(half_widths))
    assert (calibration["level"], calibration["batches"]) == (0.9, 32)
    line = f"90% interval: held {held:.1%} of the targets, half width {number(half_widths)}"
    assert line in ok("show", run).out


def test_the_source_is_closed_with_the_loop(source):
    closed = []

    def batches():
        try:
            yield from open_source(source, 20)
        finally:
            closed.append(True)

    learner = build_learner(ModelConfig(width=8), (3,), (1,))
    watched = foresight.foreseen(batches(), learner, Progress())
    assert len(next(watched)) == 20
    watched.close()
    assert closed == [True]


@pytest.mark.parametrize("head", ["auto", "static"])
def test_what_is_drawn(source, run, head):
    ok("stream", "--source", source, "--run", run, *FAST, "--head", head)
    points = lines(run)
    figure = curve_figure(points, "title", {"rmse": 0.5})
    errors = {line.get_label(): line for line in figure.axes[0].lines}
    rows = list(range(20, 201, 20))
    for label, values in {
        "recent rows": [point["recent"]["rmse"] for point in points],
        "all rows so far": [point["prequential"]["rmse"] for point in points],
        "each batch": [point["rmse"] for point in points],
        "as believed beforehand": [point["believed"]["rmse"] or np.nan for point in points],
    }.items():
        assert list(errors[label].get_xdata()) == rows
        np.testing.assert_array_equal(errors.pop(label).get_ydata(), values)
    assert list(errors) == ["held-out rows: 0.5"]
    lower = figure.axes[1:]
    keys = ["lambda", "memory"] if head == "auto" else []
    assert len(lower) == len(keys)
    for axes, key in zip(lower, keys, strict=True):
        assert axes.get_yscale() == "log"
        assert list(axes.lines[0].get_ydata()) == [point[key] for point in points]


def test_runs_from_before_lambda_and_coverage_are_drawn(source, run):
    ok("stream", "--source", source, "--run", run, *FAST)
    new = ("coverage", "interval", "believed", "lambda", "memory")
    records = [{k: v for k, v in record.items() if k not in new} for record in lines(run)]
    assert len(curve_figure(records, "title").axes) == 1
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ok("plot", run)


@pytest.mark.parametrize("top", [1.001, 3, 100, 1e5, 1e12])
def test_every_axis_has_numbers(top):
    points = [
        {"rows": rows, "rmse": value, "lambda": value, "memory": 1 / value,
         "recent": {"rmse": value}, "prequential": {"rmse": value}}
        for rows, value in ((10, 1.0), (20, top))
    ]  # fmt: skip
    figure = curve_figure(points, "title")
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_ylim()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        labels = [label.get_text() for at, label in ticks if low <= at <= high]
        assert 1 <= len([label for label in labels if label]) <= 16
