"""Estimators for river: regression, of several targets too, and classification.

They take rows as dicts and frames of pandas, pyarrow or whatever narwhals reads; what they learn
lies in a `RowModel`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from river import base, proba
from river.utils import dataframe

from kalmanhead.errors import ConfigError, shown
from kalmanhead.row_config import RowConfig
from kalmanhead.row_frames import (
    as_weight,
    frame_of,
    in_places,
    listed,
    native_frame,
    rows_of,
)
from kalmanhead.row_model import UNNAMED, RowModel, as_named, as_number, is_missing, plain

Row = Mapping[Hashable, Any]

# The single output of a regressor.
TARGET = "y"


class _RowEstimator(base.Estimator):
    """What the estimators share: their options, and rows taken apart."""

    _one_hot = False

    def __init__(
        self,
        backbone: str = "mlp",
        width: int = 32,
        depth: int | None = None,
        skip: bool | None = None,
        head: str = "auto",
        lam: float | None = None,
        eta: float | None = None,
        optimizer: str = "adam",
        lr: float | None = None,
        clip: float | None = None,
        average: float | None = None,
        robust: bool | None = None,
        backbone_every: int = 8,
        absent: str = "mean",
        seed: int = 0,
    ) -> None:
        self.backbone = backbone
        self.width = width
        self.depth = depth
        self.skip = skip
        self.head = head
        self.lam = lam
        self.eta = eta
        self.optimizer = optimizer
        self.lr = lr
        self.clip = clip
        self.average = average
        self.robust = robust
        self.backbone_every = backbone_every
        self.absent = absent
        self.seed = seed
        names = [field.name for field in dataclasses.fields(RowConfig)]
        config = RowConfig(**{name: plain(getattr(self, name)) for name in names})
        every = plain(backbone_every)
        self._model = RowModel(config, every=every, absent=absent, one_hot=self._one_hot)
        self._targets_skipped = 0
        self._start()

    def _start(self) -> None:
        """Make what a kind of estimator has of its own."""

    @property
    def values_missing(self) -> int:
        """Features that came as None, NaN or infinity while learning, and were imputed."""
        return self._model.values_missing

    @property
    def targets_skipped(self) -> int:
        """Targets that were missing or not finite while learning, and were left out."""
        return self._targets_skipped

    @property
    def _mutable_attributes(self) -> set[str]:
        return {"lr", "clip", "backbone_every"}

    def _learn(self, x: Row, y: Mapping[Hashable, float], w: float) -> NDArray[np.float64] | None:
        """Learn from a row of which at least one target is there; what had been predicted."""
        weight = as_weight(w)
        if weight == 0:
            return None
        missing, predicted = sum(map(math.isnan, y.values())), None
        if missing < len(y):
            self._model.tune(every=self.backbone_every, lr=self.lr, clip=self.clip)
            predicted = self._model.learn(x, y, weight)
        self._targets_skipped += missing
        return predicted


class KalmanHeadRegressor(_RowEstimator, base.MiniBatchRegressor):
    """Online regression by a neural network whose last layer is a Kalman filter.

    A bank of Kalman filters predicts from a constant, the inputs and the features of an MLP, and
    weighs its members by how well each foresees the stream: a drifting level, a linear model with
    or without memory, the deep model. It learns from every row in closed form, and the MLP by
    small gradient steps. Inputs and targets are standardised by running statistics.

    Parameters
    ----------
    backbone:
        `mlp` or `linear`.
    width, depth:
        Size of the MLP: features, and number of layers (2 by default).
    skip:
        Put the inputs beside the backbone's features, so that the head holds a linear model as
        well; None leaves it to the head, and the bank wants them.
    head:
        `auto` for the bank of level, linear and deep heads that needs no tuning; `reset`, `drift`
        or `static` for a single Kalman head.
    lam, eta:
        Of a single head: prior precision, in units of the largest feature's mean square, and
        rate of `drift`.
    optimizer, lr, clip:
        Of the backbone: `adam` or `sgd`, learning rate, largest gradient norm.
    average:
        Decay of the moving average of the model that predicts beside the newest; 0 for none, None
        leaves it to the head, and the bank has one.
    robust:
        Leave out single targets that are off by more than 30 deviations of the usual errors and by
        more than 3 of the targets, and start anew after three in a row; None leaves it to the
        head, and the bank does.
    backbone_every:
        Rows for each gradient step of the backbone. The head learns from every row at once.
    absent:
        What a known name stands for that a row does not hold: `mean`, the running mean of its
        values, or `zero`, as in sparse counts. None, NaN and infinity are always the mean.
    seed:
        Of the backbone's initial weights.

    Notes
    -----
    A row costs O(d^2) for each head that remembers, d being inputs plus width, and so does the
    memory: 5,000 features take 5 GB, so hash what has more than some hundred names into fewer.
    `learn_many` is a loop over `learn_one`, so that both give the same model.

    Examples
    --------
    >>> from river import datasets, evaluate, metrics, preprocessing
    >>> model = preprocessing.StandardScaler() | KalmanHeadRegressor(width=8)
    >>> rows = datasets.TrumpApproval().take(300)
    >>> score = evaluate.progressive_val_score(rows, model, metrics.MAE())
    >>> bool(score.get() < 1)
    True
    >>> x, y = next(iter(datasets.TrumpApproval()))
    >>> distribution = model.predict_one(x, with_dist=True)
    >>> bool(0 < distribution.sigma < 10)
    True

    References
    ----------
    Closed-Form Last Layer Optimization, arXiv 2510.04606.
    """

    def learn_one(self, x: Row, y: Any, w: float = 1.0) -> None:
        """Learn from a row; w weighs it, 2 being the row twice and 0 leaving it out.

        A target that is None, NaN or infinite is skipped and counted, and so is its row.

        Raises
        ------
        ConfigError
            A feature or the target is no number, or the weight is negative or not finite.
        """
        self._learn(x, {TARGET: as_number(UNNAMED, y)}, w)

    def predict_one(self, x: Row, with_dist: bool = False) -> Any:
        """Prediction for a row, 0 before any learning; a Gaussian if asked for."""
        row = self._model.read(x)
        if not self._model.outputs:
            return _gaussian(0.0, 1.0) if with_dist else 0.0
        if not with_dist:
            return float(self._model.predict_row(row)[0])
        mean, variance = self._model.predict_dist(row[None])
        return _gaussian(float(mean[0, 0]), float(variance[0, 0]))

    def learn_many(self, X: Any, y: Any, w: Any = 1.0) -> None:
        """Learn from the rows of a frame; y and w by position, w one number or one a row."""
        targets = [as_number(UNNAMED, value) for value in listed(y, "y")]
        for x, target, weight in rows_of(X, targets, w):
            self.learn_one(x, target, weight)

    def predict_many(self, X: Any) -> Any:
        """Predictions for the rows of a frame, as a series of the same kind and index."""
        frame = frame_of(X)
        mean = np.zeros(len(frame))
        if self._model.outputs:
            mean = self._model.predict(in_places(self._model, frame))[:, 0]
        return dataframe.to_native_series(mean, name=None, like=frame)


class KalmanHeadMultiTargetRegressor(_RowEstimator, base.MultiTargetRegressor):
    """Online regression of several targets at once by a network with a Kalman filter on top.

    As `KalmanHeadRegressor`; the targets share the backbone and the covariance of the head, and
    each has its own noise and its own weights over the heads of the bank. Targets may be missing
    from a row, and new ones may appear.

    Parameters are those of `KalmanHeadRegressor`.

    Examples
    --------
    >>> from river import datasets, evaluate, metrics, stream
    >>> from sklearn import datasets as sk
    >>> rows = stream.iter_sklearn_dataset(sk.load_linnerud(), shuffle=True, seed=42)
    >>> metric = metrics.multioutput.MicroAverage(metrics.MAE())
    >>> score = evaluate.progressive_val_score(rows, KalmanHeadMultiTargetRegressor(), metric)
    >>> bool(score.get() < 50)
    True
    """

    def learn_one(self, x: Row, y: Row, w: float = 1.0, **kwargs: Any) -> None:
        """Learn from a row; a target that is None, NaN or infinite is skipped and counted.

        Errors are those of `KalmanHeadRegressor.learn_one`.
        """
        targets = as_named(y, "y").items()
        self._learn(x, {name: as_number(name, value) for name, value in targets}, w)

    def predict_one(self, x: Row, with_dist: bool = False) -> dict[Any, Any]:
        """Predictions by target; of the targets seen so far, so none before any learning."""
        row = self._model.read(x)
        if not with_dist:
            outputs = self._model.predict_row(row).tolist()
            return dict(zip(self._model.outputs, outputs, strict=True))
        mean, variance = self._model.predict_dist(row[None])
        pairs = zip(mean[0].tolist(), variance[0].tolist(), strict=True)
        return {
            name: _gaussian(*pair) for name, pair in zip(self._model.outputs, pairs, strict=True)
        }

    def learn_many(self, X: Any, y: Any, w: Any = 1.0) -> None:
        """Learn from the rows of a frame and of a frame of targets, by position."""
        targets = [
            {name: as_number(name, value) for name, value in row.items()}
            for row in frame_of(y).rows(named=True)
        ]
        for x, target, weight in rows_of(X, targets, w):
            self.learn_one(x, target, weight)

    def predict_many(self, X: Any) -> Any:
        """Predictions for the rows of a frame, as a frame of the same kind and index."""
        frame = frame_of(X)
        mean = self._model.predict(in_places(self._model, frame))
        return native_frame({name: mean[:, j] for name, j in self._model.outputs.items()}, frame)


class KalmanHeadClassifier(_RowEstimator, base.MiniBatchClassifier):
    """Online classification by a neural network whose last layer is a Kalman filter.

    The bank of `KalmanHeadRegressor` regresses on one 0-or-1 output a class, whose means estimate
    the classes' probabilities. A softmax turns them into probabilities proper; its slope is
    learnt online from the log-likelihood. Classes may be bool, str or int, and appear any time.

    Parameters are those of `KalmanHeadRegressor`.

    Examples
    --------
    >>> from river import datasets, evaluate, metrics, preprocessing
    >>> model = preprocessing.StandardScaler() | KalmanHeadClassifier(width=8)
    >>> rows = datasets.Phishing().take(500)
    >>> score = evaluate.progressive_val_score(rows, model, metrics.Accuracy())
    >>> bool(score.get() > 0.8)
    True
    """

    _one_hot = True

    def _start(self) -> None:
        self._slope = Slope()

    @property
    def _multiclass(self) -> bool:
        return True

    def learn_one(self, x: Row, y: Any, w: float = 1.0) -> None:
        """Learn from a row; a label that is None or NaN is skipped and counted.

        Errors are those of `KalmanHeadRegressor.learn_one`.
        """
        label, weight = as_label(y), as_weight(w)
        if label is None:
            self._targets_skipped += 1
            return
        means = self._learn(x, {label: 1.0}, weight)
        if means is not None:
            self._slope.learn(means, self._model.outputs[label], weight)

    def predict_proba_one(self, x: Row, **kwargs: Any) -> dict[Any, float]:
        """Probability of each class seen so far; none before any learning."""
        means = self._model.predict_row(self._model.read(x))
        told = self._by_class(self._slope(means[None]))
        return {label: float(probability[0]) for label, probability in told.items()}

    def learn_many(self, X: Any, y: Any, w: Any = 1.0) -> None:
        """Learn from the rows of a frame; labels and weights by position."""
        labels = [as_label(value) for value in listed(y, "y")]
        for x, label, weight in rows_of(X, labels, w):
            self.learn_one(x, label, weight)

    def predict_proba_many(self, X: Any) -> Any:
        """Probabilities for the rows of a frame, a column for each class, same kind and index."""
        frame = frame_of(X)
        probabilities = self._probabilities(in_places(self._model, frame))
        return native_frame(self._by_class(probabilities), frame)

    def predict_many(self, X: Any) -> Any:
        """Most probable class for each row of a frame, as a series of the same kind and index."""
        frame = frame_of(X)
        probabilities = self._probabilities(in_places(self._model, frame))
        labels = list(self._model.outputs)
        best = [labels[j] for j in probabilities.argmax(1)] if labels else [None] * len(frame)
        return dataframe.to_native_series(best, name=None, like=frame)

    def _probabilities(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probabilities of the classes, (n, k)."""
        return self._slope(self._model.predict(rows))

    def _by_class(self, probabilities: NDArray[np.float64]) -> dict[Any, NDArray[np.float64]]:
        """Probabilities (n, k) by class. Of one bool the other is known, though not yet seen."""
        told = {label: probabilities[:, j] for label, j in self._model.outputs.items()}
        learner = self._model.learner
        if len(told) == 1 and learner is not None:
            (label,) = told
            if isinstance(label, bool):  # Laplace's rule of succession
                unseen = np.full(len(probabilities), 1 / (learner.batches + 2))
                told = {label: 1 - unseen, not label: unseen}
        return told


