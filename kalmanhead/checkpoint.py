"""A nested state in one file, written atomically and read without executing anything.

The file is a plain safetensors file. Tensors lie in it under the path that leads to them; all
else is a JSON manifest in its metadata, one string of the form ``FORMAT DIGEST MANIFEST``. The
digest covers every byte of the file (with the digest's own place filled with zeros), header and
padding included, so a single flipped bit anywhere is found before anything is decoded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from kalmanhead.errors import CheckpointError, ConfigError
from kalmanhead.tree import flatten, restore

FORMAT = 1
_DIGEST_LENGTH = 64
_NO_DIGEST = b"0" * _DIGEST_LENGTH
# safetensors writes the metadata first, and with a single key the bytes do not depend on the
# order of a hash map: the same tree gives the same file.
_PREFIX = b'{"__metadata__":{"kalmanhead":"'
_START = re.compile(rb".{8}" + re.escape(_PREFIX) + rb"(\d{1,9}) ", re.DOTALL)


def save(path: str | os.PathLike[str], tree: Any, *, kind: str) -> None:
    """Write a tree to one safetensors file; the old file stays whole until the new one is safe.

    Parameters
    ----------
    path:
        The file. Its folder must exist.
    tree:
        Nested dicts (with str or int keys), lists and tuples of torch tensors of any shape, numpy
        arrays, int, float (NaN and infinities too), bool, str and None. Numpy scalars become
        plain numbers, subclasses (an OrderedDict, a Parameter) their plain base.
    kind:
        What the tree is, e.g. ``"run"``; `load` can insist on it.

    Raises
    ------
    CheckpointError
        The file cannot be written: no such folder, no permission, disk full.
    TypeError
        The tree holds something else; the message says where.

    Examples
    --------
    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save(file, {"steps": 3, "moments": {0: torch.ones(2)}}, kind="example")
    >>> load(file)
    {'steps': 3, 'moments': {0: tensor([1., 1.])}}
    """
    tensors: dict[str, Tensor] = {}
    manifest = {"library": _library_version(), "kind": kind, "tree": flatten(tree, tensors)}
    text = f"{FORMAT} {_NO_DIGEST.decode()} {json.dumps(manifest, separators=(',', ':'))}"
    blob = bytearray(encode(tensors, {"kalmanhead": text}))
    place = _digest_place(blob)
    blob[place] = _digest(blob, place)
    write_atomically(path, blob)


def load(path: str | os.PathLike[str], *, kind: str | None = None) -> Any:
    """Read a tree that `save` wrote; tensors come back on the CPU, in memory of their own.

    Parameters
    ----------
    path:
        The file.
    kind:
        When given, a file of another kind is refused.

    Returns
    -------
    Any
        The tree, with the same keys, types and bits.

    Raises
    ------
    CheckpointError
        The file is missing, unreadable, damaged, of another format version or kind, or no
        checkpoint at all (a pickle, say). One line with the file and the cure.
    """
    blob = _read(path)
    start = _match_start(blob)
    if start is None:
        raise CheckpointError(_why_foreign(path, blob))
    if int(start[1]) != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {int(start[1])}, but this version of kalmanhead reads "
            f"format {FORMAT}; use the version that wrote it, or start a new run"
        )
    place = _digest_place(blob)
    if bytes(blob[place]) != _digest(blob, place):
        raise _damaged(path, "its digest does not match its content")
    manifest, tree = _decode(path, blob)
    if kind is not None and manifest.get("kind") != kind:
        raise CheckpointError(
            f"{path}: a checkpoint of kind {manifest.get('kind')!r} where {kind!r} is needed; "
            "give another file"
        )
    return tree


def write_atomically(path: str | os.PathLike[str], data: bytes | bytearray) -> None:
    """Put bytes at a path so that a reader, at any instant, finds the old file or the new one.

    Raises
    ------
    CheckpointError
        The system refuses; the message holds its reason. The old file is untouched then, and no
        temporary file is left.
    """
    path = Path(path)
    # Random, so that two writers never share one; hidden and with another suffix, so that no
    # reader that lists the folder takes it for a checkpoint.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "free some space or" if full else "mend that or"
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}; {cure} choose another place"
        ) from error


@dataclass(frozen=True)
class Restored:
    """What `CheckpointFolder.latest` found.

    Attributes
    ----------
    tree:
        The state.
    path, index:
        The file it came from and the index it was written with.
    passed_over:
        One line for each newer file that could not be used, newest first.
    """

    tree: Any
    path: Path
    index: int
    passed_over: list[str] = field(default_factory=list)


class CheckpointFolder:
    """The last few checkpoints of one run, named so that their names sort by age.

    Parameters
    ----------
    folder:
        Where they lie; made at the first write.
    keep:
        How many stay, at least 1. More than one, so that a damaged newest has an older one
        behind it.
    kind:
        The kind of tree that is written and accepted.

    Examples
    --------
    >>> import tempfile
    >>> folder = CheckpointFolder(tempfile.mkdtemp(), keep=2)
    >>> for index in (10, 20, 30):
    ...     path = folder.write({"batches": index}, index)
    >>> [path.name for path in folder.paths()]
    ['batch-000000000020.safetensors', 'batch-000000000030.safetensors']
    >>> folder.latest().tree
    {'batches': 30}
    """

    _name = re.compile(r"batch-(\d{12,})\.safetensors")

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, *, kind: str = "run") -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1 checkpoint, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self.kind = kind

    def write(self, tree: Any, index: int) -> Path:
        """Save a tree under an index (batches learnt so far), then drop the oldest beyond `keep`.

        Files with a higher index belong to a future that was given up (a damaged newest one, from
        before which the run went on). They get the suffix ``.stale``: out of the way, not lost.

        Raises
        ------
        CheckpointError
            As in `save`; nothing has been dropped then.
        ValueError
            The index is negative.
        """
        if index < 0:
            raise ValueError(f"index must not be negative, got {index}")
        path = self.folder / f"batch-{index:012d}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be made: {error.strerror or error}; choose another place"
            ) from error
        save(path, tree, kind=self.kind)
        # The new file is safe from here on; untidiness is no reason to end a run.
        with contextlib.suppress(OSError):
            self._tidy(index)
        return path

    def paths(self) -> list[Path]:
        """Files of the folder that are named as checkpoints, oldest first."""
        return [path for _, path in self._indexed()]

    def latest(self) -> Restored:
        """Load the newest sound checkpoint, passing over damaged ones.

        Raises
        ------
        CheckpointError
            There is none, or none is sound.
        """
        passed_over: list[str] = []
        for index, path in reversed(list(self._indexed())):
            try:
                tree = load(path, kind=self.kind)
            except CheckpointError as error:
                passed_over.append(str(error))
            else:
                return Restored(tree, path, index, passed_over)
        if passed_over:
            raise CheckpointError(
                f"{self.folder}: none of {len(passed_over)} checkpoints is sound; "
                f"start a new run (newest: {passed_over[0]})"
            )
        raise CheckpointError(f"{self.folder}: holds no checkpoint; start a new run")

    def _indexed(self) -> Iterator[tuple[int, Path]]:
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        found = (self._name.fullmatch(name) for name in names)
        # By number: beyond twelve digits names would no longer sort.
        for index, name in sorted((int(match[1]), match[0]) for match in found if match):
            yield index, self.folder / name

    def _tidy(self, newest: int) -> None:
        indexed = list(self._indexed())
        for index, path in indexed:
            if index > newest:
                path.replace(path.with_name(path.name + ".stale"))
        valid = [path for index, path in indexed if index <= newest]
        for path in valid[: -self.keep]:
            path.unlink()
        # What a process that was killed while writing left behind.
        for path in self.folder.glob(".batch-*.tmp"):
            path.unlink()


def _decode(path: str | os.PathLike[str], blob: bytearray) -> tuple[dict[str, Any], Any]:
    # The digest only says that the file is as it was written. Whoever wrote it may have meant
    # harm, so every failure to decode is an expected one.
    try:
        length = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + length])
        text = header["__metadata__"]["kalmanhead"]
        manifest = json.loads(text.split(" ", 2)[2])
        # safetensors checks all declared sizes against the bytes that are there. The clones
        # own aligned memory, where the decoded ones only look into a byte buffer.
        tensors = {name: view.clone() for name, view in decode(bytes(blob)).items()}
        return manifest, restore(manifest["tree"], tensors)
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(path, f"its content cannot be decoded ({type(error).__name__})") from error


def _read(path: str | os.PathLike[str]) -> bytearray:
    try:
        with open(path, "rb") as file:
            return bytearray(file.read())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such checkpoint; check the path") from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror or error}; check the path and its permissions"
        ) from error


def _match_start(blob: bytearray) -> re.Match[bytes] | None:
    return _START.match(blob[: 8 + len(_PREFIX) + 11])


def _digest_place(blob: bytearray) -> slice:
    start = _match_start(blob)
    if start is None:
        raise AssertionError("safetensors no longer writes the metadata first")
    return slice(start.end(), start.end() + _DIGEST_LENGTH)


def _digest(blob: bytearray, place: slice) -> bytes:
    hasher = hashlib.blake2b(digest_size=_DIGEST_LENGTH // 2)
    with memoryview(blob) as view:
        hasher.update(view[: place.start])
        hasher.update(_NO_DIGEST)
        hasher.update(view[place.stop :])
    return hasher.hexdigest().encode()


def _why_foreign(path: str | os.PathLike[str], blob: bytearray) -> str:
    if blob[:1] == b"\x80" or blob[:4] == b"PK\x03\x04":
        return (
            f"{path}: a pickle (or an archive of torch.save), which could run code and is never "
            "loaded; give a checkpoint that kalmanhead wrote"
        )
    return str(_damaged(path, "it does not begin as a kalmanhead checkpoint does"))


def _damaged(path: str | os.PathLike[str], what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged or foreign: {what}; use an older checkpoint or start a new run"
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: without it a power cut may undo what was reported as done."""
    if os.name == "nt":  # folders cannot be opened there, and renames are journalled
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems know no fsync of a folder
            raise
    finally:
        os.close(handle)


def _library_version() -> str:
    try:
        return version("kalmanhead")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
