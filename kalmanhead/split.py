"""Splits the last linear layer off any torch model, and puts it back.

For a model whose output is that of a Linear or 1x1 convolution, `model(x) == layer(backbone(x))`.
Weights are (k, d) as in torch.nn.Linear; features lie in dimension `feature_dim`, -1 under a
Linear and 1 under a convolution.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from kalmanhead.errors import SplitError, kind_and_line
from kalmanhead.tap import HeadTap, SplitBackbone, is_squeezed

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NO_LAYER = "the model has no Linear or 1x1 convolution to split off: end it with one"
_Example = Tensor | tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class HeadSplit:
    """A model in two parts.

    Attributes
    ----------
    backbone:
        Everything before the layer, a copy; has `out_features` and `feature_dim`.
    weight, bias:
        The layer's, (k, d) and (k,) or None; copies without gradient.
    feature_dim:
        -1 under a Linear, 1 under a 1x1 convolution.
    path:
        The layer's name in the model, "" if the model is the layer.
    verified:
        Whether it is certain that nothing follows the layer. If not, call `verify`.
    squeezed:
        Whether the model drops the single output's dimension (`fc(x).squeeze(-1)`). Then
        layer(backbone(x)) is (n, 1) where model(x) is (n,).
    """

    backbone: nn.Module
    weight: Tensor
    bias: Tensor | None
    feature_dim: int
    path: str
    verified: bool
    squeezed: bool = False

    def verify(self, example: _Example) -> HeadSplit:
        """The same split, verified: random values in the layer's place reach the output unchanged.

        Raises
        ------
        SplitError
            If the model does something to the layer's output, or does not call it just once.
        """
        if not isinstance(self.backbone, SplitBackbone):
            return self
        squeezed = _verify(self.backbone, self.path, example)
        return HeadSplit(
            self.backbone, self.weight, self.bias, self.feature_dim, self.path, True, squeezed
        )


def split_head(model: nn.Module, example: _Example | None = None) -> HeadSplit:
    """Split the last Linear or 1x1 convolution off a model; the model stays as it is.

    With an example the model's copy is run once, in evaluation mode, to find the layer that is
    executed last, and once more to see that the layer's output is the model's. Without one the
    model is traced by torch.fx, and where that fails the layer that was registered last is taken
    and the split is marked as not verified.

    Parallel and compiled wrappers are taken off. A model may reshape the layer's output, as long
    as the feature dimension stays in its place, and may squeeze the single output of k = 1.

    Parameters
    ----------
    model:
        The whole model.
    example:
        One input of a few rows, or a tuple of arguments.

    Returns
    -------
    HeadSplit
        The two parts.

    Raises
    ------
    SplitError
        If there is no such layer, something follows it, its weight is shared or parametrised, or
        it is used twice.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> split = split_head(model, torch.ones(4, 3))
    >>> split.path, tuple(split.weight.shape), split.backbone(torch.ones(4, 3)).shape
    ('2', (2, 8), torch.Size([4, 8]))
    """
    model = _unwrapped(model)
    try:
        own = copy.deepcopy(model)
    except Exception as error:
        raise SplitError(f"the model cannot be copied: {kind_and_line(error)}") from error
    if isinstance(own, _LAYERS):
        path, verified, squeezed = "", True, False
    elif example is not None:
        path, verified, squeezed = _executed_last(own, example), False, False
    else:
        path, verified, squeezed = _found_without_example(own)
    layer = _checked(own, path)
    # On the original: copying gives parameters that share memory a memory each.
    _check_untied(model, model.get_submodule(path), path)
    weight = layer.weight.detach().clone().flatten(1)
    bias = None if layer.bias is None else layer.bias.detach().clone()
    tap = HeadTap(layer)
    backbone = SplitBackbone(_replaced(own, layer, tap), tap)
    split = HeadSplit(backbone, weight, bias, tap.feature_dim, path, verified, squeezed)
    return split if example is None else split.verify(example)


def merge_head(backbone: nn.Module | HeadSplit, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The plain model again, a copy, with its last layer filled in.

    Parameters
    ----------
    backbone:
        The backbone that `split_head` gave, trained or not, or the whole split.
    weight, bias:
        The layer's weight (k, d) and bias (k,), or None for a layer without one.

    Returns
    -------
    torch.nn.Module
        A model of the original's class.

    Raises
    ------
    SplitError
        If the backbone comes from elsewhere or a shape does not fit.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> split = split_head(model)
    >>> merge_head(split.backbone, torch.zeros(2, 8), torch.ones(2))(torch.ones(1, 3)).tolist()
    [[1.0, 1.0]]
    """
    if isinstance(backbone, HeadSplit):
        backbone = backbone.backbone
    if not isinstance(backbone, SplitBackbone):
        raise SplitError(
            f"a {type(backbone).__name__} did not come from split_head: put a layer on it by hand"
        )
    own = copy.deepcopy(backbone)
    tap = own.tap
    k, d = tap.out_features, tap.in_features
    if tuple(weight.shape) != (k, d) or (bias is not None and tuple(bias.shape) != (k,)):
        got = tuple(weight.shape), None if bias is None else tuple(bias.shape)
        raise SplitError(f"weight and bias must have shapes ({k}, {d}) and ({k},), got {got}")
    layer = tap.layer(weight, bias).train(own.model.training)
    return _replaced(own.model, tap, layer)


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with a module exchanged under every name it has."""
    if model is old:
        return new
    paths = [p for p, m in model.named_modules(remove_duplicate=False) if m is old]
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
    return model


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside parallel and compiled wrappers."""
    if not isinstance(model, nn.Module):
        raise SplitError(f"a {type(model).__name__} is no torch.nn.Module: give the model itself")
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, parallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            break
    if isinstance(model, torch.jit.ScriptModule):
        raise SplitError("a scripted model cannot be split: give the model before torch.jit")
    return model


