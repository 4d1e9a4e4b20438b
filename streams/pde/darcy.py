"""Darcy's law as data: from a random permeability to the pressure on a square."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import linalg
from torch import Tensor

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.streams.pde.equation import check_fields, check_options, option, row_numbers
from kalmanhead.streams.pde.spectral import Array

# The grids, in multiples of the field's own, whose solutions are extrapolated; odd ones, for then
# cell centres of the field are cell centres there. The pressure has kinks where the permeability
# jumps, and needs finer ones.
_REFINEMENTS = {"lognormal": (1, 3), "piecewise": (3, 5)}
_BLOCK_ROWS = 32


@dataclass(frozen=True)
class Darcy:
    """Darcy's law -div(a grad p) = force on [0, length]^2, with p = 0 on the boundary.

    x is the permeability a and y the pressure p, both at the cell centres (i + 1/2) length / grid.
    With g a Gaussian field of unit variance, a sum of cosines with the spectrum
    (pi^2 |k|^2 + 9)^-2 that is usual in the literature on neural operators, a is exp(sigma g), or
    in each cell `high` where g >= 0 and `low` elsewhere. Finite volumes with harmonic means, solved
    directly on two grids and extrapolated to spacing 0 (Richardson).

    Parameters
    ----------
    permeability:
        "lognormal" or "piecewise".
    sigma:
        Standard deviation of log a where it is log-normal.
    low, high:
        The two values of a where it is piecewise constant.
    modes:
        Cosines of g along each side; at most grid / 2. Row i has the same g on every grid.
    force:
        Right-hand side, a constant.
    length:
        Side of the square.
    grid:
        Points of a field along each side.
    seed:
        Seed of the permeabilities, not negative.

    Raises
    ------
    ConfigError
        If a parameter is out of range, or the grid cannot resolve the modes.

    Examples
    --------
    >>> a, p = Darcy(grid=24).sample([0, 7])
    >>> a.shape, p.shape, bool((p > 0).all())
    (torch.Size([2, 24, 24]), torch.Size([2, 24, 24]), True)
    """

    permeability: str = option("lognormal", "lognormal or piecewise.")
    sigma: float = option(1.0, "Deviation of the logarithm, lognormal.", above=0.0, high=3.0)
    low: float = option(3.0, "Smaller permeability, piecewise.", above=0.0)
    high: float = option(12.0, "Larger permeability, piecewise.", above=0.0)
    modes: int = option(12, "Cosines along each side.", low=2, high=128)
    force: float = option(1.0, "Right-hand side.")
    length: float = option(1.0, "Side of the domain.", above=0.0)
    grid: int = option(32, "Points of a field along each side.", low=8, high=256)
    seed: int = option(0, "Of the permeabilities.", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.permeability not in _REFINEMENTS:
            raise ConfigError(
                f"permeability must be {' or '.join(_REFINEMENTS)}, got {self.permeability!r}"
            )
        if self.high / self.low > 1e4 or self.high < self.low:
            raise ConfigError(
                f"high must be from low = {self.low} up to 10000 times that, got {self.high}"
            )
        if 2 * self.modes > self.grid:
            raise ConfigError(
                f"grid = {self.grid} points cannot resolve modes = {self.modes}: take at least "
                f"{2 * self.modes}"
            )

    @property
    def name(self) -> str:
        """The equation's name, `darcy`."""
        return "darcy"

    @property
    def shape(self) -> tuple[int, ...]:
        """Grid of one field, (grid, grid)."""
        return (self.grid, self.grid)

    @property
    def labels(self) -> tuple[str, str]:
        """What the fields are."""
        return ("permeability", "pressure")

    @property
    def block_rows(self) -> int:
        """Rows that are best solved together: each is solved by itself."""
        return _BLOCK_ROWS

    def with_seed(self, seed: int) -> Self:
        """The same equation with other permeabilities."""
        return replace(self, seed=seed)

    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""
        coarse, fine = _REFINEMENTS[self.permeability]
        return {
            "equation": self.name,
            "formula": "-div(a grad p) = force, p = 0 on the boundary",
            **asdict(self),
            "domain": [0.0, self.length],
            "points": "cell centres (i + 1/2) length / grid along each side",
            "method": f"finite volumes, harmonic means, direct, extrapolated from grids of "
            f"{coarse * self.grid} and {fine * self.grid}, float64",
            "spectrum": "(pi^2 |k|^2 + 9)^-2 in cosines without the mean, scaled to variance 1",
        }

    def sample(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Permeabilities and pressures of these rows, both (n, grid, grid), float64."""
        rows = row_numbers(indices)
        a, p = np.empty((2, len(rows), *self.shape))
        for place, row in enumerate(rows):
            normal = np.random.default_rng([self.seed, row]).standard_normal
            g = normal((self.modes, self.modes)) * _deviations(self.modes)
            a[place] = self._medium(g, 1)
            p[place] = self._pressure(g)
        return torch.from_numpy(a), torch.from_numpy(p)

    def plain(self, x: Tensor) -> dict[str, Tensor]:
        """The pressure in a medium of constant permeability, each row's geometric mean."""
        check_fields(x, self.shape, "x")
        unit = torch.from_numpy(darcy_pressure(np.ones(self.shape), self.force, self.length))
        return {"constant medium": unit / x.log().mean(dim=(1, 2), keepdim=True).exp()}

    def _medium(self, g: Array, refinement: int) -> Array:
        """The permeability at the cell centres of a refined grid."""
        if self.permeability == "lognormal":
            return np.exp(self.sigma * _cosines(g, refinement * self.grid))
        cells = np.where(_cosines(g, self.grid) >= 0, self.high, self.low)
        return np.kron(cells, np.ones((refinement, refinement)))

    def _pressure(self, g: Array) -> Array:
        parts = []
        for refinement in _REFINEMENTS[self.permeability]:
            p = darcy_pressure(self._medium(g, refinement), self.force, self.length)
            parts.append(p[refinement // 2 :: refinement, refinement // 2 :: refinement])
        coarse, fine = (float(r) ** 2 for r in _REFINEMENTS[self.permeability])
        return np.asarray((fine * parts[1] - coarse * parts[0]) / (fine - coarse))


def darcy_pressure(
    a: Array,  # (n, n)
    force: Array | float,  # (n, n)
    length: float = 1.0,
) -> Array:
    """Solve -div(a grad p) = force with p = 0 on the boundary, by finite volumes.

    Between two cells flows the harmonic mean of their permeabilities times the difference of
    their pressures, which is exact for a layered medium; the boundary lies half a cell from the
    outermost centres. Second order in length / n.

    Parameters
    ----------
    a:
        Permeability at the cell centres, (n, n), positive.
    force:
        Right-hand side at the cell centres, (n, n), or a constant.
    length:
        Side of the square.

    Returns
    -------
    numpy.ndarray
        Pressure at the cell centres, (n, n), float64.

    Raises
    ------
    NumericalError
        If the system cannot be solved in float64.

    Examples
    --------
    >>> p = darcy_pressure(np.ones((9, 9)), 1.0)
    >>> round(float(p[4, 4]), 3)  # in the middle; the exact pressure is 0.07367
    0.074
    """
    n = len(a)
    down = 2 * a[1:] * a[:-1] / (a[1:] + a[:-1])
    right = 2 * a[:, 1:] * a[:, :-1] / (a[:, 1:] + a[:, :-1])
    diagonal = np.zeros((n, n))
    for axis, flow in ((0, down), (1, right)):
        total, medium = np.moveaxis(diagonal, axis, 0), np.moveaxis(a, axis, 0)
        between = np.moveaxis(flow, axis, 0)
        total[1:] += between
        total[:-1] += between
        total[0] += 2 * medium[0]
        total[-1] += 2 * medium[-1]
    beside = np.zeros((n, n))  # no flow from the end of a row to the start of the next
    beside[:, :-1] = -right
    bands = [-down.ravel(), beside.ravel()[:-1], diagonal.ravel()]
    system = sparse.diags(
        [bands[0], bands[1], bands[2], bands[1], bands[0]], [-n, -1, 0, 1, n], format="csc"
    )
    rhs = np.broadcast_to((length / n) ** 2 * np.asarray(force, dtype=np.float64), (n, n)).ravel()
    try:
        # Symmetric and positive definite: an ordering for that, and no pivoting, fills in least.
        factor = linalg.splu(
            system,
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
        p = factor.solve(rhs).reshape(n, n)
    except RuntimeError as error:
        raise NumericalError(f"Darcy's system cannot be solved ({error}): lower sigma") from error
    return np.asarray(p)


def _cosines(g: Array, n: int) -> Array:
    """The sum of cosines with coefficients g at n cell centres along each side."""
    centres = (np.arange(n) + 0.5) / n
    basis = np.cos(math.pi * np.arange(len(g))[:, None] * centres)
    return np.asarray(basis.T @ g @ basis)


def _deviations(modes: int) -> Array:
    """Deviations of the coefficients, for a field of unit variance on average, (modes, modes)."""
    k = np.arange(modes)
    spectrum = (math.pi**2 * (k[:, None] ** 2 + k**2) + 9.0) ** -2.0
    spectrum[0, 0] = 0.0
    # Orthonormal cosines: sqrt(2) cos for k > 0, whose square is 1 on average.
    return np.sqrt(spectrum / spectrum.sum() * np.outer(1 + (k > 0), 1 + (k > 0)))
