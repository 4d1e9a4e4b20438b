"""Learning row by row from named features and named targets, of which new ones may appear.

Every name keeps its column for ever. Columns are given out in order of first appearance in
learning; names that appear in the same row are sorted, so that their order in it does not matter.
The head learns from every row at once, the backbone by one gradient step for each `every` rows,
which wait until then and are part of the state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalmanhead.batch import LARGEST_VALUE
from kalmanhead.errors import ConfigError, shown
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import checked
from kalmanhead.row_compiled import holds
from kalmanhead.row_config import RowConfig
from kalmanhead.row_growth import grown
from kalmanhead.row_kernel import Noted, RowKernel, on_cpu, own_modes

# Name of a target that has none.
UNNAMED = "the target"
# Kinds of values that stay what they are.
PLAIN = frozenset((float, int, bool, np.float64))

State = dict[str, Any]
Floats = NDArray[np.float64]


class RowModel:
    """A learner of rows whose columns are known by name.

    Parameters
    ----------
    config:
        What kind of learner.
    every:
        Rows for each gradient step of the backbone.
    absent:
        What a known name stands for that a row does not hold: `mean`, the running mean of its
        column, or `zero`.
    one_hot:
        Whether the outputs are classes: their targets are 0 or 1 and are not standardised, and a
        class that is new was 0 in all earlier rows.

    Raises
    ------
    ConfigError
        Options that do not go together.
    """

    def __init__(
        self, config: RowConfig, *, every: int = 8, absent: str = "mean", one_hot: bool = False
    ) -> None:
        check_every(every)
        if absent not in ("mean", "zero"):
            raise ConfigError(f"absent is {absent!r}: choose mean or zero")
        self.config, self.every, self.absent, self.one_hot = config, every, absent, one_hot
        self.features: dict[Hashable, int] = {}
        self.outputs: dict[Hashable, int] = {}
        self.kernel: RowKernel | None = None
        # Rows in their own units, targets and weights that wait for the backbone's next step.
        self.waiting: list[tuple[Floats, Floats, float]] = []
        self.values_missing = 0
        self._take = _taker(self.features)
        self._last: tuple[tuple[Any, ...], Floats] = (), np.empty(0)
        self._fresh(1, 1)  # refuses bad options before any data come

    @property
    def learner(self) -> OnlineLearner | None:
        """The learner, with all rows taken note of; None before any row."""
        if self.kernel is None:
            return None
        self.kernel.bank.remix()
        return self.kernel.learner

    def tune(self, *, every: int, lr: float | None, clip: float | None) -> None:
        """Take over options that may change between rows."""
        if (every, lr, clip) == (self.every, self.config.lr, self.config.clip):
            return
        every, lr, clip = plain(every), plain(lr), plain(clip)
        check_every(every)
        lr = None if lr is None else checked(lr)
        config = dataclasses.replace(self.config, lr=lr, clip=clip)
        before, self.config = self.config, config
        try:
            self._fresh(1, 1)  # refuses what the constructor would have
        except ConfigError:
            self.config = before
            raise
        self.every = every
        if self.kernel is None:
            return
        learner = self.kernel.learner
        learner.clip = clip
        if learner.optimizer is not None and lr is not None:
            for group in learner.optimizer.param_groups:
                group["lr"] = lr

    def learn(
        self, x: Mapping[Hashable, Any], y: Mapping[Hashable, float], weight: float
    ) -> Floats:
        """Learn from one row; None, NaN or infinity in x and NaN in y are missing.

        At least one target must be there, and the weight positive.

        Returns
        -------
        ndarray
            What `predict_row` would have returned before, (k,), new outputs included.

        Raises
        ------
        ConfigError
            A value is no number; nothing was learnt.
        NumericalError
            The backbone has diverged: the rows that waited for its step are left out of it.
        """
        row = self._plain(x)
        known = self.kernel is not None and self.outputs.keys() >= y.keys()
        if not known:  # a name of which no value has come yet is no output yet
            y = {name: value for name, value in y.items() if value == value or name in self.outputs}
        if row is None:
            x = as_named(x, "x")
            numbers = {name: as_number(name, value) for name, value in x.items()}
            kernel = self._make_room(x.keys(), y.keys())
            row = self._place(numbers)
            self.values_missing += sum(map(math.isnan, numbers.values()))
        elif known and self.kernel is not None:
            kernel = self.kernel
        else:
            kernel = self._make_room((), y.keys())
        values = [0.0 if self.one_hot else math.nan] * len(self.outputs)
        for name, value in y.items():
            values[self.outputs[name]] = value
        target = np.array(values)
        forecast = kernel.learn(row, target, weight)
        if kernel.renewed:  # the rows that wait show the world as it was
            self.waiting = []
        if kernel.learner.trained:
            self.waiting.append((row, target, weight))
            if len(self.waiting) >= self.every:
                self._step_backbone(kernel)
        return forecast

    def read(self, x: Mapping[Hashable, Any]) -> Floats:
        """A row's values in the model's columns, (p,); unknown names drop.

        Raises
        ------
        ConfigError
            A value of a known name is no number.
        """
        row = self._plain(x)
        if row is None:
            x = as_named(x, "x")
            known = self.features.keys() & x.keys()
            row = self._place({name: as_number(name, x[name]) for name in known})
        return row

    def predict_row(self, row: Floats) -> Floats:
        """Predicted outputs (k,) of a row (p,) as `read` makes it; changes nothing."""
        if self.kernel is None:
            return np.zeros(len(self.outputs))
        return self.kernel.predict(row)

    def predict(self, rows: Floats) -> Floats:
        """Predicted outputs (n, k) of rows (n, p) as `matrix` makes them; changes nothing."""
        learner = self.learner
        if learner is None:
            return np.zeros((len(rows), len(self.outputs)))
        with on_cpu():
            return learner.predict(_imputed(learner, rows)).numpy()

    def predict_dist(self, rows: Floats) -> tuple[Floats, Floats]:
        """Mean and variance of the outputs, (n, k) each, of rows (n, p).

        The variance is the Student t's, taken as if it had at least three degrees of freedom.
        """
        learner = self.learner
        if learner is None:
            nothing = np.zeros((len(rows), len(self.outputs)))
            return nothing, nothing + 1.0
        with on_cpu():
            dist = learner.predict_dist(_imputed(learner, rows))
            dof = dist.dof.clamp_min(3.0)
            variance = dist.scale.square() * dof / (dof - 2)
        return dist.mean.numpy(), variance.numpy()

    def matrix(self, names: Collection[Hashable], values: Floats) -> Floats:
        """Columns of `names`, (n, len(names)), in the model's places, (n, p); unknown ones drop."""
        rows = self._empty(len(values))
        known = [(self.features[n], j) for j, n in enumerate(names) if n in self.features]
        if known:
            places, columns = zip(*known, strict=True)
            rows[:, places] = values[:, columns]
        return rows

    def __getstate__(self) -> State:
        """Plain values and numpy arrays; no optimiser, no module, no function."""
        state = dict(vars(self))
        kernel = state.pop("kernel")
        state.pop("_last")
        state.pop("_take")
        state["config"] = dataclasses.asdict(self.config)
        state["learnt"] = None if kernel is None else _to_numpy(kernel.learner.state())
        state["pending"] = None if kernel is None else [tuple(row) for row in kernel.pending]
        state["began"] = 0 if kernel is None else kernel.began
        return state

    def __setstate__(self, state: State) -> None:
        """Go on from what `__getstate__` returned."""
        state = dict(state)
        learnt, pending, began = (state.pop(key) for key in ("learnt", "pending", "began"))
        vars(self).update(state)
        self.config = RowConfig(**state["config"])
        self.kernel, self._last = None, ((), np.empty(0))
        self._take = _taker(self.features)
        if learnt is not None:
            learner = self._fresh(len(self.features), len(self.outputs))
            with own_modes():
                learner.load_state(_to_torch(learnt))
                noted = [Noted(*row) for row in pending]
                self.kernel = RowKernel(learner, noted, began)

    def _fresh(self, features: int, outputs: int) -> OnlineLearner:
        with torch.inference_mode(False), on_cpu():
            return self.config.build(max(features, 1), outputs, self.one_hot)

    def _make_room(
        self, features: Collection[Hashable], outputs: Collection[Hashable]
    ) -> RowKernel:
        """Give new names their places, and the learner the size for them."""
        known = self.features.keys() >= set(features) and self.outputs.keys() >= set(outputs)
        if self.kernel is not None and known:
            return self.kernel
        places = _placed(features, self.features), _placed(outputs, self.outputs)
        try:
            fresh = self._fresh(*map(len, places))
            with own_modes():
                if self.kernel is not None:
                    self.kernel.settle()
                    self._grow(self.kernel.learner, fresh, len(places[0]))
                kernel = RowKernel(fresh, began=fresh.batches)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise ConfigError(
                f"{len(places[0])} features and {len(places[1])} outputs do not fit the memory: "
                "give fewer, or hash them into fewer"
            ) from error
        # All at once, so that what fails or is interrupted before leaves the model as it was.
        self.features, self.outputs, self._take = *places, _taker(places[0])
        self.kernel, self._last = kernel, ((), np.empty(0))
        return kernel

    def _grow(self, old: OnlineLearner, fresh: OnlineLearner, after: int) -> None:
        """Go on in a learner of more inputs, `after`, or more outputs."""
        seen = float(old.batches) if self.absent == "zero" else 0.0
        before, after = max(len(self.features), 1), max(after, 1)
        fresh.load_state(grown(old, fresh, before, after, seen))
        if fresh.leads_with_inputs and after > before:
            # P is widened by the prior, in the power of the features that the head has seen.
            for part in fresh.parts:
                part.forget_inputs(torch.arange(after) >= before)

    def _plain(self, x: Mapping[Hashable, Any]) -> Floats | None:
        """Values in the model's columns if they are just what is known, and all finite numbers."""
        # Other mappings may make up what they do not hold.
        if type(x) is not dict or len(x) != len(self.features) or not x:
            return None
        try:
            values = self._take(x)
            # A row is predicted and then learnt from: the very same values are the same row.
            if all(map(is_, values, self._last[0])) and self._last[0]:
                return self._last[1]
            row = np.array(values)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        if row.dtype.kind not in "fiub" or row.ndim != 1:
            return None
        row = row.astype(np.float64, copy=False)
        if not holds(row, LARGEST_VALUE):
            return None
        if PLAIN.issuperset(map(type, values)):
            self._last = values, row
        return row

    def _place(self, values: Mapping[Hashable, float]) -> Floats:
        """Values in the model's columns, (p,), all of whose names are known."""
        row = self._empty(1)[0]
        for name, value in values.items():
            row[self.features[name]] = value
        return row

    def _empty(self, count: int) -> Floats:
        """Rows of which nothing is known, (count, p); a model without any name has one column."""
        fill = math.nan if self.absent == "mean" else 0.0
        return np.full((count, max(len(self.features), 1)), fill)

    def _step_backbone(self, kernel: RowKernel) -> None:
        """One gradient step on the rows that wait, in today's scales and at today's W."""
        waiting, self.waiting = self.waiting, []
        x = self._empty(len(waiting))
        y = np.full((len(waiting), len(self.outputs)), 0.0 if self.one_hot else math.nan)
        for i, (row, target, _) in enumerate(waiting):  # names may have come since
            x[i, : len(row)], y[i, : len(target)] = row, target
        kernel.step_backbone(x, y, np.array([weight for *_, weight in waiting]))


