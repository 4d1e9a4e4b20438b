"""The picture of a run: its errors over the rows, and what its bank of heads came to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kalmanhead.cli.figure import check_picture, log_axis, new_figure, write
from kalmanhead.errors import ConfigError
from kalmanhead.rundir import RunDirectory

Record = dict[str, Any]

# In this order a metric is chosen to be drawn.
NAMES = {"relative_l2": "relative L2 error", "rmse": "RMSE"}
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "recent": ("recent rows", {"color": "tab:blue", "linewidth": 1.8}),
    "prequential": ("all rows so far", {"color": "tab:orange", "linewidth": 1.4}),
}
# Of the same batches, so that the two can be held against each other.
ERROR = ("each batch", {"color": "gray", "linestyle": "", "marker": ".", "alpha": 0.5})
BELIEF = ("as believed beforehand", {"color": "black", "linewidth": 1.0, "linestyle": ":"})
BANK = {"lambda": ("effective lambda", "tab:purple"), "memory": ("memory, rows", "tab:brown")}


def is_drawn(batches: int) -> bool:
    """Whether the record after so many batches holds the point of a curve.

    All do at first, then ever fewer: the last half of a stream, however long, has 32 to 64
    points, so that what they cost in time and memory fades.
    """
    return batches % (1 << max(0, batches.bit_length() - 6)) == 0


def save_curve(
    directory: RunDirectory, path: Path, holdout: dict[str, float | None] | None = None
) -> None:
    """Draw the run's errors over the rows learnt, the holdout's error, and its bank of heads.

    Raises
    ------
    ConfigError
        matplotlib is not installed, there is nothing to draw, or the file cannot be written.
    """
    check_picture(path)
    points = [record for record in directory.records() if "recent" in record]
    if not points:
        raise ConfigError(f"{directory.path} has no metrics yet: nothing to draw")
    write(curve_figure(points, directory.path.name, holdout), path)


def curve_figure(
    points: Sequence[Record], title: str, holdout: dict[str, float | None] | None = None
) -> Any:
    """The picture from the records that hold points; without a bank it has one panel."""
    from matplotlib.ticker import EngFormatter

    with_bank = any("lambda" in point for point in points)
    if with_bank:
        figure = new_figure(8, 6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        draw_bank(lower, points)
    else:
        figure = new_figure(8, 4.5)
        upper = lower = figure.subplots()
    draw_errors(upper, points, holdout)
    upper.set_title(title, fontsize="medium")
    lower.xaxis.set_major_formatter(EngFormatter(sep=""))
    lower.set_xlabel("rows learnt")
    return figure


def draw_errors(
    axes: Any, points: Sequence[Record], holdout: dict[str, float | None] | None
) -> None:
    """Errors that were made, and those that the model believed it would make."""
    name = next(name for name in NAMES if name in points[0]["recent"])
    rows = [point["rows"] for point in points]
    curves = [(*LINES[part], [plain(point[part][name]) for point in points]) for part in LINES]
    if any("believed" in point for point in points):
        curves.append((*ERROR, [plain(point[name]) for point in points]))
        curves.append((*BELIEF, [plain(point.get("believed", {}).get(name)) for point in points]))
    for label, style, values in curves:
        axes.plot(rows, values, **{"label": label, "marker": marker(points), **style})
    level = None if holdout is None else holdout[name]
    if level is not None:
        axes.axhline(level, color="tab:green", linestyle="--", label=f"held-out rows: {level:.4g}")
    if any(value > 0 for _, _, values in curves for value in values):
        axes.set_yscale("log")
        log_axis(axes.yaxis, most=15)
    axes.set_ylabel(NAMES[name])
    axes.grid(alpha=0.3, which="both")
    axes.margins(x=0.01)
    axes.legend()


def draw_bank(axes: Any, points: Sequence[Record]) -> None:
    """Effective lambda and memory of the bank, each on an axis of its own."""
    rows = [point["rows"] for point in points]
    for own, (key, (label, color)) in zip((axes, axes.twinx()), BANK.items(), strict=True):
        values = [plain(point.get(key)) for point in points]
        own.plot(rows, values, color=color, marker=marker(points), linewidth=1.4)
        own.set_ylabel(label, color=color)
        own.tick_params(axis="y", labelcolor=color)
        if any(value > 0 for value in values):
            own.set_yscale("log")
            log_axis(own.yaxis, most=6)
    axes.grid(alpha=0.3)


def marker(points: Sequence[Record]) -> str:
    """A single point makes no line."""
    return "o" if len(points) == 1 else ""


def plain(value: float | None) -> float:
    """A missing number is a gap in the line."""
    return float("nan") if value is None else value
