"""Small inputs that other readers get wrong, and the messages for what cannot be read."""

import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from kalmanhead.errors import BadRowError, ConfigError, KalmanHeadError, SourceError
from kalmanhead.streams import Stream, make_source, open_source
from kalmanhead.streams.opening import SourceOptions
from kalmanhead.streams.parquet_source import natural_key
from kalmanhead.streams.river_source import BUNDLED


def rows_of(stream):
    return torch.cat([batch.x for batch in stream])


def write(path, **columns):
    options = {"row_group_size": columns.pop("row_group_size", 100)}
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def group_of(path, zarr_format=3, **arrays):
    group = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    for name, values in arrays.items():
        values = np.asarray(values)
        chunks = (4, *values.shape[1:])
        array = group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype)
        array[:] = values
    return group


# Parquet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dictionary", [False, True])
def test_row_groups_do_not_show_in_batches(tmp_path, dictionary):
    a = pa.array(np.arange(400.0) % 7)
    a = a.dictionary_encode() if dictionary else a
    path = write(tmp_path / "a.parquet", a=a, y=np.arange(400.0))
    assert [len(b) for b in open_source(path, batch_size=80)] == [80] * 5
    assert rows_of(open_source(path, batch_size=80))[:, 0].tolist() == (np.arange(400) % 7).tolist()


def test_files_in_natural_order(tmp_path):
    for number in (0, 1, 2, 10, 11):
        write(tmp_path / f"part-{number}.parquet", a=[float(number)], y=[0.0])
    (tmp_path / "_SUCCESS").touch()
    write(tmp_path / ".hidden.parquet", a=[99.0], y=[0.0])
    for target in (str(tmp_path), str(tmp_path / "part-*.parquet")):
        stream = open_source(target)
        assert rows_of(stream)[:, 0].tolist() == [0, 1, 2, 10, 11]
        files = stream.fingerprint()["source"]["files"]
        assert files == [[f"part-{n}.parquet", 1] for n in (0, 1, 2, 10, 11)]
    assert sorted(["b10", "b2", "b", "10", "2"], key=natural_key) == ["2", "10", "b", "b2", "b10"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
def test_an_integer_beyond_float64_is_refused_by_column_and_row(tmp_path, kind):
    path = write(tmp_path / "a.parquet", a=pa.array([1, None, 2**53 + 1], kind), y=[0.0] * 3)
    with pytest.raises(SourceError, match=r"a.parquet row 2: column 'a' holds an integer beyond"):
        list(open_source(path))


def test_integers_up_to_2_to_53_and_null_keep_their_value(tmp_path):
    path = write(tmp_path / "a.parquet", y=pa.array([2**53, None, -(2**53)]), a=[1.0, 2.0, 3.0])
    y = next(iter(open_source(path))).y[:, 0]
    assert y[0].item() == 2**53
    assert torch.isnan(y[1])
    assert y[2].item() == -(2**53)


@pytest.mark.parametrize("start", [0, 3, 4])
def test_null_lists_and_slices_keep_rows_in_place(tmp_path, start):
    values = [[1.0, 2.0], None, [3.0, None], [4.0, 5.0], None, [6.0, 7.0]]
    vectors = pa.array(values, pa.list_(pa.float64(), 2))
    table = pa.table({"v": vectors, "a": np.arange(6.0)}).slice(start)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    stream = open_source(str(tmp_path / "a.parquet"), targets="v", features="a")
    y = torch.cat([b.y for b in stream]).numpy()
    wanted = np.array([[np.nan] * 2 if v is None else v for v in values], dtype=float)[start:]
    np.testing.assert_array_equal(y, wanted)
    assert stream.spec.y_names == ("v[0]", "v[1]")


@pytest.mark.parametrize("start", [0, 1, 3])
def test_sliced_arrow_lists_are_read_at_their_offset(start):
    from kalmanhead.streams.columns import column_values

    whole = pa.array([[1.0, 2.0], None, [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float64(), 2))
    values = column_values(pa.chunked_array([whole[start:], whole[:1]]), "v", str)
    wanted = np.array([[1, 2], [np.nan, np.nan], [3, 4], [5, 6]])
    np.testing.assert_array_equal(values, np.concatenate([wanted[start:], wanted[:1]]))


def test_a_null_input_row_is_bad(tmp_path):
    vectors = pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2))
    path = write(tmp_path / "a.parquet", v=vectors, y=[1.0, 2.0])
    with pytest.raises(BadRowError, match=r"a.parquet row 1: column 'v\[0\]' is nan"):
        list(open_source(path))
    assert [b.bad_rows for b in open_source(path, on_bad="skip")] == [1]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"a": [1.0], "y": [1.0]}, "part-2.parquet: column 'b' is missing"),
        ({"a": [1.0], "b": ["x"], "y": [1.0]}, "part-2.parquet: column 'b' has type string"),
        ({"a": [1.0], "b": [1.0], "y": [1.0], "c": [1.0]}, "column 'c' is not in .*part-1.parquet"),
    ],
)
def test_schemas_are_compared_before_the_first_row(tmp_path, second, message):
    write(tmp_path / "part-1.parquet", a=[1.0], b=[1.0], y=[1.0])
    write(tmp_path / "part-2.parquet", **second)
    with pytest.raises(SourceError, match=message):
        open_source(str(tmp_path))


