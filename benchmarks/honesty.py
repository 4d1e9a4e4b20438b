"""Whether the untuned default is honest: its intervals, its sigma, its start, its changes.

Protocol: the default model of vectors (bank of heads, MLP), batch 32, each row predicted before it
is learnt, three seeds of rows, weights and order; figures are means over seeds.

Intervals: share of targets inside the 90 % interval given before each batch was learnt, counted
after the first tenth. Stationary streams (20,000 rows: river's Friedman, Planes2D, Mv; linear and
sine of a smooth function, both with noise 0.3) within 0.88 to 0.92; real ones (QM9's three targets,
20,000 molecules; SP500Stocks; TrumpApproval and WaterFlow in batches of 8) within 0.85 to 0.95.

Sigma: y = w x + sigma N(0, 1), 5 inputs, 20,000 rows, sigma 0.01, 1 and 100, and two outputs of
noise and signal 1 and 1000 at once. Learnt is the median predictive scale over the last 50 batches.

Start: RMSE over the first 5 % of the eight tabular streams of bank.py, first batch left out, over
the smaller of the best of five Adam rates (chosen on these rows) and the running mean of y (kept up
row by row, where the models wait for the batch). In a ninth stream 12 of 20 columns are exactly
constant for the first tenth; the next 5 %, when they move and matter, are a tenth entry.

Change: a random tanh network of 10 inputs, noise 0.1, gives way to another after 10,000 of 30,000
rows. Level is the RMSE over the 2,000 rows before; recovery the rows until a trailing window of
500, wholly after the change, is within 10 % of it (all rows left, if never). Adam's best rate is
that of the lowest RMSE over rows 5,000 to 10,000. A bad level is soon regained, so recovery to the
default's level, to that Adam's, and to the better of own and default's is shown as well.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import qm9_data
import torch
from bank import BATCH, RATES, RIVER, prequential, river_stream
from common import RESULTS, bar, finish
from torch import Tensor

from kalmanhead.bank import HeadBank
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import NumericalError
from kalmanhead.streams.river_source import RiverSource

ROWS, QUICK_ROWS = 20_000, 1_280
LEVEL, LATE_BATCHES = 0.9, 50
STATIONARY_RANGE, REAL_RANGE = (0.88, 0.92), (0.85, 0.95)
BUNDLED = {"TrumpApproval": 8, "WaterFlow": 8, "SP500Stocks": BATCH}  # batch size of each
SIGMAS = ((0.01,), (1.0,), (100.0,), (1.0, 1000.0))
RATED = {f"adam {lr:g}": {"head": "adam", "lr": lr} for lr in RATES["adam"]}
MODELS: dict[str, dict[str, Any]] = {"default": {"head": "auto"}, **RATED}

say = functools.partial(print, flush=True)

Stream = tuple[Tensor, Tensor]
Maker = Callable[[int], Stream]  # of a seed
Row = dict[str, Any]
Section = tuple[Any, Row]  # results and a bar
Errors = dict[str, list[Tensor]]  # by model, one (n,) a seed


def normal(seed: int, rows: int, columns: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator), generator


def teacher(inputs: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """A frozen random tanh network with outputs (n, 1) of mean 0 and deviation 1."""
    sizes = (inputs, 32, 32, 1)
    weights = [
        torch.randn(a, b, generator=generator) * (1.5 / math.sqrt(a))
        for a, b in itertools.pairwise(sizes)
    ]

    def outputs(x: Tensor) -> Tensor:
        return (x @ weights[0]).tanh().matmul(weights[1]).tanh() @ weights[2]

    sample = outputs(torch.randn(4096, inputs, generator=generator))
    return lambda x: (outputs(x) - sample.mean()) / sample.std()


def noisy_stream(seed: int, rows: int, sigmas: Sequence[float], inputs: int = 5) -> Stream:
    """Linear targets with this noise; the signal of several outputs is on the noise's scale."""
    x, generator = normal(seed, rows, inputs)
    sigma = torch.tensor(sigmas)
    signal = x @ torch.randn(inputs, len(sigmas), generator=generator)
    signal = signal * sigma if len(sigmas) > 1 else signal
    return x, signal + sigma * torch.randn(rows, len(sigmas), generator=generator)


def sine_stream(seed: int, rows: int) -> Stream:
    x, generator = normal(seed, rows, 5)
    signal = (2 * teacher(5, generator)(x)).sin()
    return x, signal + 0.3 * torch.randn(rows, 1, generator=generator)


