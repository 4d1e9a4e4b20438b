"""Burgers' equation at 256 points for half an hour: how far the untuned bank comes.

Protocol: u_t + u u_x = nu u_xx on (0, 1), periodic, nu = 0.01, u(0) -> u(1); 2,000 training and
200 held-out samples at 256 points; FNO of width 64; shuffled passes in batches of 16, the bank in
its default setting, one seed. Held-out relative L2 (mean over samples) after each pass, until the
minutes of learning are used up; evaluation is not on the clock. Beside it the best of the curve's
passes so far, and how many seconds it took to the bar's level.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import bar, finish

from paper.burgers import Run, fields

GRID, TRAIN, HELD, BATCH, LEVEL, MINUTES = 256, 2_000, 200, 16, 0.004, 30.0


def learnt(grid: int, samples: int, seconds: float) -> list[dict[str, float]]:
    """Seconds of learning and error after each pass."""
    run, used, curve = Run({}, 0, fields(grid, samples), BATCH), 0.0, []
    held = run.error
    run.error = lambda: 0.0  # type: ignore[method-assign]  # not on the clock
    while used < seconds:
        start = time.perf_counter()
        run.advance(len(run.curve) + 1)
        used += time.perf_counter() - start
        curve.append({"seconds": used, "error": held()})
        print(f"{len(curve)} passes, {used:.0f} s: {curve[-1]['error']:.5f}", flush=True)
    return curve


def draw(curve: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.loglog([c["seconds"] for c in curve], [c["error"] for c in curve])
    axes.axhline(LEVEL, color="black", linewidth=0.8)
    axes.set(xlabel="seconds of learning", ylabel="held-out relative L2")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, seconds")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of learning")
    arguments = parser.parse_args()
    print(__doc__)
    if arguments.quick:
        curve = learnt(64, 232, 1.0)
    else:
        curve = learnt(GRID, TRAIN + HELD, 60 * arguments.minutes)
    lowest = min(c["error"] for c in curve)
    reached = next((c["seconds"] for c in curve if c["error"] <= LEVEL), None)
    results: dict[str, Any] = {
        "curve": curve,
        "lowest": lowest,
        "last": curve[-1]["error"],
        "seconds_to_level": reached,
        "minutes": arguments.minutes,
        "threads": torch.get_num_threads(),
    }
    bars = [bar("lowest held-out relative L2 at 256 points", lowest, LEVEL, at_least=False)]
    path = finish("paper_burgers_long", str(__doc__), results, bars, arguments.quick)
    if not arguments.quick:
        draw(curve, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
