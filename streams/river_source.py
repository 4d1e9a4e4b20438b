"""river's bundled data sets and generators as sources of rows."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
from river import datasets
from river.datasets import synth
from river.datasets.base import RemoteDataset

from kalmanhead.errors import ConfigError, SourceError
from kalmanhead.streams.source import (
    LARGEST_EXACT_INTEGER,
    Block,
    Source,
    SourceSpec,
    one_line,
    require_rows,
)

BUNDLED = (
    "AirlinePassengers",
    "Bananas",
    "ChickWeights",
    "ImageSegments",
    "Phishing",
    "SP500Stocks",
    "Shuttle",
    "SolarFlare",
    "TrumpApproval",
    "WaterFlow",
    "Yeast",
)

_BLOCK_ROWS = 256


class RiverName(NamedTuple):
    """A parsed target such as `river.synth:Friedman?seed=3&rows=1000`."""

    is_synthetic: bool
    name: str
    options: dict[str, Any]


def parse_river(target: str) -> RiverName:
    """Split a river target into its parts; option values become int, float, bool or str."""
    scheme, _, rest = target.partition(":")
    name, _, query = rest.partition("?")
    options = {key: _literal(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    return RiverName(scheme == "river.synth", name, options)


class RiverSource(Source):
    """Rows of one of river's data sets, as dictionaries turned into vectors.

    Parameters
    ----------
    target:
        `river:NAME` or `river.synth:NAME`, with options after a question mark. `rows` limits
        the length (generators are endless without it); all others go to river. Seeds that are
        not given are 0, so that a stream can be read again.
    features:
        Names of the features to use, in order; by default all, in the first row's order.

    Notes
    -----
    Booleans become 0 and 1, dates seconds since 1970-01-01 (UTC), None a missing value. Reading
    from a later row replays the rows before it and drops them.

    Raises
    ------
    SourceError
        For unknown names, data sets that would have to be downloaded, and strings among the
        features or targets.
    ConfigError
        When `rows` is no whole number from 1 on.
    """

    def __init__(self, target: str, *, features: tuple[str, ...] | None = None):
        parsed = parse_river(target)
        self.name = f"{'river.synth' if parsed.is_synthetic else 'river'}:{parsed.name}"
        options = dict(parsed.options)
        limit = options.pop("rows", None)
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ConfigError(f"{target}: rows is {limit!r}; give a whole number from 1 on")
        self._make, self.options = _maker(target, parsed._replace(options=options))
        data = self._make()
        try:
            first_x, first_y = next(iter(data))
        except (StopIteration, TypeError, ValueError) as error:
            raise SourceError(f"{target} gives no rows ({one_line(error)}); check it") from error
        known = {str(key): key for key in first_x}
        for name in features or ():
            if name not in known:
                raise SourceError(f"{target}: no feature {name!r}; there are {', '.join(known)}")
        self._keys = [known[name] for name in features or known]
        self._choosy = features is not None
        self._known = set(first_x)
        self._targets = list(first_y) if isinstance(first_y, Mapping) else None
        self._refuse_text(first_x, first_y)
        rows = getattr(data, "n_samples", None)
        if limit is not None:
            rows = limit if rows is None else min(limit, rows)
        y_names = ["y"] if self._targets is None else [str(key) for key in self._targets]
        self.spec = SourceSpec(
            (len(self._keys),),
            (len(y_names),),
            tuple(str(key) for key in self._keys),
            tuple(y_names),
            rows,
        )
        require_rows(self)

    def iterate(self, start: int = 0) -> Iterator[Block]:
        """Yield rows from `start` on, replaying those before it."""
        rows = itertools.islice(enumerate(iter(self._make())), start, self.spec.rows)
        while chunk := list(itertools.islice(rows, _BLOCK_ROWS)):
            x = np.array([self._x(row, values) for row, (values, _) in chunk], dtype=np.float64)
            y = np.array([self._y(row, values) for row, (_, values) in chunk], dtype=np.float64)
            yield Block(x, y)

    def fingerprint(self) -> dict[str, Any]:
        """Return the name, the options with all seeds, and the columns."""
        return {
            "kind": "river",
            "name": self.name,
            "options": {key: str(value) for key, value in self.options.items()},
            "rows": self.spec.rows,
            "x_names": list(self.spec.x_names),
            "y_names": list(self.spec.y_names),
        }

    def _x(self, row: int, values: Mapping[Any, Any]) -> list[float]:
        unknown = [key for key in values if key not in self._known]
        if unknown and not self._choosy:
            raise SourceError(
                f"{self.locate(row)} has a feature {unknown[0]!r} that the first row has not; "
                f"choose features with features= (--feature)"
            )
        return [self._number(values.get(key), key, row) for key in self._keys]

    def _y(self, row: int, values: Any) -> list[float]:
        if self._targets is None:
            return [self._number(values, "y", row)]
        return [self._number(values.get(key), key, row) for key in self._targets]

    def _number(self, value: Any, key: Any, row: int) -> float:
        if value is None:
            return float("nan")
        if isinstance(value, datetime):
            # Without a zone the clock is read as UTC, so the machine's own zone has no say.
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return aware.timestamp()
        if isinstance(value, date):
            return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
        if isinstance(value, str):
            raise SourceError(f"{self.locate(row)}: {key!r} is text; choose numeric features")
        number = float(value)
        if isinstance(value, int) and abs(value) > LARGEST_EXACT_INTEGER:
            raise SourceError(
                f"{self.locate(row)}: {key!r} holds an integer beyond 2^53, which float64 cannot "
                f"hold exactly; leave it out with features= (--feature)"
            )
        return number

    def _refuse_text(self, x: Mapping[Any, Any], y: Any) -> None:
        text = [str(key) for key in self._keys if isinstance(x[key], str)]
        if text:
            raise SourceError(
                f"{self.name}: features that are text: {', '.join(text)}; choose numeric ones "
                f"with features= (--feature)"
            )
        labels = y.values() if isinstance(y, Mapping) else [y]
        if any(isinstance(label, str) for label in labels):
            raise SourceError(
                f"{self.name}: the target is text (classes); choose a data set with numeric targets"
            )


def _maker(target: str, parsed: RiverName) -> tuple[Callable[[], Any], dict[str, Any]]:
    module = synth if parsed.is_synthetic else datasets
    names = _names(module) if parsed.is_synthetic else list(BUNDLED)
    kind = getattr(module, parsed.name, None)
    if not (inspect.isclass(kind) and parsed.name in _names(module)):
        near = difflib.get_close_matches(parsed.name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
        raise SourceError(f"{target}: river has no data set {parsed.name!r}; {hint}")
    if issubclass(kind, RemoteDataset):
        raise SourceError(
            f"{target} would have to be downloaded; bundled with river are {', '.join(BUNDLED)}"
        )
    parameters = inspect.signature(kind).parameters
    for key in parsed.options:
        if key not in parameters:
            known = ", ".join([*parameters, "rows"])
            raise SourceError(f"{target}: no option {key!r}; there are {known}")
    # river seeds from the system's entropy by default, and such rows could not be read again.
    seeds = {k: 0 for k, p in parameters.items() if k.startswith("seed") and p.default is None}
    options = {**seeds, **parsed.options}

    def make() -> Any:
        try:
            return kind(**options)
        except Exception as error:
            raise SourceError(
                f"{target} cannot be made ({one_line(error)}); check its options"
            ) from error

    return make, options


def _names(module: Any) -> list[str]:
    return [name for name in module.__all__ if inspect.isclass(getattr(module, name))]


def _literal(text: str) -> Any:
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
