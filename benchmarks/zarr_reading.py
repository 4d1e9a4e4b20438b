"""How fast batches come from Zarr, against reading the same chunks with zarr alone.

Protocol. A store of two float32 arrays x and y, (20000, 256), chunks of 256 rows, zarr's default
compression, smooth random fields, written fresh into a temporary directory (so read from the
page cache). Direct: x[a:b] and y[a:b] chunk by chunk with zarr. Ours: `open_source(path,
batch_size=32)` from the opening to the last batch: reading, checks for bad rows and missing
chunks, rebatching into torch tensors, one prefetch thread. Both are timed in turn, order
alternating, after one untimed turn of each; the ratio is the median over the repeats of
(direct seconds / our seconds). Also reported, without a bar: chunks of 64 rows, batches of 256,
two-dimensional fields in chunks of 8 rows, and shards. Bar: ratio at least 0.80 on the first
store.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from common import bar, finish

from kalmanhead.streams import open_source

LIMIT = 0.80

# name: shape of x and y, rows per chunk, rows per shard, batch size
CASES = {
    "fields of 256 points, chunks of 256, batches of 32": ((20000, 256), 256, None, 32),
    "fields of 256 points, chunks of 64, batches of 32": ((20000, 256), 64, None, 32),
    "fields of 256 points, chunks of 256, batches of 256": ((20000, 256), 256, None, 256),
    "fields of 64 x 64 points, chunks of 8, batches of 16": ((1200, 64, 64), 8, None, 16),
    "fields of 256 points, chunks of 64 in shards of 1024": ((20000, 256), 64, 1024, 32),
}


def write_store(path: Path, shape: tuple[int, ...], chunk: int, shard: int | None) -> None:
    generator = np.random.default_rng(0)
    group = zarr.open_group(str(path), mode="w")
    for name in "xy":
        array = group.create_array(
            name,
            shape=shape,
            chunks=(chunk, *shape[1:]),
            shards=(shard, *shape[1:]) if shard else None,
            dtype="f4",
        )
        noise = generator.normal(size=shape).astype(np.float32)
        array[:] = np.cumsum(noise, axis=-1) / np.sqrt(shape[-1])


def read_directly(path: Path, step: int) -> int:
    group = zarr.open_group(str(path), mode="r")
    x: Any = group["x"]
    y: Any = group["y"]
    rows = 0
    for start in range(0, x.shape[0], step):
        a, b = x[start : start + step], y[start : start + step]
        rows += min(len(a), len(b))
    return rows


def read_ours(path: Path, batch_size: int) -> int:
    return sum(len(batch) for batch in open_source(str(path), batch_size=batch_size))


def seconds(action: Callable[[], int]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(
    shape: tuple[int, ...], chunk: int, shard: int | None, batch_size: int, repeats: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.zarr"
        write_store(path, shape, chunk, shard)
        actions: dict[str, Callable[[], int]] = {
            "direct": lambda: read_directly(path, shard or chunk),
            "ours": lambda: read_ours(path, batch_size),
        }
        if {action() for action in actions.values()} != {shape[0]}:
            raise RuntimeError("both must read every row")
        times: dict[str, list[float]] = {name: [] for name in actions}
        for repeat in range(repeats):
            for name in sorted(actions, reverse=bool(repeat % 2)):
                times[name].append(seconds(actions[name]))
    pairs = zip(times["direct"], times["ours"], strict=True)
    ratio = statistics.median(direct / ours for direct, ours in pairs)
    return {
        "ratio": round(ratio, 3),
        "rows_per_second": {
            name: round(shape[0] / statistics.median(taken)) for name, taken in times.items()
        },
        "seconds": {name: [round(t, 4) for t in taken] for name, taken in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Zarr reading speed")
    parser.add_argument("--quick", action="store_true", help="the first case, 3 repeats")
    quick = parser.parse_args().quick
    print(__doc__)
    cases = dict(list(CASES.items())[:1]) if quick else CASES
    results = {}
    for name, case in cases.items():
        results[name] = measure(*case, repeats=3 if quick else 11)
        print(f"{name}: {results[name]['ratio']} of zarr alone, {results[name]['rows_per_second']}")
    first = float(results[next(iter(CASES))]["ratio"])
    bars = [bar("zarr reading against zarr alone", first, LIMIT)]
    finish("zarr_reading", __doc__ or "", results, bars, quick)


if __name__ == "__main__":
    main()
