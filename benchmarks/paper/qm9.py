"""All of QM9 in one pass: the untuned bank and the paper's method against Adam, SGD and ridge.

Protocol: all 130,831 molecules of qm9pack in a random order (a seed's own), each seen once; the
last 10,000 of the order are held out and predicted at the end. Inputs are the eigenvalues of the
Coulomb matrix, targets gap, alpha and dipole, learnt together by one network (MLP 64-64, three
outputs, inputs and targets standardised by running statistics), which makes the sweep affordable.
Batches of 8, 32, 128 and 512. Figures are validation MAE, means over the seeds; a family's best
setting is taken by that same MAE, for each target apart, to the rivals' advantage: the bank runs
in one setting, its default (Adam at 1.5e-2, falling). Beside it, and not judged, stands the bank
at two lower, constant rates, to tell what is the rate's doing.

Families: Adam and SGD with momentum 0.9 for the whole network, five learning rates each, half a
decade apart and centred on the batch size (RATES); Adam with the bank's averaging of the model,
at the ladder's second and third rate. The paper's method is the proximal head (`reset`) over four
lambdas: Algorithm 1 as it stands (backbone first, SGD), the same with Adam, and the other order
(solve first, Adam, two lambdas). Naive ridge solves every batch on its own over three betas,
otherwise as Algorithm 1. To keep a seed under an hour on one slow core, backbones under a closed
form head run at the middle rate of the ladder only. These networks have the features of the
rivals'; the bank's has its level and linear blocks as well. The baseline is ridge regression on
the counts of atoms, over all training molecules at once.

Parts are run one by one with `--only BATCH --seed SEED` (and `--family NAME`) and joined with
`--assemble`, which adds them to what the result file holds. The quick form learns a made-up
function of 29 inputs.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import qm9_data
import torch
from common import RESULTS, bar, finish
from torch import Tensor

from kalmanhead.config import AVERAGE, ModelConfig, build_learner
from kalmanhead.errors import NumericalError
from paper.report import markdown_table, write_markdown

NAME = "paper_qm9"
BATCHES, HELD_OUT = (8, 32, 128, 512), 10_000
TARGETS = tuple(qm9_data.TARGETS)
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
RATES = {  # by batch size, where the five rates start on the ladder
    "adam": {8: 0, 32: 1, 128: 2, 512: 2},
    "sgd": {8: 1, 32: 2, 128: 3, 512: 3},
}
LOWER_RATES = (1.5e-3, 5e-3)
LAMBDAS, BETAS = (1.0, 10.0, 100.0, 1000.0), (0.1, 10.0, 1000.0)
PROXIMAL = ("Algorithm 1", "Algorithm 1, Adam", "solve first, Adam")
LABELS = {"bank": "bank, untuned", "naive ridge": "naive ridge on each batch"}

Setting = dict[str, Any]
Run = dict[str, Any]  # family, setting, batch, seed, mae (None if it diverged), seconds
Data = tuple[Tensor, Tensor, Tensor]  # inputs, targets, counts of atoms


def rates(optimizer: str, batch: int) -> tuple[float, ...]:
    start = RATES[optimizer][batch]
    return LADDER[start : start + 5]


def sweep(batch: int) -> list[tuple[str, Setting]]:
    """Every family and setting at one batch size; the bank first."""
    adam, sgd = rates("adam", batch), rates("sgd", batch)
    literal = {"order": "backbone-first", "optimizer": "sgd", "lr": sgd[2]}
    by_adam = {"order": "backbone-first", "lr": adam[2]}
    return [
        ("bank", {"head": "auto"}),
        *(("bank, lower rates", {"head": "auto", "lr": lr}) for lr in LOWER_RATES),
        *(("Adam", {"head": "adam", "lr": lr}) for lr in adam),
        *(("SGD", {"head": "sgd", "lr": lr}) for lr in sgd),
        *(("Adam, averaged", {"head": "adam", "lr": lr, "average": AVERAGE}) for lr in adam[1:3]),
        *(("Algorithm 1", {"head": "reset", "lam": lam, **literal}) for lam in LAMBDAS),
        *(("Algorithm 1, Adam", {"head": "reset", "lam": lam, **by_adam}) for lam in LAMBDAS),
        *(("solve first, Adam", {"head": "reset", "lam": v, "lr": adam[2]}) for v in LAMBDAS[2:]),
        *(("naive ridge", {"head": "ridge", "lam": beta, **literal}) for beta in BETAS),
    ]


def molecules() -> Data:
    found = qm9_data.load()
    x, y, counts = (found[name] for name in ("eigenvalues", "targets", "counts"))
    return torch.tensor(x).float(), torch.tensor(y).float(), torch.tensor(counts)


def made_up(rows: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 29, generator=generator)
    y = torch.tanh(x @ torch.randn(29, len(TARGETS), generator=generator) / 3)
    return x, y, x[:, :5].double()


def split(data: Data, seed: int, held_out: int) -> tuple[Data, Data]:
    order = torch.tensor(np.random.default_rng(seed).permutation(len(data[0])))
    x, y, counts = (part[order] for part in data)
    return (
        (x[:-held_out], y[:-held_out], counts[:-held_out]),
        (x[-held_out:], y[-held_out:], counts[-held_out:]),
    )


def mean_absolute(prediction: Tensor, y: Tensor) -> list[float]:
    return (prediction - y).abs().mean(0).tolist()


def atom_ridge(train: Data, test: Data) -> list[float]:
    """Validation MAE of ridge regression (beta 1e-3 of the mean square) on the atoms' counts."""
    (_, y, counts), (_, test_y, test_counts) = train, test
    phi = torch.nn.functional.pad(counts, (1, 0), value=1.0)
    gram = phi.T @ phi / len(phi)
    ridge = 1e-3 * gram.diagonal().mean() / len(phi) * torch.eye(len(gram)).to(gram)
    w = torch.linalg.solve(gram + ridge, phi.T @ y.double() / len(phi))
    return mean_absolute(torch.nn.functional.pad(test_counts, (1, 0), value=1.0) @ w, test_y)


