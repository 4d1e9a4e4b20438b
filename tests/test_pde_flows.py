"""Kuramoto-Sivashinsky and Navier-Stokes: growth, balances, exact solutions, order of rows."""

import numpy as np
import pytest
import torch

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.streams.pde import KuramotoSivashinsky, NavierStokes2d


def relative(a, b):
    axes = tuple(range(1, a.ndim))
    return float(((a - b).norm(dim=axes) / b.norm(dim=axes)).max())


KS = KuramotoSivashinsky(length=22.0, grid=64, trajectories=3, steps=4, burn_in=60.0)
NS = NavierStokes2d(nu=1e-2, grid=32, trajectories=2, steps=3, burn_in=1.0, time=0.5)


# Kuramoto-Sivashinsky


@pytest.mark.parametrize("mode", [1, 2, 3, 5])
def test_small_waves_grow_or_decay_at_their_linear_rate(mode):
    equation = KuramotoSivashinsky(length=22.0, grid=64, time=0.5)
    x = 22.0 * np.arange(64) / 64
    k = 2 * np.pi * mode / 22.0
    u0 = torch.from_numpy(1e-7 * np.cos(k * x))[None]
    growth = np.exp((k**2 - k**4) * 0.5)
    torch.testing.assert_close(equation.solve(u0), growth * u0, rtol=1e-6, atol=1e-14)


def test_ks_keeps_its_mean_and_balances_its_energy():
    """d/dt int u^2 / 2 = int u_x^2 - u_xx^2, by central differences over a short time."""
    u0 = KS.sample([0, 1, 2])[0]
    assert bool((KS.solve(u0, 5.0).mean(dim=1).abs() < 1e-12).all())
    after = [KS.solve(u0, t) for t in (0.01, 0.02)]
    rate = ((after[1] ** 2).mean(1) - (u0**2).mean(1)) / (2 * 0.02)
    k = 2 * torch.pi / 22.0 * torch.arange(33)
    energy = torch.fft.rfft(after[0], norm="forward").abs().square() * torch.tensor(
        [1.0, *[2.0] * 31, 1.0]
    )
    expected = (energy * (k**2 - k**4)).sum(1)
    torch.testing.assert_close(rate, expected, rtol=2e-3, atol=2e-4)


def test_ks_steps_converge_with_fourth_order():
    u0 = KS.sample([0])[0]
    solutions = [
        KuramotoSivashinsky(length=22.0, grid=64, dt=1.0 / steps).solve(u0, 2.0)
        for steps in (32, 64, 512)
    ]
    coarse, fine = (relative(u, solutions[2]) for u in solutions[:2])
    assert 3.4 < np.log2(coarse / fine) < 4.8


def test_ks_at_its_default_step_and_grid_is_accurate():
    u0, u1 = KS.sample(range(12))
    fine = KuramotoSivashinsky(length=22.0, grid=128, dt=1 / 64)
    start = torch.fft.irfft(2 * torch.fft.rfft(u0), n=128)
    assert relative(u1, fine.solve(start)[:, ::2]) < 2e-5


def test_ks_stays_on_its_attractor():
    equation = KuramotoSivashinsky(length=22.0, grid=64, trajectories=4, steps=200, burn_in=100.0)
    u = equation.sample(range(800))[0]
    assert 1.0 < float(u.square().mean().sqrt()) < 1.6  # 1.3 over a long run
    assert float(u.abs().max()) < 5
    apart = equation.sample([0, 1])[0]
    assert relative(apart[:1], apart[1:]) > 0.5  # starts lead to different states


# Navier-Stokes


def grid_of(n, length=1.0):
    x = length * torch.arange(n, dtype=torch.float64) / n
    return torch.meshgrid(x, x, indexing="ij")


@pytest.mark.parametrize("length", [1.0, 2.0])
def test_a_taylor_green_vortex_decays_exactly(length):
    x, y = grid_of(32, length)
    k = 2 * torch.pi / length
    w0 = (torch.sin(k * x) * torch.sin(k * y))[None]
    equation = NavierStokes2d(nu=0.02, force=0.0, grid=32, length=length)
    expected = np.exp(-2 * 0.02 * float(k) ** 2 * 0.7) * w0
    torch.testing.assert_close(equation.solve(w0, 0.7), expected, rtol=1e-9, atol=1e-12)


