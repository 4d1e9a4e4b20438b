"""Advection as data: a shift whose distance drifts from row to row, and is known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kalmanhead.streams.pde.equation import (
    check_even_grid,
    check_fields,
    check_options,
    option,
    row_numbers,
)
from kalmanhead.streams.pde.spectral import Array, random_fields


@dataclass(frozen=True)
class Advection:
    """Advection u_t + c u_x = 0, periodic on [0, length), whose speed c drifts with the row.

    Row i has the speed c(i) = speed + swing sin(2 pi i / period): the map from x to y is linear
    and known at every row, and no fixed map fits all. Solved exactly, by a turn of each Fourier
    mode's phase. Initial fields are those of Burgers' equation.

    Parameters
    ----------
    speed:
        Mean speed, of either sign.
    swing:
        How far the speed drifts from it; 0 for a stationary stream.
    period:
        Rows after which the speed comes back.
    time:
        Time from x to y.
    length:
        Length of the periodic domain.
    grid:
        Points of the fields; even, at least 8.
    zero_mean:
        Leave out the constant mode.
    seed:
        Seed of the initial fields, not negative.

    Raises
    ------
    ConfigError
        If a parameter is out of range.

    Examples
    --------
    >>> advection = Advection(speed=1.0, swing=0.5, period=100.0)
    >>> advection.speeds([0, 25, 75]).tolist()
    [1.0, 1.5, 0.5]
    >>> advection.sample([0, 25])[1].shape
    torch.Size([2, 64])
    """

    speed: float = option(1.0, "Mean speed.")
    swing: float = option(0.5, "How far the speed drifts from its mean.", low=0.0)
    period: float = option(5000.0, "Rows after which the speed comes back.", above=0.0)
    time: float = option(0.1, "From x to y.", above=0.0)
    length: float = option(1.0, "Of the domain.", above=0.0)
    grid: int = option(64, "Points of a field.", low=8, high=2**20)
    zero_mean: bool = option(True, "Leave out the constant mode.")
    seed: int = option(0, "Of the initial fields.", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_even_grid(self.grid)

    @property
    def name(self) -> str:
        """The equation's name, `advection`."""
        return "advection"

    @property
    def shape(self) -> tuple[int, ...]:
        """Grid of one field, (grid,)."""
        return (self.grid,)

    @property
    def labels(self) -> tuple[str, str]:
        """What the fields are: u at time 0 and at `time`."""
        return ("u(0)", f"u({self.time:g})")

    @property
    def block_rows(self) -> int:
        """Rows that are best solved together."""
        return 256

    def with_seed(self, seed: int) -> Self:
        """The same equation with other initial fields."""
        return replace(self, seed=seed)

    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""
        return {
            "equation": self.name,
            "formula": "u_t + c u_x = 0, periodic, c = speed + swing sin(2 pi row / period)",
            **asdict(self),
            "domain": [0.0, self.length],
            "method": "exact, by Fourier modes, float64",
            "spectrum": "N(0, 625 (-Laplacian + 25 I)^-2)"
            + (" without the constant mode" if self.zero_mean else ""),
        }

    def speeds(self, indices: Iterable[int]) -> Array:
        """The speed c of these rows, (n,), float64."""
        turn = np.array([row % self.period for row in row_numbers(indices)]) / self.period
        return self.speed + self.swing * np.sin(2 * math.pi * turn)

    def sample(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Initial fields and the fields at `time`, both (n, grid), float64."""
        rows = row_numbers(indices)
        u0 = random_fields(self.seed, rows, self.grid, self.length, self.zero_mean)
        return torch.from_numpy(u0), torch.from_numpy(self._shift(u0, self.speeds(rows)))

    def plain(self, x: Tensor) -> dict[str, Tensor]:
        """Plain predictions: the field itself, and the field carried at the mean speed."""
        check_fields(x, self.shape, "x")
        carried = self._shift(x.numpy(), np.full(len(x), self.speed))
        return {"persistence": x, "mean speed": torch.from_numpy(carried)}

    def _shift(self, u: Array, speeds: Array) -> Array:
        """Carry each row at its speed for `time`."""
        turns = np.outer(speeds, np.arange(self.grid // 2 + 1)) * (self.time / self.length)
        spectrum = np.fft.rfft(u) * np.exp(-2j * math.pi * turns)
        return np.asarray(np.fft.irfft(spectrum, n=self.grid))
