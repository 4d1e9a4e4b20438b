"""The loop: predict a batch, score it, learn it, and know where the stream goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kalmanhead.batch import Batch, Cursor
from kalmanhead.errors import ConfigError
from kalmanhead.learner import OnlineLearner
from kalmanhead.metrics import Metrics

State = dict[str, Any]


@dataclass
class Progress:
    """How far a run has come, and how well it has done; saved with every checkpoint.

    Attributes
    ----------
    metrics:
        Prequential metrics: every row scored before it was learnt.
    batches, rows:
        Batches learnt and rows in them, over all epochs.
    bad_rows:
        Rows that were left out.
    seconds:
        Time spent in the loop, over all resumes.
    cursor:
        Where the stream goes on.
    """

    metrics: Metrics = field(default_factory=Metrics)
    batches: int = 0
    rows: int = 0
    bad_rows: int = 0
    seconds: float = 0.0
    cursor: Cursor = field(default_factory=Cursor)

    def state(self) -> State:
        """What must be kept to go on exactly: plain values and tensors."""
        return {
            "metrics": self.metrics.state(),
            "batches": self.batches,
            "rows": self.rows,
            "bad_rows": self.bad_rows,
            "seconds": self.seconds,
            "epoch": self.cursor.epoch,
            "row": self.cursor.row,
        }

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned."""
        self.metrics.load_state(state["metrics"])
        self.batches, self.rows = state["batches"], state["rows"]
        self.bad_rows, self.seconds = state["bad_rows"], state["seconds"]
        self.cursor = Cursor(state["epoch"], state["row"])

    def summary(self) -> State:
        """Plain numbers for people and JSON; see `Metrics.summary` for the errors."""
        return {
            **self.metrics.summary(),
            "rows": self.rows,
            "batches": self.batches,
            "seconds": self.seconds,
            "rows_per_second": self.rows / self.seconds if self.seconds > 0 else None,
            "bad_rows": self.bad_rows,
        }


OnBatch = Callable[[Progress, Batch, Tensor], None]


def learn_stream(
    learner: OnlineLearner,
    batches: Iterable[Batch],
    progress: Progress,
    *,
    max_batches: int | None = None,
    on_batch: Iterable[OnBatch] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Test, then train, on every batch.

    Parameters
    ----------
    learner, progress:
        Changed in place. After each batch they agree: `progress.cursor` is the position after
        the last batch that was learnt, so a checkpoint of both resumes exactly.
    batches:
        A stream's batches, from `progress.cursor` on.
    max_batches:
        Stop once `progress.batches` has come to this.
    on_batch:
        Called as f(progress, batch, prediction) after each batch was learnt.
    should_stop:
        Asked after each batch; True ends the loop there.

    Returns
    -------
    bool
        Whether the stream came to its end.

    Examples
    --------
    >>> import torch
    >>> from kalmanhead.config import ModelConfig, build_learner
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> learner = build_learner(ModelConfig(backbone="linear", head="static"), (1,), (1,))
    >>> progress = Progress()
    >>> learn_stream(learner, [Batch(x, 2 * x), Batch(x, 2 * x)], progress)
    True
    >>> progress.rows
    128
    """
    callbacks = list(on_batch)
    iterator = iter(batches)
    try:
        while True:
            if max_batches is not None and progress.batches >= max_batches:
                return False
            started = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return True
            prediction = step_batch(learner, batch)
            progress.metrics.update(prediction, batch.y)
            progress.batches += 1
            progress.rows += len(batch)
            progress.bad_rows += batch.bad_rows
            progress.cursor = batch.cursor
            progress.seconds += time.perf_counter() - started
            for callback in callbacks:
                callback(progress, batch, prediction)
            if should_stop():
                return False
    finally:
        # Ends a reading thread at once instead of when the garbage is collected.
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def step_batch(learner: OnlineLearner, batch: Batch) -> Tensor:
    """Predict a batch, then learn what may be learnt by now; returns the prediction."""
    if batch.due is None:
        return learner.step(batch.x, batch.y, batch.weight)
    prediction = learner.predict(batch.x)
    learner.learn(*batch.due)
    return prediction


def evaluate(learner: OnlineLearner, batches: Iterable[Batch], *, field: bool) -> Metrics:
    """Score a learner on batches without learning from them."""
    metrics = Metrics(window_rows=1, field=field)
    for batch in batches:
        metrics.update(learner.predict(batch.x), batch.y)
    return metrics


def rollout(
    learner: OnlineLearner,
    x0: Tensor,  # (n, c, *grid) or (n, d)
    steps: int,
) -> Tensor:
    """Predict from the learner's own predictions: steps 1, 2, ... after the states x0.

    A state that is no longer finite stays NaN, without a word; nothing is learnt.

    Returns
    -------
    Tensor
        (n, steps, c, *grid), in the dtype of the predictions; `kalmanhead.fields.rollout_errors`
        holds it against the truth.

    Raises
    ------
    ConfigError
        The learner's targets are not of the shape of its inputs, or `steps` is below 1.

    Examples
    --------
    >>> from kalmanhead.config import ModelConfig, build_learner
    >>> learner = build_learner(ModelConfig(backbone="linear", head="ridge", lam=1e-9), (1,), (1,))
    >>> x = torch.linspace(-1, 1, 64)[:, None].double()
    >>> for _ in range(3):
    ...     learner.learn(x, 0.5 * x)
    >>> rollout(learner, torch.tensor([[8.0]]).double(), 3).flatten().round(decimals=6).tolist()
    [4.0, 2.0, 1.0]
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}: a roll-out has at least 1")
    states, x = [], x0
    for _ in range(steps):
        x = _next_state(learner, x)
        states.append(x)
    return torch.stack(states, 1)


def _next_state(learner: OnlineLearner, x: Tensor) -> Tensor:
    alive = x.isfinite().flatten(1).all(1)
    if not alive.any():
        return torch.full_like(x, math.nan)
    y = learner.predict(x[alive])
    if y.shape[1:] != x.shape[1:]:
        raise ConfigError(
            f"a roll-out needs predictions of the inputs' own shape: inputs are "
            f"{tuple(x.shape[1:])}, predictions {tuple(y.shape[1:])}; learn from u(t) as x and "
            "u(t + 1) as y"
        )
    after = y.new_full(x.shape, math.nan)
    after[alive.to(y.device)] = y
    return after
