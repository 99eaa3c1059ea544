"""Which channels of a network can be taken out, and what goes with each.

A channel is a filter of a convolution, the entry of each normalisation behind it, and the slice of
every weight that reads it. Where maps are added, as by a shortcut, channel c of all summands is one
channel: that of the residual stream. Such groups are read from the graph that torch.fx traces.

A group is given only where a channel whose filters, biases, gammas and betas are all zero is zero
at everything that reads it; then it can be removed, and nothing else changes. What the graph has
beside the operations listed here leaves the groups that it reads alone, with the reason.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
import torch.nn.functional as F
from torch import fx, nn

__all__ = ["ChannelGroup", "ChannelMap", "Reader", "channel_groups"]

#: Modules, functions and methods that give 0 where they are given 0, channel by channel.
_CHANNELWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity, nn.Dropout,
    nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_CHANNELWISE: Tuple[Any, ...] = (
    torch.relu, torch.relu_, F.relu, F.relu_, F.relu6, F.leaky_relu, F.gelu, F.silu, torch.tanh,
    F.dropout, F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d,
)  # fmt: skip
_CHANNELWISE_METHODS = ("relu", "relu_", "tanh", "contiguous", "clone")
_ADDITIONS: Tuple[Any, ...] = (operator.add, operator.iadd, torch.add)
_ADDING_METHODS = ("add", "add_")
#: What prunes nothing of its own: its weights stay in their shape.
_WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.Embedding, nn.RNNBase)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A convolution or linear layer by name, and how many of its inputs a channel is: the pixels of
    a map that was flattened, or 1."""

    name: str
    inputs: int


@dataclasses.dataclass(frozen=True)
class ChannelGroup:
    """Channels that stand or fall together. `name` is that of its first convolution, `channels` how
    many there are, `makers` the convolutions whose filters give them, `norms` the normalisations
    that they pass, `readers` what reads them."""

    name: str
    channels: int
    makers: Tuple[str, ...]
    norms: Tuple[str, ...]
    readers: Tuple[Reader, ...]

    @property
    def stream(self) -> bool:
        """Whether it is a residual stream: several convolutions add to it."""
        return len(self.makers) > 1


@dataclasses.dataclass(frozen=True)
class ChannelMap:
    """`groups` in the order of the network; `left_alone`: every other layer with weights whose
    outputs cannot be taken out, with the reason."""

    groups: Tuple[ChannelGroup, ...]
    left_alone: Dict[str, str]


def channel_groups(model: nn.Module) -> ChannelMap:
    """Read `model`, which stays as it is. Where torch.fx cannot trace it there are no groups, and
    every layer is left alone for that."""
    modules = dict(model.named_modules())
    weighted = [name for name, module in modules.items() if isinstance(module, _WEIGHTED)]
    # Tracing runs the model's own code, which may store what it is given: on a copy that shares the
    # tensors themselves.
    tensors = (*model.parameters(), *model.buffers())
    scratch = copy.deepcopy(model, {id(each): each for each in tensors}).eval()
    try:
        graph = fx.Tracer().trace(scratch)
    except Exception as error:  # whatever a forward does with a stand-in for a tensor
        said = (str(error).splitlines() or [""])[0]
        why = f"torch.fx cannot read the network: {type(error).__name__}: {said}"
        return ChannelMap((), dict.fromkeys(weighted, why))
    reading = _Reading(graph, modules)
    groups = reading.groups()
    free = {name for group in groups for name in group.makers}
    left = {name: reading.reason(name) for name in weighted if name not in free}
    return ChannelMap(groups, left)


