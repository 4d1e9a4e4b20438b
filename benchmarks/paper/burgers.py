"""Burgers' equation with a Fourier neural operator: how soon closed form is where Adam ends.

Protocol: u_t + u u_x = nu u_xx on (0, 1), periodic, nu = 0.01, u(0) -> u(1); 1,000 training and
200 held-out samples, at 64 and at 256 points; FNO of width 64; shuffled passes in batches of 4, 16
and 64, held-out relative L2 (mean over samples) after each pass, up to 32.

Methods: the whole network by Adam and by SGD with momentum 0.9, five learning rates each (all for 8
passes, the best two of them to the end; the best one is taken afterwards); naive ridge (beta 1 and
100) and the proximal head (lambda 30, 300, 3000) on a backbone by Adam at 3e-3; the proximal head
(lambda 300) on a backbone by SGD at 1e-2; the bank, untuned, with its default backbone (Adam, 3e-3)
and with SGD (1e-2). Seed 0 runs everything, seeds 1 and 2 the bank and, of Adam and SGD, the rate
that was best under seed 0. Adam with the bank's averaging of the model takes Adam's best rate. At
256 points, batch 4 has seed 0 alone.

Seconds are steps times the median cost of a step, of the first 200 and of later ones: by then most
of the bank's heads sleep. Costs are taken in turns in one process, a step of each method at a time.
Nothing but learning is on the clock. `--costs` takes a row's costs again, and keeps its curves.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, bar, finish

from kalmanhead.config import AVERAGE, ModelConfig, build_learner
from kalmanhead.errors import NumericalError
from kalmanhead.streams.pde import Burgers
from paper.report import Cell, markdown_table, write_markdown

PARTS = [(grid, batch) for grid in (64, 256) for batch in (64, 16, 4)]
RATES = {"adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "sgd": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
BANK = {"bank": {}, "bank, SGD": {"optimizer": "sgd"}}
SINGLE = {
    "naive ridge": [{"head": "ridge", "lam": lam} for lam in (1.0, 100.0)],
    "proximal": [{"head": "reset", "lam": lam} for lam in (30.0, 300.0, 3000.0)],
    "proximal, SGD": [{"head": "reset", "lam": 300.0, "optimizer": "sgd"}],
}
EARLY = 200  # steps after which the bank's heads may sleep
# Where the bank's seconds are held against another method's: the most that they may be of it.
LIMITS = {"adam": {4: 1 / 2, 16: 1 / 3, 64: 1 / 3}, "sgd": {4: 1 / 5, 16: 1 / 5, 64: 1 / 5}}
TITLES = {"adam": "Adam", "sgd": "SGD", "averaged": "Adam, averaged"}

Fields = tuple[torch.Tensor, torch.Tensor]


class Run:
    """One method under one seed, which can be taken further pass by pass."""

    def __init__(self, options: dict[str, Any], seed: int, data: Fields, batch: int) -> None:
        shape = tuple(data[0].shape[1:])
        self.options, self.seed, self.batch = options, seed, batch
        self.learner = build_learner(ModelConfig(seed=seed, **options), shape, shape, 1)
        self.train = data[0][:-200], data[1][:-200]
        self.held = data[0][-200:], data[1][-200:]
        self.curve: list[float] = []

    def advance(self, passes: int) -> "Run":
        """Learn up to so many passes; a run that diverged stays at infinity."""
        x, y = self.train
        while len(self.curve) < passes:
            generator = torch.Generator().manual_seed(1000 * self.seed + len(self.curve))
            try:
                for rows in torch.randperm(len(x), generator=generator).split(self.batch):
                    self.learner.learn(x[rows], y[rows])
                self.curve.append(self.error())
            except NumericalError:
                self.curve += [math.inf] * (passes - len(self.curve))
        return self

    def error(self) -> float:
        x, y = self.held
        error = (self.learner.predict(x).float() - y).norm(dim=2) / y.norm(dim=2)
        value = float(error.mean())
        return value if math.isfinite(value) else math.inf

    def record(self) -> dict[str, Any]:
        return {"options": self.options, "seed": self.seed, "curve": self.curve}


def tuned(head: str, data: Fields, batch: int, passes: int) -> list[Run]:
    """All rates for a quarter of the passes, the best two to the end; the best comes first."""
    runs = [
        Run({"head": head, "lr": lr}, 0, data, batch).advance(passes // 4) for lr in RATES[head]
    ]
    runs.sort(key=lambda run: min(run.curve))
    for run in runs[:2]:
        run.advance(passes)
    return sorted(runs, key=lambda run: min(run.curve))


def step_costs(
    settings: dict[str, dict[str, Any]], data: Fields, batch: int, quick: bool
) -> dict[str, list[float]]:
    """Median milliseconds of an early and of a late step of each method, taken in turns."""
    runs = {name: Run(options, 0, data, batch) for name, options in settings.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(4 if quick else EARLY + 60):
        order = torch.randperm(len(data[0]) - 200, generator=torch.Generator().manual_seed(turn))
        x, y = data[0][order[:batch]], data[1][order[:batch]]
        for name, run in runs.items():
            start = time.perf_counter()
            run.learner.learn(x, y)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: [statistics.median(values[2:EARLY]), statistics.median(values[-60:])]
        for name, values in times.items()
    }


def seconds_of(part: dict[str, Any], name: str, passes: float) -> float:
    """Time of so many passes."""
    steps, (early, late) = passes * part["steps_per_pass"], part["cost_ms"][name]
    return (min(steps, EARLY) * early + max(0, steps - EARLY) * late) / 1e3


def fields(grid: int, samples: int) -> Fields:
    u0, u1 = Burgers(nu=0.01, grid=grid).sample(range(samples))
    return u0[:, None].float(), u1[:, None].float()


def measure(grid: int, batch: int, quick: bool) -> dict[str, Any]:
    """All methods at one grid and batch size."""
    samples, passes = (264, 2) if quick else (1200, 32)
    data = fields(grid, samples)
    seeds = 1 if quick or (grid, batch) == (256, 4) else 3
    runs: dict[str, list[Run]] = {}
    for name, options in BANK.items():
        runs[name] = [Run(options, 0, data, batch).advance(passes)]
        told(grid, batch, name, runs[name])
    for head in RATES:
        runs[head] = tuned(head, data, batch, max(passes, 4))
        told(grid, batch, head, runs[head])
    best_adam = runs["adam"][0].options
    runs["averaged"] = [Run({**best_adam, "average": AVERAGE}, 0, data, batch).advance(passes)]
    told(grid, batch, "averaged", runs["averaged"])
    for name, sweep in SINGLE.items():
        runs[name] = [Run({"lr": 3e-3, **o} if "optimizer" not in o else o, 0, data, batch)
                      .advance(passes) for o in sweep]  # fmt: skip
        runs[name].sort(key=lambda run: min(run.curve))
        told(grid, batch, name, runs[name])
    for name in ("bank", *RATES):
        best = runs[name][0].options
        more = [Run(best, seed, data, batch).advance(passes) for seed in range(1, seeds)]
        runs[name] = [runs[name][0], *more, *runs[name][1:]]
    costs = step_costs({name: r[0].options for name, r in runs.items()}, data, batch, quick)
    return {
        "grid": grid,
        "batch": batch,
        "seeds": seeds,
        "steps_per_pass": -(-(samples - 200) // batch),
        "cost_ms": costs,
        "runs": {name: [run.record() for run in r] for name, r in runs.items()},
    }


def told(grid: int, batch: int, name: str, runs: list[Run]) -> None:
    best = runs[0]
    print(f"{grid}x{batch} {name}: {min(best.curve):.4f} by {best.options}", flush=True)


def passes_to(curve: list[float], level: float) -> float:
    """Passes after which a curve is first at or below a level."""
    return next((float(i + 1) for i, value in enumerate(curve) if value <= level), math.inf)


def compared(part: dict[str, Any], other: str) -> dict[str, Any]:
    """The bank against the best setting of another method: seconds to its lowest error.

    Each seed has its own level; the ratio is of the sums over seeds.
    """
    ours, theirs = (part["runs"][name][: part["seeds"]] for name in ("bank", other))
    lows = [min(run["curve"]) for run in theirs]
    seconds = []
    for name, runs in (("bank", ours), (other, theirs)):
        passes = sum(passes_to(run["curve"], low) for run, low in zip(runs, lows, strict=True))
        seconds.append(seconds_of(part, name, passes / part["seeds"]))
    return {"lowest": sum(lows) / len(lows), "seconds": seconds, "ratio": seconds[0] / seconds[1]}


def lowest(part: dict[str, Any], name: str) -> float:
    """Lowest error of a method's best setting, mean over the seeds that it ran."""
    runs = part["runs"][name]
    several = part["seeds"] if name in ("bank", *RATES) else 1
    return statistics.fmean(min(run["curve"]) for run in runs[:several])


