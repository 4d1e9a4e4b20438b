"""`kalmanhead show`: what a run is and how far it has come."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kalmanhead.cli.options import json_option, run_argument


@click.command()
@run_argument
@json_option
def show(run: Path, as_json: bool) -> None:
    """Show the options and the newest checkpoint of RUN."""
    from kalmanhead.cli.stored import newest_result
    from kalmanhead.cli.table import results_table
    from kalmanhead.rundir import RunDirectory

    directory = RunDirectory.open(run)
    config = directory.read_config()
    result = newest_result(directory)
    if as_json:
        click.echo(json.dumps({"config": config, "result": result}, default=str))
        return
    for key, value in config.items():
        if value not in (None, [], ""):
            click.echo(f"{key} = {json.dumps(value, default=str)}")
    click.echo("")
    if result is None:
        click.echo("no checkpoint yet")
        return
    click.echo(results_table(result))
    click.echo(f"checkpoint: {result['checkpoint']}")