def _checked(model: nn.Module, path: str) -> nn.Linear | _ConvNd:
    """The layer at this path, if it is one that can be taken away."""
    layer = model.get_submodule(path)
    name = f"the last layer {path!r}" if path else "the model"
    if not isinstance(layer, _LAYERS):
        kind = type(layer).__name__
        raise SplitError(f"{name} is a {kind}: end the model with a Linear or a 1x1 convolution")
    if isinstance(layer.weight, nn.parameter.UninitializedParameter):
        raise SplitError(f"{name} has no weight yet: run the model once before it is split")
    if nn.utils.parametrize.is_parametrized(layer) or "weight" not in layer._parameters:
        raise SplitError(
            f"{name} has a parametrised weight: make it plain first, with "
            "torch.nn.utils.parametrize.remove_parametrizations or remove_weight_norm"
        )
    if type(layer).forward not in [c.forward for c in _LAYERS]:
        raise SplitError(f"{name} is a {type(layer).__name__} with a forward of its own: merge it")
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise SplitError(f"{name} has forward hooks, which would be lost: remove them first")
    if isinstance(layer, _ConvNd):
        _check_pointwise(layer, name)
    return layer


def _check_pointwise(layer: _ConvNd, name: str) -> None:
    plain = (
        set(layer.kernel_size) == {1}
        and set(layer.stride) == {1}
        and (layer.padding == "valid" or layer.padding == "same" or set(layer.padding) == {0})
        and layer.groups == 1
    )
    if not plain:
        raise SplitError(
            f"{name} is a convolution with kernel {tuple(layer.kernel_size)}, stride "
            f"{tuple(layer.stride)}, padding {layer.padding} and groups {layer.groups}: "
            "only kernel 1, stride 1, padding 0 and groups 1 is linear at each point; add such a "
            "layer at the end"
        )


def _check_untied(model: nn.Module, layer: nn.Module, path: str) -> None:
    """Refuse a parameter that another module owns too."""
    places = {p.untyped_storage().data_ptr() for p in layer.parameters(recurse=False)} - {0}
    for other, module in model.named_modules():
        if module is layer:
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.untyped_storage().data_ptr() in places:
                raise SplitError(
                    f"the last layer {path!r} shares its weight with {other + '.' + own!r}: "
                    "untie them first, for the head is solved and not trained"
                )


def _found_without_example(model: nn.Module) -> tuple[str, bool, bool]:
    """Path of the last layer, whether that is certain, and whether it is squeezed."""
    try:
        graph = fx.Tracer().trace(model)
    # Any control flow on values ends a trace, in many ways; the model itself is not at fault.
    except Exception:
        graph = None
    if graph is not None:
        found = _traced_last(model, graph)
        if found is not None:
            return found
    layers = [p for p, m in model.named_modules() if isinstance(m, (nn.Linear, _ConvNd))]
    if not layers:
        raise SplitError(_NO_LAYER)
    return layers[-1], False, False


_SHAPERS = ("reshape", "view", "flatten", "unflatten", "contiguous", "unsqueeze")


def _traced_last(model: nn.Module, graph: fx.Graph) -> tuple[str, bool, bool] | None:
    """What `_found_without_example` returns, read off a traced graph; None if it cannot be."""
    node = next(n for n in graph.nodes if n.op == "output").args[0]
    certain, squeezed = True, False
    while True:
        if not isinstance(node, fx.Node):
            raise SplitError(
                f"the model returns a {type(node).__name__}: wrap it so that it returns a tensor"
            )
        what = _operation(node)
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, (nn.Linear, _ConvNd)):
            break
        squeezed = squeezed or what == "squeeze"
        # Shapes are not known while tracing: an example has to confirm what these do.
        certain = certain and what not in _SHAPERS
        passes = _is_silent(module) or what == "squeeze" or what in _SHAPERS
        if not passes or not node.args:
            _refuse_traced(model, graph, what)
        node = node.args[0]
    path = str(node.target)
    users = [n for n in graph.nodes if n.op == "call_module" and _is(model, n, module)]
    if len(users) > 1 or len(node.users) > 1:
        raise SplitError(f"the last layer {path!r} or its output is used twice: give it one use")
    prefix = f"{path}."
    if any(n.op == "get_attr" and str(n.target).startswith(prefix) for n in graph.nodes):
        raise SplitError(f"the weight of the last layer {path!r} is used elsewhere too: untie it")
    if squeezed and module.weight.shape[0] != 1:
        certain, squeezed = False, False
    return path, certain, squeezed


