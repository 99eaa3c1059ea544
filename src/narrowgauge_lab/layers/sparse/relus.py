"""Where ReLUs are in a traced model, and which of them may go into a convolution."""

from __future__ import annotations

import inspect
import operator
from typing import Any, Dict, Mapping, Optional, Set

import torch
from torch import fx, nn
from torch.nn import functional

__all__ = ["Relus", "has_hooks"]

_FUNCTIONS = (torch.relu, torch.relu_, functional.relu, functional.relu_)
_METHODS = ("relu", "relu_")
#: What has zeros at its output because it is a ReLU with an upper end.
_BOUNDED = (nn.ReLU6,)
_BOUNDED_FUNCTIONS = (functional.relu6,)
#: What hands the zeros of a nonnegative map on. Dropout only adds to them.
_KEEPING = (nn.MaxPool2d, nn.Dropout, nn.Dropout2d, nn.Identity)
_KEEPING_FUNCTIONS = (
    functional.max_pool2d, functional.dropout, functional.dropout2d, torch.max_pool2d,
)  # fmt: skip
#: Modules whose output may be the memory of their input, beside those that are in place.
_ALIASES = (
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Flatten, nn.Unflatten,
)  # fmt: skip
#: Functions whose output is memory of their own: any other may give a view.
_FRESH_FUNCTIONS = (
    operator.add, torch.add, operator.mul, torch.mul, torch.cat, functional.conv2d, torch.conv2d,
    functional.batch_norm, functional.linear, functional.max_pool2d, torch.max_pool2d,
    functional.avg_pool2d, functional.interpolate,
)  # fmt: skip
#: Python's assignments that write to their first argument, which they return.
_ASSIGNING = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
)  # fmt: skip


class Relus:
    """The ReLUs of one graph, whose modules are `modules` by name. Changes the graph."""

    def __init__(self, graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
        self.graph = graph
        self.modules = modules

    def reaches(self, node: Any) -> bool:
        """Whether a map has the zeros of a ReLU: it is one's output, or handed on by layers that
        keep zeros."""
        while isinstance(node, fx.Node):
            if self._is_relu(node) or self._is(node, _BOUNDED, _BOUNDED_FUNCTIONS):
                return True
            if not self._is(node, _KEEPING, _KEEPING_FUNCTIONS) or not node.args:
                return False
            node = node.args[0]
        return False

    def may_go(self, node: Any, reader: fx.Node) -> bool:
        """Whether `node` is a ReLU that `reader` alone reads and that can be left out: nobody
        writes to what it read before `reader` does."""
        if not isinstance(node, fx.Node) or not self._is_relu(node):
            return False
        if set(node.users) != {reader} or not self._safe_to_leave_out(node):
            return False
        return not self._written_between(node, reader)

    def after(self, node: fx.Node) -> Optional[fx.Node]:
        """The ReLU that alone reads `node`, where it can be left out; else None."""
        if len(node.users) != 1:
            return None
        (reader,) = node.users
        return reader if self._is_relu(reader) and self._safe_to_leave_out(reader) else None

    def take_out(self, node: fx.Node) -> None:
        """Let the readers of a ReLU read its input."""
        node.replace_all_uses_with(_input(node))
        self.graph.erase_node(node)

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_method":
            return node.target in _METHODS
        return self._is(node, (nn.ReLU,), _FUNCTIONS)

    def _is(self, node: fx.Node, types: Any, functions: Any) -> bool:
        if node.op == "call_module":
            # By exact type: a subclass may compute something else.
            return type(self.modules[str(node.target)]) in types
        return node.op == "call_function" and node.target in functions

    def _safe_to_leave_out(self, node: fx.Node) -> bool:
        if _input(node) is None:
            return False
        if node.op == "call_module" and has_hooks(self.modules[str(node.target)]):
            return False
        return not self._in_place(node) or self._owned(_input(node), node)

    def _in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self.modules[str(node.target)], "inplace", False))
        if self._is(node, (), (*_ASSIGNING, operator.setitem)):
            return True
        if "out" in node.kwargs:
            return True
        named = str(
            node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        )
        return named.endswith("_") or _asked_in_place(node)

    def _owned(self, node: Any, reader: fx.Node) -> bool:
        """Whether nothing but `reader` sees the memory of `node`, so that it makes no difference
        whether that is overwritten."""
        while isinstance(node, fx.Node) and set(node.users) == {reader}:
            if self._is_fresh(node):
                return True
            # An argument, a parameter, or what may give a view, of which others may be left.
            if node.op != "call_module" and not self._is(node, (), _ASSIGNING):
                return False
            node, reader = (node.args[0] if node.args else None), node
        return False

    def _is_fresh(self, node: fx.Node) -> bool:
        """Whether the memory of its output is surely nobody else's."""
        if node.op == "call_module":
            return not self._in_place(node) and not isinstance(
                self.modules[str(node.target)], _ALIASES
            )
        if self._is_relu(node) or self._is(node, (), _FRESH_FUNCTIONS):
            return not self._in_place(node)
        return False

    def _written_between(self, relu: fx.Node, reader: fx.Node) -> bool:
        """Whether a call between the two may write to the memory that `relu` reads."""
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        shared = self._sharing(_input(relu))
        return any(
            order[relu] < order[user] < order[reader] and self._in_place(user)
            for node in shared
            for user in node.users
        )

    def _sharing(self, node: fx.Node) -> Set[fx.Node]:
        """The nodes whose output may be in the same memory, `node` among them."""
        found: Set[fx.Node] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one in found:
                continue
            found.add(one)
            if not self._is_fresh(one):
                waiting += one.all_input_nodes
            waiting += [user for user in one.users if not self._is_fresh(user)]
        return found


def _input(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _asked_in_place(node: fx.Node) -> bool:
    """Whether a function's `inplace` is true, by name or by place."""
    if "inplace" in node.kwargs or node.op != "call_function":
        return bool(node.kwargs.get("inplace", False))
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # torch's builtins, none of which has it
        return False
    place = names.index("inplace") if "inplace" in names else len(node.args)
    return place < len(node.args) and bool(node.args[place])


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches the calls of a module."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    held: Dict[str, Any] = vars(module)
    return any(held.get(name) for name in names)
