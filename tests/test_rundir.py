"""The folder of a run: one writer at a time, every batch once in the metrics."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from kalmanhead import rundir
from kalmanhead.errors import CheckpointError, ConfigError
from kalmanhead.rundir import RunDirectory


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        run.write_config({"seed": 1})
        yield run


def test_configuration_round_trips(run):
    config = {"seed": 3, "source": "a/é.zarr", "head": {"etas": [0.1, 1.0], "bias": True}}
    run.write_config({**config, "target": None, "head": {**config["head"], "extra": None}})
    assert run.read_config() == config


def test_a_broken_configuration_is_named(run):
    run.config_path.write_text("seed = = 3")
    with pytest.raises(ConfigError, match=r"config\.toml: .*mend the file"):
        run.read_config()
    run.config_path.write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=r"config\.toml"):
        run.read_config()


def test_a_folder_with_a_run_is_refused(run):
    run.close()
    with pytest.raises(ConfigError, match=r"kalmanhead resume .*another --run"):
        RunDirectory.create(run.path)
    with RunDirectory.open(run.path, write=True):  # the refusal released its lock
        pass


def test_a_folder_that_was_only_begun_or_holds_other_things_is_taken(tmp_path):
    RunDirectory.create(tmp_path).close()
    (tmp_path / "notes.txt").write_text("mine")
    RunDirectory.create(tmp_path).close()


def test_opening_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        RunDirectory.open(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        RunDirectory.open(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        RunDirectory.create(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_unnamed_runs_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir.time, "strftime", lambda _: "20240229-120000")
    names = [RunDirectory.create(root=tmp_path / "runs").path.name for _ in range(3)]
    assert names == ["20240229-120000", "20240229-120000-2", "20240229-120000-3"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    path = RunDirectory.create().path
    assert re.fullmatch(r"runs/\d{8}-\d{6}", path.as_posix())


def test_every_batch_stands_there_once_after_a_resume(run):
    for batch in range(3):
        run.append({"batch": batch})
    offset = run.flush()
    for batch in range(3, 6):
        run.append({"batch": batch})
    run.close()
    with RunDirectory.open(run.path, write=True) as again:
        again.truncate(offset)
        for batch in range(3, 8):
            again.append({"batch": batch})
        assert [record["batch"] for record in again.records()] == list(range(8))
        again.truncate(offset)
        assert again.flush() == offset
        again.truncate(0)
        assert list(again.records()) == []


def test_lost_lines_are_noticed(run):
    run.append({"batch": 0})
    offset = run.flush()
    with pytest.raises(CheckpointError, match="written at byte"):
        run.truncate(offset + 1)
    run.close()
    run.metrics_path.unlink()
    with (
        RunDirectory.open(run.path, write=True) as again,
        pytest.raises(CheckpointError, match="0 bytes long"),
    ):
        again.truncate(offset)


@pytest.mark.parametrize("tail", [b'{"batch": 2', b'{"batch": 2}', b"\0\0\0\n", b"{}x\n", b"3\n"])
def test_a_last_line_cut_short_is_passed_over(run, tail):
    run.append({"batch": 0})
    run.append({"batch": 1})
    run.close()
    with open(run.metrics_path, "ab") as file:
        file.write(tail)
    assert [r["batch"] for r in RunDirectory.open(run.path).records()] == [0, 1]


@pytest.mark.parametrize("length", [10, 10_000])
def test_a_half_written_line_does_not_swallow_the_next(run, length):
    run.append({"batch": 0})
    run.close()
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"batch": 1, "x": "' + b"y" * length)
    with RunDirectory.open(run.path, write=True) as again:
        again.append({"batch": 1})
        assert [record["batch"] for record in again.records()] == [0, 1]


def test_damage_before_the_last_line_is_named(run):
    run.append({"batch": 0})
    run.flush()
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"batch\n{"batch": 2}\n')
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        list(run.records())


def test_numbers_become_plain_json(run):
    run.append({"a": math.nan, "b": [1.0, -math.inf], "c": np.float64(0.5), "d": np.int64(3)})
    run.append({"a": np.float32(math.nan), "b": {"c": "text", "d": None, "e": True}})
    run.flush()
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert lines == [
        {"a": None, "b": [1.0, None], "c": 0.5, "d": 3},
        {"a": None, "b": {"c": "text", "d": None, "e": True}},
    ]
    with pytest.raises(TypeError, match="a set cannot go"):
        run.append({"a": {1}})


def test_a_full_disk_is_one_line(run, monkeypatch):
    def fail(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir.os, "fsync", fail)
    run.append({"batch": 0})
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be written: No space left"):
        run.flush()


def test_readers_need_no_lock_and_may_not_write(run):
    run.append({"batch": 0})
    run.flush()
    reader = RunDirectory.open(run.path)
    assert list(reader.records()) == [{"batch": 0}]
    for write in (lambda: reader.append({}), lambda: reader.write_config({}), reader.flush,
                  lambda: reader.truncate(0)):  # fmt: skip
        with pytest.raises(RuntimeError, match="write=True"):
            write()
    reader.close()


HOLDER = """
import sys, time
from kalmanhead.rundir import RunDirectory
run = RunDirectory.open(sys.argv[1], write=True)
run.append({"batch": 0})
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(rundir.fcntl is None, reason="needs flock")
def test_another_process_is_refused_until_the_holder_dies(run):
    run.close()
    command = [sys.executable, "-c", HOLDER, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use by another process"):
            RunDirectory.open(run.path, write=True)
        with pytest.raises(ConfigError, match="in use by another process"):
            RunDirectory.create(run.path)
        os.kill(holder.pid, signal.SIGKILL)
    with RunDirectory.open(run.path, write=True):
        pass


def test_without_flock_the_file_is_the_lock(run, monkeypatch):
    run.close()
    (run.path / "lock").unlink()
    monkeypatch.setattr(rundir, "fcntl", None)
    with (
        RunDirectory.open(run.path, write=True),
        pytest.raises(ConfigError, match=r"if none runs, delete .*lock"),
    ):
        RunDirectory.open(run.path, write=True)
    RunDirectory.open(run.path, write=True).close()
