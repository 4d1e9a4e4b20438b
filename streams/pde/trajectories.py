"""Rows from many trajectories of one flow, each u(t) -> u(t + time).

Trajectories run side by side in groups: with K = `trajectories` and S = `steps`, row i belongs to
group g = i // (K S); within it, with r = i % (K S), to trajectory g K + r % K at step r // K. So
consecutive rows come from different trajectories at the same time, and after S steps K new
trajectories begin, each from a random field of its own followed by a burn-in that no row shows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.streams.pde.equation import check_fields, row_numbers, solving_time
from kalmanhead.streams.pde.spectral import Array

_MAX_STEPS = 2**24
_BLOCK_BYTES = 4 * 2**20
_MAX_STATE_BYTES = 2**30


class _Place(NamedTuple):
    """Spectra of all trajectories of a group at one step."""

    group: int
    step: int
    v: Array  # (trajectories, *modes)


class Trajectories(ABC):
    """Base of equations whose rows are successive states of a flow.

    A subclass is a frozen dataclass with the fields below; it says how a trajectory starts and
    how its spectrum is stepped.

    Attributes
    ----------
    time:
        Time from x to y of a row, and from one row of a trajectory to its next.
    trajectories:
        Trajectories that run side by side, K.
    steps:
        Rows of one trajectory, S. One trajectory of a billion steps is an endless one.
    burn_in:
        Time that passes before a trajectory's first row.
    seed:
        Seed of the starts; trajectory j depends on (seed, j) alone.

    Notes
    -----
    A group is always computed whole, so a row has the same bits however it is reached. Rows read
    in order cost one interval each; to start at row i costs the burn-in and up to S intervals of
    the K trajectories of its group, and nothing of the groups before it.
    """

    time: float
    trajectories: int
    steps: int
    burn_in: float
    seed: int

    @property
    @abstractmethod
    def name(self) -> str:
        """One word."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Grid of one field."""

    @property
    @abstractmethod
    def symbol(self) -> str:
        """The field's letter."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""

    @abstractmethod
    def starts(self, numbers: Iterable[int]) -> Tensor:
        """Random fields that these trajectories start from, (n, *grid), float64."""

    @abstractmethod
    def _spectrum(self, u: Array) -> Array:
        """Spectra of fields (n, *grid), on the solver's grid."""

    @abstractmethod
    def _field(self, v: Array) -> Array:
        """Fields (n, *grid) of spectra."""

    @abstractmethod
    def _largest_step(self, v: Array, time: float) -> Array:
        """Largest time step for each row over the next `time`, (n,)."""

    @abstractmethod
    def _integrate(self, v: Array, h: float, steps: int) -> Array:
        """Take steps of h."""

    @property
    def labels(self) -> tuple[str, str]:
        """What the fields are: one state and the state `time` later."""
        return (f"{self.symbol}(t)", f"{self.symbol}(t+{self.time:g})")

    @property
    def block_rows(self) -> int:
        """Rows that are best solved together: all trajectories over some steps."""
        step_bytes = self.trajectories * 16 * math.prod(self.shape)
        return self.trajectories * max(1, min(self.steps, _BLOCK_BYTES // step_bytes))

    def with_seed(self, seed: int) -> Self:
        """The same equation with other trajectories."""
        return replace(self, seed=seed)  # type: ignore[type-var]

    def plain(self, x: Tensor) -> dict[str, Tensor]:
        """The one prediction that needs no learning: that nothing changes."""
        check_fields(x, self.shape, "x")
        return {"persistence": x}

    def solve(self, u0: Tensor, time: float | None = None) -> Tensor:
        """The fields u0 (n, *grid) after `time` (None: the equation's own), float64.

        Raises
        ------
        ConfigError
            If u0 has another grid or time is not positive.
        NumericalError
            If a row overflows, which a given `dt` that is too large causes.
        """
        time = solving_time(time, self.time)
        check_fields(u0, self.shape, "u0")
        v = self._spectrum(u0.detach().cpu().numpy().astype(np.float64))
        return torch.from_numpy(self._field(self._advance(v, time)))

    def sample(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """States of these rows and the states `time` later, both (n, *grid), float64."""
        rows = np.array(row_numbers(indices), dtype=np.int64)
        u0, u1 = np.empty((2, len(rows), *self.shape))
        group_rows = self.trajectories * self.steps
        for group in np.unique(rows // group_rows).tolist():
            inside = rows // group_rows == group
            step, number = np.divmod(rows % group_rows, self.trajectories)
            place = self._start(group, int(step[inside].min()))
            for current in np.unique(step[inside]).tolist():
                while place.step < current:
                    place = self._next(place)
                # Kept, so that rows read in order do not start again from the burn-in.
                self.__dict__["_kept"] = place
                here = np.flatnonzero(inside & (step == current))
                u0[here] = self._field(place.v)[number[here]]
                place = self._next(place)
                u1[here] = self._field(place.v)[number[here]]
        return torch.from_numpy(u0), torch.from_numpy(u1)

    def _start(self, group: int, step: int) -> _Place:
        """A place of this group at or before the step: the kept one, or the end of burn-in."""
        kept: _Place | None = self.__dict__.get("_kept")
        if kept is not None and kept.group == group and kept.step <= step:
            return kept
        first = group * self.trajectories
        u = self.starts(range(first, first + self.trajectories)).numpy()
        place = _Place(group, 0, self._spectrum(u))
        for _ in range(math.ceil(self.burn_in / self.time)):
            place = self._next(place)
        return place._replace(step=0)

    def _next(self, place: _Place) -> _Place:
        return _Place(place.group, place.step + 1, self._advance(place.v, self.time))

    def _advance(self, v: Array, time: float) -> Array:
        """Step each row over `time` by its own number of steps, a power of two."""
        with np.errstate(all="ignore"):  # reported below, in words
            largest = np.nan_to_num(self._largest_step(v, time), nan=time, posinf=time)
            ratio = time / np.maximum(largest, 1e-300)
            counts = 2.0 ** np.maximum(0, np.ceil(np.log2(ratio) - 1e-9))
            if len(counts) and counts.max() > _MAX_STEPS:
                raise ConfigError(
                    f"time = {time} takes {counts.max():.3g} steps, more than {_MAX_STEPS}: "
                    f"shorten it"
                )
            result = np.empty_like(v)
            for count in np.unique(counts):
                rows = np.flatnonzero(counts == count)
                result[rows] = self._integrate(v[rows], time / count, int(count))
        if not np.isfinite(result).all():
            raise NumericalError(
                f"the {self.name} solver overflowed: give a smaller dt or a finer grid"
            )
        return result

    def _described(self) -> dict[str, Any]:
        """The parameters, and how rows follow from trajectories."""
        return {
            "equation": self.name,
            **asdict(self),  # type: ignore[call-overload]
            "rows": "row i: trajectory i // (K S) K + i % K at step i % (K S) // K, K = "
            "trajectories, S = steps",
        }

    def _check_size(self, fine: int) -> None:
        """Refuse more state than fits, and burn-ins that never end."""
        size = 8 * self.trajectories * fine ** len(self.shape)
        if size > _MAX_STATE_BYTES:
            raise ConfigError(
                f"trajectories = {self.trajectories} on a solver grid of {fine} points a side "
                f"hold {size / 2**30:.3g} GiB, more than 1: take fewer"
            )
        if self.burn_in / self.time > _MAX_STEPS:
            raise ConfigError(
                f"burn_in = {self.burn_in} is more than {_MAX_STEPS} intervals of time = "
                f"{self.time}: shorten it"
            )
