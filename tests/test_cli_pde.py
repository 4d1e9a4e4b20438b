"""Equations from the command line: streamed, resumed, shuffled, written, and refused."""

import re
import signal

import numpy as np
import pytest
import zarr
from command import Forker, assert_same_end, lines, newest, ok, refused, zarr_of

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams import open_source
from kalmanhead.streams.pde import EQUATIONS, Burgers, KuramotoSivashinsky, open_pde

SMALL = {
    "burgers": "pde:burgers?grid=32&nu=0.1&time=0.1",
    "ks": "pde:ks?grid=32&trajectories=3&steps=5&burn_in=5",
    "ns2d": "pde:ns2d?grid=16&nu=0.01&trajectories=2&steps=4&burn_in=0&time=0.2",
    "darcy": "pde:darcy?grid=16&modes=8",
    "advection": "pde:advection?grid=16&period=50",
}
FAST = ("--width", 4, "--depth", 1, "--modes", 4, "--batch-size", 8)


@pytest.mark.parametrize("name", SMALL)
def test_rows_read_from_any_place_are_those_read_through(name):
    source = open_pde(f"{SMALL[name]}&rows=40")
    through = source.read(0, 40)
    assert through.x.shape[1:] == source.spec.x_shape
    for start, stop in ((0, 3), (17, 29), (38, 40), (5, 6)):
        part = open_pde(f"{SMALL[name]}&rows=40").read(start, stop)
        assert np.array_equal(part.x, through.x[start:stop])
        assert np.array_equal(part.y, through.y[start:stop])
    endless = next(open_pde(SMALL[name]).iterate(11))
    assert np.array_equal(endless.x[:3], through.x[11:14])


@pytest.mark.parametrize("name", SMALL)
def test_the_operator_follows_the_shape(name, tmp_path):
    run = tmp_path / "run"
    ok("stream", "--source", SMALL[name], "--run", run, *FAST, "--max-batches", 4, "--quiet")
    assert len(lines(run)) == 4
    assert "relative_l2" in lines(run)[-1]
    dims = 2 if name in ("ns2d", "darcy") else 1
    assert newest(run)["rows"]["grid_dims"] == dims
    assert newest(run)["learner"]["backbone"]["lifting.weight"].shape == (4, 1)
    assert "no parameter" not in ok("show", run).out


@pytest.mark.parametrize("shape", [(16, 16), (10, 24), (3, 16)])
def test_the_operator_follows_the_shape_of_a_zarr(shape, tmp_path):
    x = np.random.default_rng(0).normal(size=(24, *shape))
    source, run = zarr_of(tmp_path / "d.zarr", x=x, y=x.cumsum(-1)), tmp_path / "run"
    ok("stream", "--source", source, "--run", run, "--width", 4, "--depth", 1, "--quiet")
    rows = newest(run)["rows"]
    assert rows["grid_dims"] == (1 if shape[0] == 3 else 2)  # few rows of a field are channels
    assert newest(run)["learner"]["backbone"]["lifting.weight"].shape[1] == rows["x_shape"][0]


@pytest.mark.parametrize("name", ["burgers", "ks", "ns2d"])
def test_a_run_that_stopped_goes_on_bit_for_bit(name, tmp_path):
    command = ("stream", "--source", SMALL[name], *FAST, "--quiet", "--checkpoint-every", 2)
    ok(*command, "--run", tmp_path / "whole", "--max-batches", 9)
    ok(*command, "--run", tmp_path / "parts", "--max-batches", 4)
    ok("resume", tmp_path / "parts", "--max-batches", 9, "--quiet")
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


def test_kills_change_no_bit_of_a_run_on_a_solver(tmp_path):
    command = ["stream", "--source", SMALL["ks"], "--quiet", "--checkpoint-every", 3]
    command += [*FAST, "--max-batches", 18]
    with Forker() as forker:
        assert forker.run(*command, "--run", tmp_path / "whole").code == 0
        run = tmp_path / "killed"
        for batch in (3, 12):
            begun = (run / "config.toml").exists()
            once = run / "checkpoints" / f"batch-{batch:012d}.safetensors"
            next_command = ["resume", run, "--quiet"] if begun else [*command, "--run", run]
            result = forker.run(*next_command, send=signal.SIGKILL, once=once)
            assert result.code in (0, -signal.SIGKILL), result
        assert forker.run("resume", run, "--quiet").code == 0
    assert_same_end(run, tmp_path / "whole")


def test_a_finite_equation_is_shuffled_and_held_out(tmp_path):
    run = tmp_path / "run"
    source = f"{SMALL['advection']}&rows=50"
    ok("stream", "--source", source, "--run", run, *FAST, "--epochs", 2, "--holdout", 10, "--quiet")
    assert lines(run)[-1]["rows"] == 80
    assert newest(run)["holdout"]["relative_l2"] > 0
    assert "shuffle = true" in (run / "config.toml").read_text()
    predicted = tmp_path / "p.zarr"
    ok("predict", run, "--source", source, "--out", predicted, "--quiet")
    assert {a.shape for _, a in zarr.open_group(predicted, mode="r").arrays()} == {(50, 1, 16)}


