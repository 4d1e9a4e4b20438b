"""`rollout`: errors by step beside persistence, the picture, and what cannot be rolled out."""

import json

import numpy as np
import pytest
import torch
from command import newest, ok, refused, vector_zarr, zarr_of

from kalmanhead.config import ModelConfig, build_learner

POINTS, STATES, MANY = 16, 12, 4


def trajectories(seed=0):
    """Waves that travel by one point a step and fade, (MANY, STATES, POINTS)."""
    u = np.random.default_rng(seed).normal(size=(MANY, POINTS)).cumsum(1)
    return np.stack([0.95**t * np.roll(u, t, 1) for t in range(STATES)], 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollout")
    u = trajectories()
    x, y = (part.reshape(-1, POINTS) for part in (u[:, :-1], u[:, 1:]))
    zarr_of(folder / "pairs.zarr", x=x, y=y)
    turns = [part.swapaxes(0, 1).reshape(-1, POINTS) for part in (u[:, :-1], u[:, 1:])]
    zarr_of(folder / "turns.zarr", x=turns[0], y=turns[1])
    zarr_of(folder / "series.zarr", u=u[0])
    ok("stream", "--source", folder / "pairs.zarr", "--run", folder / "run", "--width", 4,
       "--modes", 4, "--epochs", 6, "--batch-size", 8, "--holdout", 11)  # fmt: skip
    return folder


def learner_of(folder):
    learner = build_learner(ModelConfig(width=4, modes=4), (1, POINTS), (1, POINTS), 1)
    learner.load_state(newest(folder / "run")["learner"])
    return learner


def expected(learner, u, steps):
    """Mean relative L2 by step of the learner and of persistence, from states u[:, 0]."""
    x, errors = torch.as_tensor(u[:, :1]), []
    for step in range(1, steps + 1):
        x = learner.predict(x)
        truth = u[:, step]
        gaps = np.asarray(x[:, 0].double()) - truth, u[:, 0] - truth
        norms = [np.linalg.norm(gap, axis=1) / np.linalg.norm(truth, axis=1) for gap in gaps]
        errors.append([norm.mean() for norm in norms])
    return np.array(errors).T


def test_errors_by_step(folder):
    result = ok("rollout", folder / "run", "--source", folder / "pairs.zarr", "--steps", 11,
                "--starts", 4, "--threshold", 0.5, "--json")  # fmt: skip
    told = result.json
    assert told["starts"] == [0, 11, 22, 33]
    for name, errors in zip(
        ("learner", "persistence"), expected(learner_of(folder), trajectories(), 11), strict=True
    ):
        np.testing.assert_allclose(told[name]["relative_l2"], errors, rtol=1e-6)
        beyond = np.flatnonzero(errors > 0.5)
        first = int(beyond[0]) + 1 if beyond.size else None
        assert told[name]["steps_until"] == first
    lines = result.out.splitlines()
    assert lines[0].split() == ["step", "relative_l2", "persistence"]
    assert [line.split()[0] for line in lines[1:6]] == ["1", "2", "5", "10", "11"]
    assert lines[3].split()[1] == f"{told['learner']['relative_l2'][4]:.4g}"
    assert lines[6] == "4 roll-outs, from rows 0, 11, 22, 33"
    until = told["persistence"]["steps_until"]
    assert lines[7].startswith("first beyond 0.5: ")
    assert lines[7].endswith(f"(persistence: step {until})")


def test_rows_in_turns_and_a_series_are_the_same_trajectories(folder):
    command = ["rollout", folder / "run", "--steps", 11, "--quiet", "--json", "--source"]
    rows = ok(*command, folder / "pairs.zarr", "--starts", 4)
    turns = ok(*command, folder / "turns.zarr", "--starts", 4, "--stride", MANY)
    assert rows.out.count("\n") == 1
    assert turns.json["starts"] == [0, 1, 2, 3]
    assert turns.json["learner"] == rows.json["learner"]
    first = ok(*command, folder / "pairs.zarr").json
    series = ok(*command, folder / "series.zarr", "--field", "u").json
    assert series["learner"] == first["learner"]
    assert series["persistence"] == first["persistence"]


def test_the_options_of_the_run_say_how_its_source_is_read(folder, tmp_path):
    ok("stream", "--source", folder / "series.zarr", "--field", "u", "--lead", 2, "--run",
       tmp_path / "r", "--width", 4, "--modes", 4, "--quiet")  # fmt: skip
    command = ["rollout", tmp_path / "r", "--source", folder / "series.zarr", "--json", "--steps"]
    kept = ok(*command, 5, "--start", 1).json["persistence"]["relative_l2"]
    u = trajectories()[0]
    gaps = [np.linalg.norm(u[1] - u[t]) / np.linalg.norm(u[t]) for t in range(3, 12, 2)]
    np.testing.assert_allclose(kept, gaps)
    ends = "6 steps from row 0 end with row 10, there are 10 rows"
    assert ends in refused(*command, 6)


@pytest.fixture
def figures(monkeypatch):
    """Pictures as they are written."""
    from kalmanhead.cli import rolling

    real, drawn = rolling.write, []

    def write(figure, path):
        drawn.append(figure)
        real(figure, path)

    monkeypatch.setattr(rolling, "write", write)
    return drawn


def drawn_lines(axes):
    return {line.get_label(): line.get_ydata() for line in axes.lines}


def images(figure):
    return {own.get_title(): own.images[0].get_array() for own in figure.axes if own.images}


def test_a_picture_of_lines(folder, tmp_path, figures):
    result = ok("rollout", folder / "run", "--source", folder / "pairs.zarr", "--steps", 10,
                "--start", 12, "--json", "--plot", tmp_path / "r.png")  # fmt: skip
    assert f"picture: {tmp_path / 'r.png'}" in result.out
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    steps, spectra = (own for own in figures[0].axes if own.lines)
    drawn = drawn_lines(steps)
    for name in ("learner", "persistence"):
        np.testing.assert_array_equal(drawn[name], result.json[name]["relative_l2"])
    u = trajectories()[1]
    energy = np.abs(np.fft.rfft(u[11])) ** 2 / POINTS**2 * ([1] + [2] * 7 + [1])
    np.testing.assert_allclose(drawn_lines(spectra)["truth"], energy[1:])
    assert drawn_lines(spectra).keys() == {"truth", "prediction", "error"}
    fields = images(figures[0])
    assert list(fields) == ["truth, from row 12", "prediction", "error"]
    np.testing.assert_allclose(fields["truth, from row 12"], u[2:])
    assert figures[0].get_suptitle() == "run: a roll-out of y"


def test_a_picture_of_planes(tmp_path, figures):
    u = np.random.default_rng(0).normal(size=(30, 8, 6))
    u = np.stack([np.roll(u[0], t, 1) for t in range(30)])
    source = zarr_of(tmp_path / "u.zarr", u=u)
    ok("stream", "--source", source, "--field", "u", "--run", tmp_path / "r", "--width", 4,
       "--modes", 3, "--quiet", "--dims", 2)  # fmt: skip
    result = ok("rollout", tmp_path / "r", "--source", source, "--steps", 4, "--starts", 3,
                "--json", "--plot", tmp_path / "r.svg")  # fmt: skip
    step = result.json["learner"]["steps_until"] or 4
    fields = images(figures[0])
    assert list(fields) == [f"truth, step {step} from row 0", "prediction", "error"]
    np.testing.assert_allclose(fields[f"truth, step {step} from row 0"], u[step])


def test_a_rollout_that_diverges_is_told_and_drawn_without_a_warning(
    folder, tmp_path, figures, monkeypatch
):
    from kalmanhead.learner import OnlineLearner

    monkeypatch.setattr(OnlineLearner, "predict", lambda _, x: x.double() * -1e120)
    result = ok("rollout", folder / "run", "--source", folder / "pairs.zarr", "--steps", 6,
                "--json", "--plot", tmp_path / "r.png")  # fmt: skip
    assert result.json["learner"] == {
        "relative_l2": [pytest.approx(1e120, rel=1)] + [None] * 5,
        "steps_until": 1,
    }
    assert [line.split()[1] for line in result.out.splitlines()[2:4]] == ["inf", "inf"]
    assert "NaN" not in json.dumps(result.json)
    _, spectra = (own for own in figures[0].axes if own.lines)
    assert drawn_lines(spectra).keys() == {"truth"}


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("pairs.zarr", ["--steps", 12], "y of row 10 is not x of row 11, so they are no steps of"),
        ("turns.zarr", ["--steps", 2], "y of row 0 is not x of row 1"),
        ("turns.zarr", ["--steps", 2, "--stride", 3], "y of row 0 is not x of row 3"),
        ("pairs.zarr", ["--steps", 11, "--starts", 5], "11 steps follow one another from 4 rows"),
        ("pairs.zarr", ["--steps", 11, "--start", 40], "end with row 50, there are 44 rows"),
        ("series.zarr", ["--steps", 3], "has no array x; it has u"),
        ("series.zarr", ["--steps", 3, "--field", "v"], "has no array v; it has u"),
        ("absent.zarr", ["--steps", 3], "no such file or directory"),
        ("pairs.zarr", ["--steps", 0], "0 is not in the range"),
        ("pairs.zarr", ["--steps", 3, "--threshold", "nan"], "is not a finite number"),
        ("pairs.zarr", ["--steps", 3, "--plot", "p.xyz"], "its ending is none of"),
        ("wide.zarr", ["--steps", 3], "inputs of shape (2, 16), the run learnt (1, 16)"),
    ],
)  # fmt: skip
def test_refusals(folder, source, options, reason):
    if source == "wide.zarr":
        x = np.ones((5, 2, POINTS))
        zarr_of(folder / source, x=x, y=x)
    assert reason in refused("rollout", folder / "run", "--source", folder / source, *options)


def test_vectors_and_targets_of_another_shape_are_refused(folder, tmp_path):
    source = vector_zarr(tmp_path / "v.zarr", 40)
    ok("stream", "--source", source, "--run", tmp_path / "v", "--width", 4, "--quiet")
    command = ["rollout", tmp_path / "v", "--source", source, "--steps", 2]
    assert "learnt vectors, and roll-outs are of fields" in refused(*command)
    x = np.random.default_rng(0).normal(size=(20, 2, POINTS))
    source = zarr_of(tmp_path / "f.zarr", x=x, y=x[:, 0])
    ok("stream", "--source", source, "--run", tmp_path / "f", "--width", 4, "--quiet")
    command = ["rollout", tmp_path / "f", "--source", source, "--steps", 2]
    assert "a roll-out needs the same, u(t) as x and u(t + 1) as y" in refused(*command)
    assert "absent: no such folder" in refused("rollout", "absent", *command[2:])
