"""What every picture needs: matplotlib, a figure without a window, and a file that it goes to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kalmanhead.errors import ConfigError

NOT_INSTALLED = "matplotlib is not installed; pip install 'kalmanhead[plot]' brings it"


def new_figure(width: float, height: float) -> Any:
    """Empty figure of so many inches, which no window shows.

    Raises
    ------
    ConfigError
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(NOT_INSTALLED) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn or written, before there is anything to draw.

    Raises
    ------
    ConfigError
        matplotlib is not installed, it knows no such format, or the folder is not there.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        reason = f"its ending is none of {', '.join(sorted(known))}"
    elif path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    else:
        return
    raise unwritable(path, reason)


def write(figure: Any, path: Path) -> None:
    """Write the picture in the format that its name ends with."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise unwritable(path, " ".join(str(error).split())) from error


def unwritable(path: Path, reason: str) -> ConfigError:
    """The error for a picture that cannot be written."""
    return ConfigError(f"cannot write {path}: {reason}; give a name such as curve.png")


def log_axis(axis: Any, most: int) -> None:
    """Plain numbers on a logarithmic axis: at 1, 2 and 5 where no more than `most` come of it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    # matplotlib's own choice of a stride would leave a wide axis of 1, 2 and 5 without a number.
    if 3 * math.log10(high / low) <= most:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=most + 1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