def _placed(names: Collection[Hashable], places: dict[Hashable, int]) -> dict[Hashable, int]:
    """The places with those of new names behind them, sorted."""
    new = sorted((name for name in names if name not in places), key=_order)
    if any(name != name for name in new):
        raise ConfigError("a feature or target is named NaN, which equals no name: give it another")
    return places | {name: len(places) + i for i, name in enumerate(new)}


def _taker(names: Collection[Hashable]) -> Callable[[Mapping[Hashable, Any]], tuple[Any, ...]]:
    """What takes the values of these names out of a row, in their order."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda row: tuple(row[name] for name in names)


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NA or NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    try:
        return bool(value != value)
    except ArithmeticError:  # a signalling NaN
        return True


def plain(value: Any) -> Any:
    """The plain value of a scalar of numpy, torch or pyarrow; anything else as it is."""
    if hasattr(value, "as_py"):
        return value.as_py()
    if isinstance(value, (np.datetime64, np.timedelta64)):  # which would become a count
        return value
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def check_every(every: Any) -> None:
    """Refuse what is no number of rows."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"backbone_every is {shown(every)}: give a whole number of rows, 1 or more"
        )


def as_named(values: Any, what: str) -> Mapping[Hashable, Any]:
    """A row as a mapping, such as a dict or a pandas Series.

    Raises
    ------
    ConfigError
        It is none.
    """
    if not hasattr(values, "items") or not hasattr(values, "keys"):
        raise ConfigError(
            f"{what} is a {type(values).__name__} ({shown(values)}): give a dict of numbers by name"
        )
    return values


