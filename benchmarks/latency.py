"""Rows per second of the river estimators, predict_one and learn_one, beside plain loops.

Protocol: one thread, one run. Rows are dicts of normal features; the target is a linear part, a
product and noise. 20 features: the default and the three single heads against a plain torch loop
(dict to tensor, MLP 20-32-32-1 in float32, one forward pass that is both the prediction and what
the loss is taken of, one Adam step, for every row; with a second forward pass for a prediction
beforehand it is shown, too). 100 features: backbone="linear", head="static" against river's
BayesianLinearRegression. Each system learns from 3,000 rows first; then they take turns, a chunk of
the same rows each, in alternating order. A ratio is the median over chunks of the ratios within a
chunk; the bar of single heads is that of the slowest. The profile is cProfile's own time of the
default after the same warm-up; it makes calls look dearer than they are.

--soak instead learns 1,000,000 rows with two features of 10,000 +- 1, one that is always zero and
one that comes in the first row only. Rows per second are those of learn_one alone; 20 predictions
after every 1,000 rows must be finite and every covariance positive definite. Memory is traced in
the last fifth, which is not timed; its growth is from the peak over the first half of that to the
peak over the second, as up to 128 rows wait for their turn in some sums.
"""

import argparse
import cProfile
import math
import pstats
import re
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import bar, finish
from torch import Tensor, nn

Row = tuple[dict[Any, float], float]
Step = Callable[[dict[Any, float], float], object]  # predicts a row and learns from it

TORCH, TWICE, BANK = "torch loop", "torch loop, two forward passes", "default"
LINEAR, BAYES = "linear, static", "BayesianLinearRegression"
SINGLE: dict[str, dict[str, Any]] = {
    "drift": {"head": "drift", "eta": 0.01},
    "static": {"head": "static"},
    "reset": {"head": "reset"},
}
FEATURES, WIDE, WARM, TOP = 20, 100, 3_000, 15
SOAK, BLOCK, PROBES, KIB = 1_000_000, 1_000, 20, 1024


