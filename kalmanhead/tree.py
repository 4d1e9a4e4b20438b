"""A nested state as JSON and named tensors, and back: what a checkpoint file holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8}
    | {torch.uint64, torch.uint32, torch.uint16, torch.uint8}
)


def flatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Turn a tree into JSON, putting its tensors and arrays into `tensors` under their paths.

    What JSON would confuse is tagged: dicts (as pairs, for the sake of int keys), tuples, tensors.

    Raises
    ------
    TypeError
        The tree holds what has no plain form; the message says where.

    Examples
    --------
    >>> tensors = {}
    >>> flatten({"steps": 3, "moments": (torch.ones(2),)}, tensors)
    {'dict': [['steps', 3], ['moments', {'tuple': [{'tensor': 'moments/0'}]}]]}
    >>> tensors
    {'moments/0': tensor([1., 1.])}
    """
    return _flatten(tree, (), tensors)


def restore(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `flatten`; anything unexpected ends in a KeyError, TypeError or ValueError."""
    if isinstance(node, list):
        return [restore(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    [(tag, content)] = node.items()
    if tag == "dict":
        return {key: restore(value, tensors) for key, value in content}
    if tag == "tuple":
        return tuple(restore(value, tensors) for value in content)
    if tag == "array":
        return tensors[content].numpy()
    if tag == "tensor":
        return tensors[content]
    raise ValueError(f"unknown tag {tag!r}")


def _flatten(node: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    match node:
        case None | bool():
            return node
        case str():
            return str(node)
        case int() | float() | np.number() | np.bool_():
            return _plain_number(node, path)
        case Tensor():
            return {"tensor": _store(node, path, tensors)}
        case np.ndarray():
            return {"array": _store(_from_numpy(node, path), path, tensors)}
        case list():
            return [_flatten(v, (*path, str(i)), tensors) for i, v in enumerate(node)]
        case tuple():
            return {"tuple": [_flatten(v, (*path, str(i)), tensors) for i, v in enumerate(node)]}
        case dict():
            pairs = [(_plain_key(key, path), value) for key, value in node.items()]
            return {"dict": [[k, _flatten(v, (*path, str(k)), tensors)] for k, v in pairs]}
    raise TypeError(f"a {type(node).__name__} at {_where(path)} cannot go into a checkpoint")


def _plain_number(node: Any, path: tuple[str, ...]) -> bool | int | float:
    plain = node.item() if isinstance(node, np.generic) else node
    if isinstance(plain, bool):
        return plain
    if isinstance(plain, int):
        return int(plain)
    if isinstance(plain, float):
        return float(plain)
    raise TypeError(f"a {type(node).__name__} at {_where(path)} cannot go into a checkpoint")


def _plain_key(key: Any, path: tuple[str, ...]) -> str | int:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    raise TypeError(f"the key {key!r} in {_where(path)} is neither a str nor an int")


def _from_numpy(array: np.ndarray[Any, Any], path: tuple[str, ...]) -> Tensor:
    try:
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(native)
    except TypeError as error:
        raise TypeError(f"an array of {array.dtype} at {_where(path)} cannot be stored") from error


def _store(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
        raise TypeError(
            f"a tensor of {tensor.dtype}, {tensor.layout} at {_where(path)} cannot be stored"
        )
    wanted = "/".join(path).encode("ascii", "backslashreplace").decode() or "."
    name, copies = wanted, 1
    while name in tensors or name == "__metadata__":  # {0: a, "0": b} has one path for two
        copies += 1
        name = f"{wanted}~{copies}"
    # A copy, because two views of one storage may not share a safetensors file.
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg()
    tensors[name] = plain.clone(memory_format=torch.contiguous_format)
    return name


def _where(path: tuple[str, ...]) -> str:
    return "/".join(path) or "the root"
