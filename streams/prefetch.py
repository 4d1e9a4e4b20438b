"""One bounded background thread that reads ahead, in bursts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

# A source that blocks cannot be interrupted; its daemon thread is then left to end by itself.
_FAREWELL_SECONDS = 5.0


class _End:
    """Marks the end of the items; carries the error that ended them, if any."""

    def __init__(self, error: BaseException | None):
        self.error = error


class _Reader(Generic[Item]):
    """The thread's side: fills the store, and sleeps until half of it has been taken.

    Topping up item by item would wake the thread for each, and every time it would fight the
    learner for the interpreter.
    """

    def __init__(self, items: Iterator[Item], depth: int):
        self.items, self.depth = items, depth
        self.store: deque[Item | _End] = deque()
        self.changed = threading.Condition()
        self.stopped = False

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
        with self.changed:
            if len(self.store) >= self.depth:
                self.changed.wait_for(lambda: self.stopped or len(self.store) <= self.depth // 2)
            self.store.append(item)
            if len(self.store) == 1:
                self.changed.notify()
            return not self.stopped

    def get(self) -> Item | _End:
        with self.changed:
            self.changed.wait_for(lambda: len(self.store) > 0)
            item = self.store.popleft()
            if len(self.store) == self.depth // 2:
                self.changed.notify()
            return item

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify()


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
            item = reader.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        reader.stop()
        thread.join(_FAREWELL_SECONDS)
