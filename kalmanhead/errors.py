"""Errors that a user can cause; each is one line that names the thing and the cure."""


class KalmanHeadError(Exception):
    """Base of every error that a user's input can cause.

    The message is one line: what is wrong, where, and what to do about it. The command line
    prints it and exits with code 2.
    """


class SourceError(KalmanHeadError):
    """A source cannot be opened or read as asked."""


class BadRowError(SourceError):
    """A row holds a value that cannot be learnt from (NaN or infinite input, infinite target)."""


class ConfigError(KalmanHeadError):
    """An option, a shape or a combination of them makes no sense."""


class CheckpointError(KalmanHeadError):
    """A checkpoint is damaged, foreign or does not fit."""


class NumericalError(KalmanHeadError):
    """A matrix that must be positive definite is not, or holds NaN."""


class SplitError(KalmanHeadError):
    """The last linear layer of a model cannot be split off."""


def shown(value: object) -> str:
    """What a value looks like, on one short line, for a message."""
    try:
        return " ".join(repr(value).split())[:40]
    except Exception:  # a value's own repr may do anything
        return "cannot be shown"


def kind_and_line(error: BaseException) -> str:
    """Kind and first line of an error that is not ours, for a message of one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
