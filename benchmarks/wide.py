"""Wide last layers: what the closed-form step costs beside Adam's.

Protocol: one thread, one process; an MLP 64-128-d with ReLU and a last layer of d features to one
output, d = 1024, 4096 and 8192, batches of 8 and 32 of normal rows. A step of each learner in turn:
the whole network by Adam; the paper's proximal head (`reset`, lambda 100) in float64 and float32,
Adam for the backbone. Ratios are medians over turns of the ratio within a turn, the first ten left
out. Beside them the size of what the head carries from batch to batch: `reset` holds W and the
prior's diagonal, and no d x d matrix.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from common import bar, finish
from torch import Tensor, nn

from kalmanhead.head import Head, KalmanHead
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import adam
from kalmanhead.trained_head import TrainedHead

SIZES, BATCHES, TURNS, WARM = (1024, 4096, 8192), (8, 32), 100, 10


def learners(d: int) -> dict[str, OnlineLearner]:
    def build(head: Head) -> OnlineLearner:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, d), nn.ReLU()]
        return OnlineLearner(nn.Sequential(*layers), head, adam(1e-3))

    single = KalmanHead(d, 1, prior_precision=100.0, dtype=torch.float32)
    return {
        "adam": build(TrainedHead(d, 1)),
        "reset": build(KalmanHead(d, 1, prior_precision=100.0)),
        "reset, float32": build(single),
    }


def measure(d: int, batch: int, turns: int) -> dict[str, Any]:
    models = learners(d)
    times: dict[str, list[float]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(0)
    for _ in range(turns):
        x = torch.randn(batch, 64, generator=generator)
        y = x[:, :1].sin()
        for name, model in models.items():
            start = time.perf_counter()
            model.learn(x, y)
            times[name].append(time.perf_counter() - start)
    late = {name: values[WARM:] for name, values in times.items()}
    row: dict[str, Any] = {"d": d, "batch": batch}
    for name, values in late.items():
        ratios = [a / b for a, b in zip(values, late["adam"], strict=True)]
        state = models[name].head.state()
        size = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))
        row[name] = {
            "ms": 1e3 * statistics.median(values),
            "over_adam": statistics.median(ratios),
            "head_kib": size / 1024,
        }
    print(d, batch, {k: round(v["over_adam"], 3) for k, v in row.items() if isinstance(v, dict)})
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one size, few turns")
    quick = parser.parse_args().quick
    print(__doc__)
    torch.set_num_threads(1)
    sizes = SIZES[:1] if quick else SIZES
    table = [measure(d, b, WARM + 5 if quick else TURNS) for d in sizes for b in BATCHES]
    bars = [
        bar(
            f"d = {row['d']}, batch {row['batch']}: step of `reset` over Adam's",
            row["reset"]["over_adam"],
            1.15,
            at_least=False,
        )
        for row in table
        if quick or (row["d"], row["batch"]) == (4096, 32)
    ]
    finish("wide", str(__doc__), {"table": table}, bars, quick)


if __name__ == "__main__":
    main()
