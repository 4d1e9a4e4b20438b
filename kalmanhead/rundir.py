"""The folder of one run: its configuration, its metrics batch by batch, its checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import tomli_w

from kalmanhead.checkpoint import write_atomically
from kalmanhead.errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


class RunDirectory:
    """One run on disk. Make it with `create` or `open`; close it, or use it as a context manager.

    The folder holds ``config.toml``, ``metrics.jsonl`` (one JSON object a line, one line a batch),
    ``checkpoints/`` and ``curve.png``. Whoever writes holds a lock, so that two processes never
    write one run; the system releases it when its holder dies, however it dies.

    Attributes
    ----------
    path, config_path, metrics_path, checkpoints_path, curve_path:
        The folder and what lies in it.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "first"
    >>> with RunDirectory.create(path) as run:
    ...     run.write_config({"head": {"heads": 12}})
    ...     run.append({"rows": 32, "rmse": 0.5})
    ...     offset = run.flush()
    >>> with RunDirectory.open(path) as run:
    ...     run.read_config(), list(run.records())
    ({'head': {'heads': 12}}, [{'rows': 32, 'rmse': 0.5}])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.curve_path = self.path / "curve.png"
        self._lock: _Lock | None = None
        self._metrics: BinaryIO | None = None

    @classmethod
    def create(
        cls, path: str | os.PathLike[str] | None = None, *, root: str | os.PathLike[str] = "runs"
    ) -> RunDirectory:
        """Make the folder of a new run and lock it.

        Parameters
        ----------
        path:
            The folder; None names one after the time, ``runs/YYYYmmdd-HHMMSS``, with ``-2`` and so
            on behind it where that is taken.
        root:
            Where unnamed runs go.

        Raises
        ------
        ConfigError
            The folder holds a run already, another process is making one there, or it cannot
            be made.
        """
        run = cls(_unused_folder(Path(root)) if path is None else path)
        with _refusals(run.path, "be made"):
            run.path.mkdir(parents=True, exist_ok=True)
        run._acquire()
        # Under the lock, so that of two processes which start at once one is refused.
        if run.config_path.exists() or run.metrics_path.exists() or run.checkpoints_path.exists():
            run.close()
            raise ConfigError(
                f"{run.path}: holds a run already; go on with `kalmanhead resume {run.path}`, "
                "or give another --run"
            )
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, write: bool = False) -> RunDirectory:
        """Open the folder of an earlier run, to read it or (locked) to go on with it.

        Raises
        ------
        ConfigError
            It holds no run, or another process is writing to it.
        """
        run = cls(path)
        if not run.config_path.is_file():
            state = "holds no run (no config.toml)" if run.path.is_dir() else "no such folder"
            raise ConfigError(f"{run.path}: {state}; give the folder of a run, e.g. runs/NAME")
        if write:
            run._acquire()
        return run

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration atomically, leaving out entries that are None.

        Raises
        ------
        CheckpointError
            The file cannot be written.
        RuntimeError
            The run was opened for reading; so in `append`, `flush` and `truncate`.
        """
        self._must_hold_lock()
        write_atomically(self.config_path, tomli_w.dumps(_without_none(config)).encode())

    def read_config(self) -> dict[str, Any]:
        """Read the configuration.

        Raises
        ------
        ConfigError
            The file is no TOML, or cannot be read.
        """
        try:
            with _refusals(self.config_path, "be read"), open(self.config_path, "rb") as file:
                return tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.config_path}: {error}; mend the file by hand") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics, buffered; numbers that are not finite become null.

        Raises
        ------
        ConfigError
            The line cannot be written (disk full, say).
        """
        line = _to_json(record)
        with _refusals(self.metrics_path, "be written"):
            self._open_metrics().write(line)

    def flush(self) -> int:
        """Bring all lines to the disk and return the length of the metrics in bytes.

        Store that number in the checkpoint: `truncate` goes back to it on a resume.
        """
        with _refusals(self.metrics_path, "be written"):
            file = self._open_metrics()
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def truncate(self, offset: int) -> None:
        """Drop every line beyond an offset that `flush` gave: those batches are learnt again.

        Raises
        ------
        CheckpointError
            The metrics are shorter than that, so lines have been lost.
        """
        self._must_hold_lock()
        self._close_metrics()
        size = self.metrics_path.stat().st_size if self.metrics_path.exists() else 0
        if not 0 <= offset <= size:
            raise CheckpointError(
                f"{self.metrics_path}: {size} bytes long, but the checkpoint was written at byte "
                f"{offset}; put the file back as it was, or start a new run"
            )
        with _refusals(self.metrics_path, "be written"), open(self.metrics_path, "ab") as file:
            file.truncate(offset)
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> Iterator[dict[str, Any]]:
        """Lines of the metrics, oldest first; a last line that was cut short is passed over.

        Raises
        ------
        ConfigError
            Another line is no JSON object, or the file cannot be read.
        """
        if self._metrics is not None:
            self._metrics.flush()
        if not self.metrics_path.exists():
            return
        # Read by hand, one line ahead: only of the last line is damage to be expected.
        with _refusals(self.metrics_path, "be read"), open(self.metrics_path, "rb") as file:
            line, number = file.readline(), 0
            while line:
                following, number = file.readline(), number + 1
                record = _from_json(line)
                if record is not None:
                    yield record
                elif following:
                    raise ConfigError(
                        f"{self.metrics_path}: line {number} is damaged; delete that line"
                    )
                line = following

    def close(self) -> None:
        """Write what is buffered and release the lock; may be called twice."""
        try:
            with _refusals(self.metrics_path, "be written"):
                self._close_metrics()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _acquire(self) -> None:
        lock = _Lock(self.path / "lock")
        with _refusals(lock.path, "be made"):
            lock.acquire()
        self._lock = lock

    def _must_hold_lock(self) -> None:
        if self._lock is None:
            raise RuntimeError("the run is open for reading; open it with write=True")

    def _open_metrics(self) -> BinaryIO:
        if self._metrics is None:
            self._must_hold_lock()
            file = open(self.metrics_path, "a+b")  # noqa: SIM115
            # A line that an earlier process left half-written would swallow the next one.
            file.truncate(_end_of_last_line(file))
            file.seek(0, os.SEEK_END)
            self._metrics = file
        return self._metrics

    def _close_metrics(self) -> None:
        file, self._metrics = self._metrics, None
        if file is not None:
            file.close()


