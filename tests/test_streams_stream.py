"""Bad rows, lag, shuffling windows, reading ahead."""

import threading
import time

import numpy as np
import pytest
import torch

from kalmanhead.batch import Cursor
from kalmanhead.errors import BadRowError, ConfigError, SourceError
from kalmanhead.streams import Block, Source, SourceSpec, Stream, make_source, open_source
from kalmanhead.streams.prefetch import prefetch


def ramp(rows=20):
    return np.arange(rows, dtype=float)[:, None] * np.ones(2), np.arange(rows, dtype=float)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_input_stops_after_the_full_batches_before_it(value):
    x, y = ramp()
    x[13, 1] = value
    seen = []
    with pytest.raises(BadRowError, match=r"arrays row 13: column 'x\[1\]' is .*on_bad='skip'"):
        seen.extend(open_source((x, y), batch_size=5))
    assert [b.cursor.row for b in seen] == [5, 10]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_target_is_bad_and_a_missing_one_is_not(value):
    x, y = ramp()
    y[2] = np.nan
    assert sum(len(b) for b in open_source((x, y))) == 20
    y[3] = value
    with pytest.raises(BadRowError, match="row 3: column 'y'"):
        list(open_source((x, y)))


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_a_bad_weight_is_bad(value):
    x, y = ramp()
    weight = np.ones(20)
    weight[4] = value
    with pytest.raises(BadRowError, match="row 4: column weight"):
        list(open_source((x, y, weight)))
    batches = list(open_source((x, y, weight), batch_size=10, on_bad="skip"))
    assert [len(b.weight) for b in batches] == [10, 9]


def test_a_large_finite_sum_is_not_bad():
    x = np.full((4, 2), 3e38, dtype=np.float32)
    assert sum(len(b) for b in open_source((x, np.ones(4)))) == 4


def test_skipped_rows_are_counted_in_the_next_batch():
    x, y = ramp()
    x[[0, 7, 8, 18, 19]] = np.nan
    batches = list(open_source((x, y), batch_size=5, on_bad="skip"))
    assert [len(b) for b in batches] == [5, 5, 5, 0]
    assert [b.bad_rows for b in batches] == [1, 2, 0, 2]
    assert [b.cursor for b in batches] == [Cursor(0, 6), Cursor(0, 13), Cursor(0, 18), Cursor(1)]
    assert batches[-1].x.shape == (0, 2)


def test_a_field_names_channel_and_point():
    x = np.ones((4, 2, 9))
    x[1, 1, 3] = np.nan
    with pytest.raises(BadRowError, match=r"'x\[1\]' at grid point 3"):
        list(open_source((x, x.copy()), dims=1))


@pytest.mark.parametrize(("lead", "batch_size"), [(2, 4), (5, 3), (1, 4), (12, 4)])
def test_a_target_is_due_once_its_time_has_come(lead, batch_size):
    series = np.arange(25.0)[:, None]
    learnt = 0
    predicted = 0
    for batch in open_source(series, batch_size=batch_size, lead=lead):
        torch.testing.assert_close(batch.y, batch.x + lead)
        predicted += len(batch)
        if lead == 1:
            assert batch.due is None
            continue
        x, y, weight = batch.due
        assert weight is None
        torch.testing.assert_close(y, x + lead)
        assert x[:, 0].tolist() == list(range(learnt, learnt + len(x)))
        learnt += len(x)
        if len(batch):
            # Right after predicting row p - 1, u[p - 1] is the newest snapshot.
            assert learnt == max(0, predicted + 1 - lead)
    assert predicted == 25 - lead
    assert learnt in (0, predicted)


def test_lag_is_ignored_when_shuffled():
    stream = open_source(np.arange(25.0), lead=3, shuffle=True)
    assert all(b.due is None for b in stream)
    assert stream.lag == 0


