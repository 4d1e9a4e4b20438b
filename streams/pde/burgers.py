"""Burgers' equation as data: random initial fields and their solutions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.streams.pde.equation import (
    check_even_grid,
    check_fields,
    check_options,
    option,
    row_numbers,
    solving_time,
)
from kalmanhead.streams.pde.spectral import Array, etdrk4, etdrk4_coefficients, random_fields

# The limits are measured, not derived: with them every row stayed within 1e-4 (relative L2) of a
# far finer step and grid, for nu from 0.002 to 0.1; at twice the first limit some overflow.
_MAX_GROWTH = 3.0  # of dt * amplitude^2 / nu: advection against the diffusion that damps it
_MAX_COURANT = 1.5  # of dt * amplitude * largest wave number
_MAX_TRAVEL = 1 / 16  # of dt * amplitude / length
_MIN_SOLVER_GRID = 128
_MAX_SOLVER_GRID = 2**20
_MAX_STEPS = 2**24
_MIN_STEPS = 64  # a step over few rows costs as much as one over many: share the cheap ones


@dataclass(frozen=True)
class Burgers:
    """Burgers' equation u_t + u u_x = nu u_xx, periodic on [0, length).

    Pseudo-spectral in the conservative form, dealiased by the 2/3 rule, stepped by ETDRK4 with
    the contour-integral coefficients of Kassam and Trefethen (SIAM J. Sci. Comput. 26, 2005).
    The transforms are numpy's: they run on one thread, so that a solver that feeds a learner does
    not fight it for processors, and the data do not depend on the number of threads.
    Initial fields are drawn from N(0, 625 (-Laplacian + 25 I)^-2), as is usual in the literature
    on neural operators. Sample i at a grid of 64 points is the spectral truncation of sample i at
    256 points.

    Parameters
    ----------
    nu:
        Viscosity, in length^2 / time; positive.
    length:
        Length of the periodic domain.
    grid:
        Points of the fields that are returned; even, at least 8.
    time:
        Time at which the solution is returned.
    solver_grid:
        Points of the computation, a multiple of `grid`. 0: the smallest `grid * 2^m` with at
        least 128 points and at least 2 length / nu points, which resolves shocks of unit height.
    dt:
        Largest time step. 0: chosen for each row from its own amplitude A = max |u0| (which
        never grows) as time / 2^m, m >= 6, with dt <= max(3 nu / A^2, 1.5 / (A k_max)) and
        dt <= length / (16 A). A row's step therefore never depends on the rows beside it.
    zero_mean:
        Leave out the constant mode of the initial field, as published data sets do. With it, most
        of what there is to learn is by how far a field is carried around the domain.
    seed:
        Seed of the initial fields, not negative.

    Raises
    ------
    ConfigError
        If a parameter is out of range, or needs more than 2^20 points.

    Examples
    --------
    >>> u0, u1 = Burgers(nu=0.05, grid=64, time=0.1).sample([0, 7])
    >>> u0.shape, u1.shape
    (torch.Size([2, 64]), torch.Size([2, 64]))
    """

    nu: float = option(0.01, "Viscosity.", above=0.0)
    length: float = option(1.0, "Of the domain.", above=0.0)
    grid: int = option(256, "Points of a field.", low=8)
    time: float = option(1.0, "From x to y.", above=0.0)
    solver_grid: int = option(0, "Points of the computation; 0: chosen by viscosity.", low=0)
    dt: float = option(0.0, "Largest time step; 0: chosen by amplitude.", low=0.0)
    zero_mean: bool = option(True, "Leave out the constant mode.")
    seed: int = option(0, "Of the initial fields.", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_even_grid(self.grid)
        if self.solver_grid % self.grid:
            raise ConfigError(
                f"solver_grid must be a multiple of grid = {self.grid} points, got "
                f"{self.solver_grid}"
            )
        wanted = max(self.grid, self.solver_grid, 2.0 * self.length / self.nu)
        if wanted > _MAX_SOLVER_GRID:
            raise ConfigError(
                f"grid = {self.grid}, nu = {self.nu} and length = {self.length} need a solver grid "
                f"of {wanted:.3g} points, more than {_MAX_SOLVER_GRID}: raise nu or take fewer "
                "points"
            )

    @property
    def name(self) -> str:
        """The equation's name, `burgers`."""
        return "burgers"

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
        """Rows that are best solved together: many, for they share steps."""
        return 512

    @property
    def fine_grid(self) -> int:
        """Points on which the solution is computed."""
        if self.solver_grid:
            return self.solver_grid
        wanted = max(_MIN_SOLVER_GRID, 2.0 * self.length / self.nu)
        fine = self.grid
        while fine < wanted:
            fine *= 2
        return fine

    def with_seed(self, seed: int) -> Self:
        """The same equation with other random initial fields."""
        return replace(self, seed=seed)

    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""
        return {
            "equation": self.name,
            "formula": "u_t + u u_x = nu u_xx, periodic",
            **asdict(self),
            "domain": [0.0, self.length],
            "solver_grid": self.fine_grid,
            "step_rule": "fixed" if self.dt else "from each row's amplitude",
            "method": "pseudo-spectral, 2/3 dealiasing, ETDRK4, float64",
            "spectrum": "N(0, 625 (-Laplacian + 25 I)^-2)"
            + (" without the constant mode" if self.zero_mean else ""),
        }

    def initial(self, indices: Iterable[int]) -> Tensor:
        """Initial fields of these sample indices, (n, grid), float64.

        Row i comes from a generator seeded by (seed, index), so it is the same in any batch.
        """
        rows = row_numbers(indices)
        fields = random_fields(self.seed, rows, self.grid, self.length, self.zero_mean)
        return torch.from_numpy(fields)

    def solve(self, u0: Tensor, time: float | None = None) -> Tensor:
        """The fields u0 (n, grid) after `time` (None: the equation's own), float64.

        Raises
        ------
        ConfigError
            If u0 has another grid or time is not positive.
        NumericalError
            If a row overflows, which a given `dt` that is too large causes.
        """
        time = solving_time(time, self.time)
        check_fields(u0, self.shape, "u0")
        start = u0.detach().cpu().numpy().astype(np.float64)
        result = np.empty_like(start)
        steps = np.array([self._steps(float(a), time) for a in np.abs(start).max(axis=-1)])
        if len(steps) and steps.max() > _MAX_STEPS:
            raise ConfigError(
                f"time = {time} takes {steps.max():.3g} steps, more than {_MAX_STEPS}: shorten it "
                "or raise nu"
            )
        with np.errstate(all="ignore"):  # reported below, in words
            for count in np.unique(steps):
                rows = np.flatnonzero(steps == count)
                result[rows] = self._integrate(start[rows], time, int(count))
        if not np.isfinite(result).all():
            raise NumericalError(
                "the Burgers solver overflowed: give a smaller dt, a finer solver_grid, or leave "
                "both to be chosen"
            )
        return torch.from_numpy(result)

    def sample(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Initial fields and the solutions at `time`, both (n, grid), float64."""
        u0 = self.initial(indices)
        return u0, self.solve(u0)

    def plain(self, x: Tensor) -> dict[str, Tensor]:
        """Plain predictions of the solution: the field itself, and the heat equation's solution.

        The latter, x convolved with the heat kernel of `nu` and `time`, is what is left of the
        equation without u u_x.
        """
        check_fields(x, self.shape, "x")
        k = 2 * math.pi / self.length * np.arange(self.grid // 2 + 1)
        spectrum = np.fft.rfft(x.numpy()) * np.exp(-self.nu * k**2 * self.time)
        return {"persistence": x, "heat": torch.from_numpy(np.fft.irfft(spectrum, n=self.grid))}

    def _steps(self, amplitude: float, time: float) -> int:
        """Steps over `time` for a row with max |u0| = amplitude."""
        if self.dt:
            return max(1, math.ceil(min(time / self.dt, 1e18) - 1e-9))
        if amplitude == 0 or not math.isfinite(amplitude):
            return _MIN_STEPS
        k_max = 2 * math.pi / self.length * (self.fine_grid // 3)
        stable = max(_MAX_GROWTH * self.nu / amplitude**2, _MAX_COURANT / (amplitude * k_max))
        largest = min(stable, _MAX_TRAVEL * self.length / amplitude)
        # Powers of two: few different step counts, so that rows share a vectorised solve.
        return int(2 ** max(math.log2(_MIN_STEPS), math.ceil(math.log2(min(time / largest, 1e18)))))

    def _integrate(self, u0: Array, time: float, steps: int) -> Array:
        """Solve a block of rows in spectral space, with equal steps."""
        fine = self.fine_grid
        index = np.arange(fine // 2 + 1)
        k = 2 * math.pi / self.length * index
        coefficients = etdrk4_coefficients(-self.nu * k**2, time / steps)
        kept = index <= fine // 3
        g = np.where(kept, -0.5j * k, 0.0)

        def nonlinear(v: Array) -> Array:
            u = np.fft.irfft(v, n=fine, norm="forward")
            return np.asarray(g * np.fft.rfft(u * u, norm="forward"))

        v = np.zeros((len(u0), fine // 2 + 1), dtype=np.complex128)
        v[:, : self.grid // 2] = np.fft.rfft(u0, norm="forward")[:, : self.grid // 2]
        v *= kept
        v = etdrk4(v, nonlinear, coefficients, steps)
        u = np.fft.irfft(v, n=fine, norm="forward")
        return np.asarray(u[:, :: fine // self.grid])
