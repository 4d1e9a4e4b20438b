"""Burgers solver against exact solutions and conservation laws; the files it writes."""

import numpy as np
import pytest
import torch
import zarr
from oracles_pde import burgers_sine

from kalmanhead.errors import ConfigError, NumericalError, SourceError
from kalmanhead.streams.pde import Burgers, write_zarr


def relative(a, b):
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())


@pytest.mark.parametrize("nu", [0.1, 0.02])
@pytest.mark.parametrize("time", [0.1, 0.5])
def test_the_cole_hopf_solution_is_met(nu, time):
    x = np.arange(64) / 64
    exact = torch.from_numpy(burgers_sine(x, time, nu))[None]
    u0 = torch.from_numpy(np.sin(2 * np.pi * x))[None]
    assert relative(Burgers(nu=nu, grid=64, time=time).solve(u0), exact) < 2e-5


def test_the_step_converges_with_fourth_order():
    # A mean that carries the field is what the explicit part of the scheme has to resolve.
    u0 = Burgers(grid=64, seed=3, zero_mean=False).initial([0])
    equation = {"nu": 0.05, "grid": 64, "time": 0.5, "solver_grid": 128}
    solutions = [Burgers(dt=0.5 / steps, **equation).solve(u0) for steps in (40, 80, 1000)]
    coarse, fine = (relative(u, solutions[2]) for u in solutions[:2])
    assert 3.5 < np.log2(coarse / fine) < 4.6


@pytest.mark.parametrize("nu", [0.1, 0.01])
def test_the_default_step_and_grid_are_accurate(nu):
    equation = Burgers(nu=nu, grid=64)
    u0, u1 = equation.sample(range(8))
    finer = Burgers(
        nu=nu, grid=64, solver_grid=2 * equation.fine_grid, dt=1 / 2048 if nu > 0.05 else 1 / 4096
    )
    assert relative(u1, finer.solve(u0)) < 1e-4


def test_mean_is_conserved_and_energy_decays():
    equation = Burgers(nu=0.02, grid=64, zero_mean=False)
    u = equation.initial(range(6))
    mean, energy = u.mean(dim=1), (u**2).mean(dim=1)
    for _ in range(3):
        u = equation.solve(u, 0.1)
        torch.testing.assert_close(u.mean(dim=1), mean, atol=1e-12, rtol=0)
        assert bool(((u**2).mean(dim=1) < energy).all())
        energy = (u**2).mean(dim=1)


def test_a_row_does_not_depend_on_its_batch():
    equation = Burgers(nu=0.05, grid=64, time=0.2, seed=5)
    u0, u1 = equation.sample(range(9))
    for i in (0, 4, 8):
        alone0, alone1 = equation.sample([i])
        assert torch.equal(alone0[0], u0[i])
        assert torch.equal(alone1[0], u1[i])


