"""The untuned bank against tuned baselines, on eleven streams.

Protocol: QM9 (20,000 random molecules, eigenvalues of the Coulomb matrix to gap, alpha, dipole)
and river's Friedman, FriedmanDrift, Mv, Planes2D and Hyperplane (20,000 rows), each row seen
once, batch 32, MLP 64-64, scored by prequential RMSE; Burgers (nu = 0.01, 64 points, 1,000
samples, FNO, 4 passes) at batches 4, 16 and 64, scored by held-out relative L2. Three seeds (of
rows, weights and order); a setting's figure is its mean over seeds, and the best setting of each
family is taken afterwards, to the family's advantage. The bank runs in one setting, the default.

Families: Adam and SGD with momentum for the whole network, five learning rates each; Adam with the
bank's averaging of the model, at the three middle rates; naive ridge, `reset`, `drift` and `forget`
heads over lambda or rate, with Adam at 1e-2 (3e-3 on Burgers) for the backbone, without averaging.
A second table freezes the backbone, where `static` is exact. Baselines of river's streams:
persistence, running mean, recursive least squares on the inputs. The first batch is left out of
every figure: nothing has been learnt then.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable

import numpy as np
import qm9_data
import torch
from common import RESULTS, bar, finish

from kalmanhead.config import AVERAGE, ModelConfig, build_learner
from kalmanhead.errors import NumericalError
from kalmanhead.streams.pde import Burgers

BATCH, ROWS, QUICK = 32, 20_000, 640
RIVER = ("Friedman", "FriedmanDrift", "Mv", "Planes2D", "Hyperplane")
BURGERS_BATCHES = (4, 16, 64)
RATES = {"adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "sgd": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
LAMBDAS = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
SINGLE = ("ridge", "reset", "drift", "forget")
FROZEN = ({"head": "auto", "lr": 0.0}, {"head": "static", "lam": 1.0, "lr": 0.0, "skip": True})
ETAS, GAMMAS = (0.0, 0.001, 0.01, 0.1), (0.9, 0.99, 0.999)

Stream = tuple[torch.Tensor, torch.Tensor]
KEPT: dict[str, list[float]] = {}  # scores by stream and setting that are not run again


def settings(optimizer_lr: float) -> list[dict]:
    """Every setting of the sweep; the bank first."""
    heads: list[dict] = [{"head": h, "lr": lr} for h, rates in RATES.items() for lr in rates]
    heads += [{"head": "adam", "lr": lr, "average": AVERAGE} for lr in RATES["adam"][1:4]]
    single = [{"head": "ridge", "lam": lam} for lam in LAMBDAS[::2]]
    single += [{"head": "reset", "lam": lam} for lam in LAMBDAS]
    single += [{"head": "drift", "lam": 1.0, "eta": eta} for eta in ETAS]
    single += [{"head": "forget", "lam": 1.0, "gamma": gamma} for gamma in GAMMAS]
    single = [{**s, "lr": optimizer_lr, "skip": True} for s in single]
    return [{"head": "auto"}, *heads, *single]


def family(setting: dict) -> str:
    return f"{setting['head']}, averaged" if setting.get("average") else str(setting["head"])


def key(stream: str, setting: dict) -> str:
    return json.dumps([stream, setting], sort_keys=True)


def keep_all_but(again: str) -> None:
    """Take the scores of all other families from the last file."""
    for row in json.loads((RESULTS / "bank.json").read_text())["results"]["table"]:
        kept = [run for run in row["all"] if family(run["setting"]) != again]
        KEPT.update({key(row["stream"], run["setting"]): run["seeds"] for run in kept})


def shortened(sweep: list[dict]) -> list[dict]:
    """The first setting of every family."""
    return list({family(s): s for s in reversed(sweep)}.values())


def river_stream(name: str, rows: int, seed: int) -> Stream:
    from river.datasets import synth

    options = {
        "FriedmanDrift": {
            "drift_type": "lea",
            "position": tuple(int(rows * s) for s in (0.25, 0.5, 0.75)),
        },
        "Hyperplane": {"n_features": 10, "n_drift_features": 2, "mag_change": 0.001},
    }
    generator = getattr(synth, name)(seed=seed, **options.get(name, {}))
    codes: dict[str, float] = {}
    xs, ys = [], []
    for x, y in itertools.islice(iter(generator), rows):
        values = [x[key] for key in sorted(x, key=str)]
        # Mv's categories become numbers in the order in which they are met.
        coded = [codes.setdefault(v, len(codes)) if isinstance(v, str) else v for v in values]
        xs.append([float(v) for v in coded])
        ys.append([float(y)])
    return torch.tensor(xs, dtype=torch.float32), torch.tensor(ys, dtype=torch.float32)


def prequential(config: ModelConfig, stream: Stream) -> torch.Tensor:
    x, y = stream
    learner = build_learner(config, tuple(x.shape[1:]), tuple(y.shape[1:]))
    parts = zip(x.split(BATCH), y.split(BATCH), strict=True)
    return torch.cat([learner.step(a, b).float() for a, b in parts])


def rmse(prediction: torch.Tensor, y: torch.Tensor) -> float:
    return float((prediction - y)[BATCH:].square().mean().sqrt())


def run_tabular(setting: dict, stream: Stream, seed: int) -> float:
    try:
        return rmse(prequential(ModelConfig(seed=seed, **setting), stream), stream[1])
    except NumericalError:
        return math.inf


def baselines(stream: Stream) -> dict[str, float]:
    _, y = stream
    before = torch.cat([torch.zeros(1, y.shape[1]), y[:-1]])
    counts = torch.arange(1, len(y) + 1)[:, None]
    mean = torch.cat([torch.zeros(1, y.shape[1]), (y.cumsum(0) / counts)[:-1]])
    least_squares = ModelConfig(backbone="linear", head="static", lam=1.0)
    return {
        "persistence": rmse(before, y),
        "running mean": rmse(mean, y),
        "recursive least squares": rmse(prequential(least_squares, stream), y),
    }


def run_burgers(setting: dict, stream: Stream, seed: int, batch: int, passes: int) -> float:
    x, y = (part[:-200] for part in stream)
    held_x, held_y = (part[-200:] for part in stream)
    learner = build_learner(ModelConfig(seed=seed, **setting), (1, 64), (1, 64), 1)
    try:
        for epoch in range(passes):
            generator = torch.Generator().manual_seed(1000 * seed + epoch)
            for rows in torch.randperm(len(x), generator=generator).split(batch):
                learner.learn(x[rows], y[rows])
    except NumericalError:
        return math.inf
    error = (learner.predict(held_x).float() - held_y).norm(dim=2)
    return float((error / held_y.norm(dim=2)).mean())


def table_row(
    name: str, sweep: list[dict], score: Callable[[dict, int], float], seeds: int
) -> dict:
    """All settings of a sweep on one stream, and the best of each family."""
    start = time.perf_counter()
    scores = [KEPT.get(key(name, s)) or [score(s, seed) for seed in range(seeds)] for s in sweep]
    means = [float(np.mean(values)) for values in scores]
    families: dict[str, tuple[float, dict]] = {}
    for setting, mean in zip(sweep, means, strict=True):
        head = family(setting)
        if head not in families or mean < families[head][0]:
            families[head] = mean, setting
    single = min(v for h, (v, _) in families.items() if h in SINGLE)
    bank = families["auto"][0]
    row = {
        "stream": name,
        "bank": bank,
        "best": {h: {"value": v, "setting": s} for h, (v, s) in families.items()},
        "bank_over_adam": bank / families["adam"][0],
        "bank_over_averaged_adam": bank / families["adam, averaged"][0],
        "bank_over_sgd": bank / families["sgd"][0],
        "bank_over_best_single": bank / single,
        "all": [{"setting": s, "seeds": v} for s, v in zip(sweep, scores, strict=True)],
        "seconds": time.perf_counter() - start,
    }
    shown = {h: round(v, 4) for h, (v, _) in families.items()}
    ratios = {k: round(v, 3) for k, v in row.items() if k.startswith("bank_over")}
    print(name, shown, ratios, flush=True)
    return row


def tabular_row(name: str, streams: list[Stream], quick: bool) -> dict:
    sweep = shortened(settings(1e-2)) if quick else settings(1e-2)
    seeds = len(streams)
    row = table_row(name, sweep, lambda s, i: run_tabular(s, streams[i], i), seeds)
    frozen = [np.mean([run_tabular(s, streams[i], i) for i in range(seeds)]) for s in FROZEN]
    row["frozen"] = dict(zip(("bank", "static"), map(float, frozen), strict=True))
    return row


def averaged_baselines(streams: list[Stream]) -> dict[str, float]:
    parts = [baselines(stream) for stream in streams]
    return {k: float(np.mean([p[k] for p in parts])) for k in parts[0]}


def river_rows(quick: bool, seeds: int) -> list[dict]:
    table = []
    for name in RIVER[:2] if quick else RIVER:
        streams = [river_stream(name, QUICK if quick else ROWS, seed) for seed in range(seeds)]
        row = tabular_row(name, streams, quick)
        table.append({**row, "baselines": averaged_baselines(streams)})
    return table


def qm9_rows(quick: bool, seeds: int) -> list[dict]:
    if quick:
        return []
    table = []
    molecules = [qm9_data.load(ROWS, seed) for seed in range(seeds)]
    for column, target in enumerate(qm9_data.TARGETS):
        ys = [torch.tensor(m["targets"][:, [column]], dtype=torch.float32) for m in molecules]
        xs = [torch.tensor(m["eigenvalues"], dtype=torch.float32) for m in molecules]
        row = tabular_row(f"QM9 {target}", list(zip(xs, ys, strict=True)), quick)
        atoms = [torch.tensor(m["counts"]).float() for m in molecules]
        plain = averaged_baselines(list(zip(atoms, ys, strict=True)))
        row["baselines"] = {"atom counts, RLS": plain["recursive least squares"]}
        table.append(row)
    return table


def burgers_rows(quick: bool, seeds: int) -> list[dict]:
    samples, passes = (264, 1) if quick else (1200, 4)
    sweep = settings(3e-3)
    # A sweep over everything would take hours here: two lambdas a decade apart lose in each family.
    keep = {"auto", "adam", "sgd", "reset"}
    sweep = [s for s in sweep if s["head"] in keep or s.get("eta") == 0.1]
    sweep = shortened(sweep) if quick else sweep
    u0, u1 = Burgers(nu=0.01, grid=64).sample(range(samples))
    stream = u0[:, None].float(), u1[:, None].float()
    return [
        table_row(
            f"Burgers, batch {batch}",
            sweep,
            lambda s, i, b=batch: run_burgers(s, stream, i, b, passes),
            1 if batch == 4 else seeds,
        )
        for batch in (BURGERS_BATCHES[2:] if quick else BURGERS_BATCHES)
    ]


def draw(table: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(table))
    for key, label, shift in (
        ("bank_over_adam", "best Adam", -0.2),
        ("bank_over_best_single", "best single head", 0.2),
    ):
        axes.bar(places + shift, [row[key] for row in table], 0.4, label=f"error over {label}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(places, [row["stream"] for row in table], rotation=40, ha="right")
    axes.set_ylabel("error of the bank, ratio")
    axes.legend()
    figure.savefig(RESULTS / "bank.png", dpi=110)


def judge(table: list[dict]) -> list[dict]:
    ahead = sum(row["bank_over_adam"] < 1 for row in table)
    over = max(row["bank_over_best_single"] for row in table)
    bars = [
        bar("streams on which the bank is ahead of best-tuned Adam", ahead, max(0, len(table) - 2)),
        bar("largest error over the best single head's", over, 1.02, at_least=False),
    ]
    plain = [
        row["bank"] / min(r.values()) for row in table if len(r := row.get("baselines", {})) > 1
    ]
    if plain:
        bars.append(
            bar("largest error over the best plain baseline", max(plain), 1.02, at_least=False)
        )
    frozen = [row["frozen"]["bank"] / row["frozen"]["static"] for row in table if "frozen" in row]
    if frozen:
        bars.append(bar("largest error over static's, frozen", max(frozen), 1.01, at_least=False))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short streams, few settings")
    parser.add_argument("--only", choices=PARTS, help="one part, into a file of its own")
    parser.add_argument("--assemble", action="store_true", help="join the files of all parts")
    parser.add_argument("--again", metavar="FAMILY", help="this family alone; others as they were")
    arguments = parser.parse_args()
    quick = arguments.quick
    print(__doc__)
    if arguments.again:
        keep_all_but(arguments.again)
    torch.set_num_threads(1)
    table: list[dict] = []
    for part in [arguments.only] if arguments.only else PARTS:
        if arguments.assemble:
            path = RESULTS / f"bank_{part}.json"
            table += json.loads(path.read_text())["results"]["table"]
        else:
            table += PARTS[part](quick, 1 if quick else 3)
    if not quick and not arguments.only:
        draw(table)
    name = f"bank_{arguments.only}" if arguments.only else "bank"
    finish(name, __doc__, {"table": table}, judge(table), quick)


PARTS = {"river": river_rows, "qm9": qm9_rows, "burgers": burgers_rows}

if __name__ == "__main__":
    main()
