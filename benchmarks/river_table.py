"""The river estimators at their defaults beside river's own models and a network in torch.

Protocol: progressive validation, each row predicted before it is learnt, all models behind river's
StandardScaler as in a pipeline: scaled by earlier rows for the prediction, by its own, too, for
learning. Three seeds, of models and of generators. A figure is the mean over seeds, and the best
over a peer's settings (those listed in `regressors` and `classifiers`: its default and a small set
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
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import torch
from common import bar, finish
from latency import TorchLoop
from numpy.typing import NDArray
from river import (
    compose,
    datasets,
    dummy,
    forest,
    linear_model,
    multioutput,
    neighbors,
    optim,
    preprocessing,
    stats,
    tree,
)
from river.datasets import synth
from scipy.stats import rankdata
from torch import nn

X = dict[str, Any]
Scaled = tuple[X, X, Any]  # x for the prediction, x to learn from, y
Families = dict[str, dict[str, Callable[[int], Any]]]  # by name and setting, of a seed
Figures = dict[str, float]
Row = dict[str, Any]

REGRESSION = (
    *("TrumpApproval", "ChickWeights", "AirlinePassengers", "WaterFlow", "SP500Stocks"),
    *("Friedman", "FriedmanDrift", "Mv", "SolarFlare"),
)
CLASSIFICATION = ("Phishing", "Bananas", "ImageSegments")
QUICK_SETS = ("TrumpApproval", "SolarFlare", "Phishing")  # one for each of the three estimators
QUICK_PEERS = ("LinearRegression, SGD", "SoftmaxRegression", "torch MLP, Adam")
ROWS, QUICK_ROWS, TOLERANCE = 2_000, 300, 1.02
DRIFT = {"drift_type": "lea", "position": tuple(int(ROWS * s) for s in (0.25, 0.5, 0.75))}
BEST = {"mae": min, "late": min, "accuracy": max, "auc": max, "log_loss": min, "ece": min}
OURS, DEPARTURE = "kalmanhead", "departure from a sum of 1"
PLAIN: Families = {
    "persistence": {"default": lambda _: dummy.StatisticRegressor(stats.Shift(0, fill_value=0.0))},
    "running mean": {"default": lambda _: dummy.StatisticRegressor(stats.Mean())},
}


class TorchClassifier(TorchLoop):
    loss = staticmethod(nn.functional.cross_entropy)

    def __init__(self, classes: Sequence[Any], lr: float, seed: int) -> None:
        super().__init__("Adam", lr, seed, len(classes))
        self.classes = classes

    def predict_proba_one(self, x: X) -> dict[Any, float]:
        with torch.no_grad():
            shares = self.forward(x)[0].double().softmax(0).tolist()
        return dict(zip(self.classes, shares, strict=True))

    def learn_one(self, x: X, y: Any) -> None:
        self.descend(self.forward(x), torch.tensor([self.classes.index(y)]))


def one_hot(name: str, value: Any, levels: Iterable[Any]) -> X:
    return {f"{name}={level}": float(value == level) for level in levels}


def calendar(name: str, when: datetime, start: datetime) -> X:
    if name == "AirlinePassengers":
        months = one_hot("month", when.month, range(1, 13))
        return {"year": when.year + (when.month - 1) / 12} | months
    turn = math.tau * (when.hour + when.minute / 60) / 24
    waves = {f"{f.__name__} {k}": f(k * turn) for f in (math.sin, math.cos) for k in (1, 2)}
    days = (when - start).total_seconds() / 86_400
    return {"days": days} | waves | one_hot("weekday", when.weekday(), range(7))


def encoded(name: str, rows: list[tuple[dict[Any, Any], Any]]) -> Iterator[tuple[X, Any]]:
    """Rows in numbers alone, with the same columns in all."""
    first = rows[0][0]
    levels = {k: sorted({x[k] for x, _ in rows}) for k, v in first.items() if isinstance(v, str)}
    for x, y in rows:
        numbers: X = {}
        for key, value in x.items():
            if key in levels:
                numbers |= one_hot(key, value, levels[key])
            elif isinstance(value, datetime):
                numbers |= calendar(name, value, first[key])
            else:
                numbers[str(key)] = float(value)
        yield numbers, y


def stream(name: str, seed: int, quick: bool) -> list[Scaled]:
    """All rows of a set, scaled as river's pipeline hands them to its model."""
    if hasattr(synth, name):
        data = getattr(synth, name)(seed=seed, **(DRIFT if name == "FriedmanDrift" else {}))
        rows = list(data.take(ROWS))
    else:
        rows = list(getattr(datasets, name)())
    scaler = preprocessing.StandardScaler()
    scaled = []
    for x, y in itertools.islice(encoded(name, rows), QUICK_ROWS if quick else None):
        before = scaler.transform_one(x)
        scaler.learn_one(x)
        scaled.append((before, scaler.transform_one(x), y))
    return scaled