def test_the_force_feeds_a_wave_to_its_steady_state():
    """One wave does not carry itself: w_t = nu Laplacian w + f, whose solution is known."""
    x, y = grid_of(32)
    phase = 2 * torch.pi * (x + y)
    f = 0.1 * (torch.sin(phase) + torch.cos(phase))
    decay = 0.05 * 2 * (2 * np.pi) ** 2
    equation = NavierStokes2d(nu=0.05, force=0.1, grid=32)
    w = equation.solve(torch.zeros(1, 32, 32, dtype=torch.float64), 0.3)
    expected = f[None] / decay * (1 - np.exp(-decay * 0.3))
    torch.testing.assert_close(w, expected, rtol=1e-6, atol=1e-10)


def modes_of(n):
    """Wave numbers kx (n, 1) and ky (1, n), and 1 / |k|^2 without the mean."""
    k = 2 * torch.pi * torch.fft.fftfreq(n, 1 / n).double()
    square = k[:, None] ** 2 + k**2
    return k[:, None], k[None], torch.where(square > 0, 1 / square.clamp_min(1e-9), 0.0)


def test_vorticity_is_carried_by_the_flow_it_belongs_to():
    """Its rate is -u . grad w + nu Laplacian w + f, here with plain products on a fine grid."""
    n, nu = 64, 5e-3
    equation = NavierStokes2d(nu=nu, force=0.1, grid=n, vorticity=2.0)
    w0 = equation.solve(equation.starts([0]), 0.3)
    w1, w2 = equation.solve(w0, 1e-3), equation.solve(w0, 2e-3)
    kx, ky, inverse = modes_of(n)

    def field(modes):
        return torch.fft.ifft2(modes).real

    w = torch.fft.fft2(w1)
    velocity = field(1j * ky * inverse * w), field(-1j * kx * inverse * w)
    carried = velocity[0] * field(1j * kx * w) + velocity[1] * field(1j * ky * w)
    x, y = grid_of(n)
    phase = 2 * torch.pi * (x + y)
    force = 0.1 * (torch.sin(phase) + torch.cos(phase))
    rate = -carried + nu * field(-(kx**2 + ky**2) * w) + force
    assert relative((w2 - w0) / 2e-3, rate) < 1e-3


def test_without_force_energy_and_enstrophy_decay_at_their_rates():
    """d/dt <w^2>/2 = -nu <|grad w|^2>, and d/dt <|u|^2>/2 = -nu <w^2>."""
    equation = NavierStokes2d(nu=5e-3, force=0.0, grid=32, burn_in=0.0, trajectories=2, steps=1)
    w0 = equation.solve(equation.starts([0, 1]), 0.1)
    kx, ky, inverse = modes_of(32)
    square = kx**2 + ky**2

    def power(w):
        return torch.fft.fft2(w, norm="forward").abs().square()

    before, middle, after = (
        power(u) for u in (w0, equation.solve(w0, 0.005), equation.solve(w0, 0.01))
    )
    for scale in (torch.ones_like(square), inverse):
        rate = ((after - before) * scale).sum((1, 2)) / (2 * 0.01)
        torch.testing.assert_close(
            rate, -5e-3 * (middle * scale * square).sum((1, 2)), rtol=5e-3, atol=0
        )
    mean = equation.solve(w0 + 0.3, 0.2).mean(dim=(1, 2))
    torch.testing.assert_close(mean, torch.full((2,), 0.3, dtype=torch.float64), rtol=1e-10, atol=0)


def test_ns_at_its_default_step_and_grid_is_accurate():
    w0, w1 = NS.sample(range(4))
    fine = NavierStokes2d(nu=1e-2, grid=64, time=0.5, dt=0.5 / 256)
    modes = torch.fft.fft2(w0, norm="forward")
    wide = torch.zeros(4, 64, 64, dtype=torch.complex128)
    half = slice(None, 16), slice(-15, None)
    for a in half:
        for b in half:
            wide[:, a, b] = modes[:, a, b]
    start = torch.fft.ifft2(wide, norm="forward").real
    assert relative(w1, fine.solve(start)[:, ::2, ::2]) < 1e-4