def _is_silent(module: nn.Module | None) -> bool:
    """Whether a module never changes a value, in training mode either."""
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0
    return dropout or isinstance(module, nn.Identity)


def _is(model: nn.Module, node: fx.Node, module: nn.Module) -> bool:
    return model.get_submodule(str(node.target)) is module


def _operation(node: fx.Node) -> str:
    """Short name of what a node does."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")


def _refuse_traced(model: nn.Module, graph: fx.Graph, what: str) -> NoReturn:
    modules = [m for _, m in model.named_modules()]
    if not any(isinstance(m, (nn.Linear, _ConvNd)) for m in modules):
        raise SplitError(_NO_LAYER)
    calls = [n for n in graph.nodes if n.op == "call_module" and str(n.target) == what]
    kind = f" ({type(model.get_submodule(what)).__name__})" if calls else ""
    raise SplitError(
        f"{what!r}{kind} comes after the last linear layer: end the model with a Linear or a 1x1 "
        "convolution and apply the rest outside"
    )


def _executed_last(model: nn.Module, example: _Example) -> str:
    """Path of the layer whose output is the model's or, failing that, that ran last."""
    own = copy.deepcopy(model)
    ran: list[tuple[str, Any]] = []
    layers = [(p, m) for p, m in own.named_modules() if isinstance(m, (nn.Linear, _ConvNd))]
    for path, module in layers:
        module.register_forward_hook(lambda _m, _a, out, path=path: ran.append((path, out)))
    with _calm(own):
        output = _called(own, example)
    if not ran:
        raise SplitError(_NO_LAYER)
    path = ran[-1][0]
    if isinstance(output, Tensor):
        # An auxiliary branch may run later than the layer that makes the output.
        place = output.untyped_storage().data_ptr()
        made = [p for p, out in ran if out.untyped_storage().data_ptr() == place]
        path = made[-1] if made else path
    if [p for p, _ in ran].count(path) > 1:
        raise SplitError(f"the last layer {path!r} is used twice in one pass: give it one use")
    return path


def _verify(backbone: SplitBackbone, path: str, example: _Example) -> bool:
    """Send random values through what follows the layer; returns whether it squeezes them."""
    own = copy.deepcopy(backbone)
    tap = own.tap
    tap.probe = torch.empty(0)
    after: list[str] = []
    for name, module in own.model.named_modules():
        if module is not tap and not list(module.children()):
            module.register_forward_hook(
                lambda m, _a, _o, name=name: _note(after, tap, f"{name!r} ({type(m).__name__})", m)
            )
    with _calm(own):
        try:
            features, output, probe = own.run(*_arguments(example))
        except SplitError:
            raise
        except Exception as error:
            raise SplitError(
                f"the model fails without its last layer {path!r}: {kind_and_line(error)}"
            ) from error
    assert probe is not None
    culprit = after[0] if after else "something"
    cure = "end the model with the layer and apply the rest outside"
    refusal = f"{culprit} comes after the last linear layer {path!r}: {cure}"
    own.arranged(features, output)
    if output.numel() != probe.numel() or not torch.equal(output.reshape(probe.shape), probe):
        raise SplitError(refusal)
    # Dropout lets everything pass in evaluation mode, but not while the backbone is trained.
    if any("Dropout" in name for name in after):
        raise SplitError(refusal)
    return output.ndim < probe.ndim and is_squeezed(list(probe.shape), output, tap.feature_dim)


def _note(after: list[str], tap: HeadTap, name: str, module: nn.Module) -> None:
    """Note a module that ran after the tap and may change values."""
    shapes_only = isinstance(module, (nn.Flatten, nn.Unflatten)) or _is_silent(module)
    if tap.features is not None and not shapes_only:
        after.append(name)


def _arguments(example: _Example) -> tuple[Any, ...]:
    return example if isinstance(example, tuple) else (example,)


def _called(model: nn.Module, example: _Example) -> Any:
    try:
        return model(*_arguments(example))
    except Exception as error:
        raise SplitError(f"the model fails on the example: {kind_and_line(error)}") from error


@contextmanager
def _calm(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradient, and the global random state as it was afterwards."""
    model.eval()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        yield
