"""What the loop around the mathematics costs, and that memory does not grow.

Protocol, overhead: 20 features, MLP 64-64 and `reset` head, batch 32, rows in a Zarr group on
disk. `bare` predicts and learns the same batches from tensors in memory; `stream` runs them
through source, rebatching, prefetching thread, metrics, a metrics line a batch and a checkpoint
every 200 batches. The two alternate within one process; the ratio is of the medians.

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


def options(source: Path, run: Path) -> list[str]:
    return ["--source", str(source), "--head", "reset", "--run", str(run), "--quiet"]


def bare(source: Path) -> float:
    from kalmanhead.config import ModelConfig, build_learner

    group = zarr.open_group(source, mode="r")
    x, y = (torch.as_tensor(np.asarray(group[name][:])) for name in ("x", "y"))
    learner = build_learner(ModelConfig(head="reset"), (20,), (1,))
    start = time.perf_counter()
    for rows in range(0, len(x), BATCH):
        learner.step(x[rows : rows + BATCH], y[rows : rows + BATCH])
    return time.perf_counter() - start


def streamed(source: Path, folder: Path) -> float:
    from kalmanhead.cli.running import begin, execute
    from kalmanhead.cli.stream import stream

    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    context = stream.make_context("stream", options(source, run))
    values = dict(context.params)
    for name in ("run", "quiet", "as_json"):
        values.pop(name)
    prepared = begin(values, run)
    start = time.perf_counter()
    execute(prepared, quiet=True, as_json=False)
    return time.perf_counter() - start


def overhead(folder: Path, batches: int, repeats: int) -> dict:
    source = store(folder, batches)
    bare(source), streamed(source, folder)
    times = [(bare(source), streamed(source, folder)) for _ in range(repeats)]
    bare_median, stream_median = (statistics.median(part) for part in zip(*times, strict=True))
    return {
        "batches": batches,
        "repeats": repeats,
        "bare_us_per_batch": bare_median / batches * 1e6,
        "stream_us_per_batch": stream_median / batches * 1e6,
        "ratio": stream_median / bare_median,
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
        loop = overhead(Path(folder), 200 if quick else 1000, 1 if quick else 9)
    print(json.dumps(loop), flush=True)
    short = 200 if quick else 10_000
    peaks = {str(n): peak_memory(n) for n in (short, short * 10)}
    print(json.dumps(peaks), flush=True)
    growth = peaks[str(short * 10)] / peaks[str(short)]
    bars = [
        bar("time of the whole loop over the bare loop", loop["ratio"], 1.15, at_least=False),
        bar("peak memory of a ten times longer stream", growth, 1.05, at_least=False),
    ]
    finish("overhead", __doc__, {"loop": loop, "peak_mb": peaks}, bars, quick)


if __name__ == "__main__":
    main()