def test_a_seed_gives_the_same_data_and_another_does_not():
    equation = Burgers(grid=64, seed=1)
    before = torch.random.get_rng_state()
    first = equation.initial(range(3))
    assert torch.equal(first, Burgers(grid=64, seed=1).initial(range(3)))
    assert not torch.equal(first, equation.with_seed(2).initial(range(3)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_coarse_field_is_the_truncation_of_a_fine_one():
    coarse, fine = Burgers(grid=32).initial([4]), Burgers(grid=256).initial([4])
    spectra = [torch.fft.rfft(u, norm="forward")[:, :16] for u in (coarse, fine)]
    torch.testing.assert_close(*spectra, atol=1e-14, rtol=0)


@pytest.mark.parametrize("length", [1.0, 2.0])
def test_initial_fields_have_the_variance_of_their_spectrum(length):
    u = Burgers(grid=32, length=length, zero_mean=False).initial(range(3000))
    k = 2 * np.pi / length * np.arange(-15, 16)
    torch.testing.assert_close(
        float((u**2).mean()), float((625 / (k**2 + 25) ** 2).sum() / length), rtol=0.05, atol=0
    )
    zero_mean = Burgers(grid=32, zero_mean=True).initial(range(3))
    torch.testing.assert_close(
        zero_mean.mean(dim=1), torch.zeros(3, dtype=torch.float64), atol=1e-14, rtol=0
    )


def test_a_longer_domain_is_a_change_of_units():
    u0 = torch.sin(2 * torch.pi * torch.arange(64, dtype=torch.float64) / 64)[None]
    unit = Burgers(nu=0.05, grid=64, time=0.5).solve(u0)
    stretched = Burgers(nu=0.1, length=2.0, grid=64, time=1.0).solve(u0)
    assert relative(stretched, unit) < 1e-4


def test_a_constant_field_stays():
    u0 = torch.zeros(2, 32, dtype=torch.float64)
    u0[1] = 1.5
    torch.testing.assert_close(Burgers(nu=0.1, grid=32).solve(u0), u0, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nu": 0.0}, "nu must be a number above 0.0, got 0.0"),
        ({"nu": -1.0}, "nu must be"),
        ({"nu": True}, "nu must be a number above 0.0, got True"),
        ({"grid": 64.0}, "grid must be a whole number from 8, got 64.0"),
        ({"zero_mean": 1}, "zero_mean must be true or false, got 1"),
        ({"time": 0.0}, "time must be"),
        ({"length": float("nan")}, "length must be"),
        ({"dt": -0.1}, "dt must be"),
        ({"grid": 65}, "grid must be even"),
        ({"grid": 4}, "grid must be a whole number from 8, got 4"),
        ({"solver_grid": 300}, "solver_grid must be a multiple of grid = 256"),
        ({"seed": -1}, "seed must be a whole number from 0, got -1"),
    ],
)
def test_senseless_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Burgers(**options)


def test_senseless_fields_and_times_are_refused():
    equation = Burgers(grid=32)
    with pytest.raises(ConfigError, match=r"u0 must have shape \(n, 32\)"):
        equation.solve(torch.zeros(2, 64))
    with pytest.raises(ConfigError, match="time must be"):
        equation.solve(torch.zeros(2, 32), -1.0)
    with pytest.raises(ConfigError, match="indices must not be negative"):
        equation.initial([-1])


def test_an_overflow_is_named():
    equation = Burgers(nu=1e-4, grid=128, solver_grid=128, dt=0.1, time=5.0)
    with pytest.raises(NumericalError, match="smaller dt"):
        equation.sample([0])


QUICK = Burgers(nu=0.1, grid=32, time=0.1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_file_holds_the_fields_and_how_they_were_made(tmp_path, dtype):
    steps = []
    path = write_zarr(
        tmp_path / "new" / "b.zarr", QUICK, 5, 7, chunk_rows=2, dtype=dtype, progress=steps.append
    )
    group = zarr.open_group(path, mode="r")
    u0, u1 = QUICK.with_seed(7).sample(range(5))
    np.testing.assert_array_equal(group["x"][:], u0.numpy().astype(dtype))
    np.testing.assert_array_equal(group["y"][:], u1.numpy().astype(dtype))
    assert group["x"].chunks == (2, 32)
    assert sum(steps) == 5
    attributes = dict(group.attrs)
    for key, value in {
        "equation": "burgers",
        "nu": 0.1,
        "domain": [0.0, 1.0],
        "time": 0.1,
        "seed": 7,
        "dt": 0.0,
        "solver_grid": 128,
        "dtype": dtype,
        "samples": 5,
    }.items():
        assert attributes[key] == value
    assert "625" in attributes["spectrum"]
    assert [p.name for p in path.parent.iterdir()] == ["b.zarr"]


def test_a_file_is_replaced_only_if_asked(tmp_path):
    path = write_zarr(tmp_path / "b.zarr", QUICK, 2)
    with pytest.raises(SourceError, match="exists: choose another path or ask to overwrite"):
        write_zarr(path, QUICK, 3)
    write_zarr(path, QUICK, 3, overwrite=True)
    assert zarr.open_group(path, mode="r")["x"].shape == (3, 32)
    assert [p.name for p in tmp_path.iterdir()] == ["b.zarr"]


def test_a_failure_leaves_the_old_file_and_no_scraps(tmp_path):
    path = write_zarr(tmp_path / "b.zarr", QUICK, 2)

    def stop(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_zarr(path, QUICK, 3, overwrite=True, progress=stop)
    assert zarr.open_group(path, mode="r")["x"].shape == (2, 32)
    assert [p.name for p in tmp_path.iterdir()] == ["b.zarr"]


def test_senseless_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        write_zarr(tmp_path / "b.zarr", QUICK, 0)
    with pytest.raises(ConfigError, match="float32 or float64"):
        write_zarr(tmp_path / "b.zarr", QUICK, 2, dtype="int8")
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="cannot be written"):
        write_zarr(tmp_path / "file" / "b.zarr", QUICK, 2)
