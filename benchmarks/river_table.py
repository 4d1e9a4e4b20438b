"""The river estimators at their defaults beside river's own models and a network in torch.

Protocol: progressive validation, each row predicted before it is learnt, all models behind river's
StandardScaler as in a pipeline: scaled by earlier rows for the prediction, by its own, too, for
learning. Three seeds, of models and of generators. A figure is the mean over seeds, and the best
over a peer's settings (those listed in river_peers.py: its default and a small set
of rates; for BayesianLinearRegression, which has no intercept and forgets nothing by default, a
constant and smoothing), chosen afterwards and for each figure on its own, to the peer's advantage.
The estimators run in one setting, the default.

Regression, by MAE over all rows, and over those after the first tenth: TrumpApproval, ChickWeights,
AirlinePassengers, WaterFlow, SP500Stocks; 2,000 rows of Friedman, FriedmanDrift (lea, changes at a
quarter, half and three quarters) and Mv; SolarFlare, three targets, mean of their MAEs, for which
peers are wrapped in PerOutputRegressor. Features, the same for all: numbers as they are; text a 0/1
column for each value it takes in the set; AirlinePassengers the year with its fraction, and the
month in 0/1 columns; WaterFlow days since the start, sine and cosine of the hour of day and of
twice it, and the weekday in 0/1 columns. Peers: LinearRegression by SGD and by Adam,
BayesianLinearRegression, HoeffdingAdaptiveTreeRegressor, ARFRegressor, KNNRegressor (its search is
seeded), and an MLP of two layers of 32 in torch, stepped at every row by Adam and by SGD, its
target standardised by river's TargetStandardScaler. Persistence and running mean are no peers.

Classification: Phishing, Bananas, ImageSegments, by accuracy, ROC AUC (exact, by ranks; not for
ImageSegments, as river has no AUC of several classes), log-loss (probabilities at least 1e-15, as
in river) and expected calibration error (of the largest probability, 10 bins). A row whose class
never came before is learnt, not scored: nothing could foresee it. A model that says nothing yet
gives the classes so far equal probabilities. Peers: LogisticRegression (two classes),
SoftmaxRegression, HoeffdingAdaptiveTreeClassifier, ARFClassifier, and the MLP by Adam, which is
told the classes beforehand.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from common import bar, finish
from numpy.typing import NDArray
from river_peers import PLAIN, Families, classifiers, per_output, regressors
from river_sets import CLASSIFICATION, REGRESSION, Scaled, stream
from scipy.stats import rankdata

Figures = dict[str, float]
Row = dict[str, Any]

TOLERANCE = 1.02
QUICK_SETS = ("TrumpApproval", "SolarFlare", "Phishing")  # one for each of the three estimators
QUICK_PEERS = ("LinearRegression, SGD", "SoftmaxRegression", "torch MLP, Adam")
BEST = {"mae": min, "late": min, "accuracy": max, "auc": max, "log_loss": min, "ece": min}
OURS, DEPARTURE = "kalmanhead", "departure from a sum of 1"


def regress(model: Any, rows: list[Scaled]) -> Figures:
    """MAE, the mean of those of several targets; infinite for a model that breaks down."""
    errors = np.full(len(rows), math.inf)
    for i, (before, after, y) in enumerate(rows):
        try:
            told = model.predict_one(before)
            model.learn_one(after, y)
        except (OverflowError, np.linalg.LinAlgError):
            break
        pairs = (
            [(told.get(k, 0.0), v) for k, v in y.items()] if isinstance(y, dict) else [(told, y)]
        )
        error = sum(abs(a - b) for a, b in pairs) / len(pairs)
        errors[i] = error if math.isfinite(error) else math.inf
    return {"mae": float(errors.mean()), "late": float(errors[len(rows) // 10 :].mean())}


def classify(model: Any, rows: list[Scaled]) -> Figures:
    classes = sorted({y for *_, y in rows})
    met: set[Any] = set()
    told, labels = [], []
    for before, after, y in rows:
        if y in met:
            shares = model.predict_proba_one(before) or dict.fromkeys(met, 1 / len(met))
            told.append([shares.get(label, 0.0) for label in classes])
            labels.append(classes.index(y))
        met.add(y)
        model.learn_one(after, y)
    return probability_figures(np.array(told), np.array(labels))


def probability_figures(told: NDArray[np.float64], labels: NDArray[np.intp]) -> Figures:
    """Of probabilities (n, k) and labels (n,)."""
    right, confidence = told.argmax(1) == labels, told.max(1)
    bins = np.minimum((confidence * 10).astype(int), 9)
    gaps = [abs(float((confidence - right)[bins == b].sum())) for b in range(10)]
    truth = told[np.arange(len(labels)), labels]
    figures = {
        "accuracy": float(right.mean()),
        "log_loss": float(-np.log(truth.clip(1e-15, 1)).mean()),
        "ece": sum(gaps) / len(labels),
        DEPARTURE: float(np.abs(told.sum(1) - 1).max()),
    }
    if told.shape[1] == 2:
        ones = int(labels.sum())
        above = rankdata(told[:, 1])[labels == 1].sum() - ones * (ones + 1) / 2
        figures["auc"] = float(above / (ones * (len(labels) - ones)))
    return figures


def contest(
    name: str,
    families: Families,
    streams: list[list[Scaled]],
    score: Callable[[Any, list[Scaled]], Figures],
) -> Row:
    """The figures of all families on one set, and the best peer by each."""
    models: dict[str, Row] = {}
    for family, settings in families.items():
        start = time.perf_counter()
        tried: dict[str, Figures] = {}
        for setting, make in settings.items():
            each = [score(make(seed), rows) for seed, rows in enumerate(streams)]
            tried[setting] = {k: float(np.mean([e[k] for e in each])) for k in each[0]}
        figures = {
            k: best(t[k] for t in tried.values()) for k, best in BEST.items() if k in each[0]
        }
        chosen = {k: next(s for s, t in tried.items() if t[k] == v) for k, v in figures.items()}
        models[family] = {**figures, "chosen": chosen, "tried": tried, "last_setting_by_seed": each}
        models[family]["seconds"] = time.perf_counter() - start
        print(name, family, {k: float(f"{v:.4g}") for k, v in figures.items()}, flush=True)
    peers = [family for family in families if family != OURS and family not in PLAIN]
    rivals = {k: BEST[k](peers, key=lambda peer, k=k: models[peer][k]) for k in figures}
    features = list(streams[0][0][0])
    return {
        "set": name,
        "rows": len(streams[0]),
        "features": features,
        "models": models,
        "best_peer": rivals,
    }


def set_row(name: str, quick: bool) -> Row:
    from kalmanhead import estimators

    streams = [stream(name, seed, quick) for seed in range(1 if quick else 3)]
    y = streams[0][0][2]
    if name in CLASSIFICATION:
        kind, score = estimators.KalmanHeadClassifier, classify
        peers, plain = classifiers(sorted({y for *_, y in streams[0]})), {}
    elif isinstance(y, dict):
        kind, score = estimators.KalmanHeadMultiTargetRegressor, regress
        peers, plain = per_output(regressors()), per_output(PLAIN)
    else:
        kind, score = estimators.KalmanHeadRegressor, regress
        peers, plain = regressors(), PLAIN
    if quick:
        peers = {k: v for k, v in peers.items() if k in QUICK_PEERS}
    own: Families = {OURS: {"default": lambda seed: kind(seed=seed)}}
    row = contest(name, own | peers | plain, streams, score)
    if name in REGRESSION:
        row["ratio"] = row["models"][OURS]["mae"] / row["models"][row["best_peer"]["mae"]]["mae"]
    return row


def judge(table: list[Row]) -> list[dict[str, Any]]:
    bars = []
    if ratios := [row["ratio"] for row in table if "ratio" in row]:
        title = f"of {len(ratios)} regression sets, those within {TOLERANCE} of the best peer"
        held = sum(ratio <= TOLERANCE for ratio in ratios)
        bars.append(bar(title, held, max(0, len(ratios) - 2)))
    for row in table:
        if "ratio" in row:
            continue
        own = row["models"][OURS]
        for figure in ("accuracy", "auc", "log_loss"):
            if rival := row["best_peer"].get(figure):
                limit = row["models"][rival][figure]
                title = f"{row['set']}: {figure}, limit by {rival}"
                bars.append(bar(title, own[figure], limit, at_least=BEST[figure] is max))
        worst = max(figures[DEPARTURE] for figures in own["last_setting_by_seed"])
        bars.append(bar(f"{row['set']}: {DEPARTURE}", worst, 1e-9, at_least=False))
    return bars


def markdown(head: Iterable[str], body: list[list[str]]) -> None:
    lines = [list(head), *body] if body else []
    lines[1:1] = [["---"] * len(line) for line in lines[:1]]
    print(*(f"| {' | '.join(line)} |" for line in lines), "", sep="\n")


def show(table: list[Row]) -> None:
    regression = [row for row in table if "ratio" in row]
    names = list(regression[0]["models"]) if regression else []
    body = []
    for row in regression:
        models, rival = row["models"], row["best_peer"]["mae"]
        figures = [models[k]["mae"] for k in names] + [models[k]["late"] for k in (OURS, rival)]
        cells = [f"{value:.4g}" for value in figures]
        body.append([row["set"], *cells, f"{row['ratio']:.3f} of {rival}"])
    late = [f"{OURS} after 10 %", "best peer after 10 %", "ratio of MAE"]
    markdown(["MAE", *names, *late], body)
    figures = [k for k in BEST if k not in ("mae", "late")]
    body = [
        [row["set"], name, *(f"{model[k]:.4f}" if k in model else "" for k in figures)]
        for row in table
        if "ratio" not in row
        for name, model in row["models"].items()
    ]
    markdown(["set", "model", *figures], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, sets and peers, one seed")
    parser.add_argument("--only", metavar="SET[,SET]", help="these sets, into a file of their own")
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else []
    known = REGRESSION + CLASSIFICATION
    if unknown := set(only) - set(known):
        parser.error(f"no set {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    print(__doc__)
    torch.set_num_threads(1)
    wanted = only or (QUICK_SETS if arguments.quick else known)
    table = [set_row(name, arguments.quick) for name in known if name in wanted]
    show(table)
    name = "_".join(["river_table", *only])
    finish(name, __doc__, {"table": table}, judge(table), arguments.quick)


if __name__ == "__main__":
    main()
