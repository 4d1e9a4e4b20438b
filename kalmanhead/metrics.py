"""Prequential metrics: every row is scored by a prediction made before it was learnt.

All sums are float64 and unweighted: a row of weight 0 or 2 is scored like any other, for the
question is how well the stream was foreseen, not what it was worth to learn from. Means and
squared deviations of the targets are merged by the formula of Chan, Golub and LeVeque (1979),
never taken as ``E[y^2] - E[y]^2``, which loses all digits on targets such as 1000 +- 0.05.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalmanhead.errors import CheckpointError, ConfigError
from kalmanhead.noise import Predictive

Array = NDArray[np.float64]

# The window is kept as about this many blocks of rows, so that its memory does not depend on
# the batch size; `recent` then covers window_rows and at most a block (or a batch) more.
_BLOCKS = 20
# Probability of the interval whose coverage is measured, and how many of the batches that it was
# measured on a summary covers.
LEVEL = 0.9
CALIBRATION_BATCHES = 32

# Rows of the table of a tally, one column per output.
_COUNT, _MEAN, _SST, _SSE, _SAE = range(5)
# Entries of the field sums of a tally, over pairs of sample and channel.
_PAIRS, _RATIOS, _ERROR_NORMS, _TARGET_NORMS, _ZEROS = range(5)


@dataclass
class _Tally:
    """Sufficient statistics of some rows.

    rows: how many. missing: target entries left out. table: (5, k), per output the count and
    mean of its targets, their squared deviations from that mean, squared and absolute errors.
    field: (5,), pairs with a target that is not zero, the sum of their relative errors, the sums
    of error norms and of target norms of all pairs, and pairs whose target is zero throughout.
    """

    rows: int
    missing: int
    table: Array
    field: Array

    @classmethod
    def empty(cls, outputs: int) -> _Tally:
        return cls(0, 0, np.zeros((5, outputs)), np.zeros(5))

    def copy(self) -> _Tally:
        return _Tally(self.rows, self.missing, self.table.copy(), self.field.copy())

    def merge(self, other: _Tally) -> None:
        """Take in the rows of another tally, in place."""
        self.rows += other.rows
        self.missing += other.missing
        self.field += other.field
        ours, theirs = self.table, other.table
        count = ours[_COUNT] + theirs[_COUNT]
        gap = theirs[_MEAN] - ours[_MEAN]
        share = theirs[_COUNT] / np.maximum(count, 1.0)
        ours[_SST] += gap * gap * ours[_COUNT] * share
        ours[_MEAN] += gap * share
        ours[_COUNT] = count
        ours[_SST:] += theirs[_SST:]

    def state(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "missing": self.missing,
            "table": torch.from_numpy(self.table.copy()),
            "field": torch.from_numpy(self.field.copy()),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _Tally:
        table, field = (np.array(state[key].cpu().numpy(), float) for key in ("table", "field"))
        if table.ndim != 2 or table.shape[0] != 5 or field.shape != (5,):
            raise ValueError("sums of the wrong shape")
        return cls(int(state["rows"]), int(state["missing"]), table, field)


class Metrics:
    """Errors over the whole stream and over its last rows, with exact continuation on a resume.

    Parameters
    ----------
    window_rows:
        How many of the last rows `recent` covers, about: it moves in blocks of a twentieth.
    field:
        Whether targets are fields (n, c, *grid), to which relative L2 errors belong.

    Notes
    -----
    ===================== ==========================================================================
    ``rmse``, ``mae``     over all entries that have a target, so the largest scale rules them
    ``r2``                mean over outputs (channels of a field) of 1 - SSE / SST, so no scale
                          rules; outputs whose targets never varied are left out
    ``relative_l2``       fields: mean over samples (and channels, where there are several) of
                          ||prediction - y|| / ||y||; zero targets are left out and counted
    ``relative_l2_ratio`` fields: the sum of all ||prediction - y|| over the sum of all ||y||
    ===================== ==========================================================================

    A target entry that is NaN or infinite is left out everywhere and counted. A prediction that is
    NaN is an error of unknown size: the metrics it enters become None.

    Examples
    --------
    >>> metrics = Metrics()
    >>> for rows in (8, 8, 4):
    ...     metrics.update(torch.zeros(rows, 1), torch.full((rows, 1), 2.0))
    >>> summary = metrics.summary()
    >>> summary["rows"], summary["prequential"]
    (20, {'rmse': 2.0, 'mae': 2.0, 'r2': None})
    """

    def __init__(self, window_rows: int = 1000, field: bool = False) -> None:
        if window_rows < 1:
            raise ConfigError(f"window_rows must be at least 1, got {window_rows}")
        self.window_rows = window_rows
        self.field = field
        self._closed: _Tally | None = None  # all rows but those of the open block
        self._open: _Tally | None = None
        self._window: deque[_Tally] = deque()
        self._window_total = 0
        self._newest: _Tally | None = None
        self._calibration: deque[tuple[float, float, float]] = deque(maxlen=CALIBRATION_BATCHES)
        self._foreseen: dict[str, Any] = {}  # of the batch that `update` gets next
        self._newest_foreseen: dict[str, Any] = {}

    def foresee(self, predictive: Predictive, target: Tensor) -> None:
        """Hold a batch's targets against its predictive distribution, which costs a pass.

        To be called before `update` with the same batch (or a part of it), for as many batches
        as can be afforded. Shapes and missing targets are those of `update`.
        """
        if target.numel() == 0:
            return
        truth = _as_array(target)
        counts = _held(predictive, truth)
        self._calibration.append(counts)
        believed = _believed(predictive, truth, self.field)
        self._foreseen = {**_coverage([counts]), "believed": believed}

    def update(
        self,
        prediction: Tensor,  # (n, k) or (n, c, *grid)
        target: Tensor,  # the same; NaN where missing
    ) -> None:
        """Score one batch of predictions, made before its targets were learnt.

        Raises
        ------
        ConfigError
            The two shapes differ, or the outputs are not those of earlier batches.
        """
        if prediction.shape != target.shape or target.ndim < 1:
            raise ConfigError(
                f"predictions {tuple(prediction.shape)} and targets {tuple(target.shape)} "
                "must have the same shape, rows first"
            )
        self._newest = None
        self._newest_foreseen, self._foreseen = self._foreseen, {}
        if target.numel() == 0:
            return
        batch = _tally(_as_array(prediction), _as_array(target), self.field)
        if self._open is None:
            self._closed = _Tally.empty(batch.table.shape[1])
            self._open = batch
        elif self._open.table.shape != batch.table.shape:
            raise ConfigError(
                f"targets have {batch.table.shape[1]} outputs, earlier ones had "
                f"{self._open.table.shape[1]}; use a Metrics object for each"
            )
        elif self._open.rows == 0:
            self._open = batch
        else:
            self._open.merge(batch)
        self._newest = batch.copy() if self._open is batch else batch
        if self._open.rows * _BLOCKS >= self.window_rows:
            self._close_block()

    def newest(self) -> dict[str, Any]:
        """Errors of the newest batch alone: ``rmse`` and ``mae``, for fields ``relative_l2``.

        Where `foresee` was asked about that batch, also ``coverage``, the share of its targets
        inside the 90 % interval, ``interval``, the mean half width in units of the target, and
        ``believed``, the errors that the predicted variances amount to, under the errors' names.

        Much cheaper than `summary`, so that it can be written down for every batch. Not part of
        the saved state.
        """
        batch = self._newest
        table = np.zeros((5, 1)) if batch is None else batch.table
        count, sse, sae = (float(table[i].sum()) for i in (_COUNT, _SSE, _SAE))
        errors = {
            "rmse": _finite(_ratio(sse, count) ** 0.5),
            "mae": _finite(_ratio(sae, count)),
        }
        if self.field:
            sums = np.zeros(5) if batch is None else batch.field
            errors["relative_l2"] = _finite(_ratio(sums[_RATIOS], sums[_PAIRS]))
        return {**errors, **self._newest_foreseen}

    def summary(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON; None where a metric is undefined.

        Returns
        -------
        dict
            ``rows``, ``prequential`` and ``recent`` (each with the metrics of the table above),
            ``missing_targets`` (entries), ``zero_targets`` (fields: samples x channels) and
            ``calibration``: ``level``, ``coverage`` and ``interval`` (see `newest`) over the last
            ``batches`` that `foresee` was asked about, None where it never was.
        """
        opened = [self._open] if self._open is not None and self._open.rows else []
        everything = ([self._closed] if self._closed is not None else []) + opened
        last = [*self._window, *opened]
        return {
            "rows": sum(tally.rows for tally in everything),
            "prequential": self._measures(everything),
            "recent": self._measures(last),
            "missing_targets": sum(tally.missing for tally in everything),
            "zero_targets": int(sum(tally.field[_ZEROS] for tally in everything)),
            "calibration": self._calibration_summary(),
        }

    def state(self) -> dict[str, Any]:
        """Everything as a plain tree of numbers and tensors, to be saved and loaded bit for bit."""
        return {
            "window_rows": self.window_rows,
            "field": self.field,
            "closed": None if self._closed is None else self._closed.state(),
            "open": None if self._open is None else self._open.state(),
            "window": [tally.state() for tally in self._window],
            "calibration": [list(counts) for counts in self._calibration],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the object is untouched when the state does not fit.

        Raises
        ------
        CheckpointError
            The state belongs to other settings, or is none.
        """
        try:
            if (state["window_rows"], state["field"]) != (self.window_rows, self.field):
                raise CheckpointError(
                    f"metrics were saved with window_rows={state['window_rows']}, "
                    f"field={state['field']}, but this object has window_rows={self.window_rows}, "
                    f"field={self.field}; make it with the saved settings"
                )
            closed, opened = (
                None if state[key] is None else _Tally.from_state(state[key])
                for key in ("closed", "open")
            )
            window = deque(_Tally.from_state(tally) for tally in state["window"])
            # Runs from before it was measured have none.
            counts = [(float(n), float(m), float(s)) for n, m, s in state.get("calibration", [])]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the saved metrics cannot be read ({error!r}); start a new run"
            ) from error
        self._closed, self._open, self._window = closed, opened, window
        self._window_total = sum(tally.rows for tally in window)
        self._calibration = deque(counts, maxlen=CALIBRATION_BATCHES)

    def _close_block(self) -> None:
        assert self._open is not None
        assert self._closed is not None
        block = self._open
        self._closed.merge(block)
        self._window.append(block)
        self._window_total += block.rows
        while self._window_total - self._window[0].rows >= self.window_rows:
            self._window_total -= self._window.popleft().rows
        self._open = _Tally.empty(block.table.shape[1])

    def _calibration_summary(self) -> dict[str, Any] | None:
        if not self._calibration:
            return None
        covered = _coverage(list(self._calibration))
        return {"level": LEVEL, **covered, "batches": len(self._calibration)}

    def _measures(self, tallies: list[_Tally]) -> dict[str, float | None]:
        table, field = _pool(tallies)
        count = float(table[_COUNT].sum())
        measures = {
            "rmse": _finite(_ratio(float(table[_SSE].sum()), count) ** 0.5),
            "mae": _finite(_ratio(float(table[_SAE].sum()), count)),
            "r2": _finite(_r2(table)),
        }
        if self.field:
            measures["relative_l2"] = _finite(_ratio(field[_RATIOS], field[_PAIRS]))
            measures["relative_l2_ratio"] = _finite(
                _ratio(field[_ERROR_NORMS], field[_TARGET_NORMS])
            )
        return measures


def _as_array(values: Tensor) -> Array:
    """(n, k, points) float64 on the CPU; points is 1 for vectors."""
    plain = values.detach().cpu()
    if plain.dtype == torch.bfloat16:  # which numpy does not have
        plain = plain.float()
    outputs = plain.shape[1] if plain.ndim > 1 else 1
    # numpy casts a small array in a tenth of the time that torch takes.
    return plain.numpy().astype(np.float64).reshape(plain.shape[0], outputs, -1)


def _tally(prediction: Array, target: Array, field: bool) -> _Tally:
    n, outputs, points = target.shape
    table = np.empty((5, outputs))
    error = prediction - target
    total = np.add.reduce(target, axis=(0, 2))
    present = None  # all, in the common case, which a finite total proves
    if np.isfinite(total).all():
        table[_COUNT] = n * points
        table[_MEAN] = mean = total / (n * points)
        deviation = target - mean[:, None]
    else:
        present = np.isfinite(target)
        error, target = np.where(present, error, 0.0), np.where(present, target, 0.0)
        table[_COUNT] = count = np.add.reduce(present, axis=(0, 2), dtype=np.float64)
        table[_MEAN] = mean = np.add.reduce(target, axis=(0, 2)) / np.maximum(count, 1.0)
        deviation = np.where(present, target - mean[:, None], 0.0)
    squared = error * error
    np.add.reduce(deviation * deviation, axis=(0, 2), out=table[_SST])
    np.add.reduce(squared, axis=(0, 2), out=table[_SSE])
    np.add.reduce(np.abs(error), axis=(0, 2), out=table[_SAE])
    sums = np.zeros(5)
    if field:
        _field_sums(sums, squared, target, present)
    missing = 0 if present is None else present.size - int(np.count_nonzero(present))
    return _Tally(n, missing, table, sums)


def _field_sums(
    sums: Array, squared: Array, target: Array, present: NDArray[np.bool_] | None
) -> None:
    error_norms = np.sqrt(np.add.reduce(squared, axis=2))  # (n, c)
    norms = np.sqrt(np.add.reduce(target * target, axis=2))
    scored = norms > 0.0
    seen = norms.size if present is None else int(np.count_nonzero(present.any(axis=2)))
    sums[_PAIRS] = np.count_nonzero(scored)
    sums[_RATIOS] = (error_norms[scored] / norms[scored]).sum()
    sums[_ERROR_NORMS] = error_norms.sum()
    sums[_TARGET_NORMS] = norms.sum()
    sums[_ZEROS] = seen - sums[_PAIRS]


def _held(predictive: Predictive, target: Array) -> tuple[float, float, float]:
    """Entries that have a target, those of them in the interval, and the sum of half widths."""
    low, high = (_as_array(end) for end in predictive.interval(LEVEL))
    present = np.isfinite(target)
    held = present & (low <= target) & (target <= high)
    half_widths = float(((high - low) / 2)[present].sum())
    return float(np.count_nonzero(present)), float(np.count_nonzero(held)), half_widths


def _coverage(counts: list[tuple[float, float, float]]) -> dict[str, float | None]:
    targets, held, half_widths = (sum(column) for column in zip(*counts, strict=True))
    return {
        "coverage": _finite(_ratio(held, targets)),
        "interval": _finite(_ratio(half_widths, targets)),
    }


def _believed(predictive: Predictive, target: Array, field: bool) -> dict[str, float | None]:
    """The errors that the predicted variances amount to, over the entries that have a target."""
    present = np.isfinite(target)
    squared = np.where(present, _as_array(predictive.variance), 0.0)
    count = float(np.count_nonzero(present))
    believed = {"rmse": _finite(_ratio(float(squared.sum()), count) ** 0.5)}
    if field:
        sums = np.zeros(5)
        _field_sums(sums, squared, np.where(present, target, 0.0), present)
        believed["relative_l2"] = _finite(_ratio(sums[_RATIOS], sums[_PAIRS]))
    return believed


def _pool(tallies: list[_Tally]) -> tuple[Array, Array]:
    """Table and field sums of all rows of some tallies, in one pass over each statistic."""
    if not tallies:
        return np.zeros((5, 1)), np.zeros(5)
    tables = np.stack([tally.table for tally in tallies])
    counts, means = tables[:, _COUNT], tables[:, _MEAN]
    table: Array = tables.sum(0)
    table[_MEAN] = (counts * means).sum(0) / np.maximum(table[_COUNT], 1.0)
    table[_SST] += (counts * (means - table[_MEAN]) ** 2).sum(0)
    return table, np.sum([tally.field for tally in tallies], axis=0)


def _r2(table: Array) -> float:
    # A constant such as 0.1 leaves a rounding error where its variance should be zero.
    rounding = table[_COUNT] * (4 * np.finfo(np.float64).eps * table[_MEAN]) ** 2
    varied = table[_SST] > rounding
    if not varied.any():
        return float("nan")
    return float(np.mean(1.0 - table[_SSE, varied] / table[_SST, varied]))


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator > 0 else float("nan")


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
