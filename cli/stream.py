"""`kalmanhead stream`: learn from a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kalmanhead.cli.options import (
    config_option,
    json_option,
    keep_options,
    model_options,
    pass_options,
    quiet_option,
    source_options,
)


@click.command()
@config_option
@source_options
@pass_options
@model_options
@keep_options
@click.option("--run", type=click.Path(path_type=Path), help="Folder of the run (runs/TIME).")
@quiet_option
@json_option
def stream(run: Path | None, quiet: bool, as_json: bool, **options: Any) -> int:
    """Learn from a source, row by row as it comes, and keep everything in a run directory.

    Each row is predicted before it is learnt, so the errors shown are honest. The run directory
    holds config.toml, metrics.jsonl, checkpoints/ and curve.png; `kalmanhead resume RUN` goes on
    from there exactly.
    """
    from kalmanhead.cli.running import begin, execute

    return execute(begin(options, run), quiet=quiet, as_json=as_json)
