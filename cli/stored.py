"""The options of an earlier run, read back from its directory and checked like typed ones."""

from __future__ import annotations

from typing import Any

import click

from kalmanhead.cli.stream import stream
from kalmanhead.errors import ConfigError
from kalmanhead.rundir import RunDirectory

NOT_STORED = ("config", "run", "quiet", "as_json")


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
    saved = {**directory.read_config(), **changes}
    known = {p.name for p in stream.params} - set(NOT_STORED)
    for key in saved:
        if key not in known:
            raise ConfigError(f"{path}: key {key!r} is no option of a run: take it out")
    try:
        context = stream.make_context("stream", [], default_map=saved)
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        raise ConfigError(f"{path}: {message}") from error
    options = {key: value for key, value in context.params.items() if key in known}
    backbone = str(options["backbone"])
    if backbone.startswith("module:") and not trust_code:
        raise ConfigError(
            f"the run's backbone is the code of {backbone.removeprefix('module:')}: "
            "say --trust-code to import it"
        )
    return options
