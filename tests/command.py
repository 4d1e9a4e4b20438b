"""The command line called from tests: in this process, or in quickly forked ones that may die."""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zarr

from kalmanhead import checkpoint


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out.splitlines()[-1])


def call(*arguments):
    """Run `kalmanhead ARGUMENTS` in this process."""
    from kalmanhead.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    argv = ["kalmanhead", *map(str, arguments)]
    state = torch.get_rng_state()
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
        finally:
            torch.set_rng_state(state)
    return Result(code, out.getvalue(), err.getvalue())


def ok(*arguments):
    """Run a command that must succeed, without a word on stderr."""
    result = call(*arguments)
    assert result.code == 0, result
    assert result.err == ""
    return result


def refused(*arguments):
    """Run a command that must be refused in one line; returns the line."""
    result = call(*arguments)
    assert result.code == 2, result
    assert result.err.startswith("kalmanhead: ")
    assert result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.err
    return result.err


def vectors(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    return x, np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:]


def zarr_of(path, **arrays):
    group = zarr.open_group(path, mode="w")
    for name, values in arrays.items():
        group.create_array(name, data=values, chunks=(50, *values.shape[1:]))
    return path


def vector_zarr(path, rows=200, seed=0):
    x, y = vectors(rows, seed)
    return zarr_of(path, x=x, y=y)


def parquet_of(path, rows=200, seed=0, **more):
    x, y = vectors(rows, seed)
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y[:, 0], **more}
    pq.write_table(pa.table(columns), path, row_group_size=30)
    return path


def newest(run):
    """Tree of the newest checkpoint of a run."""
    return checkpoint.CheckpointFolder(Path(run) / "checkpoints").latest().tree


def lines(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def assert_same_end(run, other):
    """Two runs ended in the same bits."""
    ours, theirs = newest(run), newest(other)
    for tree in (ours, theirs):
        tree["progress"].pop("seconds")
    for part in ("learner", "progress", "random", "stream", "holdout"):
        ours_flat, theirs_flat = dict(leaves(ours[part])), dict(leaves(theirs[part]))
        assert ours_flat.keys() == theirs_flat.keys()
        for key, value in theirs_flat.items():
            assert same(ours_flat[key], value), (part, key)
    metrics = [(Path(path) / "metrics.jsonl").read_bytes() for path in (run, other)]
    assert metrics[0] == metrics[1]
    batches = [record["batch"] for record in lines(run)]
    assert batches == list(range(1, len(batches) + 1))


def leaves(tree, path=()):
    """All that is no container in a nested structure, under its path."""
    if not isinstance(tree, dict | list | tuple):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, (*path, key))


def same(ours, theirs):
    """Equal to the last bit."""
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.numpy().tobytes() == theirs.numpy().tobytes()
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)


def assert_same(ours, theirs):
    """Two states hold the same values, bit for bit."""
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert same(ours[key], value), key


class Forker:
    """A process that has imported everything and forks a child for each command: a child starts
    in milliseconds, and is a real process that can be killed at any instant.
    """

    def __enter__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        assert self.process.wait() == 0

    def run(self, *arguments, send=None, after=0.0, once=None):
        """Run a command; send a signal after some seconds, counted from when a file is there.

        The code is negative where the child died of a signal.
        """
        order = {"arguments": [str(a) for a in arguments], "send": send, "after": after}
        order["once"] = None if once is None else str(once)
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Result(*json.loads(self.process.stdout.readline()))


def serve():
    torch.set_num_threads(1)
    for name in (
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "torch._dynamo",  # torch.optim imports it at its first step, which takes seconds
        "kalmanhead.cli.main",
        "kalmanhead.cli.resume",
        "kalmanhead.cli.running",
        "kalmanhead.streams.river_source",
    ):
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = os.waitstatus_to_exitcode(obey(json.loads(line), out, err))
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        print(json.dumps([code, *texts]), flush=True)


def obey(order, out, err):
    child = os.fork()
    if child == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.argv = ["kalmanhead", *order["arguments"]]
        sys.modules["kalmanhead.cli.main"].main()
        os._exit(99)  # main always ends with SystemExit
    if order["send"] is None:
        return os.waitpid(child, 0)[1]
    started = time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if order["once"] is not None and os.path.exists(order["once"]):
            order["once"], started = None, time.monotonic()
        if order["once"] is not None or time.monotonic() - started < order["after"]:
            time.sleep(0.001)
            continue
        os.kill(child, signal.Signals(order["send"]))
        return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    serve()
