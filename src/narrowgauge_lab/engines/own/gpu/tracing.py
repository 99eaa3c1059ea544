"""A network's graph, and which of its nodes write over what others hold."""

from __future__ import annotations

import inspect
import operator
from typing import Any, Callable, Dict, List, Mapping

import torch
from torch import fx, nn

from narrowgauge_lab.engines.hooks import require_none
from narrowgauge_lab.transforms import folded

__all__ = ["ADDITIONS", "IN_PLACE", "first", "shares", "trace", "writes_over"]

#: What `a += b` and the like are where they make a new tensor.
IN_PLACE: Dict[Any, Callable[[Any, Any], Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
ADDITIONS = (operator.add, operator.iadd, torch.add)
_SHARING_MODULES = (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten)
#: Functions and methods whose result may lie in the memory of what they are given.
_SHARING = (
    "alias", "contiguous", "detach", "diagonal", "dropout", "dropout2d", "dropout3d", "expand",
    "expand_as", "flatten", "float", "getitem", "half", "movedim", "moveaxis", "narrow", "permute",
    "reshape", "reshape_as", "select", "squeeze", "swapaxes", "swapdims", "t", "to", "transpose",
    "type", "type_as", "unflatten", "unfold", "unsqueeze", "view", "view_as",
)  # fmt: skip


def trace(model: nn.Module, *, in_place: bool = False) -> fx.GraphModule:
    """The network's graph with every batch norm folded into the convolution before it, in a copy
    unless `in_place`. Hooks of its modules are in it, or run with them; raises HooksNotTakenError
    for hooks of the network itself, which would be lost."""
    require_none("narrowgauge", "", model)
    network = folded(model, in_place=in_place).model
    graph = _Tracer().trace(network)
    for node in graph.nodes:
        node.type = None  # torch 1.8 cannot write a graph whose annotations are strings
    _hoist_shortcuts(graph, dict(network.named_modules()))
    return fx.GraphModule(network, graph)


def _written(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def write(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return write


class _Proxy(fx.Proxy):
    """Keeps `a += b`: fx makes `a = a + b` of it, which another name of a would not see."""

    __iadd__ = _written(operator.iadd)
    __isub__ = _written(operator.isub)
    __imul__ = _written(operator.imul)
    __itruediv__ = _written(operator.itruediv)


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _hoist_shortcuts(graph: fx.Graph, modules: Dict[str, nn.Module]) -> None:
    """Of two convolutions that are added, put the one on the shorter way right after what it reads:
    it may then run beside the other way, whose last convolution does the addition."""
    nodes = list(graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}

    def way(node: Any) -> List[fx.Node]:
        """Identities down to a convolution, which is the last; none where there is no such way."""
        found: List[fx.Node] = []
        while isinstance(node, fx.Node) and node.op == "call_module":
            found.append(node)
            if isinstance(modules[str(node.target)], nn.Conv2d):
                return found
            if not isinstance(modules[str(node.target)], (nn.Identity, nn.Dropout)):
                break
            node = first(node)
        return []

    def stays(source: fx.Node, reader: fx.Node) -> bool:
        """Whether nothing writes over a value before `reader` reads it."""
        between = nodes[order[source] + 1 : order[reader]]
        memory = _memory(source, modules)
        writing = (node for node in between if writes_over(node, modules))
        return all(_memory(node, modules) is not memory for node in writing)

    for node in nodes:
        if node.op != "call_function" or node.target not in ADDITIONS or len(node.args) != 2:
            continue
        sides = [way(side) for side in node.args]
        if not all(sides) or sides[0][-1] is sides[1][-1]:
            continue
        one, other = sorted(sides, key=lambda side: order[side[-1]])
        source = first(other[-1])
        if order[source] < order[first(one[-1])] and stays(source, other[-1]):
            for each in other:  # the last to be put there comes first: the convolution
                source.append(each)


def _memory(node: fx.Node, modules: Mapping[str, nn.Module]) -> fx.Node:
    """The node that made the memory which `node`'s result may lie in."""
    while shares(node, modules) or writes_over(node, modules):
        node = first(node)
    return node


def shares(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether torch may give its argument's memory by another name, without writing to it."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _SHARING_MODULES)
    name = str(getattr(node.target, "__name__", node.target))
    return node.op in ("call_function", "call_method") and name in _SHARING


def writes_over(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it writes its result over its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if node.target in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return True
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return False  # what is not written in Python says so in its name
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    return given.get("inplace") is True


def first(node: fx.Node) -> fx.Node:
    """Its first argument."""
    given = node.args[0] if node.args else next(iter(node.kwargs.values()))
    assert isinstance(given, fx.Node), f"{node.target} has no tensor as its first argument"
    return given
