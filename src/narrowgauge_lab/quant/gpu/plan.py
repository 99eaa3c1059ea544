"""Which fused steps a folded convolutional network becomes: pure, no device, no weights moved.

A step is a convolution with everything that can ride in its epilogue (bias, residual addition,
ReLU, requantisation), a max pooling, a global average pooling, or the last linear layer.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import fx, nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.quant.gpu.number_format import STEM_PIXEL

__all__ = [
    "AveragePoolStep",
    "ConvStep",
    "LinearStep",
    "MaxPoolStep",
    "Plan",
    "Step",
    "make_plan",
]

_ADDITIONS = (operator.add, operator.iadd, torch.add)
_RELUS = (torch.relu, nn.functional.relu)
_FLATTENS = (torch.flatten,)


@dataclasses.dataclass(frozen=True)
class ConvStep:
    """output = relu?(conv(source) + bias + residual?); names are values of the graph.

    `module` is the convolution's path in the model.
    """

    module: str
    source: str
    output: str
    residual: Optional[str] = None
    relu: bool = False


@dataclasses.dataclass(frozen=True)
class MaxPoolStep:
    """Square windows; the output has the scale of the source."""

    source: str
    output: str
    window: int
    stride: int
    padding: int


@dataclasses.dataclass(frozen=True)
class AveragePoolStep:
    """The mean over height and width; [B, C] comes of it."""

    source: str
    output: str


@dataclasses.dataclass(frozen=True)
class LinearStep:
    """The last layer; its output is float32."""

    module: str
    source: str
    output: str


Step = Union[ConvStep, MaxPoolStep, AveragePoolStep, LinearStep]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Steps in an order in which they can run. `source` is the network's input."""

    source: str
    steps: Tuple[Step, ...]

    def observed(self) -> Tuple[str, ...]:
        """The values whose ranges calibration has to find: the input and what is requantised."""
        made = [s.output for s in self.steps if isinstance(s, (ConvStep, AveragePoolStep))]
        return (self.source, *made)


def make_plan(graph: fx.GraphModule) -> Plan:
    """The fused steps of a traced network whose batch norms are folded.

    Raises NotApplicableError, naming the operation, for what these steps cannot say.
    """
    return _Planner(graph).plan()