def as_number(name: Hashable, value: Any) -> float:
    """A feature or target as a float; NaN for None, NaN, infinity and what is far too large.

    Raises
    ------
    ConfigError
        The value is no number.
    """
    number = value if type(value) is float else _converted(name, value)
    return number if abs(number) <= LARGEST_VALUE else math.nan


def _converted(name: Hashable, value: Any) -> float:
    value = plain(value)
    try:
        if isinstance(value, (str, bytes, np.generic)):
            raise TypeError
        return math.nan if is_missing(value) else float(value)
    except OverflowError:
        return math.nan
    except (TypeError, ValueError):
        cure = "give a number, or None where it is missing"
        if isinstance(value, str):
            cure = (
                "give a number, or take KalmanHeadClassifier for classes"
                if name == UNNAMED
                else "give numbers; turn categories into numbers first, by "
                "river.preprocessing.OneHotEncoder for one"
            )
        raise ConfigError(
            f"{shown(name)} is a {type(value).__name__} ({shown(value)}): {cure}"
        ) from None


def _order(name: Hashable) -> tuple[str, str]:
    """A key by which names of any type can be sorted."""
    return type(name).__name__, str(name)


def _imputed(learner: OnlineLearner, rows: Floats) -> Tensor:
    """Rows as a tensor, with the running means where a value is missing."""
    x = torch.from_numpy(rows)
    if learner.scaling.x is None:
        return torch.nan_to_num(x)
    return torch.where(torch.isnan(x), learner.scaling.x.shift, x)


def _to_numpy(node: Any) -> Any:
    """A state with arrays of its own in the place of tensors.

    They keep the tensors' order of dimensions in memory: with another one products would be
    rounded differently, and the model that goes on would not be the same to the last bit.
    """
    if isinstance(node, Tensor):
        return np.array(node.detach().cpu().numpy())
    if isinstance(node, dict):
        return {key: _to_numpy(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_to_numpy(value) for value in node)
    return node


def _to_torch(node: Any) -> Any:
    """Undo `_to_numpy`."""
    if isinstance(node, np.ndarray):
        return torch.from_numpy(node.copy(order="K"))
    if isinstance(node, dict):
        return {key: _to_torch(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_to_torch(value) for value in node)
    return node