def test_starts_have_the_size_that_was_asked_for():
    equation = NavierStokes2d(grid=32, vorticity=3.0)
    w = equation.starts(range(400))
    assert float(w.square().mean().sqrt()) == pytest.approx(3.0, rel=0.03)
    assert float(w.mean(dim=(1, 2)).abs().max()) < 1e-12
    # No direction is preferred: both axes have the same power.
    power = torch.fft.fft2(w).abs().square().mean(0)
    assert float(power[1, 0] / power[0, 1]) == pytest.approx(1, abs=0.35)
    coarse = NavierStokes2d(grid=16, vorticity=3.0).starts([7])
    spectra = torch.fft.fft2(coarse, norm="forward"), torch.fft.fft2(w[7:8], norm="forward")
    torch.testing.assert_close(spectra[0][:, :8, :8], spectra[1][:, :8, :8], rtol=0, atol=1e-13)


# Both


@pytest.mark.parametrize("flow", [KS, NS], ids=lambda flow: flow.name)
def test_rows_follow_one_another_along_trajectories(flow):
    k, rows = flow.trajectories, flow.trajectories * flow.steps
    x, y = flow.sample(range(2 * rows))
    for i in range(2 * rows - k):
        if (i + k) // rows == i // rows:
            assert torch.equal(y[i], x[i + k])
        else:
            assert not torch.allclose(y[i], x[i + k])  # a new group begins with new trajectories
    torch.testing.assert_close(flow.solve(x), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flow", [KS, NS], ids=lambda flow: flow.name)
def test_a_row_is_the_same_however_it_is_reached(flow):
    fresh = [type(flow)(**vars_of(flow)) for _ in range(3)]
    through = fresh[0].sample(range(2 * flow.trajectories * flow.steps))
    for i in (5, 1, flow.trajectories * flow.steps + 2):
        alone = fresh[1].sample([i])
        assert torch.equal(alone[0][0], through[0][i])
        assert torch.equal(alone[1][0], through[1][i])
    backwards = fresh[2].sample([4, 3, 2, 4])
    assert torch.equal(backwards[0], through[0][[4, 3, 2, 4]])


def vars_of(flow):
    return {name: getattr(flow, name) for name in flow.__dataclass_fields__}


@pytest.mark.parametrize("flow", [KS, NS], ids=lambda flow: flow.name)
def test_another_seed_is_another_flow(flow):
    assert not torch.allclose(flow.sample([0])[0], flow.with_seed(1).sample([0])[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KuramotoSivashinsky(length=5.0), "length must be a number from 22.0"),
        (lambda: KuramotoSivashinsky(length=100.0, grid=64), "take at least 100"),
        (lambda: KuramotoSivashinsky(grid=65), "grid must be even"),
        (lambda: KuramotoSivashinsky(time=float("nan")), "time must be a number above 0"),
        (lambda: KuramotoSivashinsky(burn_in=1e12), "burn_in = .* shorten it"),
        (lambda: KuramotoSivashinsky(trajectories=65536, grid=2**16), "take fewer"),
        (lambda: NavierStokes2d(nu=0.0), "nu must be a number above 0.0"),
        (lambda: NavierStokes2d(nu=1e-9), "raise nu"),
        (lambda: NavierStokes2d(trajectories=0), "trajectories must be a whole number from 1"),
        (lambda: KS.solve(torch.zeros(2, 65)), r"u0 must have shape \(n, 64\)"),
        (lambda: KS.solve(torch.zeros(2, 64), 0.0), "time must be"),
        (lambda: KS.sample([-1]), "must not be negative"),
    ],
)
def test_senseless_flows_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_overflow_is_named():
    with pytest.raises(NumericalError, match="smaller dt"):
        KuramotoSivashinsky(dt=5.0, time=50.0).solve(torch.full((1, 64), 1e3).cumsum(1).double())