def learnt(setting: Setting, train: Data, test: Data, batch: int, seed: int) -> list[float] | None:
    """Validation MAE of each target after one pass; None if the network diverged."""
    x, y, _ = train
    learner = build_learner(ModelConfig(seed=seed, **setting), (x.shape[1],), (y.shape[1],))
    try:
        for rows_x, rows_y in zip(x.split(batch), y.split(batch), strict=True):
            learner.learn(rows_x, rows_y)
    except NumericalError:
        return None
    mae = mean_absolute(learner.predict(test[0]), test[1])
    return mae if all(map(math.isfinite, mae)) else None


def part(data: Data, batch: int, seed: int, held_out: int, only: str | None) -> list[Run]:
    """All settings, or those of one family, at one batch size and seed; the baseline first."""
    train, test = split(data, seed, held_out)
    key = {"batch": batch, "seed": seed}
    runs = [{"family": "atom counts", "setting": {}, **key, "mae": atom_ridge(train, test)}]
    for family, setting in sweep(batch):
        if only not in (None, family):
            continue
        start = time.perf_counter()
        mae = learnt(setting, train, test, batch, seed)
        seconds = time.perf_counter() - start
        runs.append({"family": family, "setting": setting, **key, "mae": mae, "seconds": seconds})
        print(batch, seed, family, setting, mae and [round(v, 4) for v in mae], flush=True)
    return runs


def best(runs: Iterable[Run], batch: int, family: str) -> np.ndarray:
    """Smallest mean over seeds of the validation MAE, for each target apart."""
    groups: dict[str, list[list[float]]] = {}
    for run in runs:
        if (run["batch"], run["family"]) == (batch, family):
            mae = run["mae"] or [math.inf] * len(TARGETS)
            groups.setdefault(json.dumps(run["setting"]), []).append(mae)
    return np.min([np.mean(group, axis=0) for group in groups.values()], axis=0)


def summary(runs: list[Run]) -> list[dict[str, Any]]:
    """For each batch size: every family's best MAE, and the ratios that are judged."""
    rows = []
    for batch in sorted({run["batch"] for run in runs}):
        families = list(dict.fromkeys(run["family"] for run in runs if run["batch"] == batch))
        mae = {family: best(runs, batch, family) for family in families}
        proximal = np.min([mae[family] for family in PROXIMAL], axis=0)
        ratios = {f"bank over {rival}": mae["bank"] / mae[rival] for rival in ("Adam", "SGD")}
        ratios["bank, lower rates, over Adam"] = mae["bank, lower rates"] / mae["Adam"]
        ratios["bank over Adam, averaged"] = mae["bank"] / mae["Adam, averaged"]
        ratios["proximal over SGD"] = proximal / mae["SGD"]
        ratios["proximal over Adam"] = proximal / mae["Adam"]
        ratios["Algorithm 1 over SGD"] = mae["Algorithm 1"] / mae["SGD"]
        ratios["Algorithm 1, Adam over Adam"] = mae["Algorithm 1, Adam"] / mae["Adam"]
        ratios["naive ridge over Algorithm 1"] = mae["naive ridge"] / mae["Algorithm 1"]
        rows.append(
            {
                "batch": batch,
                "seeds": len({run["seed"] for run in runs if run["batch"] == batch}),
                "mae": {family: values.tolist() for family, values in mae.items()},
                "ratios": {name: values.tolist() for name, values in ratios.items()},
            }
        )
    return rows


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bars = []
    for row in rows:
        for rival in ("Adam", "SGD"):
            ratios = row["ratios"][f"bank over {rival}"]
            name = f"batch {row['batch']}, bank over best {rival}"
            bars.append(bar(f"{name}, mean of targets", float(np.mean(ratios)), 1.0, False))
            bars.append(bar(f"{name}, worst target", max(ratios), 1.0, False))
    ridge = [float(np.mean(row["ratios"]["naive ridge over Algorithm 1"])) for row in rows]
    smallest = f"naive ridge over Algorithm 1, batch {rows[0]['batch']}"
    bars.append(bar(f"{smallest} (it fails)", ridge[0], 1.25))
    bars.append(bar(f"{smallest}, against the largest batch", ridge[0] / ridge[-1], 1.1))
    return bars


