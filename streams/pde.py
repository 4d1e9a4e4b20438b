"""Running solvers as data: random initial fields, their solutions, and Zarr files of both.

Fields are (n, *grid) in float64 while they are computed; row i belongs to sample index i and to
nothing else, so that a run may stop and go on anywhere. A new equation is a class that fulfils
`Equation`.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from kalmanhead.errors import ConfigError, NumericalError, SourceError

Array = NDArray[Any]

# The limits are measured, not derived: with them every row stayed within 1e-4 (relative L2) of a
# far finer step and grid, for nu from 0.002 to 0.1; at twice the first limit some overflow.
_MAX_GROWTH = 3.0  # of dt * amplitude^2 / nu: advection against the diffusion that damps it
_MAX_COURANT = 1.5  # of dt * amplitude * largest wave number
_MAX_TRAVEL = 1 / 16  # of dt * amplitude / length
_MIN_SOLVER_GRID = 128
_MAX_SOLVER_GRID = 2**20
_MAX_STEPS = 2**24
_MIN_STEPS = 64  # a step over few rows costs as much as one over many: share the cheap ones
_SOLVE_ROWS = 512  # rows solved at a time when a file is written


class Equation(Protocol):
    """What a solver must offer to be written to a file."""

    @property
    def name(self) -> str:
        """One word."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Grid of one field."""
        ...

    def with_seed(self, seed: int) -> Self:
        """The same equation with other random initial fields."""
        ...

    def sample(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Initial fields and solutions, both (n, *grid), float64."""
        ...

    def attributes(self) -> dict[str, Any]:
        """Everything that determines the data, as plain values."""
        ...


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
        Points of the computation, a multiple of `grid`. None: the smallest `grid * 2^m` with at
        least 128 points and at least 2 length / nu points, which resolves shocks of unit height.
    dt:
        Largest time step. None: chosen for each row from its own amplitude A = max |u0| (which
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
        If an argument makes no sense.

    Examples
    --------
    >>> u0, u1 = Burgers(nu=0.05, grid=64, time=0.1).sample([0, 7])
    >>> u0.shape, u1.shape
    (torch.Size([2, 64]), torch.Size([2, 64]))
    """

    nu: float = 0.01
    length: float = 1.0
    grid: int = 256
    time: float = 1.0
    solver_grid: int | None = None
    dt: float | None = None
    zero_mean: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for label in ("nu", "length", "time", "dt"):
            value = getattr(self, label)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{label} must be a positive number, got {value}")
        if self.grid < 8 or self.grid % 2:
            raise ConfigError(f"grid must be even and at least 8 points, got {self.grid}")
        fine = self.solver_grid
        if fine is not None and (fine < self.grid or fine % self.grid):
            raise ConfigError(
                f"solver_grid must be a multiple of grid = {self.grid} points, got {fine}"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")
        wanted = max(self.grid, self.solver_grid or 0, 2.0 * self.length / self.nu)
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
    def fine_grid(self) -> int:
        """Points on which the solution is computed."""
        if self.solver_grid is not None:
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
            "step_rule": "fixed" if self.dt is not None else "from each row's amplitude",
            "method": "pseudo-spectral, 2/3 dealiasing, ETDRK4, float64",
            "spectrum": "N(0, 625 (-Laplacian + 25 I)^-2)"
            + (" without the constant mode" if self.zero_mean else ""),
        }

    def initial(self, indices: Iterable[int]) -> Tensor:
        """Initial fields of these sample indices, (n, grid), float64.

        Row i comes from a generator seeded by (seed, index), so it is the same in any batch.
        """
        rows = [int(i) for i in indices]
        if any(i < 0 for i in rows):
            raise ConfigError(f"sample indices must not be negative, got {min(rows)}")
        modes = self.grid // 2  # k = 0 ... grid/2 - 1: the Nyquist mode has no phase
        k = 2 * math.pi / self.length * np.arange(modes)
        deviation = 25.0 / (k**2 + 25.0) / math.sqrt(self.length)
        # Modes k > 0 stand for two orthonormal functions, sqrt(2) cos and sqrt(2) sin, and irfft
        # doubles them; the constant mode is real and counted once.
        deviation[1:] /= math.sqrt(2.0)
        deviation[0] *= 0.0 if self.zero_mean else 1.0
        spectrum = np.zeros((len(rows), modes), dtype=np.complex128)
        for place, index in enumerate(rows):
            normal = np.random.default_rng([self.seed, index]).standard_normal((modes, 2))
            spectrum[place] = deviation * normal.view(np.complex128)[:, 0]
        return torch.from_numpy(np.fft.irfft(spectrum, n=self.grid, norm="forward"))

    def solve(self, u0: Tensor, time: float | None = None) -> Tensor:
        """The fields u0 (n, grid) after `time` (None: the equation's own), float64.

        Raises
        ------
        ConfigError
            If u0 has another grid or time is not positive.
        NumericalError
            If a row overflows, which a given `dt` that is too large causes.
        """
        time = self.time if time is None else time
        if not (math.isfinite(time) and time > 0):
            raise ConfigError(f"time must be a positive number, got {time}")
        if u0.ndim != 2 or u0.shape[-1] != self.grid:
            raise ConfigError(f"u0 must have shape (n, {self.grid}), got {tuple(u0.shape)}")
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

    def _steps(self, amplitude: float, time: float) -> int:
        """Steps over `time` for a row with max |u0| = amplitude."""
        if self.dt is not None:
            return max(1, math.ceil(min(time / self.dt, 1e18) - 1e-9))
        if amplitude == 0 or not math.isfinite(amplitude):
            return _MIN_STEPS
        k_max = 2 * math.pi / self.length * (self.fine_grid // 3)
        stable = max(_MAX_GROWTH * self.nu / amplitude**2, _MAX_COURANT / (amplitude * k_max))
        largest = min(stable, _MAX_TRAVEL * self.length / amplitude)
        # Powers of two: few different step counts, so that rows share a vectorised solve.
        return int(2 ** max(math.log2(_MIN_STEPS), math.ceil(math.log2(min(time / largest, 1e18)))))

    def _integrate(self, u0: Array, time: float, steps: int) -> Array:
        """ETDRK4 in spectral space, in the letters of Kassam and Trefethen, section 3."""
        fine = self.fine_grid
        index = np.arange(fine // 2 + 1)
        k = 2 * math.pi / self.length * index
        E, E2, Q, f1, f2, f3 = etdrk4_coefficients(-self.nu * k**2, time / steps)
        kept = index <= fine // 3
        g = np.where(kept, -0.5j * k, 0.0)

        def nonlinear(v: Array) -> Array:
            u = np.fft.irfft(v, n=fine, norm="forward")
            return np.asarray(g * np.fft.rfft(u * u, norm="forward"))

        v = np.zeros((len(u0), fine // 2 + 1), dtype=np.complex128)
        v[:, : self.grid // 2] = np.fft.rfft(u0, norm="forward")[:, : self.grid // 2]
        v *= kept
        for _ in range(steps):
            Nv = nonlinear(v)
            half = E2 * v
            a = half + Q * Nv
            Na = nonlinear(a)
            b = half + Q * Na
            Nb = nonlinear(b)
            c = E2 * a + Q * (2 * Nb - Nv)
            v = E * v + f1 * Nv + 2 * f2 * (Na + Nb) + f3 * nonlinear(c)
        u = np.fft.irfft(v, n=fine, norm="forward")
        return np.asarray(u[:, :: fine // self.grid])


def etdrk4_coefficients(
    L: Array,  # (m,)
    h: float,
    points: int = 32,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Coefficients E, E2, Q, f1, f2, f3 of ETDRK4 for a real diagonal linear part.

    The divided differences cancel badly for small h L, so each is the mean over a circle of
    radius 1 around h L; L is real, so the upper half of the circle is enough.

    Parameters
    ----------
    L:
        Diagonal of the linear part, (m,), real float64.
    h:
        Time step.
    points:
        Points on the half circle.

    Returns
    -------
    tuple of numpy.ndarray
        Six arrays of shape (m,).

    Examples
    --------
    >>> E, *_, f1, f2, f3 = etdrk4_coefficients(np.zeros(1), 0.6)
    >>> [round(6 * float(f[0]) / 0.6, 6) for f in (f1, f2, f3)]  # the classical Runge-Kutta weights
    [1.0, 1.0, 1.0]
    """
    angle = (np.arange(points) + 0.5) / points
    z = h * L[:, None] + np.exp(1j * math.pi * angle)
    ez = np.exp(z)
    Q = h * ((np.exp(z / 2) - 1) / z).mean(1).real
    f1 = h * ((-4 - z + ez * (4 - 3 * z + z**2)) / z**3).mean(1).real
    f2 = h * ((2 + z + ez * (z - 2)) / z**3).mean(1).real
    f3 = h * ((-4 - 3 * z - z**2 + ez * (4 - z)) / z**3).mean(1).real
    return np.exp(h * L), np.exp(h * L / 2), Q, f1, f2, f3


def write_zarr(
    path: str | os.PathLike[str],
    equation: Equation,
    samples: int,
    seed: int | None = None,
    *,
    chunk_rows: int = 64,
    dtype: Literal["float32", "float64"] = "float32",
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Write `samples` pairs of initial field x and solution y to a Zarr group.

    The group is built in a temporary folder beside `path` and renamed when it is complete, so
    that `path` never holds half a data set.

    Parameters
    ----------
    path:
        Folder to be made.
    equation:
        Where fields come from, for example `Burgers()`.
    samples:
        Rows of x and y; sample indices are 0 ... samples - 1.
    seed:
        Seed of the initial fields; None keeps the equation's own.
    chunk_rows:
        Rows in a chunk of the file.
    dtype:
        "float32" or "float64", of both arrays.
    overwrite:
        Replace what is at `path`.
    progress:
        Called with the number of rows just written, after each block of about 512.

    Returns
    -------
    Path
        The folder: arrays `x` and `y`, (samples, *grid), and the equation's attributes.

    Raises
    ------
    ConfigError
        If a number or the dtype makes no sense.
    SourceError
        If `path` exists and `overwrite` is not set, or cannot be written.
    NumericalError
        If the solver overflows.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = write_zarr(Path(folder) / "b.zarr", Burgers(nu=0.1, grid=32, time=0.1), 3)
    ...     zarr.open_group(out, mode="r")["y"].shape
    (3, 32)
    """
    target = Path(path)
    if samples < 1 or chunk_rows < 1:
        raise ConfigError(f"samples and chunk_rows must be at least 1: {samples}, {chunk_rows}")
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype must be float32 or float64, got {dtype}")
    if os.path.lexists(target) and not overwrite:
        raise SourceError(f"{target} exists: choose another path or ask to overwrite it")
    equation = equation if seed is None else equation.with_seed(seed)
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        # mkdtemp makes a private folder; the group below it gets the usual permissions.
        built = scratch / "group"
        _fill(built, equation, samples, chunk_rows, dtype, progress)
        if os.path.lexists(target):
            os.rename(target, scratch / "replaced")
        os.rename(built, target)
    except OSError as error:
        raise SourceError(f"{target} cannot be written: {error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fill(
    folder: Path,
    equation: Equation,
    samples: int,
    chunk_rows: int,
    dtype: str,
    progress: Callable[[int], object] | None,
) -> None:
    """Solve and write chunk by chunk."""
    attributes = {**equation.attributes(), "samples": samples, "dtype": dtype}
    group = zarr.create_group(folder, zarr_format=3, attributes=attributes)
    shape = (samples, *equation.shape)
    chunks = (min(chunk_rows, samples), *equation.shape)
    x = group.create_array("x", shape=shape, chunks=chunks, dtype=dtype)
    y = group.create_array("y", shape=shape, chunks=chunks, dtype=dtype)
    # Whole chunks are written, many at a time: rows that need equal steps are solved together.
    block = chunk_rows * max(1, _SOLVE_ROWS // chunk_rows)
    for start in range(0, samples, block):
        stop = min(start + block, samples)
        u0, u1 = equation.sample(range(start, stop))
        x[start:stop] = u0.numpy().astype(dtype)
        y[start:stop] = u1.numpy().astype(dtype)
        if progress is not None:
            progress(stop - start)
