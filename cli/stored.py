"""What an earlier run left in its directory: its options, and its newest sound checkpoint."""

from __future__ import annotations

from typing import Any

import click

from kalmanhead.checkpoint import CheckpointFolder, Restored
from kalmanhead.cli.options import typed
from kalmanhead.cli.stream import stream
from kalmanhead.engine import Progress
from kalmanhead.errors import CheckpointError, ConfigError
from kalmanhead.metrics import Metrics
from kalmanhead.rundir import RunDirectory

NOT_STORED = ("config", "run", "quiet", "as_json")
# What a checkpoint says of a bank of heads; see `running.bank_report`.
BANK = ("heads", "lambda", "memory")


def stored_options(
    directory: RunDirectory, changes: dict[str, Any], *, trust_code: bool
) -> dict[str, Any]:
    """Options of a run, with the changes that its user asks for now.

    A module of the user's is imported only when the user says so now, not because a file says so.

    Raises
    ------
    ConfigError
        The file holds something that is no option or no valid value, or names code that is not
        trusted.
    """
    path = directory.config_path
    saved = typed(stream, directory.read_config(), str(path), exclude=NOT_STORED)
    try:
        context = stream.make_context("stream", [], default_map={**saved, **changes})
    except click.ClickException as error:
        raise ConfigError(f"{path}: {error.format_message()}") from error
    options = {key: value for key, value in context.params.items() if key not in NOT_STORED}
    backbone = str(options["backbone"])
    if backbone.startswith("module:") and not trust_code:
        raise ConfigError(
            f"the run's backbone is the code of {backbone.removeprefix('module:')}: "
            "say --trust-code to import it"
        )
    return options


def newest_result(directory: RunDirectory) -> dict[str, Any] | None:
    """Result of a run as of its newest sound checkpoint; None before the first one."""
    folder = CheckpointFolder(directory.checkpoints_path)
    if not folder.paths():
        return None
    restored = folder.latest()
    report(restored)
    try:
        saved = restored.tree["progress"]["metrics"]
        progress = Progress(Metrics(window_rows=saved["window_rows"], field=saved["field"]))
        progress.load_state(restored.tree["progress"])
        holdout = restored.tree["holdout"]
        # Runs from before lambda and memory were kept have the heads alone.
        bank = {key: restored.tree[key] for key in BANK if key in restored.tree}
    except (KeyError, TypeError) as error:
        raise foreign(restored) from error
    return {
        **progress.summary(),
        "holdout": holdout,
        **bank,
        "run": str(directory.path),
        "checkpoint": str(restored.path),
    }


def report(restored: Restored) -> None:
    """Say which damaged checkpoints were passed over."""
    for message in restored.passed_over:
        click.echo(f"kalmanhead: warning: {message}", err=True)


def foreign(restored: Restored) -> CheckpointError:
    """The error for a sound file that is not the checkpoint of a run."""
    return CheckpointError(f"{restored.path} is no checkpoint of a run; give another run")
