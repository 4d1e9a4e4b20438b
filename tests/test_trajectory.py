"""Trajectories are found in the rows of any source, and what is none is refused."""

import numpy as np
import pytest

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.opening import SourceOptions, make_source
from kalmanhead.streams.source import Source
from kalmanhead.streams.trajectory import read_trajectories

TRAJECTORIES, STATES, POINTS = 3, 9, 8


def states(seed=0):
    return np.random.default_rng(seed).normal(size=(TRAJECTORIES, STATES, POINTS))


def pairs(u, interleaved=False):
    """Rows (x, y) of trajectories (m, states, points), one after the other or in turns."""
    u = u.swapaxes(0, 1) if interleaved else u
    x, y = (u[:-1], u[1:]) if interleaved else (u[:, :-1], u[:, 1:])
    return tuple(part.reshape(-1, POINTS).copy() for part in (x, y))


class InPieces(Source):
    """Blocks of a few rows, of a source that may not know its end."""

    def __init__(self, source, size, endless):
        self.source, self.size, self.name, self.lag = source, size, source.name, source.lag
        self.spec = source.spec
        if endless:
            self.spec = type(source.spec)(**{**vars(source.spec), "rows": None})

    def iterate(self, start=0):
        rows = self.source.spec.rows
        for first in range(start, rows, self.size):
            yield self.source.read(first, min(first + self.size, rows))

    def fingerprint(self):
        return {}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_trajectory_is_found_in_either_order(size, interleaved):
    u = states()
    source = InPieces(make_source(pairs(u, interleaved)), size, endless=False)
    stride = TRAJECTORIES if interleaved else 1
    rows, first, later = read_trajectories(source, STATES - 1, count=3, stride=stride)
    assert rows.tolist() == ([0, 1, 2] if interleaved else [0, 8, 16])
    np.testing.assert_array_equal(first[:, 0], u[:, 0])
    np.testing.assert_array_equal(later[:, :, 0], u[:, 1:])


def test_starts_are_spread_over_all_that_are_unbroken():
    source = make_source(pairs(states()))
    rows, _, later = read_trajectories(source, 6, start=1, count=4)
    assert rows.tolist() == [1, 8, 16, 18]  # of 1, 2, 8, 9, 10, 16, 17, 18
    assert later.shape == (4, 6, 1, POINTS)
    with pytest.raises(SourceError, match="6 steps follow one another from 9 rows, not from 10"):
        read_trajectories(source, 6, count=10)


@pytest.mark.parametrize("lead", [1, 3])
def test_a_series_has_the_stride_of_its_lead(lead):
    u = states()[0]
    source = make_source(u, SourceOptions(lead=lead))
    rows, first, later = read_trajectories(source, 2, start=1, count=2)
    assert rows.tolist() == [1, STATES - 1 - 2 * lead]
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(first[i, 0], u[row])
        np.testing.assert_array_equal(later[i, :, 0], u[[row + lead, row + 2 * lead]])


def test_states_may_differ_by_rounding_and_no_more():
    x, y = pairs(states()[:1])
    source = make_source((x.astype(np.float32), y))
    assert read_trajectories(source, 8)[2].shape == (1, 8, 1, POINTS)
    y[3] += 1e-3
    with pytest.raises(SourceError, match=r"y of row 3 is not x of row 4.*give another --stride"):
        read_trajectories(make_source((x, y)), 8)
    assert read_trajectories(make_source((x, y)), 4)[0].tolist() == [0]  # the break comes after


def test_an_end_that_is_not_known_is_found_by_reading():
    source = InPieces(make_source(pairs(states())), 4, endless=True)
    assert read_trajectories(source, 8, start=8)[2].shape == (1, 8, 1, POINTS)
    with pytest.raises(SourceError, match="ended before row 24; give fewer --steps"):
        read_trajectories(source, 9, start=16)
    with pytest.raises(SourceError, match="no known end; leave --starts at 1"):
        read_trajectories(source, 3, count=2)


def test_missing_values():
    x, y = pairs(states())
    x[2, 1], y[7, 3] = np.nan, np.nan  # a target may be missing at the end
    source = make_source((x, y))
    assert np.isnan(read_trajectories(source, 4, start=4)[2]).sum() == 1
    with pytest.raises(SourceError, match="row 2: x holds NaN or infinity; give another --start"):
        read_trajectories(source, 1, start=2)
    with pytest.raises(SourceError, match="y of row 1 is not x of row 2"):
        read_trajectories(source, 3)


def test_rows_that_make_no_trajectory():
    x, y = pairs(states())
    with pytest.raises(ConfigError, match=r"x has rows of shape \(2, 8\), y of \(1, 8\)"):
        read_trajectories(make_source((np.stack([x, x], 1), y)), 2)
    with pytest.raises(SourceError, match="9 steps from row 16 end with row 24, there are 24 rows"):
        read_trajectories(make_source((x, y)), 9, start=16)
