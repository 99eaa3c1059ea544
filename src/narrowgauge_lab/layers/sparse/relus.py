"""Where ReLUs are in a traced model, and which of them may go into a convolution."""

from __future__ import annotations

import operator
from typing import Any, Dict, Mapping, Optional

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
#: Modules whose output may be the memory of their input.
_ALIASES = (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Flatten)


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
        """Whether `node` is a ReLU that `reader` alone reads and that can be left out."""
        if not isinstance(node, fx.Node) or not self._is_relu(node):
            return False
        return set(node.users) == {reader} and self._safe_to_leave_out(node)

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
        named = str(
            node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        )
        second = node.args[1] if len(node.args) > 1 else False
        return named.endswith("_") or bool(node.kwargs.get("inplace", second))

    def _owned(self, node: Any, reader: fx.Node) -> bool:
        """Whether nothing but `reader` sees the memory of `node`, so that it makes no difference
        whether that is overwritten."""
        while isinstance(node, fx.Node) and set(node.users) == {reader}:
            if node.op == "call_function":
                return node.target is not operator.getitem
            if node.op != "call_module":
                return False  # an argument, a parameter, or a method that may give a view
            if not isinstance(self.modules[str(node.target)], _ALIASES):
                return True
            node, reader = (node.args[0] if node.args else None), node
        return False


def _input(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches the calls of a module."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    held: Dict[str, Any] = vars(module)
    return any(held.get(name) for name in names)