def judge(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        bar(
            f"{p['grid']} points, batch {p['batch']}: seconds to {TITLES[other]}'s lowest error, "
            f"over {TITLES[other]}'s",
            compared(p, other)["ratio"],
            LIMITS[other][p["batch"]],
            at_least=False,
        )
        for p in parts
        for other in LIMITS
    ]


def table_of(parts: list[dict[str, Any]]) -> str:
    names = [*BANK, *TITLES, *SINGLE]
    header = ["lowest held-out relative L2", *[TITLES.get(name, name) for name in names],
              "seconds to Adam's lowest / Adam's", "to SGD's lowest / SGD's"]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            f"{p['grid']} points, batch {p['batch']}",
            *[lowest(p, name) for name in names],
            *[f"{compared(p, other)['ratio']:.2f}" for other in RATES],
        ]
        for p in parts
    ]
    return markdown_table(header, rows)


def claims_of(parts: list[dict[str, Any]]) -> list[str]:
    """What of the paper is borne out here; read off the figures."""

    def wins(name: str, other: str) -> int:
        return sum(lowest(p, name) < lowest(p, other) for p in parts)

    count = len(parts)
    small = min(p["batch"] for p in parts)
    ridge = max(
        lowest(p, "naive ridge") / lowest(p, "proximal") for p in parts if p["batch"] == small
    )
    return [
        f"Closed form reaches lower errors than the squared loss by gradients alone: with the "
        f"proximal head on {wins('proximal', 'adam')} of {count} rows against Adam, with the bank "
        f"on {wins('bank', 'adam')}; with SGD for the backbone on {wins('proximal, SGD', 'sgd')} "
        f"of {count} against SGD, with the bank on {wins('bank, SGD', 'sgd')}.",
        f"Naive ridge, which forgets W between batches, has up to {ridge:.2f} times the proximal "
        f"head's error at batch {small}: "
        + (
            "it fails at small batches."
            if ridge > 1.5
            else "no failure, as a batch of fields has hundreds of points to solve from."
        ),
    ]