def test_bad_rows_name_the_file_they_are_in(tmp_path):
    write(tmp_path / "part-1.parquet", a=[1.0, 2.0], y=[1.0, 1.0])
    write(tmp_path / "part-2.parquet", a=[1.0, 2.0, np.inf], y=[1.0] * 3)
    with pytest.raises(BadRowError, match=r"part-2.parquet row 2: column 'a' is inf"):
        list(open_source(str(tmp_path)))


def test_a_page_with_a_wrong_checksum_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"a": np.arange(5000.0), "y": np.arange(5000.0)})
    options = {"compression": "none", "use_dictionary": False}
    pq.write_table(table, path, write_page_checksum=True, **options)
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=r"a.parquet: row group 0 cannot be read"):
        list(open_source(str(path)))


def test_a_file_cut_short_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", a=[1.0], y=[1.0])
    raw = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(SourceError, match=r"a.parquet cannot be read as Parquet"):
        open_source(path)


def test_types_become_numbers(tmp_path):
    from decimal import Decimal

    path = write(
        tmp_path / "a.parquet",
        flag=pa.array([True, None, False]),
        small=pa.array([1, 2, 3], pa.int8()),
        price=pa.array([Decimal("1.10"), None, Decimal("3.30")], pa.decimal128(10, 2)),
        y=pa.array([1, 2, 3], pa.float32()),
    )
    block = make_source(path).read(0, 3)
    np.testing.assert_array_equal(block.x, [[1, 1, 1.1], [np.nan, 2, np.nan], [0, 3, 3.3]])
    assert (block.x.dtype, block.y.dtype) == (np.float64, np.float32)


def test_training_and_holdout_may_be_read_at_once(tmp_path):
    for number in range(4):
        a = np.arange(500.0) + 500 * number
        write(tmp_path / f"{number}.parquet", a=a, y=a)
    stream = open_source(str(tmp_path), batch_size=20, holdout=1000)
    pairs = list(zip(stream, stream.holdout(), strict=True))
    assert torch.cat([b.x for b, _ in pairs])[:, 0].tolist() == list(range(1000))
    assert torch.cat([b.x for _, b in pairs])[:, 0].tolist() == list(range(1000, 2000))


def test_weights_and_remote_files(tmp_path):
    import fsspec

    table = pa.table({"a": [1.0, 2.0], "y": [3.0, 4.0], "w": [5, 6]})
    with fsspec.open(f"memory://{tmp_path.name}/a.parquet", "wb") as file:
        pq.write_table(table, file)
    batch = next(iter(open_source(f"memory://{tmp_path.name}/a.parquet", weight="w")))
    assert batch.weight.tolist() == [5, 6]
    assert batch.x.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no column named y; .*--target.*there are a, s, t"),
        ({"targets": "q"}, "no column 'q'; there are a, s, t"),
        ({"targets": "a"}, r"no numbers: 's' \(string\), 't' \(timestamp.*--feature\)"),
        ({"targets": "s", "features": "a"}, "column 's' has type string"),
        ({"targets": "a", "field": "u"}, "Parquet, which has no option field"),
    ],
)
def test_columns_that_cannot_be_used(tmp_path, options, message):
    stamps = pa.array([0], pa.timestamp("s"))
    path = write(tmp_path / "a.parquet", a=[1.0], s=["x"], t=stamps)
    with pytest.raises(KalmanHeadError, match=message) as caught:
        open_source(path, **options)
    assert "\n" not in str(caught.value)


