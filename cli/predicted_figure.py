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
    if last.values.ndim == 3:
        figure = draw_plane(last.values, level)
    else:
        first = 0 if last.is_field else last.rows - last.values.shape[1]
        figure = draw_line(last.values, first, level)
        figure.axes[0].set(ylabel=name)
        figure.axes[-1].set(xlabel="grid point" if last.is_field else "row")
    what = f"{name} of row {last.rows - 1}" if last.is_field else name
    figure.suptitle(f"{title}: {what}", fontsize="medium")
    return figure


def draw_line(values: Array, first: int, level: float) -> Any:
    """Truth, prediction and interval over rows or grid points, counted from `first`.

    Where the truth is known, the error has a panel below, with the interval that it is held in.
    """
    known = not np.isnan(values[TRUTH]).all()
    figure = new_figure(8, 6 if known else 4.5)
    ratios = (3, 1) if known else (1,)
    panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    at = np.arange(first, first + values.shape[1])
    draw_prediction(panels[0], at, values, f"{100 * level:g}% interval")
    if known:
        draw_error_line(panels[1], at, values)
    return figure


def draw_prediction(axes: Any, at: Array, values: Array, interval: str) -> None:
    """Truth, where it is known, prediction and interval."""
    marker = "o" if len(at) == 1 else ""
    axes.fill_between(at, values[LOW], values[HIGH], color="tab:blue", alpha=0.2, label=interval)
    axes.plot(at, values[MEAN], color="tab:blue", marker=marker, label="prediction")
    if not np.isnan(values[TRUTH]).all():
        axes.plot(at, values[TRUTH], color="black", linewidth=1, marker=marker, label="truth")
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)
    axes.legend()


def draw_error_line(axes: Any, at: Array, values: Array) -> None:
    """Prediction less truth."""
    error, *ends = values[MEAN] - values[[TRUTH, LOW, HIGH]]
    axes.fill_between(at, *ends, color="tab:blue", alpha=0.2)
    axes.plot(at, error, color="tab:red", linewidth=1, marker="o" if len(at) == 1 else "")
    axes.grid(alpha=0.3)
    axes.set_ylabel("error")


def draw_plane(values: Array, level: float) -> Any:
    """Pictures of truth and error, where the truth is known, prediction and half width."""
    known = not np.isnan(values[TRUTH]).all()
    figure = new_figure(16 if known else 8, 4)
    axes = list(figure.subplots(1, 4 if known else 2))
    fields = {"truth": values[TRUTH]} if known else {}
    fields["prediction"] = values[MEAN]
    draw_fields(axes[: len(fields)], fields)
    if known:
        draw_error(axes[2], "error", values[MEAN] - values[TRUTH])
    half_width = (values[HIGH] - values[LOW]) / 2
    spread = axes[-1].imshow(half_width, origin="lower", cmap="magma", vmin=0)
    axes[-1].set_title(f"half width of the {100 * level:g}% interval", fontsize="medium")
    figure.colorbar(spread, ax=axes[-1], shrink=0.8)
    return figure


def draw_fields(axes: list[Any], fields: dict[str, Array], **how: Any) -> None:
    """Pictures on one scale, so that equal colours are equal values."""
    every = np.stack(list(fields.values()))
    scale = {"vmin": np.nanmin(every), "vmax": np.nanmax(every)}
    for own, (label, field) in zip(axes, fields.items(), strict=True):
        image = own.imshow(field, **{"origin": "lower", **scale, **how})
        own.set_title(label, fontsize="medium")
    axes[0].figure.colorbar(image, ax=axes, shrink=0.8)


def draw_error(axes: Any, label: str, error: Array, **how: Any) -> None:
    """A picture of what is white where there is none of it."""
    most = np.nanmax(np.abs(error))
    scale = {"vmin": -most, "vmax": most, "cmap": "RdBu_r"}
    image = axes.imshow(error, **{"origin": "lower", **scale, **how})
    axes.set_title(label, fontsize="medium")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
