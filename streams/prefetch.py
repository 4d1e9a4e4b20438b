"""One bounded background thread that reads ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

# How long a full queue waits before it looks whether the consumer is still there.
_PATIENCE_SECONDS = 0.05
# A source that blocks cannot be interrupted; its daemon thread is then left to end by itself.
_FAREWELL_SECONDS = 5.0


class _End:
    """Marks the end of the items; carries the error that ended them, if any."""

    def __init__(self, error: BaseException | None):
        self.error = error


class _Reader(Generic[Item]):
    """The thread's side: fills the queue until the items or the consumer end."""

    def __init__(self, items: Iterator[Item], depth: int):
        self.items = items
        self.queue: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self.stopped = threading.Event()

    def run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self.items:
                if not self._put(item):
                    break
        # Whatever happens here must reach the consumer, who would otherwise wait for ever.
        except BaseException as caught:
            error = caught
        finally:
            if isinstance(self.items, Generator):
                self.items.close()
        self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        while not self.stopped.is_set():
            try:
                self.queue.put(item, timeout=_PATIENCE_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def prefetch(items: Iterator[Item], depth: int) -> Iterator[Item]:
    """Yield `items`, made up to `depth` ahead by one daemon thread.

    The thread starts with the first item asked for and ends with the items, or when the
    consumer closes this generator. An error in the items is raised here, in its place among
    them. With depth 0 there is no thread.
    """
    if depth == 0:
        yield from items
        return
    reader = _Reader(items, depth)
    thread = threading.Thread(target=reader.run, name="kalmanhead-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = reader.queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        reader.stopped.set()
        thread.join(_FAREWELL_SECONDS)
