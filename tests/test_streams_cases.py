"""One table of sources; every law of a stream is tested on each."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from kalmanhead.batch import Cursor
from kalmanhead.streams import RandomAccessSource, Stream, make_source
from kalmanhead.streams.opening import SourceOptions

ROWS = 47


def data(rows=ROWS):
    generator = np.random.default_rng(5)
    return generator.normal(size=(rows, 3)), generator.normal(size=(rows, 2))


def write_zarr(store, **options):
    x, y = data()
    group = zarr.open_group(store, mode="w", zarr_format=options.pop("zarr_format", 3))
    for name, values, rows in (("x", x, 5), ("y", y, 10)):
        shards = (2 * rows, values.shape[1]) if options.get("sharded") else None
        array = group.create_array(
            name,
            shape=values.shape,
            chunks=(rows, values.shape[1]),
            shards=shards,
            dtype=options.get("dtype", "f8"),
        )
        array[:] = values


def table(x, y):
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "u": y[:, 0], "v": y[:, 1]}
    return pa.table(columns)


def arrays_source(_):
    return make_source(data())


def tensors_source(_):
    return make_source(tuple(torch.tensor(part) for part in data()))


def zarr3_source(path):
    write_zarr(path / "a.zarr")
    return make_source(str(path / "a.zarr"))


def zarr2_source(path):
    write_zarr(path / "a.zarr", zarr_format=2, dtype=">f8")
    return make_source(path / "a.zarr")


def zarr_sharded_source(path):
    write_zarr(path / "a.zarr", sharded=True)
    return make_source(str(path / "a.zarr"))


def zarr_zip_source(path):
    store = zarr.storage.ZipStore(str(path / "a.zip"), mode="w")
    write_zarr(store)
    store.close()
    return make_source(str(path / "a.zip"))


def zarr_url_source(path):
    url = f"memory://{path.name}/a.zarr"
    write_zarr(url)
    return make_source(url)


def zarr_follow_source(path):
    write_zarr(path / "a.zarr")
    return make_source(str(path / "a.zarr"), SourceOptions(follow=True))


def parquet_source(path):
    pq.write_table(table(*data()), path / "a.parquet", row_group_size=10)
    return make_source(str(path / "a.parquet"), SourceOptions(targets=("u", "v")))


def parquet_files_source(path):
    x, y = data()
    for number, (low, high) in {1: (0, 7), 2: (7, 30), 10: (30, 30), 11: (30, 47)}.items():
        part = table(x[low:high], y[low:high])
        pq.write_table(part, path / f"part-{number}.parquet", row_group_size=9)
    return make_source(str(path), SourceOptions(targets=("u", "v")))


def loader_source(_):
    parts = TensorDataset(*(torch.tensor(part) for part in data()))
    return make_source(DataLoader(parts, batch_size=6))


SAME_DATA = [
    arrays_source,
    tensors_source,
    zarr3_source,
    zarr2_source,
    zarr_sharded_source,
    zarr_zip_source,
    zarr_url_source,
    zarr_follow_source,
    parquet_source,
    parquet_files_source,
    loader_source,
]
OTHER = [
    lambda _: make_source("river:AirlinePassengers?rows=47"),
    lambda _: make_source("river.synth:Friedman?seed=3&rows=47"),
    lambda _: make_source("river.synth:RandomRBFDrift?rows=47"),
    lambda _: make_source(np.random.default_rng(0).normal(size=(50, 1)), SourceOptions(lead=3)),
]


@pytest.fixture(
    params=SAME_DATA + OTHER, ids=[*(f.__name__ for f in SAME_DATA), "river", "synth", "rbf", "u"]
)
def source(request, tmp_path):
    return request.param(tmp_path)


def same(a, b):
    assert a.cursor == b.cursor
    assert a.bad_rows == b.bad_rows
    for left, right in ((a.x, b.x), (a.y, b.y), (a.weight, b.weight)):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    assert (a.due is None) == (b.due is None)
    for left, right in zip(a.due or (), b.due or (), strict=True):
        if left is not None:
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def same_all(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        same(a, b)


@pytest.mark.parametrize("make", SAME_DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch_size", [1, 8, 47, 100])
def test_rows_in_order_and_exact_sizes(make, batch_size, tmp_path):
    x, y = data()
    batches = list(Stream(make(tmp_path), batch_size))
    np.testing.assert_array_equal(torch.cat([b.x for b in batches]).numpy(), x)
    np.testing.assert_array_equal(torch.cat([b.y for b in batches]).numpy(), y)
    assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= batch_size
    assert all(b.x.dtype == torch.float64 and b.bad_rows == 0 for b in batches)


def test_spec_matches_the_rows(source):
    batch = next(iter(Stream(source, 4)))
    assert batch.x.shape == (4, *source.spec.x_shape)
    assert batch.y.shape == (4, *source.spec.y_shape)
    assert len(source.spec.x_names) == source.spec.x_shape[0]
    assert len(source.spec.y_names) == source.spec.y_shape[0]


def test_last_cursor_ends_the_epoch(source):
    last = list(Stream(source, 8))[-1].cursor
    assert last == (Cursor(0, ROWS) if source.spec.rows is None else Cursor(1, 0))


def test_resume_from_every_cursor(source):
    stream = Stream(source, 8)
    batches = list(stream)
    for i, batch in enumerate(batches):
        same_all(stream.iterate(batch.cursor), batches[i + 1 :])


def test_iterate_starts_at_any_row(source):
    whole = np.concatenate([block.x for block in source.iterate(0)])
    for start in (0, 1, 9, 10, 11, 46, 47):
        blocks = [block.x for block in source.iterate(start)]
        assert np.array_equal(np.concatenate([whole[:0], *blocks]), whole[start:])


def test_random_reads_equal_iteration(source):
    if not isinstance(source, RandomAccessSource):
        pytest.skip("sequential")
    whole = np.concatenate([block.x for block in source.iterate(0)])
    for low, high in ((0, 47), (3, 4), (9, 31), (40, 47)):
        np.testing.assert_array_equal(source.read(low, high).x, whole[low:high])
    edges = source.edges()
    assert edges[0] == 0
    assert edges[-1] == ROWS
    assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs(source, shuffle):
    if source.spec.rows is None:
        pytest.skip("no known end")
    stream = Stream(source, 8, epochs=3, shuffle=shuffle, seed=1)
    batches = list(stream)
    same_all(batches, stream)
    plain = torch.cat([b.x for b in Stream(source, 8)])
    per_epoch = torch.cat([b.x for b in batches]).split(len(plain))
    assert len(per_epoch) == 3
    for x in per_epoch:
        torch.testing.assert_close(x.sort(0).values, plain.sort(0).values, rtol=0, atol=0)
        assert torch.equal(x, plain) is not shuffle
    assert torch.equal(per_epoch[0], per_epoch[1]) is not shuffle
    for i in (0, 4, 5, 10, 17):
        same_all(stream.iterate(batches[i].cursor), batches[i + 1 :])


@pytest.mark.parametrize(("holdout", "rows"), [(5, 5), (0.2, 9), (0.001, 1)])
def test_holdout(source, holdout, rows):
    if source.spec.rows is None:
        pytest.skip("no known end")
    whole = torch.cat([b.x for b in Stream(source, 8)])
    stream = Stream(source, 4, holdout=holdout)
    assert stream.rows == ROWS - rows
    torch.testing.assert_close(torch.cat([b.x for b in stream]), whole[:-rows])
    torch.testing.assert_close(torch.cat([b.x for b in stream.holdout()]), whole[-rows:])


def test_fingerprint_is_plain_json_and_stable(source):
    import json

    first = json.dumps(source.fingerprint(), sort_keys=True)
    assert json.dumps(json.loads(first), sort_keys=True) == first
    assert json.dumps(Stream(source, 3).fingerprint()) == json.dumps(
        Stream(source, 9).fingerprint()
    )


def test_tensors_are_torchs_own(source):
    for batch in Stream(source, 7):
        assert batch.x.is_contiguous()
        assert batch.x.data_ptr() % 64 == 0
        assert batch.y.data_ptr() % 64 == 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    epochs=st.integers(1, 2),
    shuffle=st.booleans(),
    window=st.sampled_from([1, 300, 2**28]),
    lag=st.integers(0, 9),
    bad=st.sets(st.integers(0, 59), max_size=30),
    split=st.integers(0, 200),
)
@example(1, 1, 1, False, 1, 1, {0}, 1)  # what is left waiting at the end is a bad row alone
def test_splitting_anywhere_changes_nothing(
    rows, batch_size, epochs, shuffle, window, lag, bad, split
):
    x, y = data(rows)
    x[[r for r in bad if r < rows]] = np.nan
    source = make_source((x, y))
    source._step = 7
    stream = Stream(
        source,
        batch_size,
        epochs=epochs,
        shuffle=shuffle,
        window_bytes=window,
        lag=lag,
        on_bad="skip",
        prefetch=0,
    )
    batches = list(stream)
    split = split % (len(batches) + 1)
    cursor = batches[split - 1].cursor if split else Cursor()
    same_all(stream.iterate(cursor), batches[split:])
    good = x[~np.isnan(x).any(axis=1)]
    seen = torch.cat([b.x for b in batches]).numpy() if batches else x[:0]
    assert len(seen) == epochs * len(good)
    assert sum(b.bad_rows for b in batches) == epochs * (rows - len(good))
    np.testing.assert_array_equal(
        np.sort(seen, axis=0), np.sort(np.concatenate([good] * epochs), axis=0)
    )
    if lag and not shuffle:
        due = torch.cat([b.due[0] for b in batches]).numpy()
        np.testing.assert_array_equal(due, seen)
