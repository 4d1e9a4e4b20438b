"""`stream`, `resume`, `show` and `plot`: what a run leaves behind, and how it goes on."""

import builtins
import json
import sys
import tomllib

import numpy as np
import pytest
from command import (
    assert_same_end,
    call,
    lines,
    newest,
    ok,
    parquet_of,
    refused,
    vector_zarr,
    zarr_of,
)

from kalmanhead import checkpoint
from kalmanhead.cli.table import results_table

FAST = ("--width", 8, "--batch-size", 20)


@pytest.fixture
def source(tmp_path):
    return vector_zarr(tmp_path / "data.zarr")


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def names(run):
    return [path.name for path in sorted((run / "checkpoints").iterdir())]


def test_a_run_directory_holds_everything(source, run):
    result = ok("stream", "--source", source, "--run", run, *FAST, "--checkpoint-every", 3)
    assert "prequential" in result.out
    assert {path.name for path in run.iterdir()} == {
        "config.toml", "metrics.jsonl", "checkpoints", "curve.png", "lock",
    }  # fmt: skip
    assert names(run) == [f"batch-{i:012d}.safetensors" for i in (6, 9, 10)]
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"
    records = lines(run)
    assert [record["batch"] for record in records] == list(range(1, 11))
    assert [record["rows"] for record in records] == list(range(20, 201, 20))
    assert records[0].keys() >= {"epoch", "row", "bad_rows", "rmse", "mae"}
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["source"] == str(source)
    assert config["shuffle"] is False