# Zarr ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_deleted_chunk_is_refused_unless_asked_otherwise(tmp_path, zarr_format):
    path = tmp_path / "a.zarr"
    group_of(path, zarr_format, x=np.ones((10, 2)), y=np.ones(10))
    key = "x/1.0" if zarr_format == 2 else "x/c/1/0"
    (path / key).unlink()
    with pytest.raises(SourceError, match=rf"chunk {key} is missing.*--missing-chunks fill"):
        list(open_source(str(path)))
    x = rows_of(open_source(str(path), missing_chunks="fill"))
    assert x[:, 0].tolist() == [1] * 4 + [0] * 4 + [1] * 2


def test_a_deleted_shard_is_refused(tmp_path):
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    for name in "xy":
        array = group.create_array(name, shape=(24, 2), chunks=(3, 2), shards=(6, 2), dtype="f4")
        array[:] = 1
    assert rows_of(open_source(str(tmp_path / "a.zarr"))).dtype == torch.float32
    (tmp_path / "a.zarr/y/c/2/0").unlink()
    with pytest.raises(SourceError, match="chunk y/c/2/0 is missing"):
        list(open_source(str(tmp_path / "a.zarr")))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_chunk_cut_short_is_refused(tmp_path, compressed):
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    options = {} if compressed else {"compressors": None}
    for name in "xy":
        array = group.create_array(name, shape=(9, 2), chunks=(3, 2), dtype="f8", **options)
        array[:] = np.random.default_rng(0).normal(size=(9, 2))
    chunk = tmp_path / "a.zarr/x/c/1/0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(SourceError, match=r"array x rows 0 to 8 cannot be read .*cut short"):
        list(open_source(str(tmp_path / "a.zarr")))


def test_following_a_writer_reads_complete_rows_only(tmp_path):
    path = str(tmp_path / "a.zarr")
    group = group_of(path, x=np.arange(8.0)[:, None], y=np.arange(8.0))
    stream = open_source(path, batch_size=4, follow=True)
    group["x"].resize((20, 1))
    group["x"][8:12] = np.arange(8.0, 12)[:, None]
    group["y"].resize((16,))
    group["y"][8:16] = np.arange(8.0, 16)
    batches = list(stream)
    assert rows_of(batches)[:, 0].tolist() == list(range(12))
    group["x"][12:20] = np.arange(12.0, 20)[:, None]
    more = rows_of(stream.iterate(batches[-1].cursor))
    assert more[:, 0].tolist() == [12, 13, 14, 15]


def test_zarr_is_read_in_whole_chunks_from_any_row(tmp_path):
    path = str(tmp_path / "a.zarr")
    group_of(path, x=np.arange(100.0)[:, None], y=np.arange(100.0))
    source = make_source(path)
    reads, fetch = [], source.x.fetch
    source.x.fetch = lambda low, high: reads.append((low, high)) or fetch(low, high)
    source._step = 8
    assert len(list(source.iterate(30))) == 10
    assert reads[:2] == [(30, 32), (32, 40)]


def test_a_field_leads_itself_and_reads_each_chunk_once(tmp_path):
    path = str(tmp_path / "a.zarr")
    u = np.random.default_rng(0).normal(size=(21, 16)).astype(np.float32)
    group_of(path, u=u)
    source = make_source(path, SourceOptions(field="u", lead=3))
    source._step = 4
    reads, fetch = [], source.u.fetch
    source.u.fetch = lambda low, high: reads.append((low, high)) or fetch(low, high)
    blocks = list(source.iterate(2))
    np.testing.assert_array_equal(np.concatenate([b.x for b in blocks])[:, 0], u[2:-3])
    np.testing.assert_array_equal(np.concatenate([b.y for b in blocks])[:, 0], u[5:])
    assert reads == [(2, 5), (5, 8), (8, 12), (12, 16), (16, 20), (20, 21)]
    assert source.spec.x_shape == (1, 16)
    assert open_source(path, field="u", lead=3).lag == 2


def test_unequal_lengths_are_refused_or_cut(tmp_path):
    path = str(tmp_path / "a.zarr")
    group_of(path, x=np.ones((100, 2)), y=np.ones(99))
    with pytest.raises(SourceError, match=r"x has 100 rows, y has 99 rows; .*follow=True"):
        open_source(path)
    assert len(rows_of(open_source(path, follow=True))) == 99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": "input"}, "has no array input; it has deep/z, s, x, y; choose"),
        ({"x": "deep"}, "has no array deep"),
        ({"x": "s"}, "array s has dtype .* no real number"),
        ({"field": "y", "lead": 10}, "y has 10 rows, too few for lead 10"),
        ({"missing_chunks": "maybe"}, "missing_chunks is 'maybe'"),
        ({"targets": "y"}, "a Zarr group, which has no option targets"),
        ({"dims": 3}, "dims is 3"),
    ],
)
def test_groups_that_cannot_be_used(tmp_path, options, message):
    group = group_of(tmp_path / "a.zarr", x=np.ones((10, 2)), y=np.ones(10))
    group.create_array("s", shape=(10,), dtype="str")
    group.create_array("deep/z", shape=(10,), dtype="f4")
    with pytest.raises(KalmanHeadError, match=message) as caught:
        open_source(str(tmp_path / "a.zarr"), **options)
    assert "\n" not in str(caught.value)


