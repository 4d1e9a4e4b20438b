"""Roll-outs of a learnt run along the trajectories of a source."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from kalmanhead.cli.figure import check_picture, write
from kalmanhead.cli.predicting import check_rows, open_new_rows, restored_learner
from kalmanhead.cli.rollout_figure import RolledOut, rollout_figure
from kalmanhead.cli.stored import stored_options
from kalmanhead.cli.table import aligned, number
from kalmanhead.engine import rollout
from kalmanhead.errors import ConfigError
from kalmanhead.fields import rollout_errors
from kalmanhead.rundir import RunDirectory
from kalmanhead.streams.trajectory import read_trajectories


@dataclass(frozen=True)
class Request:
    """What was asked for; see the command."""

    run: Path
    source: str
    steps: int
    start: int
    starts: int
    stride: int | None
    field: str | None
    lead: int | None
    threshold: float


def roll_out(
    request: Request, *, plot: Path | None, trust_code: bool, quiet: bool, as_json: bool
) -> None:
    """Roll out, and say how well it went; see the command."""
    if plot is not None:
        check_picture(plot)
    rolled = rolled_out(request, trust_code=trust_code)
    if plot is not None:
        write(rollout_figure(rolled, request.run.resolve().name), plot)
    if not quiet:
        click.echo(report(rolled))
        if plot is not None:
            click.echo(f"picture: {plot}")
    if as_json:
        click.echo(json.dumps(result(request, rolled), allow_nan=False))


def rolled_out(request: Request, *, trust_code: bool) -> RolledOut:
    """Predictions of the run's newest checkpoint beside what came."""
    directory = RunDirectory.open(request.run)
    options = stored_options(directory, {}, trust_code=trust_code)
    learner, learnt, features = restored_learner(directory, options)
    changes: dict[str, Any] = {}
    if request.field is not None:
        changes = {"field": request.field, "lead": 1}
    if request.lead is not None:
        changes["lead"] = request.lead
    stream = open_new_rows(options, learnt, features, request.source, **changes)
    check_rows(stream.spec, learnt, request.source)
    if not learnt.grid_dims:
        raise ConfigError(
            f"{request.run} learnt vectors, and roll-outs are of fields: learn with --dims 1 or "
            "--dims 2, or call kalmanhead.rollout"
        )
    starts, first, truth = read_trajectories(
        stream.source,
        request.steps,
        start=request.start,
        count=request.starts,
        stride=request.stride,
    )
    predicted = rollout(learner, torch.from_numpy(first), request.steps).cpu().double().numpy()
    kept = np.broadcast_to(first[:, None], truth.shape)
    return RolledOut(
        starts.tolist(),
        predicted,
        truth,
        rollout_errors(predicted, truth, request.threshold),
        rollout_errors(kept, truth, request.threshold),
        learnt.y_names[0],
    )


def report(rolled: RolledOut) -> str:
    """Table of the errors by step, and how long they stay small."""
    errors, kept = rolled.errors, rolled.persistence
    lines = [["step", "relative_l2", "persistence"]]
    for step in listed_steps(len(errors.relative_l2)):
        pair = (number(e.relative_l2[step - 1]) for e in (errors, kept))
        lines.append([str(step), *pair])
    rows = ", ".join(map(str, rolled.starts[:8])) + (", ..." if len(rolled.starts) > 8 else "")
    return "\n".join(
        [
            aligned(lines),
            f"{len(rolled.starts)} roll-outs, from rows {rows}"
            if len(rolled.starts) > 1
            else f"from row {rows}",
            f"first beyond {errors.threshold:g}: {when(errors.steps_until)} "
            f"(persistence: {when(kept.steps_until)})",
        ]
    )


def listed_steps(steps: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... and the last."""
    digits = len(str(steps))
    series = [lead * 10**power for power in range(digits) for lead in (1, 2, 5)]
    return [step for step in series if step < steps] + [steps]


def when(step: int | None) -> str:
    """A step, if it came to that."""
    return "never" if step is None else f"step {step}"


def result(request: Request, rolled: RolledOut) -> dict[str, Any]:
    """The same as plain numbers; null for an error that is infinite, or of no truth."""
    found: dict[str, Any] = {
        "run": str(request.run),
        "source": request.source,
        "steps": request.steps,
        "starts": rolled.starts,
        "threshold": request.threshold,
    }
    for name, errors in (("learner", rolled.errors), ("persistence", rolled.persistence)):
        by_step = [value if math.isfinite(value) else None for value in errors.relative_l2.tolist()]
        found[name] = {"relative_l2": by_step, "steps_until": errors.steps_until}
    return found
