"""The `kalmanhead` command: its sub-commands, and how errors end."""

from __future__ import annotations

import sys
import warnings

import click

from kalmanhead.cli.make import make
from kalmanhead.cli.plot import plot
from kalmanhead.cli.predict import predict
from kalmanhead.cli.resume import resume
from kalmanhead.cli.show import show
from kalmanhead.cli.stream import stream
from kalmanhead.errors import KalmanHeadError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kalmanhead")
def cli() -> None:
    """Learn a neural network from a stream, with the last layer kept as a Kalman filter."""


for command in (stream, resume, show, predict, plot, make):
    cli.add_command(command)


def main() -> None:
    """Run the command line; what a user can cause ends in one line and exit code 2."""
    warnings.showwarning = _one_line_warning
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        fail("interrupted")
    except click.ClickException as error:
        fail(" ".join(error.format_message().split()))
    except KalmanHeadError as error:
        fail(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(2)
    except MemoryError:
        fail("out of memory: use a smaller --batch-size or --width")
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> None:
    """End with one line on stderr and exit code 2."""
    click.echo(f"kalmanhead: {message}", err=True)
    sys.exit(2)


def _one_line_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"kalmanhead: warning: {message}", err=True)


if __name__ == "__main__":
    main()