class Slope:
    """How steeply probabilities follow the means of 0-or-1 outputs: softmax(slope * mean).

    The slope climbs the log-likelihood of each label by natural gradient: a Newton step in which
    the curvature is the sum of the Fisher information so far, slowly forgotten.

    Examples
    --------
    >>> Slope()(np.array([[0.5, 0.5]]))
    array([[0.5, 0.5]])
    """

    START, LEAST, MOST = 4.0, 0.1, 40.0
    FORGETTING = 0.999

    def __init__(self) -> None:
        self.slope, self.information = self.START, 1.0

    def __call__(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probabilities that sum to 1, (n, k), for means (n, k)."""
        if means.shape[1] == 0:
            return means
        powers = np.exp(self.slope * (means - means.max(1, keepdims=True)))
        return np.asarray(powers / powers.sum(1, keepdims=True))

    def learn(self, means: NDArray[np.float64], label: int, weight: float) -> None:
        """Learn from the means (k,) that were predicted for a row before its label was known."""
        if len(means) < 2:
            return
        probabilities = self(means[None])[0]
        expected = float(probabilities @ means)
        fisher = float(probabilities @ (means - expected) ** 2)
        self.information = self.FORGETTING * self.information + weight * fisher
        gradient = weight * (float(means[label]) - expected)
        step = gradient / max(self.information, 1.0)
        self.slope = min(max(self.slope + step, self.LEAST), self.MOST)


def as_label(y: Any) -> Hashable:
    """A class as a plain value; None where it is missing.

    Raises
    ------
    ConfigError
        It is nothing that a dict could hold as a key.
    """
    label = plain(y)
    try:
        hash(label)
    except TypeError:
        raise ConfigError(
            f"y is a {type(y).__name__} ({shown(y)}): give a class as a bool, str or int"
        ) from None
    return None if is_missing(label) else label


def _gaussian(mean: float, variance: float) -> Any:
    """River's normal distribution with these moments."""
    return proba.Gaussian._from_state(n=1, m=mean, var=variance, ddof=0)  # type: ignore[no-untyped-call]
