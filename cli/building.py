"""From the options of a run to its stream and its learner."""

from __future__ import annotations

from typing import Any

import torch

from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.learner import OnlineLearner
from kalmanhead.streams import SourceSpec, Stream, open_source


def open_stream(options: dict[str, Any], **changes: Any) -> Stream:
    """Open the source that the options of a run describe."""
    values = {**options, **changes}
    return open_source(
        values["source"],
        values["batch_size"],
        x=values["x"],
        y=values["y"],
        weight=values["weight"],
        field=values["field"],
        lead=values["lead"],
        targets=values["target"] or None,
        features=values["feature"] or None,
        dims=values["dims"],
        missing_chunks=values["missing_chunks"],
        on_bad=values["on_bad"],
        epochs=values["epochs"],
        shuffle=values["shuffle"],
        seed=values["seed"],
        holdout=values["holdout"],
        max_rows=values["max_rows"],
        optional_targets=values.get("optional_targets"),
    )


def make_learner(options: dict[str, Any], rows: SourceSpec) -> OnlineLearner:
    """Build the learner for the rows of a source."""
    # The weights of a user's own module come from the global generator.
    torch.manual_seed(options["seed"])
    config = ModelConfig.from_mapping(options)
    return build_learner(config, rows.x_shape, rows.y_shape, rows.grid_dims)
