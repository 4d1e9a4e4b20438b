"""Rows kept for the backbone, whose gradient steps want rows that do not resemble each other.

Consecutive rows of one trajectory are nearly the same, and a gradient step on them forgets what
others taught. The head has its covariance for that and learns from every batch as it comes; the
backbone's steps are taken on rows drawn from what has come so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmanhead.errors import ConfigError

State = dict[str, Any]
Rows = tuple[Tensor, Tensor, Tensor]

KINDS = ("reservoir", "recent")


class Buffer:
    """A bounded sample of the rows of a stream, from which batches are drawn.

    Parameters
    ----------
    capacity:
        Most rows that are kept.
    kind:
        `reservoir`: a uniform sample of all rows so far (Vitter, ACM TOMS 11, 1985, algorithm R);
        `recent`: the last `capacity` rows, for streams whose law drifts.
    seed:
        Of what is kept and drawn.

    Raises
    ------
    ConfigError
        A capacity below 1 or an unknown kind.

    Examples
    --------
    >>> buffer = Buffer(8, "recent")
    >>> for i in range(3):
    ...     buffer.add(torch.full((4, 2), float(i)), torch.zeros(4, 1), None)
    >>> x, y, weight = buffer.draw(100)
    >>> x.shape, sorted(x[:, 0].tolist())
    (torch.Size([8, 2]), [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    """

    def __init__(self, capacity: int, kind: str = "reservoir", seed: int = 0) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"buffer is {capacity!r}: give a number of rows, 1 or more")
        if kind not in KINDS:
            raise ConfigError(f"buffer kind {kind!r} is unknown: choose {' or '.join(KINDS)}")
        self.capacity, self.kind = capacity, kind
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = self.size = 0
        self._held: Rows | None = None  # the first `size` rows of it are in use
        self._replaced: list[tuple[Tensor, Rows]] = []

    def __len__(self) -> int:
        return self.size

    @property
    def rows(self) -> Rows | None:
        """What is kept, in its own units: x (m, ...), y (m, ...) and weights (m,)."""
        if self._held is None:
            return None
        x, y, weight = (part[: self.size] for part in self._held)
        return x, y, weight

    def add(self, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Take in a batch, x (n, ...) and y (n, ...), with row weights (n,) or None for ones.

        Raises
        ------
        ConfigError
            Rows of another shape than those that are kept.
        """
        new = (x, y, torch.ones(len(x), device=x.device) if weight is None else weight)
        room = min(self.capacity - self.size, len(x))
        held = self._make_room(new, self.size + room)
        chosen = {self.size + i: i for i in range(room)}
        chosen |= {j: room + i for j, i in self._places(len(x) - room, self.seen + room).items()}
        places = torch.tensor(list(chosen), dtype=torch.int64, device=x.device)
        taken = torch.tensor(list(chosen.values()), dtype=torch.int64, device=x.device)
        before = (held[0][places], held[1][places], held[2][places])
        self._replaced.append((places, before))
        for old, part in zip(held, new, strict=True):
            old[places] = part[taken].to(old)
        self.size, self.seen = self.size + room, self.seen + len(x)

    def clear(self) -> None:
        """Keep nothing of what came so far."""
        self.seen = self.size = 0

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of what is kept, drawn at random; all of them if they are no more than `count`.

        Weights are None where all are 1.
        """
        assert self.rows is not None, "nothing was added"
        order = torch.arange(self.size)
        if self.size > count:
            order = torch.randint(self.size, (count,), generator=self.generator)
        x, y, weight = (part[order.to(part.device)] for part in self.rows)
        return x, y, None if bool((weight == 1).all()) else weight

    def mark(self) -> Callable[[], None]:
        """How to come back to what is kept now, until the next mark."""
        self._replaced = []
        seen, size, drawn = self.seen, self.size, self.generator.get_state()

        def undo() -> None:
            for places, before in reversed(self._replaced):
                assert self._held is not None
                for part, old in zip(self._held, before, strict=True):
                    part[places] = old
            self._replaced = []
            self.seen, self.size = seen, size
            self.generator.set_state(drawn)

        return undo

    def state(self) -> State:
        """Everything needed to go on exactly: plain values and tensors, the buffer's own."""
        return {
            "capacity": self.capacity,
            "kind": self.kind,
            "seen": self.seen,
            "rows": None if self.rows is None else list(self.rows),
            "generator": self.generator.get_state(),
        }

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned.

        Raises
        ------
        ConfigError
            The state is of another capacity or kind.
        """
        for key, mine in (("capacity", self.capacity), ("kind", self.kind)):
            if state[key] != mine:
                raise ConfigError(
                    f"the saved buffer has {key} {state[key]}, this one {mine}: build the "
                    "learner with the options it was saved under"
                )
        self.seen, self._held, self._replaced = int(state["seen"]), None, []
        self.size = 0
        if state["rows"] is not None:
            x, y, weight = (part.clone() for part in state["rows"])
            self._held, self.size = (x, y, weight), len(x)
        self.generator.set_state(state["generator"])

    def _make_room(self, new: Rows, size: int) -> Rows:
        """Memory for so many rows, doubled when it is full."""
        if self._held is None:
            x, y, weight = (part.new_empty((size, *part.shape[1:])) for part in new)
            self._held = x, y, weight
        x, y, weight = (old.to(part.device) for old, part in zip(self._held, new, strict=True))
        self._held = x, y, weight
        for old, part in zip(self._held, new, strict=True):
            if old.shape[1:] != part.shape[1:]:
                raise ConfigError(
                    f"the buffer holds rows of shape {tuple(old.shape[1:])}, these are "
                    f"{tuple(part.shape[1:])}: give rows of one shape, or no buffer"
                )
        if size > len(self._held[0]):
            most = min(self.capacity, max(size, 2 * len(self._held[0])))
            x, y, weight = (old.new_empty((most, *old.shape[1:])) for old in self._held)
            for fresh, old in zip((x, y, weight), self._held, strict=True):
                fresh[: len(old)] = old
            self._held = x, y, weight
        return self._held

    def _places(self, count: int, seen: int) -> dict[int, int]:
        """Which rows, of `count` after `seen`, replace which of those kept: place -> row."""
        if self.kind == "recent":
            return {(seen + i) % self.capacity: i for i in range(count)}
        # Algorithm R: row t stays with probability capacity / (t + 1), at a place of chance.
        at = torch.arange(seen + 1, seen + count + 1, dtype=torch.float64)
        chosen = torch.rand(count, generator=self.generator, dtype=torch.float64) * at
        return {int(j): i for i, j in enumerate(chosen.tolist()) if j < self.capacity}