def draw(parts: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2 * len({p["grid"] for p in parts})), layout="constrained")
    grids = sorted({p["grid"] for p in parts})
    axes = figure.subplots(len(grids), 3, squeeze=False)
    for part in parts:
        own = axes[grids.index(part["grid"])][(4, 16, 64).index(part["batch"])]
        for name in ("bank", *RATES, *SINGLE):
            curve = part["runs"][name][0]["curve"]
            seconds = [seconds_of(part, name, i + 1) for i in range(len(curve))]
            own.loglog(seconds, curve, label=TITLES.get(name, name))
        own.set_title(f"{part['grid']} points, batch {part['batch']}", fontsize="medium")
        own.set(xlabel="seconds", ylabel="held-out relative L2")
        own.grid(alpha=0.3, which="both")
        own.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one row, few samples and passes")
    parser.add_argument("--only", metavar="GRIDxBATCH", help="one row, into a file of its own")
    parser.add_argument("--costs", action="store_true", help="with --only: costs of its steps")
    parser.add_argument("--assemble", action="store_true", help="join the files of all rows")
    arguments = parser.parse_args()
    print(__doc__)
    torch.set_num_threads(1)
    chosen = [p for p in PARTS if arguments.only in (None, "{}x{}".format(*p))]
    parts = []
    for grid, batch in chosen[:1] if arguments.quick else chosen:
        path = RESULTS / f"paper_burgers_{grid}x{batch}.json"
        if arguments.assemble or arguments.costs:
            known = json.loads(path.read_text())["results"]["parts"] if path.exists() else []
            if arguments.costs:
                settings = {name: runs[0]["options"] for name, runs in known[0]["runs"].items()}
                data = fields(grid, 1200)
                known[0]["cost_ms"] = step_costs(settings, data, batch, arguments.quick)
            parts += known
        else:
            parts.append(measure(grid, batch, arguments.quick))
    bars, table, claims = judge(parts), table_of(parts), claims_of(parts)
    print("\n\n".join([table, *claims]), flush=True)
    name = f"paper_burgers_{arguments.only}" if arguments.only else "paper_burgers"
    results = {"parts": parts, "claims": claims}
    path = finish(name, str(__doc__), results, bars, arguments.quick)
    if arguments.only is None:
        write_markdown(
            path, "Burgers' equation with closed form and without", [table], claims, bars
        )
        draw(parts, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