def test_another_parameter_is_another_source(tmp_path):
    run = tmp_path / "run"
    ok("stream", "--source", SMALL["burgers"], "--run", run, *FAST, "--max-batches", 2, "--quiet")
    config = run / "config.toml"
    config.write_text(config.read_text().replace("nu=0.1", "nu=0.2"))
    line = refused("resume", run, "--max-batches", 4)
    assert "the source has changed since the checkpoint" in line
    assert "nu was 0.1, is 0.2" in line


def test_what_is_streamed_is_the_equation():
    stream = open_source("pde:burgers?grid=32&nu=0.1&time=0.1&seed=3&rows=16", 8)
    fields = [(batch.x.numpy(), batch.y.numpy()) for batch in stream]
    u0, u1 = Burgers(grid=32, nu=0.1, time=0.1, seed=3).sample(range(16))
    np.testing.assert_array_equal(np.concatenate([x for x, _ in fields])[:, 0], u0)
    np.testing.assert_array_equal(np.concatenate([y for _, y in fields])[:, 0], u1)
    assert open_pde("pde:burgers?zero_mean=false").equation.zero_mean is False
    assert open_pde("pde:darcy?permeability=piecewise").equation.permeability == "piecewise"
    assert open_pde("pde:ks?length=30").equation == KuramotoSivashinsky(length=30)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("pde:heat", "no equation 'heat'; there are burgers, ks, ns2d, darcy, advection"),
        ("pde:", "no equation ''"),
        ("pde:Burgers", "no equation 'Burgers'"),
        ("pde:burgers?", None),
        ("pde:burgers?viscosity=1", "no parameter 'viscosity'; there are nu, length"),
        ("pde:burgers?nu=1&nu=2", "nu is given twice"),
        ("pde:burgers?nu=thick", "nu is 'thick'; give a number"),
        ("pde:burgers?nu=", "nu is ''; give a number"),
        ("pde:burgers?nu=nan", "nu must be a number above 0.0, got nan"),
        ("pde:burgers?nu=1e-300", "raise nu or take fewer points"),
        ("pde:burgers?grid=1e3", "grid is '1e3'; give a whole number"),
        ("pde:burgers?grid=0", "grid must be a whole number from 8"),
        ("pde:burgers?grid=99999999998", "more than 1048576"),
        ("pde:burgers?zero_mean=yes", "zero_mean is 'yes'; give true or false"),
        ("pde:burgers?rows=0", "rows is 0; give a whole number from 1 on"),
        ("pde:burgers?rows=99999999999999999999", "up to 2^53"),
        ("pde:burgers?seed=-1", "seed must be a whole number from 0"),
        ("pde:ks?trajectories=100000", "trajectories must be a whole number from 1 up to 65536"),
    ],
)
def test_what_makes_no_sense_is_refused(target, message):
    if message is None:
        assert open_pde(target).spec.rows is None
        return
    with pytest.raises((ConfigError, SourceError), match=re.escape(message)) as caught:
        open_pde(target)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(target)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--epochs", 2), "epochs"),
        (("--shuffle",), "shuffling"),
        (("--holdout", 10), "holdout"),
        (("--field", "u"), "field"),
        (("--target", "y"), "target"),
        (("--weight", "w"), "weight"),
        (("--dims", 2), "dims"),
    ],
)
def test_what_an_endless_equation_cannot_do_is_refused(options, word, tmp_path):
    line = refused("stream", "--source", SMALL["ks"], "--run", tmp_path / "run", *options)
    assert word in line


@pytest.mark.parametrize("name", sorted(EQUATIONS))
def test_make_writes_every_equation(name, tmp_path):
    out = tmp_path / f"{name}.zarr"
    pairs = [part.split("=") for part in SMALL[name].partition("?")[2].split("&")]
    options = [word for key, value in pairs for word in ("--" + key.replace("_", "-"), value)]
    result = ok("make", name, "--out", out, "--samples", 5, "--dtype", "float64", *options)
    assert f"{out}: 5 pairs" in result.out
    assert re.search(r"relative L2 without learning: \w[\w ]* [\d.]+", result.out)
    group = zarr.open_group(out, mode="r")
    x, y = open_pde(SMALL[name]).equation.sample(range(5))
    np.testing.assert_array_equal(group["x"][:], x)
    np.testing.assert_array_equal(group["y"][:], y)
    attributes = dict(group.attrs)
    assert attributes["equation"] == name
    assert attributes["domain"][0] == 0.0
    for key, value in pairs:
        assert attributes[key] == float(value)
    assert f"(0, {attributes['length']:g})" in result.out


def test_make_refuses_what_makes_no_sense(tmp_path):
    out = tmp_path / "x.zarr"
    assert "high must be from low" in refused("make", "darcy", "--out", out, "--high", 1)
    assert "permeability must be" in refused("make", "darcy", "--out", out, "--permeability", "mud")
    assert "whole number" in refused("make", "ks", "--out", out, "--grid", "many")
    assert "No such command 'heat'" in refused("make", "heat", "--out", out)
    assert not out.exists()