def test_without_a_name_the_run_is_named_after_the_time(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = ok("stream", "--source", source, *FAST, "--max-batches", 1, "--json").json
    assert result["run"].startswith("runs/2")
    assert (tmp_path / result["checkpoint"]).is_file()


def test_json(source, run):
    result = ok("stream", "--source", source, "--run", run, *FAST, "--holdout", 50, "--json").json
    assert result.keys() >= {
        "rows", "batches", "seconds", "rows_per_second", "bad_rows", "prequential", "recent",
        "holdout", "run", "checkpoint",
    }  # fmt: skip
    assert (result["rows"], result["batches"], result["bad_rows"]) == (150, 8, 0)
    for part in ("prequential", "recent", "holdout"):
        assert result[part].keys() == {"rmse", "mae", "r2"}
    assert result["run"] == str(run)
    assert result["checkpoint"] == str(run / "checkpoints" / names(run)[-1])
    shown = ok("show", run, "--json").json
    assert shown["result"] == result
    assert shown["config"]["holdout"] == 50
    assert "holdout" in ok("show", run).out


def test_fields_have_relative_errors(tmp_path, run):
    x = np.random.default_rng(0).normal(size=(40, 16))
    source = zarr_of(tmp_path / "f.zarr", x=x, y=np.roll(x, 3, 1))
    told = ok("stream", "--source", source, "--run", run, *FAST, "--modes", 4, "--holdout", 0.25,
              "--json")  # fmt: skip
    result = told.json
    assert result["rows"] == 30
    names = ["rmse", "mae", "r2", "nrmse", "relative_l2", "relative_l2_ratio", "relative_h1"]
    for part in ("prequential", "recent", "holdout"):
        assert list(result[part]) == names
    table = told.out.splitlines()[:4]
    assert table[0].split() == [name for name in names if name != "relative_l2_ratio"]
    assert max(map(len, table)) <= 90
    del result["holdout"]["nrmse"]  # as a run of earlier has it
    assert results_table(result).splitlines()[3].split()[4] == "-"
    assert "relative_l2" in lines(run)[0]


def test_quiet_prints_nothing_but_the_json_asked_for(source, run):
    assert ok("stream", "--source", source, "--run", run, *FAST, "--quiet").out == ""
    result = ok("resume", run, "--quiet", "--json")
    assert result.out.count("\n") == 1
    assert result.json["batches"] == 10


@pytest.mark.parametrize(
    ("options", "shuffled"),
    [
        ([], False),
        (["--epochs", 2], True),
        (["--epochs", 2, "--no-shuffle"], False),
        (["--shuffle"], True),
    ],
)
def test_several_passes_shuffle_and_a_single_one_does_not(source, run, options, shuffled):
    ok("stream", "--source", source, "--run", run, *FAST, *options)
    assert tomllib.loads((run / "config.toml").read_text())["shuffle"] is shuffled
    assert newest(run)["stream"]["shuffle"] is shuffled


def test_the_seed_decides_all(source, tmp_path):
    errors = []
    for seed in (0, 0, 1):
        run = tmp_path / f"run{len(errors)}"
        options = ["--seed", seed, "--shuffle", "--json"]
        errors.append(ok("stream", "--source", source, "--run", run, *FAST, *options).json)
    errors = [result["prequential"]["rmse"] for result in errors]
    assert errors[0] == errors[1] != errors[2]


HEADS = [
    ["reset", "--lam", 3, "--lambda-scale", "mean"],
    ["drift", "--eta", 0.1],
    ["forget", "--gamma", 0.99],
    ["static", "--skip", "--dtype", "float32"],
    ["ridge", "--lam", 1],
    ["adam", "--lr", 0.01],
    ["sgd", "--lr", 0.001, "--clip", 1],
    ["auto", "--order", "backbone-first", "--optimizer", "sgd", "--depth", 1],
    ["auto", "--backbone", "mlp", "--device", "cpu"],
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: " ".join(map(str, head)))
def test_every_head_learns_and_resumes_bit_for_bit(source, tmp_path, head):
    command = ["stream", "--source", source, *FAST, "--epochs", 2, "--head", *head]
    ok(*command, "--run", tmp_path / "whole")
    ok(*command, "--run", tmp_path / "cut", "--max-batches", 7)
    ok("resume", tmp_path / "cut", "--max-batches", 11)
    ok("resume", tmp_path / "cut", "--max-batches", 0)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_a_limit_says_how_to_go_on(source, run):
    result = ok("stream", "--source", source, "--run", run, *FAST, "--max-batches", 3)
    assert f"ended by --max-batches 3; go on: kalmanhead resume {run}" in result.out
    again = ok("resume", run, "--json")  # nothing to do: the limit has been reached
    assert again.json["batches"] == 3
    assert len(lines(run)) == 3


def test_resuming_at_the_end_changes_nothing(source, run):
    ok("stream", "--source", source, "--run", run, *FAST)
    before = newest(run), (run / "metrics.jsonl").read_bytes()
    for _ in range(2):
        assert ok("resume", run, "--json").json["batches"] == 10
    assert (run / "metrics.jsonl").read_bytes() == before[1]
    assert newest(run)["progress"]["seconds"] == before[0]["progress"]["seconds"]


def test_more_epochs_on_a_finished_run(source, run):
    ok("stream", "--source", source, "--run", run, *FAST)
    assert ok("resume", run, "--epochs", 3, "--json").json["rows"] == 600
    assert tomllib.loads((run / "config.toml").read_text())["epochs"] == 3


def test_a_run_without_a_checkpoint_begins_again(source, tmp_path):
    command = ["stream", "--source", source, *FAST]
    ok(*command, "--run", tmp_path / "whole")
    ok(*command, "--run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.unlink()
    assert "no checkpoint yet" in ok("show", tmp_path / "run").out
    ok("resume", tmp_path / "run")
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_damaged_newest_checkpoint_is_passed_over(source, tmp_path):
    command = ["stream", "--source", source, *FAST, "--checkpoint-every", 4]
    ok(*command, "--run", tmp_path / "whole")
    run = tmp_path / "run"
    ok(*command, "--run", run)
    path = run / "checkpoints" / names(run)[-1]
    damaged = bytearray(path.read_bytes())
    damaged[-9] ^= 1
    path.write_bytes(damaged)
    result = call("resume", run)
    assert result.code == 0
    assert result.err.count("\n") == 1
    assert "warning" in result.err
    assert path.name in result.err
    assert "batch-000000000008" in result.out
    assert_same_end(run, tmp_path / "whole")
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"nothing")
    assert "none of 3 checkpoints is sound" in refused("resume", run)
    assert "none of 3 checkpoints is sound" in refused("show", run)


def test_a_sound_file_that_is_no_run(source, run, tmp_path):
    ok("stream", "--source", source, "--run", run, *FAST)
    path = run / "checkpoints" / names(run)[-1]
    checkpoint.save(path, {"learner": 3}, kind="run")
    for command in (["resume", run], ["show", run], ["plot", run]):
        assert "no checkpoint of a run" in refused(*command)
    out = ["--source", source, "--out", tmp_path / "p.parquet"]
    assert "no checkpoint of a run" in refused("predict", run, *out)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", "9", r"seed was 0, is 9"),
        ("holdout", "40", r"rows was 200, is 160"),
        ("shuffle", "false", r"shuffle was True, is False"),
        ("max_rows", "100", r"rows was 200, is 100"),
    ],
)
def test_changed_options_are_refused_by_name(source, run, key, value, message):
    ok("stream", "--source", source, "--run", run, *FAST, "--epochs", 2, "--max-batches", 5)
    text = (run / "config.toml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
    (run / "config.toml").write_text("\n".join([*kept, f"{key} = {value}"]))
    line = refused("resume", run)
    assert "the source has changed since the checkpoint" in line
    assert message in line


def test_a_changed_source_is_refused(source, run, tmp_path):
    ok("stream", "--source", source, "--run", run, *FAST, "--max-batches", 5)
    vector_zarr(source, rows=199)
    assert "200, is 199" in refused("resume", run)
    zarr_of(source, x=np.zeros((200, 4)), y=np.zeros((200, 1)))
    assert "was 3, is 4" in refused("resume", run)


def test_bad_rows_stop_or_are_counted(tmp_path, run):
    x, y = np.ones((100, 3)), np.ones((100, 1))
    x[47, 1] = np.nan
    source = zarr_of(tmp_path / "bad.zarr", x=x, y=y)
    line = refused("stream", "--source", source, "--run", run, *FAST)
    assert "row 47" in line
    assert "learnt up to batch 2" in line
    assert ok("resume", run, "--on-bad", "skip", "--json").json["bad_rows"] == 1
    assert [record["bad_rows"] for record in lines(run)] == [0, 0, 1, 1, 1]
    assert "1 bad rows left out" in ok("show", run).out


def test_a_batch_that_fails_half_way_is_in_no_checkpoint(source, run, monkeypatch):
    from kalmanhead.errors import NumericalError
    from kalmanhead.learner import OnlineLearner

    step = OnlineLearner.step

    def failing(self, x, y, weight=None):
        prediction = step(self, x, y, weight)
        if self.batches == 6:
            raise NumericalError("diverged")
        return prediction

    with monkeypatch.context() as patch:
        patch.setattr(OnlineLearner, "step", failing)
        line = refused("stream", "--source", source, "--run", run, *FAST, "--checkpoint-every", 4)
    assert "in batch 6" in line
    assert names(run) == ["batch-000000000004.safetensors"]
    ok("resume", run)
    ok("stream", "--source", source, "--run", run.with_name("whole"), *FAST)
    assert_same_end(run, run.with_name("whole"))


def test_several_targets_features_and_weights_of_parquet(tmp_path, run):
    source = parquet_of(tmp_path / "d.parquet", w=np.ones(200))
    options = ["--target", "y", "--target", "c", "--feature", "a", "--feature", "b"]
    ok("stream", "--source", source, "--run", run, *FAST, *options, "--weight", "w")
    rows = newest(run)["rows"]
    assert list(rows["y_names"]) == ["y", "c"]
    assert list(rows["x_names"]) == ["a", "b"]
    assert newest(run)["stream"]["source"]["weight"] == "w"


def test_a_series_that_predicts_itself(tmp_path, run):
    series = np.sin(np.arange(200.0) / 5)[:, None] * np.ones(3)
    source = zarr_of(tmp_path / "s.zarr", u=series)
    result = ok("stream", "--source", source, "--run", run, "--field", "u", "--lead", 3, *FAST,
                "--dims", 0, "--json").json  # fmt: skip
    assert result["rows"] == 197
    batches = [record["batch"] for record in lines(run)]
    assert batches == list(range(1, len(batches) + 1))
    assert result["batches"] == len(batches)


def test_names_of_arrays(tmp_path, run):
    rng = np.random.default_rng(0)
    source = zarr_of(tmp_path / "d.zarr", inputs=rng.normal(size=(60, 3)),
                     outputs=rng.normal(size=(60, 1)), w=np.ones(60))  # fmt: skip
    ok("stream", "--source", source, "--run", run, *FAST, "--x", "inputs", "--y", "outputs",
       "--weight", "w", "--keep", 1)  # fmt: skip
    assert len(names(run)) == 1


def test_river(run):
    result = ok("stream", "--source", "river:TrumpApproval", "--run", run, *FAST,
                "--max-rows", 100, "--json").json  # fmt: skip
    assert result["rows"] == 100


def test_plotting(source, run, tmp_path):
    ok("stream", "--source", source, "--run", run, *FAST, "--holdout", 20)
    (run / "curve.png").unlink()
    assert str(run / "curve.png") in ok("plot", run).out
    for name in ("c.png", "c.pdf", "c.svg"):
        ok("plot", run, "--out", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert "give a name such as curve.png" in refused("plot", run, "--out", tmp_path / "c.xyz")
    assert "cannot write" in refused("plot", run, "--out", tmp_path / "absent" / "c.png")
    (run / "metrics.jsonl").unlink()
    assert "has no metrics yet" in refused("plot", run)


def test_a_run_succeeds_without_matplotlib(source, run, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    result = ok("stream", "--source", source, "--run", run, *FAST)
    assert "no picture: matplotlib is not installed; pip install 'kalmanhead[plot]'" in result.out
    line = refused("plot", run)
    assert "kalmanhead[plot]" in line
    # Before any work: that the run and the source do not exist is not found out.
    predict = ["predict", "absent", "--source", "absent.zarr", "--out", run / "p.zarr"]
    assert refused(*predict, "--plot", "p.png") == line


def test_the_module_of_a_run_is_imported_only_when_told(source, run, tmp_path, monkeypatch):
    (tmp_path / "userbackbone.py").write_text(
        "from torch import nn\n"
        "def make(x_shape, y_shape):\n"
        "    return nn.Sequential(nn.Linear(x_shape[0], 8), nn.Tanh(), nn.Dropout(0.1),\n"
        "                         nn.Linear(8, y_shape[0]))\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["--backbone", "module:userbackbone:make", "--batch-size", 20]
    ok("stream", "--source", source, "--run", run, *options, "--max-batches", 4)
    ok("stream", "--source", source, "--run", run.with_name("whole"), *options)
    sys.modules.pop("userbackbone")
    out = ["--source", source, "--out", tmp_path / "p.parquet"]
    for command in (["resume", run, "--max-batches", 0], ["predict", run, *out]):
        assert "userbackbone:make: say --trust-code to import it" in refused(*command)
        assert "userbackbone" not in sys.modules
    ok("show", run)
    ok("resume", run, "--max-batches", 0, "--trust-code")
    assert_same_end(run, run.with_name("whole"))
    ok("predict", run, *out, "--trust-code")


def test_the_bar_of_a_terminal_counts_bad_rows_too(source, run):
    import io

    from kalmanhead.cli.watching import progress_bar, recent_error
    from kalmanhead.engine import Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    progress = Progress(rows=40, bad_rows=2)
    error, sys.stderr = sys.stderr, terminal
    try:
        with progress_bar(100, progress, quiet=False) as bar:
            bar.set_postfix_str("rmse 0.5", refresh=False)
            bar.update(58)
    finally:
        sys.stderr = error
    assert "100%" in terminal.getvalue()
    assert "rmse 0.5" in terminal.getvalue()
    assert "row/s" in terminal.getvalue()
    assert recent_error(progress) == ""


def test_metrics_are_plain_json(source, run):
    ok("stream", "--source", source, "--run", run, *FAST)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
