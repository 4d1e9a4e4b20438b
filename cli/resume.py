"""`kalmanhead resume`: go on with a run exactly where its last checkpoint left it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kalmanhead.cli.options import (
    COUNT,
    LIMIT,
    json_option,
    quiet_option,
    run_argument,
    trust_option,
)


@click.command()
@run_argument
@click.option("--epochs", type=COUNT, help="Passes in all, instead of the run's own number.")
@click.option(
    "--max-batches",
    type=LIMIT,
    help="Batches in all, instead of the run's own number; 0 for no limit.",
)
@click.option(
    "--on-bad", type=click.Choice(["stop", "skip"]), help="What to do with bad rows from here on."
)
@trust_option
@quiet_option
@json_option
def resume(
    run: Path,
    epochs: int | None,
    max_batches: int | None,
    on_bad: str | None,
    trust_code: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Go on with RUN from its newest sound checkpoint.

    The result is bit for bit that of a run that was never interrupted, on the same machine with
    the same number of threads.
    """
    from kalmanhead.cli.running import execute, go_on
    from kalmanhead.cli.stored import stored_options
    from kalmanhead.rundir import RunDirectory

    changes: dict[str, Any] = {"epochs": epochs, "on_bad": on_bad, "max_batches": max_batches}
    changes = {name: value for name, value in changes.items() if value is not None}
    with RunDirectory.open(run, write=True) as directory:
        unlimited = changes.get("max_batches") == 0
        if unlimited:
            del changes["max_batches"]
        options = stored_options(directory, changes, trust_code=trust_code)
        if unlimited:
            options["max_batches"] = None
        resumed = go_on(directory, options, quiet=quiet)
        return execute(resumed, quiet=quiet, as_json=as_json)
