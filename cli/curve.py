"""The picture of a run: its errors over the rows."""

from __future__ import annotations

from pathlib import Path

from kalmanhead.errors import ConfigError
from kalmanhead.rundir import RunDirectory


def save_curve(directory: RunDirectory, path: Path) -> None:
    """Draw the run's prequential and recent error over the rows learnt.

    Raises
    ------
    ConfigError
        matplotlib is not installed, there is nothing to draw, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed; pip install 'kalmanhead[plot]' brings it"
        ) from None
    records = list(directory.records())
    if not records:
        raise ConfigError(f"{directory.path} has no metrics yet: nothing to draw")
    name = "relative_l2" if "relative_l2" in records[0]["recent"] else "rmse"
    step = max(1, len(records) // 2000)
    shown = records[::step] + ([records[-1]] if (len(records) - 1) % step else [])
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [record["rows"] for record in shown]
    for part, style in (("recent", "-"), ("prequential", "--")):
        axes.plot(rows, [plain(record[part][name]) for record in shown], style, label=part)
    axes.set(xlabel="rows learnt", ylabel=name.replace("_", " "), title=directory.path.name)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}; give a name such as curve.png") from error


def plain(value: float | None) -> float:
    """A missing number is a gap in the line."""
    return float("nan") if value is None else value
