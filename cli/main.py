"""The `kalmanhead` command: its sub-commands, and how errors end."""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from typing import NoReturn

import click
from click.core import ParameterSource

from kalmanhead.errors import KalmanHeadError

COMMANDS = {
    "stream": "Learn from a source.",
    "resume": "Go on with a run where its last checkpoint left it.",
    "show": "Show the options and the newest checkpoint of a run.",
    "predict": "Predict the rows of a new source.",
    "rollout": "Predict a trajectory of fields, each step from the one before.",
    "plot": "Draw the learning curve of a run.",
    "make": "Make a data set by solving an equation.",
}


class Commands(click.Group):
    """Sub-commands, each from the module of its name, imported when it is called for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which they are listed."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"kalmanhead.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="kalmanhead")
@click.pass_context
def cli(context: click.Context) -> None:
    """Learn a neural network from a stream, with the last layer kept as a Kalman filter."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Run the command line; what a user can cause ends in one line and exit code 2."""
    warnings.showwarning = _one_line_warning
    try:
        code = cli.main(prog_name="kalmanhead", standalone_mode=False)
    except click.exceptions.Abort:
        fail("interrupted", 128 + signal.SIGINT)
    except click.ClickException as error:
        fail(_from_file(error) + error.format_message())
    except KalmanHeadError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}; mend that")
    except MemoryError:
        fail(NO_MEMORY)
    except RuntimeError as error:  # torch's own kind of MemoryError
        if "memory" not in str(error).lower():
            raise
        fail(NO_MEMORY)
    sys.exit(code if isinstance(code, int) else 0)


NO_MEMORY = "out of memory: use a smaller --batch-size, --width or --grid"


def fail(message: str, code: int = 2) -> NoReturn:
    """End with one line on stderr."""
    click.echo(f"kalmanhead: {one_line(message)}", err=True)
    sys.exit(code)


def one_line(message: str) -> str:
    """A message without its line breaks."""
    return " ".join(message.split())


def _from_file(error: click.ClickException) -> str:
    """Name the configuration file where a refused value comes from it."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    source = error.ctx.get_parameter_source(error.param.name or "")
    if source is not ParameterSource.DEFAULT_MAP or "config" not in error.ctx.meta:
        return ""
    return f"{error.ctx.meta['config']}: "


def _one_line_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"kalmanhead: warning: {one_line(str(message))}", err=True)


if __name__ == "__main__":
    main()
