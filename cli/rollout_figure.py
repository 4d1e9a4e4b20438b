"""The picture of roll-outs: errors over steps, spectra at the last, and fields beside the truth."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kalmanhead.cli.figure import log_axis, new_figure
from kalmanhead.cli.predicted_figure import draw_error, draw_fields
from kalmanhead.fields import Array, RolloutErrors, energy_spectrum


class RolledOut(NamedTuple):
    """Roll-outs and what came: fields are (n, steps, c, *grid)."""

    starts: list[int]
    predicted: Array
    truth: Array
    errors: RolloutErrors
    persistence: RolloutErrors
    name: str


def rollout_figure(rolled: RolledOut, title: str) -> Any:
    """Draw it; the fields are those of the first roll-out's first channel."""
    figure = new_figure(12, 8)
    upper, lower = figure.subfigures(2, 1)
    left, right = upper.subplots(1, 2)
    draw_steps(left, rolled)
    draw_spectra(right, rolled)
    axes = list(lower.subplots(1, 3))
    if rolled.truth.ndim == 4:
        draw_over_time(axes, rolled)
    else:
        draw_frame(axes, rolled)
    many = len(rolled.starts)
    what = f"{many} roll-outs" if many > 1 else "a roll-out"
    figure.suptitle(f"{title}: {what} of {rolled.name}", fontsize="medium")
    return figure


def draw_steps(axes: Any, rolled: RolledOut) -> None:
    """Relative L2 error of each step, of the learner and of persistence."""
    steps = np.arange(1, len(rolled.errors.relative_l2) + 1)
    marker = "o" if len(steps) == 1 else ""
    for label, errors in (("learner", rolled.errors), ("persistence", rolled.persistence)):
        drawn = np.where(np.isfinite(errors.relative_l2), errors.relative_l2, np.nan)
        axes.plot(steps, drawn, label=label, marker=marker)
    threshold = rolled.errors.threshold
    axes.axhline(threshold, color="gray", linestyle=":", label=f"threshold {threshold:g}")
    axes.set_yscale("log")
    log_axis(axes.yaxis, most=12)
    axes.set(xlabel="step", ylabel="relative L2 error")
    axes.grid(alpha=0.3)
    axes.legend()


def draw_spectra(axes: Any, rolled: RolledOut) -> None:
    """Energy by wave number at the last step, of the roll-outs that are finite there."""
    truth, predicted = rolled.truth[:, -1], rolled.predicted[:, -1]
    every = tuple(range(1, truth.ndim))
    known, alive = (np.isfinite(values).all(every) for values in (truth, predicted))
    both = known & alive if (known & alive).any() else known
    for label, values, color in (
        ("truth", truth[both], "black"),
        ("prediction", predicted[both & alive], "tab:blue"),
        ("error", (predicted - truth)[both & alive], "tab:red"),
    ):
        if len(values):
            k, energy = energy_spectrum(values)
            axes.plot(k[1:], np.where(energy > 0, energy, np.nan)[1:], label=label, color=color)
    axes.set(xscale="log", yscale="log", xlabel="wave number", ylabel="energy")
    axes.set_title(f"step {last_step(rolled)}", fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.lines:
        log_axis(axes.xaxis, most=12)
        axes.legend()


def draw_over_time(axes: list[Any], rolled: RolledOut) -> None:
    """Of lines: the grid from left to right, time upwards."""
    truth, predicted = rolled.truth[0, :, 0], rolled.predicted[0, :, 0]
    steps, points = truth.shape
    how = {"aspect": "auto", "extent": (-0.5, points - 0.5, 0.5, steps + 0.5)}
    draw_beside(axes, truth, predicted, f"from row {rolled.starts[0]}", **how)
    for own in axes:
        own.set_xlabel("grid point")
    axes[0].set_ylabel("step")


def draw_frame(axes: list[Any], rolled: RolledOut) -> None:
    """Of planes: where the threshold is passed, or the last step."""
    step = rolled.errors.steps_until or last_step(rolled)
    truth, predicted = (values[0, step - 1, 0] for values in (rolled.truth, rolled.predicted))
    draw_beside(axes, truth, predicted, f"step {step} from row {rolled.starts[0]}")


def draw_beside(axes: list[Any], truth: Array, predicted: Array, where: str, **how: Any) -> None:
    """Truth, prediction and error in the truth's colours, beyond which a roll-out may be far."""
    known = truth[np.isfinite(truth)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    span = high - low or 1.0
    shown = np.clip(predicted, low - span, high + span)
    fields = {f"truth, {where}": truth, "prediction": shown}
    draw_fields(axes[:2], fields, vmin=low, vmax=low + span, **how)
    error = np.clip(predicted - truth, -span, span)
    finite = np.abs(error[np.isfinite(error)])
    most = finite.max() if finite.size and finite.max() > 0 else span
    draw_error(axes[2], "error", error, vmin=-most, vmax=most, **how)


def last_step(rolled: RolledOut) -> int:
    """Number of the last step, counted from 1."""
    return rolled.truth.shape[1]
