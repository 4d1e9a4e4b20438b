"""The peers of the river estimators, by family and setting; each is made from a seed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from latency import TorchLoop
from river import (
    compose,
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
from river_sets import X
from torch import nn

Families = dict[str, dict[str, Callable[[int], Any]]]  # by name and setting, of a seed

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