def regressors() -> Families:
    linear, bayes = linear_model.LinearRegression, linear_model.BayesianLinearRegression
    constant = compose.FuncTransformer(lambda x: {**x, "constant": 1.0})
    families: Families = {
        "LinearRegression, SGD": {
            f"rate {r:g}, of the intercept as well": lambda _, r=r: linear(
                optim.SGD(r), intercept_lr=r
            )
            for r in (0.01, 0.001, 0.003, 0.03, 0.1)
        },
        "LinearRegression, Adam": {
            f"rate {r:g}, of the intercept {i:g}": lambda _, r=r, i=i: linear(
                optim.Adam(r), intercept_lr=i
            )
            for r, i in ((0.1, 0.01), (0.01, 0.01), (0.1, 0.1), (1.0, 0.1), (1.0, 0.3))
        },
        "BayesianLinearRegression": {
            "default": lambda _: bayes(),
            "smoothing 0.99": lambda _: bayes(smoothing=0.99),
            "constant": lambda _: constant.clone() | bayes(),
            "constant, smoothing 0.99": lambda _: constant.clone() | bayes(smoothing=0.99),
        },
        "HoeffdingAdaptiveTree": {"default": lambda s: tree.HoeffdingAdaptiveTreeRegressor(seed=s)},
        "ARF": {"default": lambda s: forest.ARFRegressor(seed=s)},
        "KNN": {"default": neighbours},
    }
    for optimizer, rates in (("Adam", (1e-3, 3e-3, 1e-2)), ("SGD", (1e-3, 1e-2, 3e-2, 1e-1))):
        families[f"torch MLP, {optimizer}"] = {
            f"rate {r:g}": lambda s, o=optimizer, r=r: preprocessing.TargetStandardScaler(
                TorchLoop(o, r, s)
            )
            for r in rates
        }
    return families


def neighbours(seed: int) -> neighbors.KNNRegressor:
    distance = neighbors.KNNRegressor().engine.dist_func
    return neighbors.KNNRegressor(engine=neighbors.SWINN(dist_func=distance, seed=seed))


def classifiers(classes: Sequence[Any]) -> Families:
    rates = (0.01, 0.03, 0.1, 0.3)
    logistic, softmax = linear_model.LogisticRegression, linear_model.SoftmaxRegression
    families: Families = {
        "LogisticRegression": {
            f"rate {r:g}": lambda _, r=r: logistic(optim.SGD(r), intercept_lr=r) for r in rates
        },
        "SoftmaxRegression": {f"rate {r:g}": lambda _, r=r: softmax(optim.SGD(r)) for r in rates},
        "HoeffdingAdaptiveTree": {
            "default": lambda s: tree.HoeffdingAdaptiveTreeClassifier(seed=s)
        },
        "ARF": {"default": lambda s: forest.ARFClassifier(seed=s)},
        "torch MLP, Adam": {
            f"rate {r:g}": lambda s, r=r: TorchClassifier(classes, r, s) for r in (1e-3, 3e-3, 1e-2)
        },
    }
    return {k: v for k, v in families.items() if len(classes) == 2 or k != "LogisticRegression"}


def per_output(families: Families) -> Families:
    wrap = multioutput.PerOutputRegressor
    return {
        name: {k: lambda seed, make=make: wrap(make(seed)) for k, make in settings.items()}
        for name, settings in families.items()
    }


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