def test_no_rows(tmp_path):
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    for name in "xy":
        group.create_array(name, shape=(0, 2), chunks=(3, 2), dtype="f8")
    write(tmp_path / "a.parquet", a=np.zeros(0), y=np.zeros(0))
    for target in (str(tmp_path / "a.zarr"), str(tmp_path / "a.parquet"), (np.ones(0), np.ones(0))):
        with pytest.raises(SourceError, match="has no rows"):
            open_source(target)


def test_targets_that_are_not_there(tmp_path):
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "bad.zip").write_text("PK\x03\x04 no")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.zarr").mkdir()
    zarr.open_array(str(tmp_path / "one.zarr"), mode="w", shape=(3,), dtype="f4")
    for target, message in {
        "nope.zarr": "no such file or directory: ",
        "nope.parquet": "no such file or directory: ",
        "nope*.parquet": "holds no Parquet files",
        "text.txt": "neither Parquet nor Zarr",
        "bad.zip": "no readable Zarr group",
        "empty": "holds no Parquet files",
        "empty.zarr": "no readable Zarr group",
        "one.zarr": "a single Zarr array; .*--field",
    }.items():
        with pytest.raises(SourceError, match=message) as caught:
            open_source(str(tmp_path / target))
        assert "\n" not in str(caught.value)
    with pytest.raises(SourceError, match=r"besides paths and URLs there are river:NAME"):
        open_source("reiver:Bananas")
    with pytest.raises(SourceError, match="no readable Zarr group"):
        open_source("memory://nothing/here.zarr")
    with pytest.raises(SourceError, match="cannot stream from int"):
        open_source(3)


def test_a_moved_store_keeps_its_fingerprint(tmp_path):
    group_of(tmp_path / "a.zarr", x=np.ones((10, 2)), y=np.ones(10))
    before = open_source(str(tmp_path / "a.zarr")).fingerprint()
    shutil.move(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert open_source(str(tmp_path / "b.zarr")).fingerprint() == before


# Shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "dims", "wanted"),
    [
        ((), (), None, ((1,), (1,), 0)),
        ((5,), (5,), None, ((5,), (5,), 0)),
        ((8,), (8,), None, ((1, 8), (1, 8), 1)),
        ((8,), (8,), 0, ((8,), (8,), 0)),
        ((8,), (9,), None, ((8,), (9,), 0)),
        ((3, 64), (2, 64), None, ((3, 64), (2, 64), 1)),
        ((3, 64), (64,), None, ((3, 64), (1, 64), 1)),
        ((3, 24), (), None, ((72,), (1,), 0)),
        ((16, 16), (16, 16), None, ((1, 16, 16), (1, 16, 16), 2)),
        ((2, 16, 16), (16, 16), None, ((2, 16, 16), (1, 16, 16), 2)),
        ((2, 16, 16), (3, 16, 16), None, ((2, 16, 16), (3, 16, 16), 2)),
        ((3, 16, 16), (10,), None, ((768,), (10,), 0)),
        ((5,), (5,), 1, ((1, 5), (1, 5), 1)),
        ((8, 16), (8, 16), 2, ((1, 8, 16), (1, 8, 16), 2)),
    ],
)
def test_shapes_tell_fields_from_vectors(x, y, dims, wanted):
    source = make_source((np.ones((3, *x)), np.ones((3, *y))), SourceOptions(dims=dims))
    assert (source.spec.x_shape, source.spec.y_shape, source.spec.grid_dims) == wanted
    batch = next(iter(Stream(source)))
    assert (batch.x.shape, batch.y.shape) == ((3, *wanted[0]), (3, *wanted[1]))