def waking_stream(seed: int, rows: int) -> Stream:
    """Twelve of 20 columns are constant for the first tenth of the rows, then move."""
    x, generator = normal(seed, rows, 20)
    constants = torch.randn(12, generator=generator)
    x[:, 8:] += constants
    x[: rows // 10, 8:] = constants
    return x, teacher(20, generator)(x) + 0.1 * torch.randn(rows, 1, generator=generator)


def changing_stream(seed: int, rows: int, change: int) -> Stream:
    x, generator = normal(seed, rows, 10)
    before, after = teacher(10, generator), teacher(10, generator)
    signal = torch.cat([before(x[:change]), after(x[change:])])
    return x, signal + 0.1 * torch.randn(rows, 1, generator=generator)


molecules = functools.cache(qm9_data.load)


def qm9_stream(column: int, rows: int, seed: int) -> Stream:
    loaded = molecules(rows, seed)
    x, y = loaded["eigenvalues"], loaded["targets"][:, [column]]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def bundled_stream(name: str, rows: int, seed: int) -> Stream:
    """One of river's data sets, the same for all seeds; float64 holds seconds since 1970."""
    blocks = list(RiverSource(f"river:{name}").iterate())
    x = torch.cat([torch.as_tensor(block.x) for block in blocks])
    return x[:rows], torch.cat([torch.as_tensor(block.y) for block in blocks])[:rows]


def river_makers(names: Sequence[str], rows: int) -> dict[str, Maker]:
    return {name: functools.partial(river_stream, name, rows) for name in names}


def qm9_makers(rows: int) -> dict[str, Maker]:
    names = enumerate(qm9_data.TARGETS)
    return {f"QM9 {name}": functools.partial(qm9_stream, i, rows) for i, name in names}


@dataclass(frozen=True)
class Foresight:
    """What the default said of every row before it learnt it, (n, k), and its head at the end."""

    mean: Tensor
    scale: Tensor
    inside: Tensor
    dof: float
    leaders: list[tuple[str, float]]


def foresee(stream: Stream, seed: int, batch: int = BATCH) -> Foresight:
    x, y = stream
    learner = build_learner(ModelConfig(seed=seed), tuple(x.shape[1:]), tuple(y.shape[1:]))
    parts: list[tuple[Tensor, ...]] = []
    for rows, targets in zip(x.split(batch), y.split(batch), strict=True):
        told = learner.predict_dist(rows)
        low, high = told.interval(LEVEL)
        parts.append((told.mean, told.scale, (low <= targets) & (targets <= high)))
        learner.learn(rows, targets)
    mean, scale, inside = (torch.cat(part) for part in zip(*parts, strict=True))
    head = learner.head
    leaders = head.leaders() if isinstance(head, HeadBank) else []
    return Foresight(mean, scale, inside, float(told.dof.median()), leaders)


def coverage_row(
    name: str, maker: Maker, batch: int, limits: tuple[float, float], seeds: int
) -> Row:
    streams = [maker(seed) for seed in range(seeds)]
    told = [foresee(stream, seed, batch) for seed, stream in enumerate(streams)]
    late = slice(len(streams[0][1]) // 10, None)
    covered = [float(t.inside[late].double().mean()) for t in told]
    pairs = zip(told, streams, strict=True)
    rmse = float(np.mean([float((t.mean - y)[late].square().mean().sqrt()) for t, (_, y) in pairs]))
    scale = float(np.mean([float(t.scale[late].square().mean().sqrt()) for t in told]))
    row: Row = {
        "stream": name,
        "coverage": float(np.mean(covered)),
        "in_range": bool(limits[0] <= np.mean(covered) <= limits[1]),
        "range": limits,
        "seeds": covered,
        "rmse": rmse,
        "scale_over_rmse": scale / rmse,
        "last_dof": told[-1].dof,
        "leaders": told[-1].leaders,
    }
    shown = [round(row[k], 3) for k in ("coverage", "rmse", "scale_over_rmse")]
    mark = "" if row["in_range"] else "OUTSIDE"
    say("interval", name, "coverage, RMSE, scale over RMSE:", shown, mark)
    return row


def intervals(quick: bool, seeds: int, rows: int) -> Section:
    stationary = river_makers(("Friedman", "Planes2D", "Mv"), rows)
    stationary["linear"] = functools.partial(noisy_stream, rows=rows, sigmas=(0.3,), inputs=10)
    stationary["sine"] = functools.partial(sine_stream, rows=rows)
    real = {} if quick else qm9_makers(rows)
    real |= {name: functools.partial(bundled_stream, name, rows) for name in BUNDLED}
    table = [coverage_row(n, m, BATCH, STATIONARY_RANGE, seeds) for n, m in stationary.items()]
    for name, maker in real.items():
        table.append(coverage_row(name, maker, BUNDLED.get(name, BATCH), REAL_RANGE, seeds))
    outside = sum(not row["in_range"] for row in table)
    return table, bar("streams with coverage out of range", outside, 0, at_least=False)


def sigma(_: bool, seeds: int, rows: int) -> Section:
    table: list[Row] = []
    for sigmas in SIGMAS:
        told = [foresee(noisy_stream(seed, rows, sigmas), seed) for seed in range(seeds)]
        late = torch.stack([t.scale[-LATE_BATCHES * BATCH :].median(0).values for t in told])
        for true, learnt in zip(sigmas, late.T.tolist(), strict=True):
            row: Row = {"true": true, "outputs": len(sigmas), "learnt": learnt}
            row |= {"ratio": float(np.mean(learnt)) / true, "leaders": told[-1].leaders}
            say(f"sigma {true:g} of {len(sigmas)}: learnt over true {row['ratio']:.4f}")
            table.append(row)
    worst = max(abs(row["ratio"] - 1) for row in table)
    return table, bar("largest relative error of sigma", worst, 0.1, at_least=False)


def all_errors(streams: Sequence[Stream]) -> Errors:
    """Squared errors of every row by the default and by every Adam rate."""
    return {
        label: [squared_errors(setting, *stream, seed) for seed, stream in enumerate(streams)]
        for label, setting in MODELS.items()
    }


def squared_errors(setting: dict[str, Any], x: Tensor, y: Tensor, seed: int) -> Tensor:
    """Squared error of every row, (n,); infinite throughout if the network diverged."""
    try:
        return (prequential(ModelConfig(seed=seed, **setting), (x, y)) - y).square().mean(1)
    except NumericalError:
        return torch.full((len(y),), math.inf)


def mean_errors(y: Tensor) -> Tensor:
    """Squared error of the mean of all earlier rows."""
    counts = torch.arange(1, len(y) + 1)[:, None]
    means = torch.cat([torch.zeros(1, y.shape[1]), (y.cumsum(0) / counts)[:-1]])
    return (means - y).square().mean(1)


def over_seeds(errors: Sequence[Tensor], window: slice) -> float:
    return float(np.mean([float(e[window].mean().sqrt()) for e in errors]))


def start(quick: bool, seeds: int, rows: int) -> Section:
    first = max(rows // 20, 4 * BATCH)
    early, woken = slice(BATCH, first), slice(rows // 10, rows // 10 + first)
    makers = river_makers(RIVER[:2] if quick else RIVER, rows) | ({} if quick else qm9_makers(rows))
    waking = functools.partial(waking_stream, rows=rows)
    table = [row for n, maker in makers.items() for row in contest(maker, seeds, {n: early})]
    table += contest(waking, seeds, {"waking": early, "waking, columns move": woken})
    worst = max(row["ratio"] for row in table)
    return table, bar("largest error at the start over rivals", worst, 1.1, at_least=False)


def contest(maker: Maker, seeds: int, windows: dict[str, slice]) -> list[Row]:
    """RMSE of the default over Adam's and the running mean's, on windows of one stream."""
    end = max(window.stop for window in windows.values())
    streams = [(x[:end], y[:end]) for x, y in map(maker, range(seeds))]
    errors = all_errors(streams)
    errors["running mean"] = [mean_errors(y) for _, y in streams]
    table: list[Row] = []
    for name, window in windows.items():
        rmse = {label: over_seeds(e, window) for label, e in errors.items()}
        rival = min((label for label in rmse if label != "default"), key=rmse.__getitem__)
        ratio = rmse["default"] / rmse[rival]
        table.append({"stream": name, "ratio": ratio, "rival": rival, "rmse": rmse})
        say(f"start {name}: {rmse['default']:.4g} over {rival} {rmse[rival]:.4g}: {ratio:.3f}")
    return table


def trailing(errors: Tensor, width: int) -> Tensor:
    """RMSE of every full window of `width` rows, (n - width + 1,)."""
    return errors.double().unfold(0, width, 1).mean(1).sqrt()


def recovery(errors: Tensor, width: int, level: float) -> tuple[int, bool]:
    """Rows until a window is within 10 % of a level, and whether that happened."""
    curve = trailing(errors, width)
    there = ((curve <= 1.1 * level) & curve.isfinite()).nonzero()
    return (int(there[0]) + width, True) if len(there) else (len(errors), False)


def recovery_row(
    model: str, best: str, errors: Errors, levels: dict[str, list[float]], rows: int
) -> Row:
    change, parts, own = rows // 2, errors[model], levels[model]
    row: Row = {
        "model": model,
        "level": float(np.mean(own)),
        "rmse_after": over_seeds(parts, slice(change, None)),
    }
    goals = {
        "own": own,
        "default": levels["default"],
        "adam": levels[best],
        "better": [min(pair) for pair in zip(own, levels["default"], strict=True)],
    }
    for goal, values in goals.items():
        pairs = zip(parts, values, strict=True)
        back = [recovery(e[change:], rows // 40, value) for e, value in pairs]
        row[f"rows_to_{goal}"] = float(np.mean([n for n, _ in back]))
        row[f"never_to_{goal}"] = sum(not done for _, done in back)
    say("change", {k: v if k == "model" else round(v, 4) for k, v in row.items()})
    return row


def change(_: bool, seeds: int, rows: int) -> Section:
    half = rows // 2
    errors = all_errors([changing_stream(seed, 3 * half, half) for seed in range(seeds)])
    before = slice(half - rows // 10, half)
    levels = {k: [float(e[before].mean().sqrt()) for e in v] for k, v in errors.items()}
    late = {k: over_seeds(v, slice(half // 2, half)) for k, v in errors.items()}
    best = min(RATED, key=late.__getitem__)
    table = [recovery_row(model, best, errors, levels, rows) for model in errors]
    back = {row["model"]: row["rows_to_own"] for row in table}
    ratio = back["default"] / back[best]
    quickest = back["default"] / min(back[model] for model in RATED)
    say(f"change: rows to own level over {best} {ratio:.3f}, over the quickest Adam {quickest:.3f}")
    width, step = rows // 40, rows // 200
    curves = {
        k: torch.stack([trailing(e, width)[::step] for e in v]).mean(0).tolist()
        for k, v in errors.items()
    }
    results = {"models": table, "best": best, "second_quarter": late, "curves": curves}
    return results, bar("rows to recover over best-tuned Adam", ratio, 0.5, at_least=False)


def draw(intervals: list[Row], change: Row) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, row in enumerate(intervals):
        left.plot([place, place], row["range"], color="lightgrey", linewidth=9, zorder=0)
        left.plot([place] * len(row["seeds"]), row["seeds"], ".", color="C0")
        left.plot(place, row["coverage"], "D", color="C0" if row["in_range"] else "C3")
    left.axhline(LEVEL, color="black", linewidth=0.8)
    names = [row["stream"] for row in intervals]
    left.set_xticks(range(len(names)), names, rotation=40, ha="right")
    left.set_ylabel(f"coverage of the {LEVEL:.0%} interval; grey: allowed")
    for label, curve in change["curves"].items():
        color = {"default": "C0", change["best"]: "C1"}.get(label, "lightgrey")
        shown = f"{label}, best before" if label == change["best"] else label
        ends = ROWS // 40 + ROWS // 200 * np.arange(len(curve))
        right.plot(ends, curve, color=color, label=shown)
    right.axvline(ROWS // 2, color="black", linewidth=0.8)
    right.set(xlabel="rows", ylabel=f"RMSE, trailing {ROWS // 40} rows", yscale="log")
    right.legend(fontsize=8)
    figure.savefig(RESULTS / "honesty.png", dpi=110)


SECTIONS = {section.__name__: section for section in (intervals, sigma, start, change)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short streams, one seed")
    parser.add_argument("--only", choices=list(SECTIONS), help="one section")
    arguments = parser.parse_args()
    quick, only = arguments.quick, arguments.only
    print(__doc__)
    torch.set_num_threads(1)
    seeds, rows = (1, QUICK_ROWS) if quick else (3, ROWS)
    wanted = [only] if only else list(SECTIONS)
    done = {name: SECTIONS[name](quick, seeds, rows) for name in wanted}
    results = {name: result for name, (result, _) in done.items()}
    if not (quick or only):
        draw(results["intervals"], results["change"])
    bars = [holds for _, holds in done.values()]
    finish(f"honesty_{only}" if only else "honesty", __doc__ or "", results, bars, quick)


if __name__ == "__main__":
    main()
