"""River's data sets as rows of numbers, scaled as a pipeline hands them to its model."""

import itertools
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from river import datasets, preprocessing
from river.datasets import synth

X = dict[str, Any]
Scaled = tuple[X, X, Any]  # x for the prediction, x to learn from, y

REGRESSION = (
    *("TrumpApproval", "ChickWeights", "AirlinePassengers", "WaterFlow", "SP500Stocks"),
    *("Friedman", "FriedmanDrift", "Mv", "SolarFlare"),
)
CLASSIFICATION = ("Phishing", "Bananas", "ImageSegments")
ROWS, QUICK_ROWS = 2_000, 300
DRIFT = {"drift_type": "lea", "position": tuple(int(ROWS * s) for s in (0.25, 0.5, 0.75))}


def one_hot(name: str, value: Any, levels: Iterable[Any]) -> X:
    return {f"{name}={level}": float(value == level) for level in levels}


def calendar(name: str, when: datetime, start: datetime) -> X:
    if name == "AirlinePassengers":
        months = one_hot("month", when.month, range(1, 13))
        return {"year": when.year + (when.month - 1) / 12} | months
    turn = math.tau * (when.hour + when.minute / 60) / 24
    waves = {f"{f.__name__} {k}": f(k * turn) for f in (math.sin, math.cos) for k in (1, 2)}
    days = (when - start).total_seconds() / 86_400
    return {"days": days} | waves | one_hot("weekday", when.weekday(), range(7))


def encoded(name: str, rows: list[tuple[dict[Any, Any], Any]]) -> Iterator[tuple[X, Any]]:
    """Rows in numbers alone, with the same columns in all."""
    first = rows[0][0]
    levels = {k: sorted({x[k] for x, _ in rows}) for k, v in first.items() if isinstance(v, str)}
    for x, y in rows:
        numbers: X = {}
        for key, value in x.items():
            if key in levels:
                numbers |= one_hot(key, value, levels[key])
            elif isinstance(value, datetime):
                numbers |= calendar(name, value, first[key])
            else:
                numbers[str(key)] = float(value)
        yield numbers, y


def stream(name: str, seed: int, quick: bool) -> list[Scaled]:
    """All rows of a set, scaled as river's pipeline hands them to its model."""
    if hasattr(synth, name):
        data = getattr(synth, name)(seed=seed, **(DRIFT if name == "FriedmanDrift" else {}))
        rows = list(data.take(ROWS))
    else:
        rows = list(getattr(datasets, name)())
    scaler = preprocessing.StandardScaler()
    scaled = []
    for x, y in itertools.islice(encoded(name, rows), QUICK_ROWS if quick else None):
        before = scaler.transform_one(x)
        scaler.learn_one(x)
        scaled.append((before, scaler.transform_one(x), y))
    return scaled
