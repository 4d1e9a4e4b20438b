"""What the loop around the mathematics costs, and that memory does not grow.

Protocol, overhead: 20 features, MLP 64-64, batch 32, rows in a Zarr group on disk, with the
default head and with the cheaper `reset`. `bare` predicts and learns the same batches from
tensors in memory; `stream` runs them through source, rebatching, prefetching thread, metrics, a
metrics line a batch and a checkpoint every 200 batches and at the end (the picture is not drawn).
The two alternate within one process; the ratio is the median over pairs. The bar is on the
default; the cheaper the head, the larger the share of the loop.

Protocol, memory: peak resident memory of a process that streams so many batches of 32 rows (an
endless generator, MLP 8), for a short and a ten times longer stream, each in a fresh process.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import zarr
from common import bar, finish

BATCH = 32


def store(folder: Path, batches: int) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batches * BATCH, 20)).astype(np.float32)
    y = (np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]).astype(np.float32)
    group = zarr.open_group(folder / "data.zarr", mode="w")
    for name, values in (("x", x), ("y", y)):
        group.create_array(name, data=values, chunks=(1024, values.shape[1]))
    return folder / "data.zarr"


def options(source: Path, run: Path, head: str) -> list[str]:
    return ["--source", str(source), "--head", head, "--run", str(run), "--quiet"]


def bare(source: Path, head: str) -> float:
    from kalmanhead.config import ModelConfig, build_learner

    group = zarr.open_group(source, mode="r")
    x, y = (torch.as_tensor(np.asarray(group[name][:])) for name in ("x", "y"))
    learner = build_learner(ModelConfig(head=head), (20,), (1,))
    start = time.perf_counter()
    for rows in range(0, len(x), BATCH):
        learner.step(x[rows : rows + BATCH], y[rows : rows + BATCH])
    return time.perf_counter() - start


def streamed(source: Path, folder: Path, head: str) -> float:
    from kalmanhead.cli.running import begin, learn, save
    from kalmanhead.cli.stream import stream
    from kalmanhead.cli.watching import Stopper, progress_bar

    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    context = stream.make_context("stream", options(source, run, head))
    values = dict(context.params)
    for name in ("run", "quiet", "as_json"):
        values.pop(name)
    prepared = begin(values, run)
    counted = progress_bar(None, prepared.progress, True)
    with prepared.directory, Stopper() as stopper, counted as shown:
        start = time.perf_counter()
        learn(prepared, stopper, shown)
        save(prepared)
        return time.perf_counter() - start


def overhead(folder: Path, head: str, batches: int, repeats: int) -> dict:
    source = store(folder, batches)
    bare(source, head), streamed(source, folder, head)
    pairs = [(bare(source, head), streamed(source, folder, head)) for _ in range(repeats)]
    bare_median, stream_median = (statistics.median(part) for part in zip(*pairs, strict=True))
    return {
        "head": head,
        "batches": batches,
        "repeats": repeats,
        "bare_us_per_batch": bare_median / batches * 1e6,
        "stream_us_per_batch": stream_median / batches * 1e6,
        "ratio": statistics.median(whole / alone for alone, whole in pairs),
        "ratios": [whole / alone for alone, whole in pairs],
    }


def peak_memory(batches: int) -> float:
    """Peak resident memory in MB of a fresh process that streams so many batches."""
    command = [sys.executable, __file__, "--memory-child", str(batches)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.strip().splitlines()[-1])


def memory_child(batches: int) -> None:
    from kalmanhead.cli.main import cli

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args = ["stream", "--source", "river.synth:Friedman", "--run", f"{folder}/run"]
        args += ["--max-batches", str(batches), "--width", "8", "--quiet", "--head", "reset"]
        args += ["--checkpoint-every", "1000"]
        cli.main(args, standalone_mode=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short streams, one repeat")
    parser.add_argument("--memory-child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_child:
        memory_child(arguments.memory_child)
        return
    print(__doc__)
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as folder:
        size = (200, 1) if quick else (1000, 9)
        loops = {head: overhead(Path(folder), head, *size) for head in ("auto", "reset")}
    print(json.dumps(loops), flush=True)
    short = 200 if quick else 10_000
    peaks = {str(n): peak_memory(n) for n in (short, short * 10)}
    print(json.dumps(peaks), flush=True)
    growth = peaks[str(short * 10)] / peaks[str(short)]
    bars = [
        bar(
            "whole loop over bare loop, default head", loops["auto"]["ratio"], 1.15, at_least=False
        ),
        bar("peak memory of a ten times longer stream", growth, 1.05, at_least=False),
    ]
    finish("overhead", __doc__, {"loops": loops, "peak_mb": peaks}, bars, quick)


if __name__ == "__main__":
    main()
