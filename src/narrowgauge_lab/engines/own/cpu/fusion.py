"""A folded network rewritten so that convolutions take their neighbours with them into oneDNN.

What may be taken together is read from the graph that torch.fx traces: a convolution, an addition
of another tensor, an activation. In-place operators are where such rewriting goes wrong, so nothing
moves across one, and no tensor is written over that anything else still reads.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from torch import fx, nn
from torch.nn import functional

from narrowgauge_lab.engines.base import LayerFact
from narrowgauge_lab.engines.hooks import has_hooks, require_none
from narrowgauge_lab.engines.own.cpu.onednn import (
    Activation,
    FusedConv,
    FusedLinear,
    conv_obstacle,
    works,
)
from narrowgauge_lab.torch_compat import inference_mode

__all__ = ["WORDS", "Fusion", "fuse"]

_RELU: Activation = ("relu", ())
_NONE: Activation = ("none", ())
_RELU6: Activation = ("hardtanh", (0.0, 6.0))
_FUNCTIONS = {
    functional.relu: _RELU, functional.relu_: _RELU, torch.relu: _RELU, torch.relu_: _RELU,
    functional.relu6: _RELU6,
}  # fmt: skip
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_IN_PLACE_FUNCTIONS = tuple(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
)
#: Each gives a tensor of its own, and none of them its input again.
_FRESH = (nn.MaxPool2d, nn.AvgPool2d, nn.Conv2d)
#: Names of precisions, as rows have them.
WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The network as a graph, and what each of its nodes runs as."""

    model: fx.GraphModule
    layers: Tuple[LayerFact, ...]


@dataclasses.dataclass(frozen=True)
class _Match:
    """Nodes that become one, whose result is that of the last: a layer, then perhaps an addition,
    then perhaps an activation."""

    kind: str
    layer: fx.Node
    addition: Optional[fx.Node] = None
    activation: Activation = _NONE
    activator: Optional[fx.Node] = None

    @property
    def members(self) -> Tuple[fx.Node, ...]:
        nodes = (self.layer, self.addition, self.activator)
        return tuple(node for node in nodes if node is not None)

    @property
    def end(self) -> fx.Node:
        return self.members[-1]


def fuse(model: nn.Module, example: torch.Tensor, *, linear: bool) -> Fusion:
    """`model` (eval, BatchNorm folded, of the example's dtype; not changed, its weights shared),
    fused for inputs like `example`; `linear`: its Linear layers as well.

    Raises what torch.fx raises where it cannot trace the model, and HooksNotTakenError for hooks of
    the network itself, which are no part of its graph.
    """
    require_none("the fused form", "", model)
    network = fx.symbolic_trace(model)
    rewriting = _Rewriting(network, _shapes(network, example), example)
    rewriting.drop_identities()
    rewriting.fuse(linear)
    network.recompile()
    return Fusion(network.eval(), rewriting.facts())


def _shapes(network: fx.GraphModule, example: torch.Tensor) -> Dict[fx.Node, Tuple[int, ...]]:
    """The shape of every tensor in a run with two images of the example's kind: with one, what is
    added to each image alike would seem to have the images' shape."""
    few = example[:1].expand(2, *example.shape[1:]).contiguous(memory_format=torch.channels_last)
    with inference_mode():
        try:
            seen = _run_for_shapes(_without_data(network), few.to("meta"))
        # An operator that does not do without data, or a tensor that the model makes itself.
        except (NotImplementedError, RuntimeError):
            seen = _run_for_shapes(network, few)
    return {node: seen[node.name] for node in network.graph.nodes if node.name in seen}


def _without_data(network: fx.GraphModule) -> fx.GraphModule:
    """A copy whose tensors have shapes and nothing else: running it costs nothing."""
    tensors = (*network.parameters(), *network.buffers())
    return copy.deepcopy(network, {id(each): each.detach().to("meta") for each in tensors})


def _run_for_shapes(network: fx.GraphModule, x: torch.Tensor) -> Dict[str, Tuple[int, ...]]:
    shapes = _Shapes(network)
    shapes.run(x)
    return shapes.seen


