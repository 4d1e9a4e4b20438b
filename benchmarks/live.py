"""Learning from a solver while it runs: each field is seen once, and is gone.

Protocol: rows of `pde:` sources in batches of 16, each predicted before it is learnt; Fourier
neural operators of the default size, one seed. The bank runs in one setting, its default; the same
network by Adam throughout runs at five learning rates, of which the best is taken for each figure
on its own. Shown beside them: the bank without the input among its features (what its level and
linear blocks gain), the bank under the relative loss, and plain predictions that need no learning.

    burgers     u(0) -> u(1), nu = 0.01 on (0, 1), 64 points: 20,000 rows
    ks          u(t) -> u(t + 1), length 22, 64 points, 16 trajectories side by side: 10,000 rows
    ks, alone   the same from one endless trajectory: 6,000 rows; also with a buffer of 1,000 rows
    ns2d        w(t) -> w(t + 1), nu = 1e-3, forced, 32 x 32 points: 3,000 rows
    darcy       permeability -> pressure, 24 x 24 points: 3,000 rows
    advection   u(0) -> u(0.1), 32 points, speed 1 + sin(2 pi row / 1000) / 2: 8,000 rows
    advection, slow   the same with a period of 8,000 rows

Figures: relative L2, mean over the last 1,000 rows. Of the flows also the error of one step and the
steps until a roll-out's mean error passes 0.3, on 8 trajectories of another seed, of at most 100
steps (ns2d: 40).
"""

import argparse
import json
import math
import time
from dataclasses import replace
from typing import Any

import torch
from common import RESULTS, bar, finish
from torch import Tensor

from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.engine import rollout
from kalmanhead.errors import NumericalError
from kalmanhead.fields import relative_l2, rollout_errors
from kalmanhead.learner import OnlineLearner
from kalmanhead.streams.pde import Equation, baselines, open_pde

BATCH, LAST = 16, 1000
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
STREAMS: dict[str, tuple[str, int]] = {
    "burgers": ("pde:burgers?grid=64&nu=0.01", 20_000),
    "ks": ("pde:ks", 10_000),
    "ks, alone": ("pde:ks?trajectories=1&steps=1000000", 6_000),
    "ns2d": ("pde:ns2d?grid=32", 3_000),
    "darcy": ("pde:darcy?grid=24", 3_000),
    "advection": ("pde:advection?grid=32&period=1000", 8_000),
    "advection, slow": ("pde:advection?grid=32&period=8000", 8_000),
}
HORIZON = {"ks": 100, "ks, alone": 100, "ns2d": 40}
BUFFER = {"buffer": 1000}
# The bank's last error over best-tuned Adam's: at most this.
LIMITS = {"burgers": 0.5, "advection": 0.5}


def settings(name: str) -> dict[str, dict[str, Any]]:
    """All that learn a stream, the bank first."""
    found: dict[str, dict[str, Any]] = {"bank": {}}
    found["bank, no input among its features"] = {"skip": False}
    found["bank, relative loss"] = {"loss": "relative"}
    found |= {f"Adam {rate:g}": {"head": "adam", "lr": rate} for rate in RATES}
    if name == "ks, alone":
        found["bank, buffer"] = dict(BUFFER)
        found |= {
            f"Adam {rate:g}, buffer": {"head": "adam", "lr": rate, **BUFFER} for rate in RATES[1:4]
        }
    return found


def learn(learner: OnlineLearner, fields: tuple[Tensor, Tensor]) -> list[float]:
    """Relative L2 of every row, predicted before it was learnt."""
    errors: list[float] = []
    for x, y in zip(*(part.split(BATCH) for part in fields), strict=True):
        errors += relative_l2(learner.step(x, y), y)[:, 0].tolist()
    return errors


def trajectories(equation: Any, count: int, steps: int) -> Tensor:
    """States of trajectories that nobody learnt from, (count, 1 + steps, 1, *grid)."""
    unseen = replace(equation, seed=equation.seed + 1000, trajectories=count)
    states = [unseen.sample(range(count))[0]]
    for _ in range(steps):
        states.append(equation.solve(states[-1]))
    return torch.stack(states, 1)[:, :, None].float()