class _Lock:
    """A lock file that one process holds.

    With ``fcntl.flock`` the system releases it when the holder dies. Elsewhere the file's mere
    existence is the lock, and after a crash a person has to delete it, as the message says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        exclusive = os.O_EXCL if fcntl is None else 0
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_RDWR | exclusive, 0o666)
        except FileExistsError:
            raise ConfigError(
                f"{self.path.parent}: in use by another process; wait for it, or give another "
                f"--run (if none runs, delete {self.path})"
            ) from None
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise ConfigError(
                    f"{self.path.parent}: in use by another process; wait for it to end, "
                    "or give another --run"
                ) from None
            except OSError:
                os.close(handle)
                raise
        self._handle = handle

    def release(self) -> None:
        if self._handle is None:
            return
        os.close(self._handle)
        self._handle = None
        # Under flock the file stays: were it deleted, one process could lock the old file and
        # another the new one.
        if fcntl is None:
            self.path.unlink(missing_ok=True)


def _unused_folder(root: Path) -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    with _refusals(root, "be made"):
        root.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = root / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()  # fails where another process was quicker
            except FileExistsError:
                number += 1
            else:
                return path


def _end_of_last_line(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _to_json(record: Mapping[str, Any]) -> bytes:
    try:
        text = _ENCODER.encode(record)
    except ValueError:  # rare, so only then is every number looked at
        text = json.dumps(_finite(record), allow_nan=False)
    return text.encode() + b"\n"


def _from_json(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _plain(value: Any) -> Any:
    """What json cannot write by itself: numpy scalars and tensors of one number."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot go into the metrics")


_ENCODER = json.JSONEncoder(allow_nan=False, default=_plain)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    number = value if isinstance(value, float) else _plain(value)
    return None if isinstance(number, float) and not math.isfinite(number) else number


def _without_none(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value is not None
    }


@contextlib.contextmanager
def _refusals(path: Path, what: str) -> Iterator[None]:
    """Turn the system's refusals into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot {what}: {error.strerror or error}; mend that or choose another place"
        ) from error
