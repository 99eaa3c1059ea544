"""BatchNorm folded into the layer before it: W' = W · s, b' = (b - mean) · s + beta, per output
channel, with s = gamma / sqrt(variance + eps). All in float64, rounded once to the layer's dtype.

Which BatchNorm follows which layer is read from the graph that torch.fx traces. Where the model
does not trace, its largest parts that do are traced, and a Sequential that does not is read by its
order. Such a part is taken to be used whole: a forward that reaches into it from outside is not
seen.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict, Iterator, List, Set, Tuple

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Folding", "fold_batch_norm", "folded"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: By exact type: a subclass may compute something else.
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *_TRANSPOSED)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclasses.dataclass(frozen=True)
class Folding:
    """What folding made of a model.

    `pairs`: (layer, BatchNorm) by name, each BatchNorm now an Identity. `kept`: each BatchNorm that
    is still there, with the reason. `untraced`: why torch.fx could not read the whole model, or "".
    """

    model: nn.Module
    pairs: Tuple[Tuple[str, str], ...]
    kept: Dict[str, str]
    untraced: str


def fold_batch_norm(model: nn.Module) -> nn.Module:
    """A copy of `model` in eval mode with every BatchNorm folded that certainly can be; `folded`
    says which and why not the others."""
    return folded(model).model


def folded(model: nn.Module, *, in_place: bool = False) -> Folding:
    """Fold every BatchNorm that has the output of one layer, used nowhere else, as its input.

    Layers: Conv1d to 3d, ConvTranspose1d to 3d, Linear (of inputs [N, features]). A layer or a
    BatchNorm that is called twice, shares its tensors, or has hooks is kept as it is. `in_place`:
    `model` itself is changed, not a copy.
    """
    # Tracing runs the model's own code with stand-ins for tensors, which it may store: on a copy,
    # which shares the tensors themselves.
    tensors = (*model.parameters(), *model.buffers())
    scratch = copy.deepcopy(model, {id(each): each for each in tensors}).eval()
    found: List[Tuple[str, str]] = []
    kept: Dict[str, str] = {}
    untraced = _read(scratch, "", found, kept)
    new = (model if in_place else copy.deepcopy(model)).eval()
    modules = dict(_everywhere(new))
    shared = _shared(modules)
    pairs = []
    for layer_name, norm_name in found:
        layer, norm = modules[layer_name], modules[norm_name]
        why = _obstacle(layer_name, layer, norm_name, norm, shared)
        if why:
            kept[norm_name] = why
            continue
        _fold(layer, norm)
        pairs.append((layer_name, norm_name))
    folded_away = {norm_name for _, norm_name in pairs}
    for name, module in modules.items():
        if isinstance(module, _BatchNorm) and name not in folded_away:
            kept.setdefault(name, "nothing says what its input is")
    for name in folded_away:
        new = _replace(new, modules, name, nn.Identity())
    return Folding(new, tuple(pairs), {name: kept[name] for name in sorted(kept)}, untraced)


def _read(
    module: nn.Module, prefix: str, found: List[Tuple[str, str]], kept: Dict[str, str]
) -> str:
    """Find the pairs below `module`; why it does not trace, or ""."""
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # whatever a forward does with a stand-in for a tensor
        # Not the whole: then its parts.
        if isinstance(module, nn.Sequential):
            _read_order(module, prefix, found)
        for name, child in module.named_children():
            if next(child.children(), None) is not None:
                _read(child, f"{prefix}{name}.", found, kept)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    _read_graph(graph, module, prefix, found, kept)
    return ""


def _read_order(sequence: nn.Sequential, prefix: str, found: List[Tuple[str, str]]) -> None:
    children = list(sequence.named_children())
    for (first, layer), (second, norm) in zip(children, children[1:]):
        if type(layer) in _LAYERS and isinstance(norm, _BatchNorm):
            found.append((prefix + first, prefix + second))


def _read_graph(
    graph: fx.Graph,
    root: nn.Module,
    prefix: str,
    found: List[Tuple[str, str]],
    kept: Dict[str, str],
) -> None:
    modules = dict(root.named_modules())
    calls: Dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            called = id(modules[node.target])
            calls[called] = calls.get(called, 0) + 1
    read = [node.target for node in graph.nodes if node.op == "get_attr"]
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(modules[node.target], _BatchNorm):
            continue
        before = node.args[0] if node.args else None
        why = _obstacle_in_graph(node, before, modules, calls, read)
        if why or before is None:
            kept[prefix + node.target] = why
        else:
            found.append((prefix + before.target, prefix + node.target))


def _obstacle_in_graph(
    node: fx.Node,
    before: Any,
    modules: Dict[str, nn.Module],
    calls: Dict[int, int],
    read: List[str],
) -> str:
    """Why the BatchNorm of `node` cannot be folded into `before`; "" where the graph allows it."""
    if calls[id(modules[node.target])] > 1:
        return "it is fed by more than one thing"
    if not isinstance(before, fx.Node) or before.op != "call_module":
        return f"its input is not a layer but {getattr(before, 'target', 'no plain argument')}"
    layer = modules[before.target]
    if type(layer) not in _LAYERS:
        return f"its input is {before.target}, a {type(layer).__name__}"
    if calls[id(layer)] > 1:
        return f"{before.target} is called more than once"
    if len(before.users) > 1:
        return f"the output of {before.target} is used elsewhere too"
    for owner in (node.target, before.target):
        if any(name.startswith(owner + ".") for name in read):
            return f"the model reads the tensors of {owner} itself"
    return ""


def _everywhere(module: nn.Module, name: str = "") -> Iterator[Tuple[str, nn.Module]]:
    """Every module by name; one that stands at two places comes twice, unlike in named_modules."""
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _everywhere(child, f"{name}.{key}" if name else key)


def _shared(modules: Dict[str, nn.Module]) -> Set[int]:
    """The ids of modules and tensors that stand at more than one place."""
    places: List[Any] = []
    for module in modules.values():
        places += [module, *module._parameters.values(), *module._buffers.values()]
    seen: Set[int] = set()
    twice: Set[int] = set()
    for thing in places:
        if thing is not None:
            (twice if id(thing) in seen else seen).add(id(thing))
    return twice


def _obstacle(
    layer_name: str, layer: nn.Module, norm_name: str, norm: nn.Module, shared: Set[int]
) -> str:
    """Why these two modules cannot be folded, wherever they stand; "" where they can."""
    if type(norm) not in _NORMS:
        return f"it is a {type(norm).__name__}"
    if norm.running_mean is None:
        return "it has no running statistics: it normalises by each batch"
    for name, module in ((layer_name, layer), (norm_name, norm)):
        if id(module) in shared:
            return f"{name} stands at more than one place"
        tensors = [*module.parameters(), *module.buffers()]
        if any(id(tensor) in shared for tensor in tensors):
            return f"{name} shares a tensor with another module"
        # A hook sees or changes what is between the two; weight_norm makes the weight in one.
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return f"{name} has hooks"
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    if outputs != norm.num_features:
        return f"{layer_name} has {outputs} outputs, it {norm.num_features} features"
    return ""


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    """Put the BatchNorm into the layer, in place."""
    weight = layer.weight
    with torch.no_grad():
        mean, variance = norm.running_mean.double(), norm.running_var.double()
        factor = torch.rsqrt(variance + norm.eps)
        if norm.weight is not None:
            factor = factor * norm.weight.double()
        offset = -mean if layer.bias is None else layer.bias.double() - mean
        bias = offset * factor
        if norm.bias is not None:
            bias = bias + norm.bias.double()
        scaled = _times(layer, weight.double(), factor)
        trains = layer.bias.requires_grad if layer.bias is not None else weight.requires_grad
        layer.weight = nn.Parameter(scaled.to(weight.dtype), weight.requires_grad)
        layer.bias = nn.Parameter(bias.to(weight.dtype), trains)


def _times(layer: nn.Module, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`weight` with each output channel multiplied by its factor."""
    ones = (1,) * (weight.dim() - 2)
    if not isinstance(layer, _TRANSPOSED):
        return weight * factor.reshape(-1, 1, *ones)
    # [inputs, outputs / groups, ...]: the inputs of a group meet the outputs of that group.
    groups = layer.groups
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    return (grouped * factor.reshape(groups, 1, -1, *ones)).reshape(weight.shape)


def _replace(
    model: nn.Module, modules: Dict[str, nn.Module], name: str, module: nn.Module
) -> nn.Module:
    """`model`, which has these `modules`, with `module` at the place `name`; the module itself
    where that is the root."""
    if not name:
        return module
    parent_name, _, last = name.rpartition(".")
    setattr(modules[parent_name], last, module)
    return model
