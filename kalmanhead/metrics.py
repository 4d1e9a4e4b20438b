"""Prequential metrics: every row is scored by a prediction made before it was learnt."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

from kalmanhead.errors import CheckpointError, ConfigError
from kalmanhead.fields import Array, as_array, l2_norms, mean_defined, pair, relative
from kalmanhead.noise import Predictive
from kalmanhead.tally import Tally, errors_of, finite, measures_of, pooled, ratio

# The window is kept as about this many blocks of rows, so that its memory does not depend on
# the batch size; `recent` then covers window_rows and at most a block (or a batch) more.
_BLOCKS = 20
# Probability of the interval whose coverage is measured, and how many of the batches that it was
# measured on a summary covers.
LEVEL = 0.9
CALIBRATION_BATCHES = 32


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
    ``nrmse``             fields: mean over channels of the root mean square error over the root
                          mean square target, each over all rows
    ``relative_l2``       fields: mean over samples (and channels, where there are several) of
                          ||prediction - y|| / ||y||; zero targets are left out and counted
    ``relative_l2_ratio`` fields: the sum of all ||prediction - y|| over the sum of all ||y||
    ``relative_h1``       fields: as ``relative_l2``, with the gradient in the norms, on a periodic
                          grid of unit side; targets with a missing entry are left out
    ===================== ==========================================================================

    The formulas of fields, with their sources, are in `kalmanhead.fields`; what PDEBench calls
    nRMSE is ``relative_l2``.

    A target entry that is NaN or infinite is left out everywhere and counted. A prediction that is
    NaN is an error of unknown size: the metrics it enters become None.

    Examples
    --------
    >>> import torch
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
        self._closed: Tally | None = None  # all rows but those of the open block
        self._open: Tally | None = None
        self._window: deque[Tally] = deque()
        self._window_total = 0
        self._newest: Tally | None = None
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
        truth = as_array(target)
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
        p, y = pair(prediction, target)
        self._newest = None
        self._newest_foreseen, self._foreseen = self._foreseen, {}
        if target.numel() == 0:
            return
        batch = Tally.of(p, y, field=self.field)
        if self._open is None:
            self._closed = Tally.empty(batch.outputs)
            self._open = batch
        elif self._open.outputs != batch.outputs:
            raise ConfigError(
                f"targets have {batch.outputs} outputs, earlier ones had {self._open.outputs}; "
                "use a Metrics object for each"
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
        newest = Tally.empty(1) if self._newest is None else self._newest
        errors = errors_of(newest, field=self.field)
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
            "prequential": measures_of(pooled(everything), field=self.field),
            "recent": measures_of(pooled(last), field=self.field),
            "missing_targets": sum(tally.missing for tally in everything),
            "zero_targets": sum(tally.zeros for tally in everything),
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
                None if state[key] is None else Tally.from_state(state[key])
                for key in ("closed", "open")
            )
            window = deque(Tally.from_state(tally) for tally in state["window"])
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
        self._open = Tally.empty(block.outputs)

    def _calibration_summary(self) -> dict[str, Any] | None:
        if not self._calibration:
            return None
        covered = _coverage(list(self._calibration))
        return {"level": LEVEL, **covered, "batches": len(self._calibration)}


def _held(predictive: Predictive, target: Array) -> tuple[float, float, float]:
    """Entries that have a target, those of them in the interval, and the sum of half widths."""
    low, high = (as_array(end) for end in predictive.interval(LEVEL))
    present = np.isfinite(target)
    held = present & (low <= target) & (target <= high)
    half_widths = float(((high - low) / 2)[present].sum())
    return float(np.count_nonzero(present)), float(np.count_nonzero(held)), half_widths


def _coverage(counts: list[tuple[float, float, float]]) -> dict[str, float | None]:
    targets, held, half_widths = (sum(column) for column in zip(*counts, strict=True))
    return {
        "coverage": finite(ratio(held, targets)),
        "interval": finite(ratio(half_widths, targets)),
    }


def _believed(predictive: Predictive, target: Array, field: bool) -> dict[str, float | None]:
    """The errors that the predicted variances amount to, over the entries that have a target."""
    present = np.isfinite(target)
    squared = np.where(present, as_array(predictive.variance), 0.0)
    count = float(np.count_nonzero(present))
    believed = {"rmse": finite(ratio(float(squared.sum()), count) ** 0.5)}
    if field:
        norms = l2_norms(np.where(present, target, 0.0) ** 2)
        believed["relative_l2"] = finite(mean_defined(relative(l2_norms(squared), norms)))
    return believed
