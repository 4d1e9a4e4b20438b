"""The picture of a run: its errors over the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kalmanhead.errors import ConfigError
from kalmanhead.rundir import RunDirectory

# In this order a metric is chosen to be drawn.
NAMES = {"relative_l2": "relative L2 error", "rmse": "RMSE"}
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "recent": ("recent rows", {"color": "tab:blue", "linewidth": 1.8}),
    "prequential": ("all rows so far", {"color": "tab:orange", "linewidth": 1.4}),
}


def is_drawn(batches: int) -> bool:
    """Whether the record after so many batches holds the point of a curve.

    All do at first, then ever fewer: the last half of a stream, however long, has 32 to 64
    points, so that what they cost in time and memory fades.
    """
    return batches % (1 << max(0, batches.bit_length() - 6)) == 0


def save_curve(
    directory: RunDirectory, path: Path, holdout: dict[str, float | None] | None = None
) -> None:
    """Draw the run's prequential and recent error over the rows learnt, and the holdout's error.

    Raises
    ------
    ConfigError
        matplotlib is not installed, there is nothing to draw, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed; pip install 'kalmanhead[plot]' brings it"
        ) from None
    points = [record for record in directory.records() if "recent" in record]
    if not points:
        raise ConfigError(f"{directory.path} has no metrics yet: nothing to draw")
    name = next(name for name in NAMES if name in points[0]["recent"])
    rows = [point["rows"] for point in points]
    curves = {part: [plain(point[part][name]) for point in points] for part in LINES}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marker = "o" if len(points) == 1 else ""
    for part, (label, style) in LINES.items():
        axes.plot(rows, curves[part], label=label, marker=marker, **style)
    level = None if holdout is None else holdout[name]
    if level is not None:
        axes.axhline(level, color="tab:green", linestyle="--", label=f"held-out rows: {level:.4g}")
    values = [value for curve in curves.values() for value in curve if value > 0]
    if values:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel="rows learnt", ylabel=NAMES[name])
    axes.set_title(directory.path.name, fontsize="medium")
    axes.grid(alpha=0.3, which="both")
    axes.margins(x=0.01)
    axes.legend()
    write(figure, path)


def write(figure: Any, path: Path) -> None:
    """Write the picture in the format that its name ends with."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"cannot write {path}: {reason}; give a name such as curve.png"
        ) from error


def plain(value: float | None) -> float:
    """A missing number is a gap in the line."""
    return float("nan") if value is None else value