class _Planner:
    def __init__(self, graph: fx.GraphModule) -> None:
        self._modules: Dict[str, nn.Module] = dict(graph.named_modules())
        self._nodes = [node for node in graph.graph.nodes if not self._is_identity(node)]
        self._order = {node: place for place, node in enumerate(self._nodes)}
        self._taken: Dict[fx.Node, str] = {}

    def plan(self) -> Plan:
        source = ""
        steps: List[Step] = []
        for node in self._nodes:
            if node.op == "placeholder":
                if source:
                    raise self._unsupported(node, "a second input")
                source = node.name
                self._taken[node] = node.name
            elif node.op == "output":
                self._check_output(node, steps)
            elif node not in self._taken:
                steps += self._step(node)
        return Plan(source, tuple(steps))

    def _step(self, node: fx.Node) -> Sequence[Step]:
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Conv2d):
            return [self._conv(node)]
        if isinstance(module, nn.MaxPool2d):
            return [self._max_pool(node, module)]
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
            self._taken[node] = node.name
            return [AveragePoolStep(self._value(node, 0), node.name)]
        if isinstance(module, nn.Linear):
            if any(user.op != "output" for user in node.users):
                raise self._unsupported(node, "only the last layer may be linear")
            self._taken[node] = node.name
            return [LinearStep(str(node.target), self._value(node, 0), node.name)]
        if self._is_flatten(node, module):
            # Of one pixel, [B, C, 1, 1] and [B, C] are the same bytes; more are refused later.
            self._taken[node] = self._value(node, 0)
            return []
        raise self._unsupported(node, "no fused step takes it")

    def _conv(self, node: fx.Node) -> ConvStep:
        module = self._modules[str(node.target)]
        assert isinstance(module, nn.Conv2d)
        self._check_conv(node, module)
        self._taken[node] = node.name
        source, last, residual = self._value(node, 0), node, None
        addition = self._only_user(node)
        if addition is not None and self._is_addition(addition):
            other = self._other(addition, node)
            # The other side has to be there first: of two convolutions the later one adds.
            if other is not None and self._order[other] < self._order[node]:
                residual, last = self._taken.get(other), addition
                if residual is None:
                    raise self._unsupported(addition, "its other side is inside another step")
        relu = self._only_user(last)
        if relu is not None and self._is_relu(relu):
            last = relu
        for absorbed in (addition if residual is not None else None, last):
            if absorbed is not None:
                self._taken[absorbed] = last.name
        self._taken[node] = last.name
        return ConvStep(str(node.target), source, last.name, residual, self._is_relu(last))

    def _check_conv(self, node: fx.Node, module: nn.Conv2d) -> None:
        if isinstance(module.padding, str):
            raise self._unsupported(node, f"padding '{module.padding}': give it as a number")
        first = isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"
        if first != (module.in_channels < STEM_PIXEL):
            raise self._unsupported(
                node, f"the first convolution, and only it, reads fewer than {STEM_PIXEL} channels"
            )
        square = all(
            len(set(_pair(each))) == 1
            for each in (module.kernel_size, module.stride, module.padding, module.dilation)
        )
        if not square or module.groups != 1 or _pair(module.dilation)[0] != 1:
            raise self._unsupported(node, "square windows, one group and no dilation only")
        if module.padding_mode != "zeros":
            raise self._unsupported(node, f"padding by {module.padding_mode}")

    def _max_pool(self, node: fx.Node, module: nn.MaxPool2d) -> MaxPoolStep:
        sides = [module.kernel_size, module.stride, module.padding, module.dilation]
        window, stride, padding, dilation = (_pair(side) for side in sides)
        square = all(a == b for a, b in (window, stride, padding))
        if not square or dilation != (1, 1) or module.ceil_mode:
            raise self._unsupported(node, "square windows, no dilation, no ceil_mode only")
        self._taken[node] = node.name
        return MaxPoolStep(self._value(node, 0), node.name, window[0], stride[0], padding[0])

    def _check_output(self, node: fx.Node, steps: Sequence[Step]) -> None:
        given = node.args[0]
        if not steps or not isinstance(steps[-1], LinearStep) or not isinstance(given, fx.Node):
            raise self._unsupported(node, "a network ends in a linear layer")
        if self._taken.get(given) != steps[-1].output:
            raise self._unsupported(node, "a network gives its last linear layer only")

    def _value(self, node: fx.Node, position: int) -> str:
        given = self._real(node.args[position])
        if given is None or given not in self._taken:
            raise self._unsupported(node, f"argument {position} is not a value of a step")
        return self._taken[given]

    def _other(self, addition: fx.Node, node: fx.Node) -> Optional[fx.Node]:
        sides = [self._real(side) for side in addition.args[:2]]
        if addition.kwargs or None in sides or sides[0] is sides[1]:
            raise self._unsupported(addition, "two different values without a factor only")
        return next(side for side in sides if side is not node)

    def _only_user(self, node: fx.Node) -> Optional[fx.Node]:
        """The one reader of a value, behind identities; None where there are several."""
        users = list(node.users)
        while len(users) == 1 and self._is_identity(users[0]):
            users = list(users[0].users)
        return users[0] if len(users) == 1 else None

    def _real(self, given: Any) -> Optional[fx.Node]:
        while isinstance(given, fx.Node) and self._is_identity(given):
            given = given.args[0]
        return given if isinstance(given, fx.Node) else None

    def _is_flatten(self, node: fx.Node, module: Optional[nn.Module]) -> bool:
        """Whether it keeps the batch and joins the rest."""
        if isinstance(module, nn.Flatten):
            return module.start_dim == 1 and module.end_dim == -1
        if node.op != "call_function" or node.target not in _FLATTENS:
            return False
        given = [
            *node.args[1:],
            *([node.kwargs["start_dim"]] if "start_dim" in node.kwargs else []),
        ]
        return given == [1] and "end_dim" not in node.kwargs

    def _is_identity(self, node: fx.Node) -> bool:
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        return isinstance(module, (nn.Identity, nn.Dropout))

    def _is_addition(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target in _ADDITIONS

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._modules.get(str(node.target)), nn.ReLU)
        return node.op == "call_function" and node.target in _RELUS

    def _unsupported(self, node: fx.Node, why: str) -> NotApplicableError:
        return NotApplicableError(
            f"the 8-bit GPU network cannot take {node.op} '{node.target}'",
            why=why,
            next_step="networks like ResNet work: conv, ReLU, addition, pooling, one linear layer",
        )


def _pair(value: Any) -> Tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)