def test_windows_hold_whole_chunks_and_every_row_once():
    source = make_source((np.arange(100.0), np.arange(100.0)))
    source._step = 10
    stream = Stream(source, 10, shuffle=True, window_bytes=30 * source.spec.row_bytes)
    rows = torch.cat([b.x for b in stream])[:, 0].tolist()
    assert sorted(rows) == list(range(100))
    assert rows != sorted(rows)
    window = sorted(rows[:30])
    assert len({int(r) // 10 for r in window}) == 3


def test_a_resumed_shuffle_reads_only_its_window():
    source = make_source((np.arange(100.0), np.arange(100.0)))
    source._step = 10
    stream = Stream(source, 10, shuffle=True, window_bytes=30 * source.spec.row_bytes, prefetch=0)
    read, original = [], source.read
    source.read = lambda low, high: read.append((low, high)) or original(low, high)
    next(stream.iterate(Cursor(0, 65)))
    assert len(read) == 3


def test_shuffling_follows_seed_and_leaves_global_state_alone():
    x, y = ramp(50)
    before = np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()  # noqa: NPY002
    orders = [
        torch.cat([b.x for b in open_source((x, y), shuffle=True, seed=seed)])[:, 0].tolist()
        for seed in (0, 0, 1)
    ]
    after = np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()  # noqa: NPY002
    assert orders[0] == orders[1] != orders[2]
    assert before == after


def test_max_rows_makes_endless_finite():
    stream = open_source("river.synth:Friedman", 10, max_rows=25, epochs=2, holdout=5)
    assert stream.rows == 20
    assert [len(b) for b in stream] == [10, 10, 10, 10]
    shuffled = open_source("river.synth:Friedman", 10, max_rows=25, shuffle=True)
    assert [len(b) for b in shuffled] == [10, 10, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"on_bad": "ignore"}, "on_bad is 'ignore'; choose"),
        ({"holdout": 20}, "leaves none of 20"),
        ({"holdout": 2.5}, "count of rows or a fraction"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"lead": 0}, None),
    ],
)
def test_options_out_of_range(options, message):
    if message is None:
        with pytest.raises(ConfigError, match="lead is 0"):
            open_source(np.arange(9.0), **options)
        return
    with pytest.raises(ConfigError, match=message):
        open_source(ramp(), **options)


@pytest.mark.parametrize("options", [{"epochs": 2}, {"shuffle": True}, {"holdout": 3}])
def test_endless_sources_need_an_end(options):
    with pytest.raises(ConfigError, match=r"no known end.*max_rows"):
        open_source("river.synth:Friedman", **options)


def test_a_cursor_from_other_data_is_refused():
    with pytest.raises(ConfigError, match="outside arrays, which has 20 training rows"):
        open_source(ramp()).iterate(Cursor(0, 21))


class Failing(Source):
    name, spec = "failing", SourceSpec((1,), (1,), ("x",), ("y",), 100)

    def iterate(self, start=0):
        for _ in range(start, 10):
            yield Block(np.ones((1, 1)), np.ones((1, 1)))
        if self.error:
            raise self.error

    error = None

    def fingerprint(self):
        return {}


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_errors_arrive_in_their_place(depth):
    source = Failing()
    source.error = RuntimeError("disk on fire")
    seen = []
    with pytest.raises(RuntimeError, match="disk on fire"):
        seen.extend(Stream(source, 2, prefetch=depth))
    assert len(seen) == 5


def test_a_source_that_ends_early_says_so():
    with pytest.raises(SourceError, match="ended after 10 rows though 100 were expected"):
        list(Stream(Failing(), 2))


def own_threads():
    return [t for t in threading.enumerate() if t.name == "kalmanhead-prefetch"]


def test_the_thread_ends_with_the_consumer():
    closed = []

    def numbers():
        try:
            yield from range(10**9)
        finally:
            closed.append(True)

    items = prefetch(numbers(), 2)
    assert next(items) == 0
    assert len(own_threads()) == 1
    items.close()
    assert not own_threads()
    assert closed == [True]
    assert list(prefetch(iter(range(5)), 2)) == [0, 1, 2, 3, 4]
    assert not own_threads()


def test_reading_ahead_is_bounded():
    made = []

    def numbers():
        for i in range(100):
            made.append(i)
            yield i

    items = prefetch(numbers(), 2)
    next(items)
    time.sleep(0.2)
    assert len(made) <= 4
    items.close()
