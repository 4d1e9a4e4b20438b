"""Darcy's law and advection: exact solutions, orders of accuracy, and what a row depends on."""

import numpy as np
import pytest
import torch

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.streams.pde import Advection, Darcy, baselines
from kalmanhead.streams.pde.darcy import darcy_pressure


def centres(n):
    return (np.arange(n) + 0.5) / n


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# Darcy


def test_the_pressure_of_a_smooth_medium_converges_with_second_order():
    """p = sin(pi x) sin(2 pi y) under a = 1 + x y / 2, whose right-hand side is known."""
    errors = []
    for n in (16, 32, 64):
        x, y = np.meshgrid(centres(n), centres(n), indexing="ij")
        a = 1 + x * y / 2
        p = np.sin(np.pi * x) * np.sin(2 * np.pi * y)
        px = np.pi * np.cos(np.pi * x) * np.sin(2 * np.pi * y)
        py = 2 * np.pi * np.sin(np.pi * x) * np.cos(2 * np.pi * y)
        force = 5 * np.pi**2 * a * p - y / 2 * px - x / 2 * py
        errors.append(relative(darcy_pressure(a, force), p))
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert bool(((orders > 1.9) & (orders < 2.1)).all())


@pytest.mark.parametrize("length", [1.0, 3.0])
def test_the_pressure_of_a_uniform_medium_is_its_fourier_series(length):
    k = np.pi * np.arange(1, 200, 2)
    waves = np.sin(np.outer(centres(32), k))
    series = 16 / (k[:, None] ** 2 + k**2) / np.outer(k, k)
    exact = 0.7 / 2.5 * length**2 * waves @ series @ waves.T
    coarse, fine = (
        darcy_pressure(np.full((m * 32, m * 32), 2.5), 0.7, length)[m // 2 :: m, m // 2 :: m]
        for m in (1, 3)
    )
    assert relative((9 * fine - coarse) / 8, exact) < 1e-4


@pytest.mark.parametrize("permeability", ["lognormal", "piecewise"])
def test_rows_of_darcy_are_accurate(permeability):
    equation = Darcy(permeability=permeability, grid=24)
    a, p = equation.sample([0, 5])
    for i in range(2):
        normal = np.random.default_rng([0, (0, 5)[i]]).standard_normal((12, 12))
        from kalmanhead.streams.pde.darcy import _deviations

        fine = darcy_pressure(equation._medium(normal * _deviations(12), 9), 1.0)[4::9, 4::9]
        assert relative(p[i].numpy(), fine) < 2e-3
    assert bool((p > 0).all())  # maximum principle under a positive force
    if permeability == "piecewise":
        assert set(a.unique().tolist()) == {3.0, 12.0}
    else:
        assert float(Darcy(grid=24).sample(range(60))[0].log().std()) == pytest.approx(1, rel=0.1)


def test_pressure_scales_as_it_must():
    a, p = Darcy(grid=24).sample([3])
    torch.testing.assert_close(Darcy(grid=24, force=-2.0).sample([3])[1], -2 * p)
    torch.testing.assert_close(Darcy(grid=24, length=2.0).sample([3])[1], 4 * p)
    torch.testing.assert_close(Darcy(grid=24, length=2.0).sample([3])[0], a)


# Advection


def test_a_wave_is_carried_by_the_speed_of_its_row():
    equation = Advection(speed=0.7, swing=0.3, period=8.0, time=0.5, grid=64, length=2.0)
    np.testing.assert_allclose(
        equation.speeds(range(9)), 0.7 + 0.3 * np.sin(2 * np.pi * np.arange(9) / 8), atol=1e-12
    )
    u0, u1 = equation.sample(range(9))
    x = 2 * torch.pi * torch.arange(64).double() / 64
    k = torch.arange(33).double()
    for u, v, speed in zip(u0, u1, equation.speeds(range(9)), strict=True):
        modes = torch.fft.rfft(u, norm="forward")
        weights = torch.tensor([1.0, *[2.0] * 31, 1.0])
        angle = torch.outer(x - 2 * torch.pi * speed * 0.5 / 2.0, k)
        direct = (weights * (modes.real * angle.cos() - modes.imag * angle.sin())).sum(1)
        torch.testing.assert_close(v, direct, atol=1e-10, rtol=0)
    torch.testing.assert_close(u0.norm(dim=1), u1.norm(dim=1))


def test_a_whole_turn_changes_nothing():
    u0, u1 = Advection(speed=2.0, swing=0.0, time=0.5).sample([0, 3])
    torch.testing.assert_close(u0, u1, atol=1e-12, rtol=0)


def test_speeds_come_back_and_stay_exact_far_out():
    equation = Advection(period=1000.0)
    assert equation.speeds([250])[0] == pytest.approx(1.5)
    np.testing.assert_allclose(equation.speeds([10**12 + 250]), equation.speeds([250]), atol=1e-9)


# Both


@pytest.mark.parametrize("equation", [Darcy(grid=24), Advection(grid=32)], ids=lambda e: e.name)
def test_a_row_depends_on_its_index_and_the_seed_alone(equation):
    x, y = equation.sample(range(6))
    for i in (4, 0):
        assert torch.equal(equation.sample([i])[0][0], x[i])
        assert torch.equal(equation.sample([i])[1][0], y[i])
    assert not torch.allclose(equation.with_seed(1).sample([0])[0], x[:1])
    assert equation.with_seed(1).seed == 1


def test_plain_predictions_are_as_good_as_they_claim():
    darcy = baselines(Darcy(grid=24, sigma=0.05), range(4))
    assert darcy["constant medium"] < 0.05
    shift = baselines(Advection(swing=0.0), range(4))
    assert shift["mean speed"] < 1e-10 < shift["persistence"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Darcy(permeability="sand"), "permeability must be lognormal or piecewise"),
        (lambda: Darcy(grid=16), "grid = 16 points cannot resolve modes = 12: take at least 24"),
        (lambda: Darcy(low=5.0, high=1.0), "high must be from low"),
        (lambda: Darcy(sigma=50.0), "sigma must be a number above 0.0 up to 3.0"),
        (lambda: Darcy(force=float("inf")), "force must be a number"),
        (lambda: Advection(period=0.0), "period must be a number above 0.0"),
        (lambda: Advection(grid=33), "grid must be even"),
        (lambda: Advection(zero_mean="no"), "zero_mean must be true or false"),
    ],
)
def test_senseless_parameters_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_system_that_cannot_be_solved_is_named():
    with pytest.raises(NumericalError, match="lower sigma"):
        darcy_pressure(np.zeros((9, 9)) + 1e-320, 1.0)
