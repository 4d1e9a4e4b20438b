"""`predict` and `make`: predictions of new rows, with and without targets, on other grids."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from command import newest, ok, parquet_of, refused, vectors, zarr_of

from kalmanhead.config import ModelConfig, build_learner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    parquet_of(folder / "train.parquet", 300, w=np.ones(300))
    ok("stream", "--source", folder / "train.parquet", "--run", folder / "run", "--width", 8,
       "--weight", "w", "--epochs", 3)  # fmt: skip
    return folder


def table(rows, names, seed=1):
    x, y = vectors(rows, seed)
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y[:, 0]}
    return pa.table({name: columns.get(name, np.arange(float(rows))) for name in names}), x, y


@pytest.mark.parametrize(
    "names",
    [["a", "b", "c", "y", "w"], ["a", "b", "c"], ["date", "c", "y", "b", "a"]],
    ids=["as learnt", "without targets and weights", "in another order, with more"],
)
def test_vectors(folder, tmp_path, names):
    new, x, _ = table(50, names)
    pq.write_table(new, tmp_path / "new.parquet")
    before = newest(folder / "run")["learner"]["batches"]
    result = ok("predict", folder / "run", "--source", tmp_path / "new.parquet",
                "--out", tmp_path / "p.parquet", "--batch-size", 7)  # fmt: skip
    assert ("rmse" in result.out) == ("y" in names)
    assert "50 predictions with 90% intervals" in result.out
    predicted = pq.read_table(tmp_path / "p.parquet")
    assert predicted.column_names == ["y", "y_low", "y_high"]
    mean, low, high = (column.to_numpy() for column in predicted.columns)
    assert ((low < mean) & (mean < high)).all()
    learner = build_learner(ModelConfig(width=8), (3,), (1,))
    tree = newest(folder / "run")["learner"]
    learner.load_state(tree)
    import torch

    # `predict` multiplies in the backbone's float32, the distribution in float64.
    expected = learner.predict(torch.as_tensor(x))[:, 0]
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)
    assert tree["batches"] == before


def test_wider_levels_give_wider_intervals_and_out_is_replaced_only_when_told(folder, tmp_path):
    pq.write_table(table(30, ["a", "b", "c"])[0], tmp_path / "new.parquet")
    command = ["predict", folder / "run", "--source", tmp_path / "new.parquet"]
    widths = []
    for level, told in ((0.5, "50%"), (0.99, "99%"), (0.999999, "99.9999%")):
        options = "--level", level, "--overwrite"
        result = ok(*command, "--out", tmp_path / "p.parquet", *options)
        assert f"30 predictions with {told} intervals" in result.out
        p = pq.read_table(tmp_path / "p.parquet")
        widths.append((p["y_high"].to_numpy() - p["y_low"].to_numpy()).mean())
    assert widths == sorted(widths)
    assert "exists" in refused(*command, "--out", tmp_path / "p.parquet")
    ok(*command, "--out", tmp_path / "more" / "p.zarr")
    assert zarr.open_group(tmp_path / "more" / "p.zarr", mode="r")["y"].shape == (30, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more", "new.parquet", "p.parquet"]


def test_a_column_that_is_missing_is_named(folder, tmp_path):
    pq.write_table(table(30, ["a", "c", "d"])[0], tmp_path / "new.parquet")
    line = refused("predict", folder / "run", "--source", tmp_path / "new.parquet",
                   "--out", tmp_path / "p.parquet")  # fmt: skip
    assert "no column 'b'; there are a, c, d" in line
    assert [path.name for path in tmp_path.iterdir()] == ["new.parquet"]


def test_a_bad_row_is_named_and_leaves_no_half_file(folder, tmp_path):
    new, x, _ = table(30, ["a", "b", "c"])
    x[11, 0] = np.nan
    pq.write_table(new.set_column(0, "a", [x[:, 0]]), tmp_path / "new.parquet")
    line = refused("predict", folder / "run", "--source", tmp_path / "new.parquet",
                   "--out", tmp_path / "p.parquet", "--batch-size", 5)  # fmt: skip
    assert "row 11" in line
    assert [path.name for path in tmp_path.iterdir()] == ["new.parquet"]


def test_columns_that_are_vectors(tmp_path):
    x, y = vectors(60)
    column = pa.FixedSizeListArray.from_arrays(x.ravel(), 3)
    pq.write_table(pa.table({"v": column, "y": y[:, 0]}), tmp_path / "d.parquet")
    pq.write_table(pa.table({"k": y[:, 0], "v": column}), tmp_path / "new.parquet")
    ok("stream", "--source", tmp_path / "d.parquet", "--run", tmp_path / "r", "--width", 4)
    ok("predict", tmp_path / "r", "--source", tmp_path / "new.parquet",
       "--out", tmp_path / "p.parquet")  # fmt: skip
    assert pq.read_table(tmp_path / "p.parquet").num_rows == 60


def test_a_field_is_predicted_on_a_finer_grid(tmp_path):
    for name, grid, seed in (("train", 64, 0), ("fine", 128, 1)):
        ok("make", "burgers", "--out", tmp_path / f"{name}.zarr", "--samples", 80, "--grid", grid,
           "--nu", 0.1, "--time", 0.2, "--seed", seed, "--quiet")  # fmt: skip
    ok("stream", "--source", tmp_path / "train.zarr", "--run", tmp_path / "r", "--width", 8,
       "--modes", 6, "--epochs", 6, "--batch-size", 16)  # fmt: skip
    fine = zarr.open_group(tmp_path / "fine.zarr", mode="r")
    result = ok("predict", tmp_path / "r", "--source", tmp_path / "fine.zarr",
                "--out", tmp_path / "p.zarr")  # fmt: skip
    predicted = zarr.open_group(tmp_path / "p.zarr", mode="r")
    truth, mean = fine["y"][:], predicted["y"][:].reshape(80, 128)
    error = np.linalg.norm(mean - truth, axis=1) / np.linalg.norm(truth, axis=1)
    assert error.mean() < 0.5
    assert f"relative_l2 {error.mean():.4g}" in result.out
    assert predicted.attrs["interval_level"] == 0.9
    zarr_of(tmp_path / "only.zarr", x=fine["x"][:])
    result = ok("predict", tmp_path / "r", "--source", tmp_path / "only.zarr",
                "--out", tmp_path / "q.zarr")  # fmt: skip
    assert "rmse" not in result.out
    np.testing.assert_array_equal(
        zarr.open_group(tmp_path / "q.zarr", mode="r")["y"][:], predicted["y"][:]
    )


@pytest.fixture
def figures(monkeypatch):
    """Pictures as they are written."""
    from kalmanhead.cli import predicting

    real, drawn = predicting.write, []

    def write(figure, path):
        drawn.append(figure)
        real(figure, path)

    monkeypatch.setattr(predicting, "write", write)
    return drawn


def drawn_lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


@pytest.mark.parametrize("known", [True, False])
def test_a_picture_of_the_last_rows(folder, tmp_path, figures, known, monkeypatch):
    from kalmanhead.learner import OnlineLearner

    calls, real = [], OnlineLearner.predict_dist

    def counted(self, x):
        calls.append(len(x))
        return real(self, x)

    monkeypatch.setattr(OnlineLearner, "predict_dist", counted)
    new, _, y = table(620, ["a", "b", "c", "y"] if known else ["a", "b", "c"])
    pq.write_table(new, tmp_path / "new.parquet")
    result = ok("predict", folder / "run", "--source", tmp_path / "new.parquet", "--out",
                tmp_path / "p.parquet", "--plot", tmp_path / "p.png", "--level", 0.8)  # fmt: skip
    assert calls == [256, 256, 108]  # what was written is what is drawn
    assert f"picture: {tmp_path / 'p.png'}" in result.out
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    written = pq.read_table(tmp_path / "p.parquet").slice(120)
    lines = drawn_lines(figures[0])
    assert set(lines) == ({"prediction", "truth"} if known else {"prediction"})
    assert list(lines["prediction"].get_xdata()) == list(range(120, 620))
    np.testing.assert_array_equal(lines["prediction"].get_ydata(), written["y"])
    if known:
        np.testing.assert_array_equal(lines["truth"].get_ydata(), y[120:, 0])
    (band,) = figures[0].axes[0].collections
    assert band.get_label() == "80% interval"
    outline = band.get_paths()[0].vertices
    for end in ("y_low", "y_high"):
        assert set(written[end].to_pylist()) <= set(outline[:, 1])
    assert len(figures[0].axes) == 1 + known
    if known:
        (error,) = figures[0].axes[1].lines
        np.testing.assert_array_equal(error.get_ydata(), written["y"].to_numpy() - y[120:, 0])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("grid", [(16,), (8, 6)])
def test_a_picture_of_the_last_field(tmp_path, figures, grid, known):
    x = np.random.default_rng(0).normal(size=(30, *grid))
    y = np.stack([np.roll(x, 2, -1), 9 + x], 1)  # two channels, of which the first is drawn
    dims = ["--dims", len(grid), "--quiet"]
    train = zarr_of(tmp_path / "train.zarr", x=x[:, None], y=y)
    ok("stream", "--source", train, "--run", tmp_path / "r", "--width", 4, "--modes", 3, *dims)
    new = train if known else zarr_of(tmp_path / "new.zarr", x=x[:, None])
    ok("predict", tmp_path / "r", "--source", new, "--out", tmp_path / "p.zarr",
       "--plot", tmp_path / "p.svg", "--batch-size", 7)  # fmt: skip
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()
    group = zarr.open_group(tmp_path / "p.zarr", mode="r")
    mean, low, high = (group[name][-1, 0] for name in ("y", "y_low", "y_high"))
    expected = {"truth": y[-1, 0], "prediction": mean}
    if not known:
        del expected["truth"]
    if len(grid) == 1:
        drawn = {name: line.get_ydata() for name, line in drawn_lines(figures[0]).items()}
        (band,) = figures[0].axes[0].collections
        assert set(low) | set(high) <= set(band.get_paths()[0].vertices[:, 1])
    else:
        scaled = list(expected)
        if known:
            expected["error"] = mean - y[-1, 0]
        expected["half width of the 90% interval"] = (high - low) / 2
        images = {own.get_title(): own.images[0] for own in figures[0].axes if own.get_title()}
        drawn = {name: image.get_array() for name, image in images.items()}
        assert len({images[name].get_clim() for name in scaled}) == 1
        if known:
            least, most = images["error"].get_clim()
            assert -least == most == np.abs(expected["error"]).max()
    assert drawn.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(drawn[name], values, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("p.xyz", "its ending is none of"),
        ("p", "its ending is none of"),
        ("absent/p.png", "there is no folder"),
        ("folder.png", "it is a folder"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path, name, reason):
    (tmp_path / "folder.png").mkdir()
    line = refused("predict", "absent", "--source", "absent.zarr", "--out",
                   tmp_path / "p.parquet", "--plot", tmp_path / name)  # fmt: skip
    assert f"cannot write {tmp_path / name}: {reason}" in line
    assert line.endswith("give a name such as curve.png\n")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_making_data(tmp_path):
    out = tmp_path / "b.zarr"
    command = ["make", "burgers", "--out", out, "--samples", 5, "--grid", 16, "--dtype", "float64"]
    result = ok(*command)
    assert f"learn it: kalmanhead stream --source {out}" in result.out
    first = zarr.open_group(out, mode="r")["y"][:]
    assert first.shape == (5, 16)
    assert first.dtype == np.float64
    assert "exists" in refused(*command)
    assert ok(*command, "--overwrite", "--seed", 1, "--quiet").out == ""
    assert not np.array_equal(zarr.open_group(out, mode="r")["y"][:], first)
