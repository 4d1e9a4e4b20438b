"""The Kuramoto-Sivashinsky equation as data: a chaotic flow in one dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kalmanhead.errors import ConfigError
from kalmanhead.streams.pde.equation import check_even_grid, check_options, option, row_numbers
from kalmanhead.streams.pde.spectral import Array, Coefficients, etdrk4, etdrk4_coefficients
from kalmanhead.streams.pde.trajectories import Trajectories

# Measured: with them every row on the attractor stayed within 2e-5 (relative L2) of twice the
# grid and an eighth of the step over one unit of time.
_LARGEST_STEP = 1 / 8
_USUAL_AMPLITUDE = 4.0  # what max |u| seldom exceeds on the attractor, whatever the length
_POINTS_PER_LENGTH = 2.0  # of the solver's grid: the 2/3 rule then keeps wave numbers up to 4.2


@dataclass(frozen=True)
class KuramotoSivashinsky(Trajectories):
    """Kuramoto-Sivashinsky equation u_t + u u_x + u_xx + u_xxxx = 0, periodic on [0, length).

    Pseudo-spectral, dealiased by the 2/3 rule, stepped by ETDRK4 (Kassam and Trefethen, SIAM J.
    Sci. Comput. 26, 2005). Modes of wave number below 1 grow as exp((k^2 - k^4) t) while they are
    small, and u u_x carries their energy to those that decay; the mean is conserved, and 0 here.
    See `kalmanhead.streams.pde.trajectories` for which row is which, and what a resume costs.

    Parameters
    ----------
    length:
        Length of the periodic domain, from 22 on, where the flow is chaotic.
    grid:
        Points of the fields; even, at least `length`.
    time:
        Time from x to y.
    trajectories, steps, burn_in:
        Trajectories side by side, rows of each, and the time before its first row.
    dt:
        Largest time step; 0: chosen for each row from its own amplitude, at most 1/8.
    seed:
        Seed of the starts, not negative.

    Raises
    ------
    ConfigError
        If a parameter is out of range, or the grid cannot resolve the length.

    Examples
    --------
    >>> flow = KuramotoSivashinsky(length=22.0, grid=64, trajectories=2, burn_in=10.0)
    >>> u0, u1 = flow.sample([0, 1, 2])  # row 2 is where row 0 leads
    >>> u0.shape, torch.equal(u0[2], u1[0])
    (torch.Size([3, 64]), True)
    """

    length: float = option(22.0, "Of the domain.", low=22.0, high=1e5)
    grid: int = option(64, "Points of a field.", low=8, high=2**17)
    time: float = option(1.0, "From x to y.", above=0.0)
    trajectories: int = option(16, "Trajectories side by side.", low=1, high=2**16)
    steps: int = option(64, "Rows of each trajectory.", low=1, high=2**40)
    burn_in: float = option(100.0, "Time before a trajectory's first row.", low=0.0)
    dt: float = option(0.0, "Largest time step; 0: chosen by amplitude.", low=0.0)
    seed: int = option(0, "Of the starts.", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_even_grid(self.grid)
        if self.grid < self.length:
            raise ConfigError(
                f"grid = {self.grid} points cannot resolve length = {self.length}: take at least "
                f"{math.ceil(self.length)}"
            )
        self._check_size(self.fine_grid)

    @property
    def name(self) -> str:
        """The equation's name, `ks`."""
        return "ks"

    @property
    def shape(self) -> tuple[int, ...]:
        """Grid of one field, (grid,)."""
        return (self.grid,)

    @property
    def symbol(self) -> str:
        """The field's letter."""
        return "u"

    @property
    def fine_grid(self) -> int:
        """Points on which the solution is computed."""
        fine = self.grid
        while fine < _POINTS_PER_LENGTH * self.length:
            fine *= 2
        return fine

    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""
        return {
            **self._described(),
            "formula": "u_t + u u_x + u_xx + u_xxxx = 0, periodic",
            "domain": [0.0, self.length],
            "solver_grid": self.fine_grid,
            "step_rule": "fixed" if self.dt else "from each row's amplitude",
            "method": "pseudo-spectral, 2/3 dealiasing, ETDRK4, float64",
            "spectrum": "white for 0 < k <= 1, variance 1, then the burn-in",
        }

    def starts(self, numbers: Iterable[int]) -> Tensor:
        """Random fields of the modes 0 < k <= 1, of variance 1 and mean 0, (n, grid)."""
        modes = int(self.length / (2 * math.pi))
        rows = row_numbers(numbers)
        v = np.zeros((len(rows), self.grid // 2 + 1), dtype=np.complex128)
        for place, number in enumerate(rows):
            normal = np.random.default_rng([self.seed, number]).standard_normal((modes, 2))
            v[place, 1 : modes + 1] = normal.view(np.complex128)[:, 0] / (2 * math.sqrt(modes))
        return torch.from_numpy(np.fft.irfft(v, n=self.grid, norm="forward"))

    def _spectrum(self, u: Array) -> Array:
        v = np.zeros((len(u), self.fine_grid // 2 + 1), dtype=np.complex128)
        v[:, : self.grid // 2] = np.fft.rfft(u, norm="forward")[:, : self.grid // 2]
        v[:, self.fine_grid // 3 + 1 :] = 0.0
        return v

    def _field(self, v: Array) -> Array:
        u = np.fft.irfft(v, n=self.fine_grid, norm="forward")
        return np.asarray(u[:, :: self.fine_grid // self.grid])

    def _largest_step(self, v: Array, time: float) -> Array:
        if self.dt:
            return np.full(len(v), self.dt)
        amplitude = np.abs(np.fft.irfft(v, n=self.fine_grid, norm="forward")).max(axis=-1)
        return np.asarray(_LARGEST_STEP * np.minimum(1.0, _USUAL_AMPLITUDE / amplitude))

    def _integrate(self, v: Array, h: float, steps: int) -> Array:
        fine = self.fine_grid
        index = np.arange(fine // 2 + 1)
        g = np.where(index <= fine // 3, -0.5j * 2 * math.pi / self.length * index, 0.0)

        def nonlinear(v: Array) -> Array:
            u = np.fft.irfft(v, n=fine, norm="forward")
            return np.asarray(g * np.fft.rfft(u * u, norm="forward"))

        return etdrk4(v, nonlinear, _coefficients(self.length, fine, h), steps)


@lru_cache(maxsize=16)
def _coefficients(length: float, fine: int, h: float) -> Coefficients:
    k = 2 * math.pi / length * np.arange(fine // 2 + 1)
    # Modes that dealiasing leaves out stay zero; their rates would only overflow.
    k = np.where(np.arange(len(k)) <= fine // 3, k, 0.0)
    return etdrk4_coefficients(k**2 - k**4, h)
