"""What goes on between a running loop and its terminal: the progress bar, and signals to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tqdm import tqdm

from kalmanhead.engine import Progress


def recent_error(progress: Progress) -> str:
    """The error that a person watches, over the last rows."""
    recent = progress.metrics.summary()["recent"]
    name = "relative_l2" if "relative_l2" in recent else "rmse"
    value = recent[name]
    return f"{name} {value:.4g}" if value is not None else ""


@contextlib.contextmanager
def progress_bar(total: int | None, progress: Progress, quiet: bool) -> Iterator[tqdm[Any]]:
    """Bar on stderr with rows per second, recent error and time left; off without a terminal."""
    bar: tqdm[Any] = tqdm(
        total=total,
        initial=progress.rows + progress.bad_rows,
        unit="row",
        unit_scale=True,
        disable=True if quiet else None,
        dynamic_ncols=True,
    )
    try:
        yield bar
    finally:
        bar.close()


class Stopper:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the current batch.

    The second one ends the process at once, as a source that blocks may need.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        self._give_back()

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
