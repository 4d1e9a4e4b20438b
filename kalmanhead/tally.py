"""Sums over rows from which errors follow: small, mergeable, and saved bit for bit.

All sums are float64 and unweighted: a row of weight 0 or 2 is scored like any other, for the
question is how well the stream was foreseen, not what it was worth to learn from. Means and
squared deviations of the targets are merged by the formula of Chan, Golub and LeVeque (1979),
never taken as ``E[y^2] - E[y]^2``, which loses all digits on targets such as 1000 +- 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kalmanhead.fields import (
    Array,
    l2_norms,
    mean_defined,
    relative,
    relative_h1,
    relative_rms,
)

# Rows of the table of a tally, one column per output.
_COUNT, _MEAN, _SST, _SSE, _SAE = range(5)
# Entries of the field sums of a tally, over pairs of sample and channel.
_PAIRS, _RATIOS, _ERROR_NORMS, _TARGET_NORMS, _ZEROS, _H1_PAIRS, _H1_RATIOS = range(7)
_OLD_FIELD_SUMS = 5  # without H1, as runs were saved before it was measured


@dataclass
class Tally:
    """Sufficient statistics of some rows.

    Attributes
    ----------
    rows, missing:
        How many rows, and target entries that were left out.
    table:
        (5, k), per output the count and mean of its targets, their squared deviations from that
        mean, squared and absolute errors.
    field:
        (7,), pairs with a target that is not zero, the sum of their relative errors, the sums of
        error norms and of target norms of all pairs, pairs whose target is zero throughout; pairs
        with a relative error in H1, and the sum of these.
    """

    rows: int
    missing: int
    table: Array
    field: Array

    @classmethod
    def empty(cls, outputs: int) -> Tally:
        """Of no rows."""
        return cls(0, 0, np.zeros((5, outputs)), np.zeros(7))

    @classmethod
    def of(cls, prediction: Array, target: Array, *, field: bool) -> Tally:
        """Of a batch, (n, k, *grid) each."""
        n, k = target.shape[:2]
        error, y = (v.reshape(n, k, -1) for v in (prediction - target, target))
        total = np.add.reduce(y, axis=(0, 2))
        # In the common case all are there, which a finite total proves.
        present = None if np.isfinite(total).all() else np.isfinite(y)
        if present is not None:
            error, y = np.where(present, error, 0.0), np.where(present, y, 0.0)
            total = np.add.reduce(y, axis=(0, 2))
        squared = error * error
        sums = np.zeros(7)
        if field:
            sums[:_H1_PAIRS] = _l2_sums(squared, y, present)
            sums[_H1_PAIRS:] = _count_and_sum(relative_h1(prediction, target))
        missing = 0 if present is None else present.size - int(np.count_nonzero(present))
        return cls(n, missing, _table(error, squared, y, total, present), sums)

    @property
    def outputs(self) -> int:
        """How many outputs a row has."""
        return self.table.shape[1]

    @property
    def zeros(self) -> int:
        """Pairs of sample and channel whose target is zero throughout."""
        return int(self.field[_ZEROS])

    def copy(self) -> Tally:
        """The same, in memory of its own."""
        return Tally(self.rows, self.missing, self.table.copy(), self.field.copy())

    def merge(self, other: Tally) -> None:
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
        """Plain numbers and tensors."""
        return {
            "rows": self.rows,
            "missing": self.missing,
            "table": torch.from_numpy(self.table.copy()),
            "field": torch.from_numpy(self.field.copy()),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Tally:
        """What `state` returned; ValueError where it is of another shape."""
        table, field = (np.array(state[key].cpu().numpy(), float) for key in ("table", "field"))
        if field.shape == (_OLD_FIELD_SUMS,):
            field = np.append(field, [0.0, 0.0])
        if table.ndim != 2 or table.shape[0] != 5 or field.shape != (7,):
            raise ValueError("sums of the wrong shape")
        return cls(int(state["rows"]), int(state["missing"]), table, field)


def errors_of(tally: Tally, *, field: bool) -> dict[str, float | None]:
    """The errors that are had at once: ``rmse``, ``mae`` and, for fields, ``relative_l2``."""
    count = float(tally.table[_COUNT].sum())
    errors = {
        "rmse": finite(ratio(float(tally.table[_SSE].sum()), count) ** 0.5),
        "mae": finite(ratio(float(tally.table[_SAE].sum()), count)),
    }
    if field:
        errors["relative_l2"] = finite(ratio(tally.field[_RATIOS], tally.field[_PAIRS]))
    return errors


def measures_of(tally: Tally, *, field: bool) -> dict[str, float | None]:
    """All errors; see `kalmanhead.metrics.Metrics`."""
    errors = errors_of(tally, field=field)
    measures = {"rmse": errors["rmse"], "mae": errors["mae"], "r2": finite(_r2(tally.table))}
    if field:
        table, sums = tally.table, tally.field
        squares = table[_SST] + table[_COUNT] * table[_MEAN] ** 2
        measures["nrmse"] = finite(mean_defined(relative_rms(table[_SSE], squares)))
        measures["relative_l2"] = errors["relative_l2"]
        measures["relative_l2_ratio"] = finite(ratio(sums[_ERROR_NORMS], sums[_TARGET_NORMS]))
        measures["relative_h1"] = finite(ratio(sums[_H1_RATIOS], sums[_H1_PAIRS]))
    return measures


def pooled(tallies: Sequence[Tally]) -> Tally:
    """All rows of some tallies, in one pass over each statistic."""
    if not tallies:
        return Tally.empty(1)
    tables = np.stack([tally.table for tally in tallies])
    counts, means = tables[:, _COUNT], tables[:, _MEAN]
    table: Array = tables.sum(0)
    table[_MEAN] = (counts * means).sum(0) / np.maximum(table[_COUNT], 1.0)
    table[_SST] += (counts * (means - table[_MEAN]) ** 2).sum(0)
    rows, missing = (sum(getattr(t, name) for t in tallies) for name in ("rows", "missing"))
    return Tally(rows, missing, table, np.sum([tally.field for tally in tallies], axis=0))


def _table(
    error: Array, squared: Array, y: Array, total: Array, present: NDArray[np.bool_] | None
) -> Array:
    n, k, points = y.shape
    table = np.empty((5, k))
    if present is None:
        table[_COUNT] = n * points
    else:
        table[_COUNT] = np.add.reduce(present, axis=(0, 2), dtype=np.float64)
    table[_MEAN] = mean = total / np.maximum(table[_COUNT], 1.0)
    deviation = y - mean[:, None]
    if present is not None:
        deviation = np.where(present, deviation, 0.0)
    np.add.reduce(deviation * deviation, axis=(0, 2), out=table[_SST])
    np.add.reduce(squared, axis=(0, 2), out=table[_SSE])
    np.add.reduce(np.abs(error), axis=(0, 2), out=table[_SAE])
    return table


def _l2_sums(squared: Array, y: Array, present: NDArray[np.bool_] | None) -> list[float]:
    error_norms, norms = l2_norms(squared), l2_norms(y * y)  # (n, c)
    seen = norms.size if present is None else int(np.count_nonzero(present.any(axis=2)))
    pairs, ratios = _count_and_sum(relative(error_norms, norms))
    return [pairs, ratios, float(error_norms.sum()), float(norms.sum()), seen - pairs]


def _count_and_sum(errors: Array) -> tuple[float, float]:
    """Of those that are defined."""
    defined = errors[~np.isnan(errors)]
    return float(defined.size), float(defined.sum())


def _r2(table: Array) -> float:
    # A constant such as 0.1 leaves a rounding error where its variance should be zero.
    rounding = table[_COUNT] * (4 * np.finfo(np.float64).eps * table[_MEAN]) ** 2
    varied = table[_SST] > rounding
    if not varied.any():
        return float("nan")
    return float(np.mean(1.0 - table[_SSE, varied] / table[_SST, varied]))


def ratio(numerator: float, denominator: float) -> float:
    """Quotient of two sums; NaN where nothing was summed."""
    return float(numerator) / float(denominator) if denominator > 0 else float("nan")


def finite(value: float) -> float | None:
    """The number, or None for one that is none."""
    return float(value) if math.isfinite(value) else None
