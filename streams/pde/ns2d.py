"""The Navier-Stokes equations in two dimensions as data: the vorticity of a forced flow."""

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

# Measured: with them every row stayed within 1e-4 (relative L2) of twice the grid and an eighth
# of the step over one unit of time, for nu from 1e-4 to 1e-2.
_MAX_COURANT = 2.5  # of h * max |velocity| * largest wave number
_MAX_TRAVEL = 1 / 8  # of h * max |velocity| / length
_MIN_STEPS = 4
_RESOLUTION = 2.0  # largest wave number, in units of sqrt(vorticity / nu)
_MIN_SOLVER_GRID = 32
_MAX_SOLVER_GRID = 2048
_CORRELATION = 7.0  # of the starts: wave numbers above 7 / length fall off


@dataclass(frozen=True)
class NavierStokes2d(Trajectories):
    """Vorticity w_t + u . grad w = nu Laplacian w + f on a periodic square [0, length)^2.

    The velocity u = (psi_y, -psi_x) has the stream function -Laplacian psi = w, and the force is
    f = force (sin 2 pi (x + y) / length + cos 2 pi (x + y) / length). Pseudo-spectral, dealiased
    by the 2/3 rule, with the advection in Basdevant's form (J. Comput. Phys. 50, 1983), which
    needs four transforms, stepped by ETDRK4. Starts are drawn from a multiple of
    N(0, (-Laplacian + 49 / length^2 I)^-5/2) without the mean; force and starts are, up to their
    scale, those usual in the literature on neural operators. The mean is conserved.
    See `kalmanhead.streams.pde.trajectories` for which row is which, and what a resume costs.

    Parameters
    ----------
    nu:
        Viscosity, in length^2 / time; positive.
    force:
        Amplitude of the force, in 1 / time^2; 0 for a flow that decays.
    vorticity:
        Root mean square of the starts, in 1 / time.
    length:
        Side of the periodic square.
    grid:
        Points of a field along each side; even, at least 8.
    time:
        Time from x to y.
    trajectories, steps, burn_in:
        Trajectories side by side, rows of each, and the time before its first row.
    dt:
        Largest time step; 0: chosen for each row from its own velocity.
    seed:
        Seed of the starts, not negative.

    Raises
    ------
    ConfigError
        If a parameter is out of range, or needs a solver's grid of more than 2048 points a side.

    Examples
    --------
    >>> flow = NavierStokes2d(grid=32, trajectories=2, burn_in=0.0)
    >>> w0, w1 = flow.sample([0, 1, 2])  # row 2 is where row 0 leads
    >>> w0.shape, torch.equal(w0[2], w1[0])
    (torch.Size([3, 32, 32]), True)
    """

    nu: float = option(1e-3, "Viscosity.", above=0.0)
    force: float = option(0.1, "Amplitude of the force.", low=0.0)
    vorticity: float = option(1.0, "Root mean square of the starts.", above=0.0)
    length: float = option(1.0, "Side of the domain.", above=0.0)
    grid: int = option(64, "Points of a field along each side.", low=8, high=_MAX_SOLVER_GRID)
    time: float = option(1.0, "From x to y.", above=0.0)
    trajectories: int = option(16, "Trajectories side by side.", low=1, high=2**16)
    steps: int = option(20, "Rows of each trajectory.", low=1, high=2**40)
    burn_in: float = option(4.0, "Time before a trajectory's first row.", low=0.0)
    dt: float = option(0.0, "Largest time step; 0: chosen by velocity.", low=0.0)
    seed: int = option(0, "Of the starts.", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_even_grid(self.grid)
        if self._wanted_grid > _MAX_SOLVER_GRID:
            raise ConfigError(
                f"nu = {self.nu} with vorticity = {self.vorticity}, force = {self.force} and "
                f"length = {self.length} needs a solver grid of {self._wanted_grid:.3g} points a "
                f"side, more than {_MAX_SOLVER_GRID}: raise nu"
            )
        self._check_size(self.fine_grid)

    @property
    def name(self) -> str:
        """The equation's name, `ns2d`."""
        return "ns2d"

    @property
    def shape(self) -> tuple[int, ...]:
        """Grid of one field, (grid, grid)."""
        return (self.grid, self.grid)

    @property
    def symbol(self) -> str:
        """The field's letter."""
        return "w"

    @property
    def _wanted_grid(self) -> float:
        """Points a side that resolve the smallest scale of a vorticity such as this flow's."""
        forced = math.sqrt(self.force)  # the rate at which the force turns a flow over
        smallest = math.sqrt((self.vorticity + forced) / self.nu)
        return max(self.grid, 3 * _RESOLUTION * smallest * self.length / (2 * math.pi))

    @property
    def fine_grid(self) -> int:
        """Points a side on which the solution is computed."""
        fine = self.grid
        while fine < max(self._wanted_grid, _MIN_SOLVER_GRID):
            fine *= 2
        return fine

    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""
        return {
            **self._described(),
            "formula": "w_t + u . grad w = nu Laplacian w + force (sin 2 pi (x + y) / length + "
            "cos 2 pi (x + y) / length), periodic",
            "domain": [0.0, self.length],
            "solver_grid": self.fine_grid,
            "step_rule": "fixed" if self.dt else "from each row's velocity",
            "method": "pseudo-spectral, Basdevant's form, 2/3 dealiasing, ETDRK4, float64",
            "spectrum": "N(0, (-Laplacian + 49 / length^2 I)^-5/2) without the mean, scaled to "
            "the root mean square `vorticity`, then the burn-in",
        }

    def starts(self, numbers: Iterable[int]) -> Tensor:
        """Random fields of mean 0, (n, grid, grid), float64.

        Each is drawn on the modes of its grid, from the smallest ones outwards, so that a coarse
        field is the spectral truncation of a fine one.
        """
        half = self.grid // 2
        a, b, deviation = _shells(half)
        rows = row_numbers(numbers)
        v = np.zeros((len(rows), self.grid, half + 1), dtype=np.complex128)
        for place, number in enumerate(rows):
            normal = np.random.default_rng([self.seed, number]).standard_normal((len(a), 2))
            v[place, a, b] = self.vorticity * deviation * normal.view(np.complex128)[:, 0]
        # Modes (a, 0) and (-a, 0) are one real function's, of which irfft reads both.
        v[:, half + 1 :, 0] = v[:, half - 1 : 0 : -1, 0].conj()
        return torch.from_numpy(np.fft.irfft2(v, s=self.shape, norm="forward"))

    def _spectrum(self, u: Array) -> Array:
        half, fine = self.grid // 2, self.fine_grid
        w = np.fft.rfft2(u, norm="forward")
        v = np.zeros((len(u), fine, fine // 2 + 1), dtype=np.complex128)
        v[:, :half, :half] = w[:, :half, :half]
        v[:, -half + 1 :, :half] = w[:, -half + 1 :, :half]
        return v * _modes(fine, self.length)[3]

    def _field(self, v: Array) -> Array:
        fine, stride = self.fine_grid, self.fine_grid // self.grid
        w = np.fft.irfft2(v, s=(fine, fine), norm="forward")
        return np.asarray(w[:, ::stride, ::stride])

    def _velocity(self, v: Array) -> tuple[Array, Array]:
        kx, ky, inverse, _ = _modes(self.fine_grid, self.length)
        s = (self.fine_grid, self.fine_grid)
        psi = inverse * v
        return (
            np.fft.irfft2(1j * ky * psi, s=s, norm="forward"),
            np.fft.irfft2(-1j * kx * psi, s=s, norm="forward"),
        )

    def _largest_step(self, v: Array, time: float) -> Array:
        if self.dt:
            return np.full(len(v), self.dt)
        a, b = self._velocity(v)
        speed = np.sqrt((a**2 + b**2).max(axis=(1, 2)))
        # What the force may add meanwhile: |f| <= sqrt(2) force at wave number sqrt(2) 2 pi / l.
        speed = speed + self.force * self.length / (2 * math.pi) * time
        k_max = 2 * math.pi / self.length * (self.fine_grid // 3)
        stable = np.minimum(_MAX_COURANT / k_max, _MAX_TRAVEL * self.length) / speed
        return np.minimum(stable, time / _MIN_STEPS)

    def _integrate(self, v: Array, h: float, steps: int) -> Array:
        fine = self.fine_grid
        kx, ky, _, kept = _modes(fine, self.length)
        across, along = (kx**2 - ky**2) * kept, kx * ky * kept
        push = np.zeros(v.shape[1:], dtype=np.complex128)
        push[1, 1] = 0.5 * self.force * (1 - 1j)

        def nonlinear(v: Array) -> Array:
            a, b = self._velocity(v)
            product = np.fft.rfft2(a * b, norm="forward")
            difference = np.fft.rfft2(b * b - a * a, norm="forward")
            return np.asarray(across * product + along * difference + push)

        coefficients = _coefficients(self.nu, self.length, fine, h)
        return etdrk4(v, nonlinear, coefficients, steps)


@lru_cache(maxsize=4)
def _modes(fine: int, length: float) -> tuple[Array, Array, Array, Array]:
    """Wave numbers kx (fine, 1) and ky (1, m), 1 / k^2 (0 for the mean), and which are kept."""
    index = np.fft.fftfreq(fine, 1 / fine)[:, None]
    other = np.arange(fine // 2 + 1)[None, :]
    kx, ky = 2 * math.pi / length * index, 2 * math.pi / length * other
    square = kx**2 + ky**2
    inverse = np.divide(1.0, square, out=np.zeros_like(square), where=square > 0)
    kept = ((np.abs(index) <= fine // 3) & (other <= fine // 3)).astype(np.float64)
    return kx, ky, inverse, kept


@lru_cache(maxsize=4)
def _coefficients(nu: float, length: float, fine: int, h: float) -> Coefficients:
    kx, ky, _, _ = _modes(fine, length)
    # Few different sums of squares occur among the modes: a contour for each is enough.
    square, place = np.unique(kx**2 + ky**2, return_inverse=True)
    parts = etdrk4_coefficients(-nu * square, h)
    E, E2, Q, f1, f2, f3 = (part[place].reshape(fine, -1) for part in parts)
    return E, E2, Q, f1, f2, f3


@lru_cache(maxsize=4)
def _shells(half: int) -> tuple[Array, Array, Array]:
    """Modes (a, b) of one half plane in the order of max(|a|, |b|), and their deviations.

    The deviations are for a variance of 1 over all modes of the plane, not only those below
    `half`, so that they do not depend on the grid.
    """
    mesh = np.meshgrid(np.arange(-half + 1, half), np.arange(half), indexing="ij")
    a, b = (part.ravel() for part in mesh)
    ours = (b > 0) | (a > 0)  # the other half plane holds the conjugates
    a, b = a[ours], b[ours]
    order = np.lexsort((b, a, np.maximum(np.abs(a), b)))
    a, b = a[order], b[order]
    far = np.arange(-512, 513)
    total = _power(far[:, None], far[None, :]).sum() - _power(np.zeros(1), np.zeros(1)).item()
    # A complex normal of unit parts has variance 2, and each mode here stands for two.
    return a, b, np.sqrt(_power(a, b) / (4 * total) * 2)


def _power(a: Array, b: Array) -> Array:
    return np.asarray((4 * math.pi**2 * (a**2.0 + b**2.0) + _CORRELATION**2) ** -2.5)