def flow_figures(learner: OnlineLearner, truth: Tensor, horizon: int) -> dict[str, float]:
    """Error of one step over all states, and steps until a roll-out is lost."""
    x, y = truth[:, :-1].flatten(0, 1), truth[:, 1:].flatten(0, 1)
    one = torch.cat([learner.predict(part) for part in x.split(64)])
    errors = rollout_errors(rollout(learner, truth[:, 0], horizon), truth[:, 1:])
    until = errors.steps_until
    return {
        "one_step": float(relative_l2(one, y).mean()),
        "steps": float(horizon + 1 if until is None else until),
    }


def row_of(name: str, quick: bool) -> dict[str, Any]:
    target, rows = STREAMS[name]
    rows = 160 if quick else rows
    horizon = min(HORIZON.get(name, 0), 3 if quick else 10**9)
    equation: Equation = open_pde(target).equation
    start = time.perf_counter()
    x, y = (part[:, None].float() for part in equation.sample(range(rows)))
    solving = time.perf_counter() - start
    truth = trajectories(equation, 2 if quick else 8, horizon) if horizon else None
    shape = tuple(x.shape[1:])
    models: dict[str, dict[str, Any]] = {}
    chosen = settings(name)
    for model in list(chosen)[: 4 if quick else None]:
        learner = build_learner(ModelConfig(**chosen[model]), shape, shape, len(shape) - 1)
        start = time.perf_counter()
        try:
            errors = learn(learner, (x, y))
            figures = {"last": sum(errors[-LAST:]) / len(errors[-LAST:])}
            if truth is not None:
                figures |= flow_figures(learner, truth, horizon)
            quarters = [float(part.mean()) for part in torch.tensor(errors).chunk(4)]
        except NumericalError:
            figures, quarters = {"last": math.inf, "one_step": math.inf, "steps": 0.0}, []
        models[model] = {**figures, "quarters": quarters, "seconds": time.perf_counter() - start}
        shown = {key: round(value, 4) for key, value in figures.items()}
        print(name, model, shown, f"{models[model]['seconds']:.0f} s", flush=True)
    plain = baselines(equation, range(rows - min(rows, 200), rows))
    return {
        "stream": name,
        "source": target,
        "rows": rows,
        "models": models,
        "plain": plain,
        "solving_seconds": solving,
    }


def best_adam(row: dict[str, Any], key: str, buffered: bool = False) -> float:
    """Adam's best figure over its rates."""
    found = [
        figures[key]
        for model, figures in row["models"].items()
        if model.startswith("Adam") and model.endswith("buffer") == buffered and key in figures
    ]
    return max(found) if key == "steps" else min(found)


def judge(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bars = []
    for row in table:
        name, bank = row["stream"], row["models"]["bank"]
        ratio = bank["last"] / best_adam(row, "last")
        bars.append(bar(f"{name}: error over Adam's", ratio, LIMITS.get(name, 1.0), at_least=False))
        if "one_step" in bank:
            ratio = bank["one_step"] / best_adam(row, "one_step")
            bars.append(bar(f"{name}: one step, over Adam's", ratio, 1.0, at_least=False))
            more = bank["steps"] - best_adam(row, "steps")
            bars.append(bar(f"{name}: steps of a roll-out beyond Adam's", more, 0.0))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two streams, few rows and models")
    parser.add_argument("--only", choices=STREAMS, help="one stream, added to the result file")
    arguments = parser.parse_args()
    print(__doc__)
    torch.set_num_threads(1)
    names = ["ks", "advection"] if arguments.quick else list(STREAMS)
    names = [arguments.only] if arguments.only else names
    table = {name: row_of(name, arguments.quick) for name in names}
    path = RESULTS / "live.json"
    if arguments.only and path.exists():
        before = json.loads(path.read_text())["results"]["table"]
        table = {row["stream"]: row for row in before} | table
    rows = [table[name] for name in STREAMS if name in table]
    finish("live", __doc__, {"table": rows}, judge(rows), arguments.quick)


if __name__ == "__main__":
    main()