class _Channels:
    """Channels of one node's value, or of several that were found to be the same."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.makers: List[str] = []
        self.norms: List[str] = []
        self.readers: List[Reader] = []
        #: Why they have to stay; "" where they need not.
        self.fixed = ""
        self.merged_into: Optional[_Channels] = None

    def whole(self) -> _Channels:
        return self if self.merged_into is None else self.merged_into.whole()

    def fix(self, why: str) -> None:
        self.fixed = self.fixed or why


class _Reading:
    """One pass over the graph. A node has channels, or none that are known: those of the input, of
    a linear layer, of an operation that is not listed."""

    def __init__(self, graph: fx.Graph, modules: Dict[str, nn.Module]) -> None:
        self.modules = modules
        self.of: Dict[fx.Node, _Channels] = {}
        self.made: Dict[str, _Channels] = {}
        #: Names of modules in the order of their calls.
        self.order = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        ids = [id(modules[name]) for name in self.order]
        self.often = {each for each in ids if ids.count(each) > 1}
        self.shared = _shared_tensors(modules)
        self.read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        for node in graph.nodes:
            found = self._value(node)
            if found is not None:
                self.of[node] = found

    def groups(self) -> Tuple[ChannelGroup, ...]:
        found: List[_Channels] = []
        for channels in self.made.values():
            whole = channels.whole()
            if not whole.fixed and not any(whole is each for each in found):
                found.append(whole)
        return tuple(self._group(each) for each in found)

    def _group(self, whole: _Channels) -> ChannelGroup:
        makers = sorted(whole.makers, key=self.order.index)
        norms = sorted(whole.norms, key=self.order.index)
        readers = sorted(whole.readers, key=lambda each: self.order.index(each.name))
        return ChannelGroup(makers[0], whole.count, tuple(makers), tuple(norms), tuple(readers))

    def reason(self, name: str) -> str:
        """Why the outputs of this layer stay."""
        if name in self.made:
            return self.made[name].whole().fixed
        module = self.modules[name]
        if type(module) is nn.Linear:
            return "outputs of linear layers are not taken out, only inputs"
        return f"a {type(module).__name__} that the network's graph does not call as a layer"

    def _value(self, node: fx.Node) -> Optional[_Channels]:
        """The channels that `node` gives."""
        if node.op == "call_module":
            return self._module(node)
        if node.op == "output":
            self._fix_inputs(node, "the network gives them as they are")
        elif node.op in ("call_function", "call_method"):
            return self._operation(node)
        return None

    def _module(self, node: fx.Node) -> Optional[_Channels]:
        name, module = str(node.target), self.modules[str(node.target)]
        given = self._only_input(node)
        if type(module) is nn.Conv2d:
            return self._convolution(node, name, module, given)
        if given is None:
            self._fix_inputs(node, f"{name} reads them beside others")
            return None
        obstacle = self._obstacle(name, module)
        if obstacle:
            given.fix(obstacle)
        if type(module) is nn.BatchNorm2d:
            if module.weight is None:
                given.fix(f"{name} has no gamma that could be zero")
            given.norms.append(name)
            return given
        if type(module) is nn.Linear:
            inputs, rest = divmod(module.in_features, given.count)
            if rest:
                given.fix(f"{name} reads {module.in_features} inputs of {given.count} channels")
            given.readers.append(Reader(name, inputs))
            return None
        if type(module) in _CHANNELWISE_MODULES or _flattens(module):
            return given
        given.fix(f"{name}, a {type(module).__name__}, reads them")
        return None

    def _convolution(
        self, node: fx.Node, name: str, module: nn.Conv2d, given: Optional[_Channels]
    ) -> _Channels:
        made = self.made.setdefault(name, _Channels(module.out_channels))
        made.makers += [] if name in made.makers else [name]
        obstacle = self._obstacle(name, module)
        if not obstacle and module.groups > 1:
            obstacle = f"{name} has {module.groups} groups"
        if obstacle:
            made.whole().fix(obstacle)
            self._fix_inputs(node, obstacle)
        if given is not None:
            given.readers.append(Reader(name, 1))
        return made.whole()

    def _operation(self, node: fx.Node) -> Optional[_Channels]:
        function = node.op == "call_function"
        adds = node.target in (_ADDITIONS if function else _ADDING_METHODS)
        if adds and len(node.args) == 2 and not node.kwargs:
            one, other = (self._channels(each) for each in node.args)
            if one is not None and other is not None and one.count == other.count:
                return _merged(one, other)
        elif node.target in (_CHANNELWISE if function else _CHANNELWISE_METHODS) or _averages(node):
            given = self._only_input(node)
            if given is not None:
                return given
        called = getattr(node.target, "__name__", None) or str(node.target)
        self._fix_inputs(node, f"{called} reads them")
        return None

    def _channels(self, argument: Any) -> Optional[_Channels]:
        found = self.of.get(argument) if isinstance(argument, fx.Node) else None
        return None if found is None else found.whole()

    def _only_input(self, node: fx.Node) -> Optional[_Channels]:
        """The channels of the first argument, where no other argument is a tensor."""
        inputs = node.all_input_nodes
        return self._channels(node.args[0]) if len(inputs) == 1 and node.args else None

    def _fix_inputs(self, node: fx.Node, why: str) -> None:
        for each in node.all_input_nodes:
            channels = self._channels(each)
            if channels is not None:
                channels.fix(why)

    def _obstacle(self, name: str, module: nn.Module) -> str:
        """Why this module has to keep its shape; "" where it need not."""
        tensors = [*module.parameters(), *module.buffers()]
        if tensors and id(module) in self.often:
            return f"{name} is called more than once"
        if any(id(each) in self.shared for each in tensors):
            return f"{name} shares a tensor with another module"
        # A hook sees or changes what passes; weight_norm makes the weight in one.
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return f"{name} has hooks"
        if any(each.startswith(f"{name}.") for each in self.read):
            return f"the network reads the tensors of {name} itself"
        return ""


def _merged(one: _Channels, other: _Channels) -> _Channels:
    """Both as one, from now on."""
    if one is not other:
        one.makers += other.makers
        one.norms += other.norms
        one.readers += other.readers
        one.fix(other.fixed)
        other.merged_into = one
    return one


def _shared_tensors(modules: Dict[str, nn.Module]) -> Set[int]:
    """The ids of tensors that are at more than one place."""
    seen: Set[int] = set()
    twice: Set[int] = set()
    for module in modules.values():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                (twice if id(tensor) in seen else seen).add(id(tensor))
    return twice


def _flattens(module: nn.Module) -> bool:
    return isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)


def _averages(node: fx.Node) -> bool:
    """Whether it is the mean over height and width, or puts channels and pixels into one row."""
    if node.target in (torch.mean, "mean"):
        given: Sequence[Any] = [*node.args[1:2], *filter(None, [node.kwargs.get("dim")])]
        return len(given) == 1 and _pair(given[0]) in ((2, 3), (-2, -1))
    if node.target in (torch.flatten, "flatten"):
        return tuple(node.args[1:]) == (1,) and not node.kwargs
    return False


def _pair(value: Any) -> Tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