@pytest.mark.parametrize(
    ("x", "y", "dims"),
    [((3, 64), (3, 32), None), ((16, 16), (16, 8), None), ((8,), (9,), 1), ((4,), (), 1)],
)
def test_grids_that_differ_are_refused(x, y, dims):
    with pytest.raises(SourceError, match=r"x rows of shape .* y rows of shape .*--dims 0"):
        open_source((np.ones((3, *x)), np.ones((3, *y))), dims=dims)


# river --------------------------------------------------------------------------------------

WITH_TEXT = {"ImageSegments": "target is text", "SolarFlare": "text: zurich-class"}


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_data_sets_load(name):
    if name in WITH_TEXT:
        with pytest.raises(SourceError, match=WITH_TEXT[name]):
            open_source(f"river:{name}")
        return
    source = make_source(f"river:{name}?rows=1000")
    assert sum(len(block) for block in source.iterate(0)) == source.spec.rows


def test_river_dates_labels_and_many_targets():
    air = next(iter(open_source("river:AirlinePassengers")))
    assert air.x[:2, 0].tolist() == [-662688000, -660009600]
    assert set(next(iter(open_source("river:Phishing"))).y[:, 0].tolist()) == {0, 1}
    flare = open_source("river:SolarFlare", features=["activity", "evolution"])
    assert flare.spec.y_names == ("c-class-flares", "m-class-flares", "x-class-flares")
    assert next(iter(flare)).y.shape == (32, 3)


def test_generators_without_a_seed_repeat():
    for name in ("Friedman", "RandomRBF", "RandomTree", "AnomalySine", "SEA"):
        streams = [open_source(f"river.synth:{name}?rows=30") for _ in range(2)]
        assert torch.equal(*map(rows_of, streams))
    other = open_source("river.synth:Friedman?rows=30&seed=1")
    assert not torch.equal(rows_of(other), rows_of(open_source("river.synth:Friedman?rows=30")))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("river:TrumpAproval", "no data set 'TrumpAproval'; did you mean TrumpApproval"),
        ("river:zzz", "no data set 'zzz'; there are AirlinePassengers"),
        ("river.synth:Fridman", "did you mean Friedman"),
        ("river:Bikes", "would have to be downloaded; bundled with river are AirlinePassengers"),
        ("river.synth:Mv", r"features that are text: 3, 7, 8; .*--feature\)"),
        ("river.synth:Friedman?sed=3", "no option 'sed'; there are seed, rows"),
        ("river.synth:Friedman?rows=x", "rows is 'x'"),
        ("river.synth:Agrawal?classification_function=99", "gives no rows|cannot be made"),
    ],
)
def test_river_names_and_options(target, message):
    with pytest.raises(KalmanHeadError, match=message) as caught:
        open_source(target)
    assert "\n" not in str(caught.value)


# Arrays and loaders -------------------------------------------------------------------------


def test_array_dtypes():
    x = np.arange(6, dtype=">f4").reshape(3, 2)
    batch = next(iter(open_source((x, np.array([True, False, True])))))
    assert (batch.x.dtype, batch.y.dtype) == (torch.float32, torch.float64)
    assert batch.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    half = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    assert next(iter(open_source((half, [1, 2, 3])))).x.dtype == torch.float64


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ((np.ones(3), np.array(["a", "b", "c"])), "y has dtype <U1"),
        ((np.ones(3), np.array([1, 2, 2**53 + 1])), "y row 2 holds an integer beyond"),
        ((np.ones(3), np.ones(2)), "x has 3 rows, y has 2 rows"),
        ((np.ones(3), np.float64(2)), "y is a single number"),
        ((np.ones(3), [[1], [1, 2]]), "y is no array"),
        ((np.ones(3), np.ones(3), np.ones((3, 2))), r"weight has shape \(3, 2\)"),
    ],
)
def test_arrays_that_cannot_be_used(target, message):
    with pytest.raises(SourceError, match=message):
        list(open_source(target))


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(2), torch.ones(1)


def test_loaders():
    x, y = torch.arange(10.0)[:, None], torch.arange(10.0)
    parts = TensorDataset(x, y, torch.ones(10))
    assert make_source(DataLoader(parts, batch_size=4, drop_last=True)).spec.rows == 8
    before = torch.random.get_rng_state()
    stream = open_source(DataLoader(parts, batch_size=4, shuffle=True), batch_size=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert sorted(rows_of(stream)[:, 0].tolist()) == list(range(10))
    with pytest.raises(SourceError, match=r"must yield \(x, y\)"):
        open_source(DataLoader(TensorDataset(x)))
    with pytest.raises(ConfigError, match="no known end"):
        open_source(DataLoader(Endless(), batch_size=2), epochs=2)
