"""The picture of predictions: what came, what was predicted, and the interval around it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kalmanhead.cli.figure import new_figure
from kalmanhead.cli.predictions import Array, Predicted
from kalmanhead.errors import ConfigError

MOST_ROWS = 500
TRUTH, MEAN, LOW, HIGH = range(4)


class LastPredictions:
    """The end of what was predicted, of the first output: rows, or the last field.

    Attributes
    ----------
    values:
        Truth (NaN where it is not known), prediction and ends of the interval: (4, rows) of
        vectors, (4, *grid) of fields; None before the first batch.
    rows:
        Rows that were predicted.
    """

    def __init__(self, *, is_field: bool) -> None:
        self.is_field = is_field
        self.values: Array | None = None
        self.rows = 0

    def add(self, predicted: Predicted, truth: Array) -> None:
        """Take in a batch of at least one row."""
        self.rows += len(truth)
        kept = 1 if self.is_field else MOST_ROWS
        parts = (truth, predicted.mean, predicted.low, predicted.high)
        new = np.stack([part[-kept:, 0] for part in parts])  # (4, n) or (4, 1, *grid)
        if self.is_field:
            self.values = new[:, 0]
        else:
            before = new[:, :0] if self.values is None else self.values
            self.values = np.concatenate([before, new], axis=1)[:, -MOST_ROWS:]


def predicted_figure(last: LastPredictions, name: str, level: float, title: str) -> Any:
    """Draw predictions over rows or over the grid; of a field on a plane, a picture each.

    Raises
    ------
    ConfigError
        No row was predicted.
    """
    if last.values is None:
        raise ConfigError("no row was predicted: nothing to draw; give a source with rows")
    figure = draw_plane(last.values, level) if last.values.ndim == 3 else None
    if figure is None:
        first = 0 if last.is_field else last.rows - last.values.shape[1]
        figure = draw_line(last.values, first, level)
        figure.axes[0].set(xlabel="grid point" if last.is_field else "row", ylabel=name)
    what = f"{name} of row {last.rows - 1}" if last.is_field else name
    figure.suptitle(f"{title}: {what}", fontsize="medium")
    return figure


def draw_line(values: Array, first: int, level: float) -> Any:
    """Truth, prediction and interval over rows or grid points, counted from `first`."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    at = np.arange(first, first + values.shape[1])
    marker = "o" if len(at) == 1 else ""
    axes.fill_between(
        at,
        values[LOW],
        values[HIGH],
        color="tab:blue",
        alpha=0.2,
        label=f"{100 * level:g}% interval",
    )
    axes.plot(at, values[MEAN], color="tab:blue", marker=marker, label="prediction")
    if not np.isnan(values[TRUTH]).all():
        axes.plot(at, values[TRUTH], color="black", linewidth=1, marker=marker, label="truth")
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)
    axes.legend()
    return figure


def draw_plane(values: Array, level: float) -> Any:
    """Pictures of truth, where it is known, prediction and half the interval's width."""
    half_width = (values[HIGH] - values[LOW]) / 2
    fields = [("prediction", values[MEAN])]
    if not np.isnan(values[TRUTH]).all():
        fields.insert(0, ("truth", values[TRUTH]))
    figure = new_figure(4 * (len(fields) + 1), 4)
    axes = figure.subplots(1, len(fields) + 1)
    # One scale for both, so that equal colours are equal values.
    every = np.stack([field for _, field in fields])
    scale = {"vmin": np.nanmin(every), "vmax": np.nanmax(every)}
    for own, (label, field) in zip(axes, fields, strict=False):
        image = own.imshow(field, origin="lower", **scale)
        own.set_title(label, fontsize="medium")
    figure.colorbar(image, ax=list(axes[:-1]), shrink=0.8)
    spread = axes[-1].imshow(half_width, origin="lower", cmap="magma", vmin=0)
    axes[-1].set_title(f"half width of the {100 * level:g}% interval", fontsize="medium")
    figure.colorbar(spread, ax=axes[-1], shrink=0.8)
    return figure
