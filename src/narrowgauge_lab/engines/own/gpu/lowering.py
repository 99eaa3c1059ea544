"""Which steps a folded network becomes: pure, no device, no weights moved."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import fx, nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.hooks import has_hooks
from narrowgauge_lab.engines.own.gpu.riding import pair, ride
from narrowgauge_lab.engines.own.gpu.steps import (
    AffineStep,
    ConcatStep,
    ConvStep,
    LinearStep,
    Plan,
    PoolStep,
    Step,
    TorchStep,
)
from narrowgauge_lab.engines.own.gpu.tracing import (
    ADDITIONS,
    IN_PLACE,
    first,
    shares,
    trace,
    writes_over,
)

__all__ = ["Sizes", "lower", "trace"]

#: (channels, height, width) of each value with pixels, (features,) of each flat one, by name.
Sizes = Dict[str, Tuple[int, ...]]

_functional = nn.functional
_RELUS = (torch.relu, _functional.relu)
_CONCATENATIONS = (torch.cat,)


def lower(graph: fx.GraphModule, sizes: Sizes) -> Plan:
    """The steps of a traced network whose batch norms are folded.

    `sizes`: of each of its values. What no kernel of ours says becomes a TorchStep. Raises
    NotApplicableError for a network with other than one tensor in and one out.
    """
    return _Lowering(graph, sizes).plan()


class _Lowering:
    def __init__(self, graph: fx.GraphModule, sizes: Sizes) -> None:
        self._modules: Dict[str, nn.Module] = dict(graph.named_modules())
        self._sizes = sizes
        self._nodes = list(graph.graph.nodes)
        self._order = {node: place for place, node in enumerate(self._nodes)}
        self._source = ""
        #: The value that stands for a node's result.
        self._value: Dict[fx.Node, str] = {}
        #: (C, H, W) of what each linear layer is packed for.
        self._packed: Dict[str, Tuple[int, ...]] = {}

    def plan(self) -> Plan:
        source, output, shaped = "", "", ""
        steps: List[Step] = []
        for node in self._nodes:
            if node.op == "placeholder":
                if source:
                    raise _refused(f"a second input, '{node.name}'")
                source = self._source = self._value[node] = node.name
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    raise _refused("more than one output")
                output, shaped = self._value[node.args[0]], node.args[0].name
            elif node.op != "get_attr":
                # What rides in a step before it writes over its argument all the same.
                self._check_in_place(node)
                if node not in self._value:
                    steps += self._step(node)
        return Plan(source, output, shaped, ride(tuple(steps), self._modules, output))

    def _check_in_place(self, node: fx.Node) -> None:
        """A value that is written over must not be read afterwards: values here never change."""
        if not writes_over(node, self._modules):
            return
        if any(self._order[user] > self._order[node] for user in self._other_readers(node)):
            raise _refused(f"{node.op} '{node.target}', which writes over what is read later")

    def _other_readers(self, node: fx.Node) -> List[fx.Node]:
        """All that read the memory of `node`'s first argument, by whatever name, but `node`."""
        names, place = [first(node)], 0
        while self._shares(names[0]):
            names[0] = first(names[0])
        while place < len(names):
            names += [user for user in names[place].users if self._shares(user)]
            place += 1
        readers = {user for name in names for user in name.users}
        return [user for user in readers if user is not node and user not in names]

    def _step(self, node: fx.Node) -> Sequence[Step]:
        if any(each not in self._value for each in node.all_input_nodes):
            raise _refused(f"{node.op} '{node.target}', which reads more than values")
        if self._is_view(node):
            self._value[node] = self._value[first(node)]
            return []
        for make in (self._conv, self._linear, self._pool, self._affine, self._concat):
            step = make(node)
            if step is not None:
                return [step]
        return [self._torch(node)]

    # ---- what rides along

    def _conv(self, node: fx.Node) -> Optional[Step]:
        module = self._module(node)
        # By exact type: a subclass may compute something else.
        if type(module) is not nn.Conv2d or not _is_plain(module):
            return None
        depthwise = module.groups > 1
        if depthwise and not module.groups == module.in_channels == module.out_channels:
            return None
        source = self._value[first(node)]
        last, residual = node, None
        addition = None if depthwise else self._only_user(node)
        if addition is not None and self._is_addition(addition):
            residual = self._other_side(addition, node)
            last = node if residual is None else addition
        last, activation = self._with_activation(last)
        return ConvStep(
            str(node.target), source, self._settle(node, addition, last, residual is not None),
            residual, activation, depthwise=depthwise,
        )  # fmt: skip

    def _settle(
        self, node: fx.Node, addition: Optional[fx.Node], last: fx.Node, added: bool
    ) -> str:
        for absorbed in (node, addition if added else None, last):
            if absorbed is not None:
                self._value[absorbed] = last.name
        return last.name

    def _linear(self, node: fx.Node) -> Optional[Step]:
        if type(self._module(node)) is not nn.Linear or self._value[first(node)] == self._source:
            return None  # between an image's pixels in memory there is room
        if len(self._sizes[first(node).name]) != 1:
            return None  # of a tensor whose last dimension is not all of its features
        stored = (*self._sizes[self._value[first(node)]], 1, 1)[:3]
        if self._packed.setdefault(str(node.target), stored) != stored:
            return None  # its weights are in the order of other pixels
        last, activation = self._with_activation(node)
        output = self._settle(node, None, last, False)
        return LinearStep(str(node.target), self._value[first(node)], output, activation)

    def _affine(self, node: fx.Node) -> Optional[Step]:
        module = self._module(node)
        if len(self._sizes.get(node.name, ())) != 3:
            return None
        if type(module) is nn.BatchNorm2d and _is_fixed(module):
            last, activation = self._with_activation(node)
            output = self._settle(node, None, last, False)
            return AffineStep(str(node.target), self._value[first(node)], output, activation)
        activation = self._activation(node)
        if activation:
            self._value[node] = node.name
            return AffineStep("", self._value[first(node)], node.name, activation)
        return None

    def _pool(self, node: fx.Node) -> Optional[Step]:
        module = self._module(node)
        found: Optional[Tuple[str, int, int, int]] = None
        if isinstance(module, nn.MaxPool2d) and not module.return_indices:
            found = _square("max", module.kernel_size, module.stride, module.padding)
            if pair(module.dilation) != (1, 1):
                found = None
        elif isinstance(module, nn.AvgPool2d):
            found = _square("mean", module.kernel_size, module.stride, module.padding)
            if module.divisor_override or module.ceil_mode or not module.count_include_pad:
                found = None
        elif self._is_adaptive(node, module):
            after = self._sizes[node.name]
            if after[1:] == (1, 1):
                found = ("mean", 0, 1, 0)
        elif self._is_spatial_mean(node):
            found = ("mean", 0, 1, 0)
        if found is None:
            return None
        self._value[node] = node.name
        return PoolStep(found[0], self._value[first(node)], node.name, *found[1:])

    def _concat(self, node: fx.Node) -> Optional[Step]:
        if node.op != "call_function" or node.target not in _CONCATENATIONS:
            return None
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        inputs = node.args[0] if node.args else node.kwargs.get("tensors")
        if dim not in (1, -3) or len(self._sizes[node.name]) != 3 or not inputs:
            return None
        self._value[node] = node.name
        return ConcatStep(tuple(self._value[each] for each in inputs), node.name)  # type: ignore[index, union-attr]

    def _torch(self, node: fx.Node) -> Step:
        given: List[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), given.append)
        if any(each.name not in self._sizes for each in given):
            raise _refused(f"{node.op} '{node.target}', which reads more than values")
        if node.name not in self._sizes:
            raise _refused(f"{node.op} '{node.target}', whose result is no tensor")
        if (
            writes_over(node, self._modules)
            and node.target not in IN_PLACE
            and self._other_readers(node)
        ):
            # It would write over a concatenation that its argument lies in, too.
            raise _refused(f"{node.op} '{node.target}', which writes over what others read")
        self._value[node] = node.name
        target = str(node.target)
        name = type(self._modules[target]).__name__ if node.op == "call_module" else target
        return TorchStep(tuple(self._value[each] for each in given), node.name, node, name)

    # ---- reading the graph

    def _module(self, node: fx.Node) -> Optional[nn.Module]:
        """The module that a node is; None where it is none, or does more than its class says."""
        module = self._modules[str(node.target)] if node.op == "call_module" else None
        return None if module is None or has_hooks(module) else module

    def _with_activation(self, node: fx.Node) -> Tuple[fx.Node, str]:
        user = self._only_user(node)
        activation = self._activation(user) if user is not None else ""
        return (user, activation) if user is not None and activation else (node, "none")

    def _activation(self, node: fx.Node) -> str:
        module = self._module(node)
        if isinstance(module, nn.Hardtanh):  # ReLU6 too
            return "relu6" if (module.min_val, module.max_val) == (0, 6) else ""
        if isinstance(module, nn.ReLU) or (node.op == "call_function" and node.target in _RELUS):
            return "relu"
        return "relu6" if node.op == "call_function" and node.target is _functional.relu6 else ""

    def _other_side(self, addition: fx.Node, node: fx.Node) -> Optional[str]:
        """The value that is added to `node`'s, where it is there before the convolution runs: of
        two convolutions the later one adds. Nothing is broadcast."""
        sides = [side for side in addition.args[:2] if isinstance(side, fx.Node)]
        if addition.kwargs or len(addition.args) != 2 or len(sides) != 2 or sides[0] is sides[1]:
            return None
        through = [self._behind_identities(side) for side in sides]
        other = through[1] if through[0] is node else through[0]
        if other not in self._value or self._order[other] > self._order[node]:
            return None
        same = self._sizes[other.name] == self._sizes[node.name]
        return self._value[other] if same else None

    def _is_view(self, node: fx.Node) -> bool:
        """Whether it is its argument by another name."""
        return self._is_identity(node) or self._is_flatten(node)

    def _shares(self, node: fx.Node) -> bool:
        """Whether its memory may be its argument's, here or in torch."""
        return self._is_view(node) or shares(node, self._modules)

    def _behind_identities(self, node: fx.Node) -> fx.Node:
        while self._is_identity(node):
            node = first(node)
        return node

    def _only_user(self, node: fx.Node) -> Optional[fx.Node]:
        """The one reader of a value, behind identities; None where there are several, or none."""
        users = list(node.users)
        while len(users) == 1 and self._is_identity(users[0]):
            users = list(users[0].users)
        return users[0] if len(users) == 1 else None

    def _is_identity(self, node: fx.Node) -> bool:
        if isinstance(self._module(node), (nn.Identity, nn.Dropout, nn.Dropout2d)):
            return True
        if self._is_adaptive(node, self._module(node)):
            return self._sizes[node.name] == self._sizes[first(node).name]
        called = (_functional.dropout, _functional.dropout2d)
        if node.op != "call_function" or node.target not in called:
            return False
        # As a function it drops wherever nobody says otherwise.
        return not (node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True))

    def _is_flatten(self, node: fx.Node) -> bool:
        """Whether it keeps the batch and joins the rest."""
        module = self._module(node)
        if isinstance(module, nn.Flatten):
            return (module.start_dim, module.end_dim) == (1, -1)
        called = (node.op == "call_function" and node.target is torch.flatten) or (
            node.op == "call_method" and node.target == "flatten"
        )
        rest = (*node.args[1:], *([node.kwargs["start_dim"]] if "start_dim" in node.kwargs else []))
        return called and rest == (1,) and "end_dim" not in node.kwargs

    def _is_addition(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target in ADDITIONS

    def _is_adaptive(self, node: fx.Node, module: Optional[nn.Module]) -> bool:
        called = node.op == "call_function" and node.target is _functional.adaptive_avg_pool2d
        return isinstance(module, nn.AdaptiveAvgPool2d) or called

    def _is_spatial_mean(self, node: fx.Node) -> bool:
        called = (node.op == "call_method" and node.target == "mean") or (
            node.op == "call_function" and node.target is torch.mean
        )
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        flat = len(self._sizes.get(node.name, ())) == 1 or node.kwargs.get("keepdim")
        return called and dims in ([2, 3], (2, 3), [-2, -1], (-2, -1)) and bool(flat)


def _is_plain(module: nn.Conv2d) -> bool:
    """Square windows, steps and borders, no dilation, zeros around."""
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        return False
    sides = (module.kernel_size, module.stride, module.padding)
    return all(len(set(pair(side))) == 1 for side in sides) and pair(module.dilation) == (1, 1)


def _is_fixed(module: nn.BatchNorm2d) -> bool:
    return module.running_mean is not None and module.running_var is not None


def _square(
    kind: str, window: Any, stride: Any, padding: Any
) -> Optional[Tuple[str, int, int, int]]:
    sides = [pair(side) for side in (window, stride, padding)]
    if any(a != b for a, b in sides):
        return None
    return (kind, sides[0][0], sides[1][0], sides[2][0])


def _refused(what: str) -> NotApplicableError:
    return NotApplicableError(
        f"engine narrowgauge cannot take {what}",
        why="it runs networks from one tensor [B, C, H, W] to one tensor",
    )