class _Shapes(fx.Interpreter):
    """Runs the graph and keeps the shape of every tensor, by its node's name."""

    def __init__(self, network: fx.GraphModule) -> None:
        super().__init__(network)
        self.seen: Dict[str, Tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.seen[n.name] = tuple(result.shape)
        return result


class _Rewriting:
    """One graph while it is being changed."""

    def __init__(
        self, network: fx.GraphModule, shapes: Dict[fx.Node, Tuple[int, ...]], example: torch.Tensor
    ) -> None:
        self.network, self.graph, self.shapes = network, network.graph, shapes
        self.batch, self.dtype = example.shape[0], example.dtype
        self.modules = dict(network.named_modules())
        #: Nodes that are fused now, and how.
        self.fused: Dict[fx.Node, _Match] = {}
        self.left: Dict[fx.Node, str] = {}

    def drop_identities(self) -> None:
        """Take out what does nothing in eval mode."""
        for node in list(self.graph.nodes):
            kind = type(self.plain(node))
            if kind in (nn.Identity, nn.Dropout, nn.Dropout2d) and len(node.args) == 1:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)

    def fuse(self, linear: bool) -> None:
        # From the end: where both sides of an addition are convolutions, the later one takes it.
        matches: List[_Match] = []
        taken: Set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            match = self.match(node, taken, linear)
            if match is not None:
                matches.append(match)
                taken.update(match.members)
        for match in reversed(matches):
            self.replace(match)
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        for node, match in self.fused.items():
            setattr(self.network, node.target, self.make(node, match, order))
        self.modules = dict(self.network.named_modules())

    def match(self, node: fx.Node, taken: Set[fx.Node], linear: bool) -> Optional[_Match]:
        """What the layer of `node` can take with it; None where it stays as it is."""
        module = self.module(node)
        if type(module) is nn.Linear and linear:
            why = "it has hooks" if has_hooks(module) else works("linear", "none", self.dtype)
            if why:
                self.left[node] = why
                return None
            return self.activated(_Match("linear", node))
        if not isinstance(module, nn.Conv2d):
            return None
        why = conv_obstacle(module) or works("conv", "none", self.dtype)
        if has_hooks(module):
            why = "it has hooks"
        if len(node.args) != 1 or node.kwargs:
            why = why or "it is called in an unusual way"
        if why:
            self.left[node] = why
            return None
        return self.activated(self.with_addition(node, taken) or _Match("conv", node))

    def with_addition(self, node: fx.Node, taken: Set[fx.Node]) -> Optional[_Match]:
        addition = _only_user(node)
        if addition is None or addition in taken or works("conv-add", "none", self.dtype):
            return None
        match = _Match("conv-add", node, addition)
        if self.added(addition, node) is None or self.is_crossed(match):
            return None
        return match

    def activated(self, match: _Match) -> _Match:
        """With the activation that alone reads the match's result, if the fused operator has it."""
        user = _only_user(match.end)
        activation = None if user is None else self.activation(user)
        if activation is None or works(match.kind, activation[0], self.dtype):
            return match
        longer = dataclasses.replace(match, activation=activation, activator=user)
        return match if self.is_crossed(longer) else longer

    def added(self, addition: fx.Node, node: fx.Node) -> Optional[fx.Node]:
        """The tensor of the same shape that `addition` adds to `node`, if that is what it does."""
        is_method = addition.op == "call_method" and addition.target in ("add", "add_")
        is_function = addition.op == "call_function" and addition.target in _ADDITIONS
        if not (is_method or is_function) or addition.kwargs or len(addition.args) != 2:
            return None
        others = [each for each in addition.args if each is not node]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return None
        other: fx.Node = others[0]
        if self.shapes.get(other) != self.shapes.get(node) or node not in self.shapes:
            return None
        # What is added to in place changes for its other readers, which the fused one would not do.
        target = addition.args[0]
        if self.is_in_place(addition) and len(target.users) != 1:
            return None
        return other

    def activation(self, node: fx.Node) -> Optional[Activation]:
        module = self.plain(node)
        if type(module) is nn.ReLU:
            return _RELU
        if type(module) in (nn.ReLU6, nn.Hardtanh):
            return "hardtanh", (float(module.min_val), float(module.max_val))
        if node.op == "call_method" and node.target in ("relu", "relu_"):
            return _RELU
        return _FUNCTIONS.get(node.target) if node.op == "call_function" else None

    def is_crossed(self, match: _Match) -> bool:
        """Whether something within the match's length, and not of it, writes in place: what its
        layer reads, or what is added, may be other numbers at its end."""
        node, members = match.layer, match.members
        while node is not match.end:
            if node not in members and self.is_in_place(node):
                return True
            node = node.next
        return False

    def is_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_method":
            return str(node.target).endswith("_") and not str(node.target).endswith("__")
        if node.op == "call_function":
            name = getattr(node.target, "__name__", "")
            by_name = name.endswith("_") and not name.endswith("__")
            asked = node.kwargs.get("inplace", False) or "out" in node.kwargs
            return bool(by_name or asked or node.target in _IN_PLACE_FUNCTIONS)
        return bool(getattr(self.module(node), "inplace", False))

    def replace(self, match: _Match) -> None:
        """Put one node in the place of the match's; its module comes when all nodes stand."""
        name = f"fused_{len(self.fused)}"
        setattr(self.network, name, nn.Identity())
        inputs = [match.layer.args[0]]
        if match.addition is not None:
            inputs += [each for each in match.addition.args if each is not match.layer]
        with self.graph.inserting_after(match.end):
            node = self.graph.call_module(name, tuple(inputs))
        match.end.replace_all_uses_with(node)
        for member in reversed(match.members):
            self.graph.erase_node(member)
        self.shapes[node] = self.shapes[match.end]
        self.fused[node] = match

    def make(self, node: fx.Node, match: _Match, order: Dict[fx.Node, int]) -> nn.Module:
        layer = self.modules[match.layer.target]
        image = (self.batch, *self.shapes[node.args[0]][1:])
        if match.kind == "linear":
            return FusedLinear(layer, match.activation, self.batch)
        adds = match.addition is not None
        name = match.activation[0]
        in_place = (
            adds
            and self.is_last_reader(node, node.args[1], order)
            and not works("conv-add-in-place", name, self.dtype)
        )
        return FusedConv(layer, match.activation, image, adds=adds, in_place=in_place)

    def is_last_reader(self, node: fx.Node, other: fx.Node, order: Dict[fx.Node, int]) -> bool:
        """Whether `node` may write over `other`: nobody reads that memory afterwards."""
        fresh = other in self.fused or type(self.plain(other)) in _FRESH
        if not fresh or other is node.args[0]:
            return False
        readers = [each for each in other.users if each is not node]
        return all(
            order[each] < order[node] and (each in self.fused or type(self.plain(each)) in _FRESH)
            for each in readers
        )

    def module(self, node: fx.Node) -> Optional[nn.Module]:
        return self.modules.get(node.target) if node.op == "call_module" else None

    def plain(self, node: fx.Node) -> Optional[nn.Module]:
        """Its module, unless that has hooks: then it does more than its class says."""
        module = self.module(node)
        return None if module is None or has_hooks(module) else module

    def facts(self) -> Tuple[LayerFact, ...]:
        """One for each node that computes."""
        word = WORDS[self.dtype]
        found = []
        for node in self.graph.nodes:
            if node in self.fused:
                match = self.fused[node]
                found.append(
                    LayerFact(
                        str(match.layer.target), _operator(match), "oneDNN",
                        self.modules[node.target].kernel, word,
                    )
                )  # fmt: skip
            elif node.op.startswith("call_"):
                module = self.module(node)
                kind = type(module).__name__ if module is not None else _name(node.target)
                why = self.left.get(node, "")
                kernel = f"not fused: {why}" if why else ""
                found.append(LayerFact(str(node.target) if module else node.name, kind, "ATen",
                                       kernel, word))  # fmt: skip
        return tuple(found)


def _only_user(node: fx.Node) -> Optional[fx.Node]:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _operator(match: _Match) -> str:
    parts = ["linear" if match.kind == "linear" else "conv2d"]
    if match.addition is not None:
        parts.append("add")
    if match.activation[0] != "none":
        parts.append("relu6" if match.activation == _RELU6 else match.activation[0])
    return "+".join(parts)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
