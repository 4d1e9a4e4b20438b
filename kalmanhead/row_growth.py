"""The state of a learner, made to fit one that has more inputs or outputs; nothing is lost.

Layout: a head's features are [1 | p inputs | backbone], so new inputs go in at 1 + p, and all else
that grows (outputs, the backbone's first layer, the scalers) grows at its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmanhead.learner import OnlineLearner

State = dict[str, Any]

# The statistics of a channel that nothing is known of yet.
UNSEEN = {"count": 0.0, "mean": 0.0, "squares": 0.0, "strange": 0.0, "shift": 0.0, "scale": 1.0}


def grown(
    old: OnlineLearner, fresh: OnlineLearner, before: int, after: int, rows: float = 0.0
) -> State:
    """State of `old` for `fresh`, a learner of the same options with more inputs or outputs.

    What is new starts as in `fresh`, but for the new weights of the backbone, which start at 0, so
    that the features of the old inputs stay what they were.

    Parameters
    ----------
    old, fresh:
        The learners. `fresh` has learnt nothing; the state still is to be loaded into it.
    before, after:
        Inputs of the old learner, p, and of the fresh one.
    rows:
        How many rows the new inputs are to count as seen at 0.
    """
    state, start, place = old.state(), fresh.state(), 1 + before
    x, y = state["scaling"]["x"], state["scaling"]["y"]
    outputs = fresh.head.out_features
    average, outliers = state["average"], state["outliers"]
    if average is not None:
        average = {
            **_fitted(average, start["average"], place),
            "backbone": _padded(average["backbone"], start["average"]["backbone"]),
        }
    return {
        **state,
        "backbone": _padded(state["backbone"], start["backbone"]),
        "head": _fitted(state["head"], start["head"], place),
        "optimizer": _moments(state["optimizer"], fresh, place),
        "average": average,
        "outliers": outliers and _fitted(outliers, start["outliers"], place),
        "scaling": {
            "x": None if x is None else _channels(x, after, rows),
            "y": None if y is None else _channels(y, outputs, 0.0),
        },
    }


def inserted(old: Tensor, into: Tensor, places: dict[int, int]) -> Tensor:
    """Put `old` into a larger tensor, whose values stay where something is new.

    Parameters
    ----------
    old, into:
        Tensors of equally many dimensions.
    places:
        By dimension, counted from the last one as -1: where the new entries begin; at the end for
        dimensions that are left out.

    Examples
    --------
    >>> inserted(torch.tensor([1.0, 2.0]), torch.zeros(3), {-1: 1})
    tensor([1., 0., 2.])
    """
    kept = []
    for axis, (before, after) in enumerate(zip(old.shape, into.shape, strict=True)):
        at = min(places.get(axis - old.dim(), before), before)
        kept.append(torch.tensor([*range(at), *range(at + after - before, after)]))
    result = into.clone()
    if not kept:
        return old.clone()
    result[torch.meshgrid(*kept, indexing="ij")] = old.to(result)
    return result


def _fitted(node: Any, fresh: Any, place: int, name: str = "") -> Any:
    """A head's or an average's state in the shapes of a fresh one."""
    if isinstance(node, dict):
        return {
            key: value if key == "backbone" else _fitted(value, fresh[key], place, key)
            for key, value in node.items()
        }
    if isinstance(node, list) and name == "groups":
        return [_fitted(a, b, place) for a, b in zip(node, fresh, strict=True)]
    if not isinstance(node, Tensor) or node.shape == fresh.shape:
        return node
    return inserted(node, fresh, _places(name, place))


def _places(name: str, place: int) -> dict[int, int]:
    """Where new features go in tensors (..., k, d), (..., d, d) or (..., d); elsewhere none do."""
    return {"mean": {-1: place}, "weight": {-1: place}, "spread": {-1: place, -2: place}}.get(
        name, {}
    )


def _padded(tensors: dict[str, Tensor], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """A backbone's parameters, with zeros for those that are new."""
    return {
        name: value
        if value.shape == fresh[name].shape
        else inserted(value, torch.zeros_like(fresh[name]), {})
        for name, value in tensors.items()
    }


def _moments(state: State | None, fresh: OnlineLearner, place: int) -> State | None:
    """The optimiser's state: what it knows of the old parameters, and nothing of the new."""
    if state is None:
        return None
    named = [(name, p) for name, p in fresh.named_parameters() if p.requires_grad]
    moments: dict[int, State] = {}
    for i, values in state["state"].items():
        name, parameter = named[i]
        places = _places("mean", place) if name.startswith("head.") else {}
        moments[i] = {
            key: inserted(value, torch.zeros_like(parameter.detach()), places)
            if isinstance(value, Tensor) and value.dim() == parameter.dim()
            else value
            for key, value in values.items()
        }
    return {**state, "state": moments}


def _channels(state: State, channels: int, rows: float) -> State:
    """Statistics with more channels, of which nothing is known, or so many rows of 0."""
    more = channels - state["count"].shape[0]
    unseen = {**UNSEEN, "count": rows}
    return {
        name: torch.cat([value, torch.full((more,), unseen[name]).to(value)])
        for name, value in state.items()
    }