class TorchLoop:
    """What one writes without a library: an MLP, and a step of the optimiser for every row."""

    loss = staticmethod(nn.functional.mse_loss)

    def __init__(
        self, optimizer: str = "Adam", lr: float = 1e-3, seed: int = 0, outputs: int = 1
    ) -> None:
        self.optimizer_name, self.lr, self.seed, self.outputs = optimizer, lr, seed, outputs
        self.network: nn.Sequential | None = None

    def forward(self, x: dict[Any, float]) -> Tensor:
        """Outputs of a row, (1, outputs)."""
        if self.network is None:
            self.build(len(x))
        return self.network(torch.tensor([list(x.values())]))  # type: ignore[misc]

    def build(self, inputs: int, width: int = 32) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network = nn.Sequential(
                nn.Linear(inputs, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, self.outputs),
            )
        make = getattr(torch.optim, self.optimizer_name)
        self.optimizer = make(self.network.parameters(), lr=self.lr)

    def descend(self, outputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(outputs, target).backward()
        self.optimizer.step()

    def step(self, x: dict[Any, float], y: float) -> float:
        """The prediction for a row, which is then learnt from."""
        outputs = self.forward(x)
        self.descend(outputs, torch.tensor([[y]]))
        return outputs.item()

    def predict_one(self, x: dict[Any, float]) -> float:
        with torch.no_grad():
            return self.forward(x).item()

    def learn_one(self, x: dict[Any, float], y: float) -> None:
        self.step(x, y)


def rows(features: int) -> Iterator[Row]:
    """Rows without end."""
    generator = np.random.default_rng(0)
    while True:
        *values, noise = generator.standard_normal(features + 1).tolist()
        y = 2 * values[0] + values[1] * values[2] + 0.1 * noise
        yield {f"x{i}": value for i, value in enumerate(values)}, y


def two_calls(model: Any) -> Step:
    def step(x: dict[Any, float], y: float) -> None:
        model.predict_one(x)
        model.learn_one(x, y)

    return step


def narrow_systems() -> dict[str, Step]:
    from kalmanhead.estimators import KalmanHeadRegressor

    systems: dict[str, Step] = {TORCH: TorchLoop().step, TWICE: two_calls(TorchLoop())}
    systems[BANK] = two_calls(KalmanHeadRegressor())
    return systems | {k: two_calls(KalmanHeadRegressor(**v)) for k, v in SINGLE.items()}


def wide_systems() -> dict[str, Step]:
    from river.linear_model import BayesianLinearRegression

    from kalmanhead.estimators import KalmanHeadRegressor

    linear = KalmanHeadRegressor(backbone="linear", head="static")
    return {BAYES: two_calls(BayesianLinearRegression()), LINEAR: two_calls(linear)}


def take_turns(
    systems: dict[str, Step], features: int, warm: int, chunks: int, size: int
) -> dict[str, list[float]]:
    """Seconds a row by system, one figure a chunk."""
    stream = rows(features)
    seconds: dict[str, list[float]] = {name: [] for name in systems}

    def turn(order: list[str], count: int) -> dict[str, float]:
        chunk = [next(stream) for _ in range(count)]
        times = {}
        for name in order:
            step = systems[name]
            start = time.perf_counter()
            for x, y in chunk:
                step(x, y)
            times[name] = (time.perf_counter() - start) / count
        return times

    order = list(systems)
    turn(order, warm)
    for _ in range(chunks):
        order.reverse()
        for name, value in turn(order, size).items():
            seconds[name].append(value)
    return seconds


def speed_ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    pairs = zip(seconds[one], seconds[other], strict=True)
    return statistics.median(b / a for a, b in pairs)


def profile(warm: int, count: int) -> list[dict[str, Any]]:
    """The functions in which the default spends most of a row, by own time."""
    from kalmanhead.estimators import KalmanHeadRegressor

    stream, step = rows(FEATURES), two_calls(KalmanHeadRegressor())
    for _ in range(warm):
        step(*next(stream))
    chunk = [next(stream) for _ in range(count)]
    profiler = cProfile.Profile()
    profiler.enable()
    for x, y in chunk:
        step(x, y)
    profiler.disable()
    stats = pstats.Stats(profiler)
    total = stats.total_tt  # type: ignore[attr-defined]
    entries = [
        {
            "function": re.sub(
                " at 0x[0-9a-f]+", "", f"{Path(path).name} {name}".removeprefix("~ ")
            ),
            "own_share": own / total,
            "calls_per_row": calls / count,
        }
        for (path, _, name), (_, calls, own, *_) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(entries, key=lambda entry: -entry["own_share"])[:TOP]


def compare(quick: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    warm, chunks = (150, 7) if quick else (WARM, 15)
    seconds = take_turns(narrow_systems(), FEATURES, warm, chunks, 40 if quick else 300)
    seconds |= take_turns(wide_systems(), WIDE, warm, chunks, 40 if quick else 300)
    speeds = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    pairs = [(name, TORCH) for name in (BANK, *SINGLE)]
    pairs += [(BANK, TWICE), (LINEAR, BAYES)]
    ratios = {pair: speed_ratio(seconds, *pair) for pair in pairs}
    shares = profile(warm, 100 if quick else 1_000)
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} rows/s, {1e6 / speed:.0f} us a row")
    for (one, other), ratio in ratios.items():
        print(f"{one} over {other}: {ratio:.2f}")
    for entry in shares:
        calls = entry["calls_per_row"]
        print(f"  {entry['own_share']:6.1%} {calls:6.2f} calls a row  {entry['function']}")
    slowest = min(SINGLE, key=lambda name: ratios[name, TORCH])
    bars = [
        bar("rows per second, default over the torch loop", ratios[BANK, TORCH], 4),
        bar("rows per second, slowest single head over the torch loop", ratios[slowest, TORCH], 8),
        bar("rows per second, linear over BayesianLinearRegression", ratios[LINEAR, BAYES], 1),
    ]
    results = {
        "rows_per_second": speeds,
        "ratios": {f"{one} over {other}": ratio for (one, other), ratio in ratios.items()},
        "profile_of_the_default": shares,
        "seconds_a_row_by_chunk": seconds,
    }
    return results, bars


def hard_rows() -> Iterator[list[Row]]:
    """Blocks of rows far from zero, with a feature that never moves."""
    generator = np.random.default_rng(0)
    while True:
        draws = generator.standard_normal((BLOCK, 3)).tolist()
        yield [
            ({"a": 1e4 + a, "b": 1e4 + b, "zero": 0.0}, 1e4 + a - 2 * b + 0.1 * c)
            for a, b, c in draws
        ]


def soak(quick: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from kalmanhead.estimators import KalmanHeadRegressor

    model, stream = KalmanHeadRegressor(), hard_rows()
    blocks = (5_000 if quick else SOAK) // BLOCK
    tenth, traced = max(1, blocks // 10), blocks - max(2, blocks // 5)
    model.learn_one({"a": 1e4, "b": 1e4, "zero": 0.0, "idle": 3.0}, 1e4)
    reports: list[dict[str, float]] = []
    seconds, probes, peak = 0.0, 0, 0
    for done in range(1, blocks + 1):
        block = next(stream)
        start = time.perf_counter()
        for x, y in block:
            model.learn_one(x, y)
        seconds += (time.perf_counter() - start) * (done <= traced)
        errors = [abs(model.predict_one(x) - y) for x, y in next(stream)[:PROBES]]
        probes += sum(not math.isfinite(error) for error in errors)
        if done == traced:
            tracemalloc.start()
        if done == blocks - tenth:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
        if done % tenth == 0 or done == blocks:
            speed = min(done, traced) * BLOCK / seconds
            reports.append(
                {"rows": done * BLOCK, "rows_per_second": speed, "mae": statistics.mean(errors)}
                | {"smallest_eigenvalue": smallest_eigenvalue(model)}
            )
            print(reports[-1], flush=True)
    growth = (tracemalloc.get_traced_memory()[1] - peak) / KIB
    tracemalloc.stop()
    low = min(report["smallest_eigenvalue"] for report in reports)
    print(f"not finite: {probes}; memory grew by {growth:.1f} KiB over {tenth * BLOCK} rows")
    bars = [
        bar("predictions that are not finite", probes, 0, at_least=False),
        bar("smallest eigenvalue of a covariance, above zero", low, np.finfo(float).tiny),
        bar("KiB by which the peak of traced memory grew", growth, 64, at_least=False),
    ]
    results = {"reports": reports, "growth_kib": growth, "growth_over_rows": tenth * BLOCK}
    return results, bars


def smallest_eigenvalue(model: Any) -> float:
    groups = model._model.learner.head.groups
    return min(float(torch.linalg.eigvalsh(g.posterior.covariance).min()) for g in groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows")
    parser.add_argument("--soak", action="store_true", help="a million hard rows, nothing else")
    arguments = parser.parse_args()
    print(__doc__)
    torch.set_num_threads(1)
    results, bars = (soak if arguments.soak else compare)(arguments.quick)
    finish("latency_soak" if arguments.soak else "latency", __doc__, results, bars, arguments.quick)


if __name__ == "__main__":
    main()