def tables(rows: list[dict[str, Any]]) -> list[str]:
    header = ["batch (seeds)", "family, best setting", *(f"{t} MAE" for t in TARGETS)]
    body = [
        [f"{row['batch']} ({row['seeds']})", LABELS.get(family, family), *values]
        for row in rows
        for family, values in row["mae"].items()
    ]
    names = list(rows[0]["ratios"])
    ratios = [[name, *(float(np.mean(row["ratios"][name])) for row in rows)] for name in names]
    sizes = [f"batch {row['batch']}" for row in rows]
    return [
        markdown_table(header, body),
        markdown_table(["MAE ratio, mean of targets", *sizes], ratios),
    ]


def verdict(claim: str, values: list[float], sizes: list[int], limit: float, below: bool) -> str:
    """A claim with the batch sizes at which it was borne out."""
    found = [s for s, v in zip(sizes, values, strict=True) if (v < limit if below else v > limit)]
    missed = [size for size in sizes if size not in found]
    where = f"borne out at batch {', '.join(map(str, found))}" if found else "not borne out"
    rest = f"; not at {', '.join(map(str, missed))}" if found and missed else ""
    return f"{claim}: {where}{rest}."


def claims(rows: list[dict[str, Any]]) -> list[str]:
    sizes = [row["batch"] for row in rows]

    def ratio(name: str) -> list[float]:
        return [float(np.mean(row["ratios"][name])) for row in rows]

    order = [
        float(np.mean(np.divide(row["mae"]["solve first, Adam"], row["mae"]["Algorithm 1, Adam"])))
        for row in rows
    ]
    ridge, by_adam = ratio("naive ridge over Algorithm 1"), ratio("proximal over Adam")
    return [
        "Claims of the paper. "
        + " ".join(
            [
                verdict("Algorithm 1 beats SGD", ratio("Algorithm 1 over SGD"), sizes, 1, True),
                verdict("The proximal head at its best beats Adam", by_adam, sizes, 1, True),
                verdict("Naive ridge fails (by a quarter or more)", ridge, sizes, 1.25, False),
                verdict("Backbone first is the better order", order, sizes, 1, False),
            ]
        )
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    sizes = [row["batch"] for row in rows]
    for family in rows[0]["mae"]:
        if family == "atom counts":
            continue
        shares = [np.mean(np.divide(row["mae"][family], row["mae"]["atom counts"])) for row in rows]
        axes.plot(sizes, shares, "o-", label=family, linewidth=3 if family == "bank" else 1.2)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(top=1.5)
    axes.set_xlabel("batch size")
    axes.set_ylabel("validation MAE, atom counts = 1")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def publish(runs: list[Run], quick: bool) -> None:
    rows = summary(runs)
    bars = judge(rows)
    path = finish(NAME, str(__doc__), {"table": rows, "runs": runs}, bars, quick)
    title = "QM9, one pass over 120,831 molecules, MAE on 10,000 held out"
    write_markdown(path, title, tables(rows), claims(rows), bars)
    draw(rows, path.with_suffix(".png"))


def assembled() -> list[Run]:
    """Runs of the result file and of all parts; a part's replace older ones."""
    found: dict[str, Run] = {}
    for path in [RESULTS / f"{NAME}.json", *sorted(RESULTS.glob(f"{NAME}_b*_s*.json"))]:
        for run in json.loads(path.read_text())["results"]["runs"] if path.exists() else []:
            found[json.dumps([run[k] for k in ("batch", "seed", "family", "setting")])] = run
    return sorted(found.values(), key=lambda run: (run["batch"], run["seed"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a made-up function, two batch sizes")
    parser.add_argument("--only", type=int, nargs="+", choices=BATCHES, help="batch sizes")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="seeds")
    parser.add_argument("--family", help="one family alone")
    parser.add_argument("--assemble", action="store_true", help="join the files of all parts")
    arguments = parser.parse_args()
    print(__doc__)
    torch.set_num_threads(1)
    if arguments.assemble:
        publish(assembled(), quick=False)
        return
    data = made_up(1_500) if arguments.quick else molecules()
    runs: list[Run] = []
    for seed in arguments.seed:
        for batch in arguments.only or (BATCHES[1:3] if arguments.quick else BATCHES):
            held_out = 300 if arguments.quick else HELD_OUT
            made = part(data, batch, seed, held_out, arguments.family)
            if not arguments.quick:
                suffix = f"_{arguments.family}" if arguments.family else ""
                finish(f"{NAME}_b{batch}_s{seed}{suffix}", str(__doc__), {"runs": made}, [], False)
            runs += made
    if arguments.quick or not arguments.only:
        publish(runs if arguments.quick else assembled(), arguments.quick)


if __name__ == "__main__":
    main()
