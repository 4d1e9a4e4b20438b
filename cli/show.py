"""`kalmanhead show`: what a run is and how far it has come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kalmanhead.checkpoint import CheckpointFolder
from kalmanhead.cli.options import json_option, run_argument
from kalmanhead.cli.table import results_table
from kalmanhead.engine import Progress
from kalmanhead.errors import CheckpointError
from kalmanhead.metrics import Metrics
from kalmanhead.rundir import RunDirectory


@click.command()
@run_argument
@json_option
def show(run: Path, as_json: bool) -> None:
    """Show the options and the newest checkpoint of RUN."""
    directory = RunDirectory.open(run)
    config = directory.read_config()
    result = newest(directory)
    if as_json:
        click.echo(json.dumps({"config": config, "result": result}))
        return
    for key, value in config.items():
        if value not in (None, [], ""):
            click.echo(f"{key} = {json.dumps(value)}")
    click.echo("")
    if result is None:
        click.echo("no checkpoint yet")
        return
    click.echo(results_table(result))
    click.echo(f"checkpoint: {result['checkpoint']}")


def newest(directory: RunDirectory) -> dict[str, Any] | None:
    """Result as of the newest sound checkpoint."""
    folder = CheckpointFolder(directory.checkpoints_path)
    if not folder.paths():
        return None
    restored = folder.latest()
    for message in restored.passed_over:
        click.echo(f"kalmanhead: warning: {message}", err=True)
    try:
        saved = restored.tree["progress"]["metrics"]
        metrics = Metrics(window_rows=saved["window_rows"], field=saved["field"])
        progress = Progress(metrics)
        progress.load_state(restored.tree["progress"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{restored.path} is no checkpoint of a run ({error!r})") from error
    return {**progress.summary(), "run": str(directory.path), "checkpoint": str(restored.path)}
