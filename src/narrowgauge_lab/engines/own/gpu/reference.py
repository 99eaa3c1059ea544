"""What a lowered network must compute, step by step in float64 on the CPU.

Stored values are rounded to the network's format, sums are exact: sums of 8-bit integers are so in
the kernels too, so int8 results may differ from theirs in the rounding of the float32 epilogue
only, by one unit where it falls on a half. In other formats kernels round while they sum.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import fx, nn

from narrowgauge_lab.engines.own.gpu.formats import decode, encode
from narrowgauge_lab.engines.own.gpu.lowered import Lowered
from narrowgauge_lab.engines.own.gpu.packing import STEM_PIXEL, PackedWeight
from narrowgauge_lab.engines.own.gpu.steps import (
    ACTIVATIONS,
    AffineStep,
    ConcatStep,
    ConvStep,
    LinearStep,
    PoolStep,
    Prologue,
    Step,
    TorchStep,
)

__all__ = ["Reference"]

_functional = nn.functional


class Reference:
    """Runs a network on images [B, C, H, W]; `stored` are then the values of its last run by name,
    [B, C, H, W] or [B, features], in the format, on the CPU."""

    def __init__(self, network: Lowered) -> None:
        self._network, self._plan, self._form = network, network.plan, network.form
        self.stored: Dict[str, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result, float32, in the network's shape."""
        self.stored = {}
        self._put(self._plan.source, x.detach().cpu().float())
        shape = (x.shape[0], *self._network.sizes[self._plan.shaped])
        with torch.no_grad():
            for step in self._plan.steps:
                value = self.step(step)
                if self._plan.is_result(step):
                    return value.float().reshape(shape)
                self._put(step.output, value)
        return self.real(self._plan.output).float().reshape(shape)

    def step(self, step: Step) -> torch.Tensor:
        """What `step` makes of the values that are stored, float64, not rounded yet."""
        if isinstance(step, ConvStep):
            return self._conv(step)
        if isinstance(step, LinearStep):
            packed = self._network.weights[step.module].to(torch.device("cpu"))
            flat = self.real(step.source).flatten(1)
            sums = flat @ self._linear_weight(packed, step.source).t() + packed.bias.double()
            return _activated(sums, step.activation)
        if isinstance(step, PoolStep):
            return self._pool(step)
        if isinstance(step, AffineStep):
            return self._affine(step.source, step.module, step.activation)
        if isinstance(step, ConcatStep):
            return torch.cat([self.real(name) for name in step.sources], 1)
        return self._torch(step)

    def real(self, name: str) -> torch.Tensor:
        """A stored value as the number that it stands for, float64."""
        return decode(self.stored[name], self._unit(name)).double()

    def _put(self, name: str, value: torch.Tensor) -> None:
        self.stored[name] = encode(value, self._unit(name), self._form)

    def _unit(self, name: str) -> torch.Tensor:
        return torch.tensor(self._network.scales[name] if self._form.scaled else 1.0)

    # ---- steps

    def _conv(self, step: ConvStep) -> torch.Tensor:
        packed = self._network.weights[step.module].to(torch.device("cpu"))
        x = self.real(step.source)
        if step.prologue is not None:
            x = self._before(step.prologue, step.source)
            unit = self._unit(step.prologue.value)
            x = decode(encode(x, unit, self._form), unit).double()
        weight = _depthwise_weight(packed) if step.depthwise else self._conv_weight(step, packed)
        value = _functional.conv2d(
            x, weight, packed.bias.double(), packed.stride, packed.padding,
            groups=packed.channels if step.depthwise else 1,
        )  # fmt: skip
        if step.residual is not None:
            value = value + self.real(step.residual)
        return _activated(value, step.activation)

    def _pool(self, step: PoolStep) -> torch.Tensor:
        x = self.real(step.source)
        if step.prologue is not None:
            x = self._before(step.prologue, step.source)
        if step.window == 0:
            joined = x.flatten(2)
            pooled = joined.mean(2) if step.kind == "mean" else joined.max(2)[0]
            return pooled.view(x.shape[0], *self._network.sizes[step.output])
        height, width = self._network.sizes[step.output][1:]
        outside = 0.0 if step.kind == "mean" else float("-inf")
        # Where sizes are rounded up, the last windows end beyond the border.
        reach = [(size - 1) * step.stride + step.window for size in (width, height)]
        more = [max(0, end - step.padding - size) for end, size in zip(reach, x.shape[:1:-1])]
        edges = (step.padding, more[0], step.padding, more[1])
        x = _functional.pad(x, edges, value=outside)
        if step.kind == "mean":
            return _functional.avg_pool2d(x, step.window, step.stride)
        return _functional.max_pool2d(x, step.window, step.stride)

    def _before(self, prologue: Prologue, source: str) -> torch.Tensor:
        return self._affine(source, prologue.module, prologue.activation)

    def _affine(self, source: str, module: str, activation: str) -> torch.Tensor:
        x = self.real(source)
        if module:
            scale, shift = (
                each.cpu().double().view(1, -1, 1, 1) for each in self._network.affines[module]
            )
            x = x * scale + shift
        return _activated(x, activation)

    def _torch(self, step: TorchStep) -> torch.Tensor:
        """By the float64 operator; a module's own numbers are rounded to the format first."""
        assert not self._form.scaled, "no 8-bit network has steps of torch"
        given: List[fx.Node] = []
        fx.node.map_arg((step.node.args, step.node.kwargs), given.append)
        values = dict(zip(given, step.sources))

        def load(node: fx.Node) -> torch.Tensor:
            value = self.real(values[node])
            return value.flatten(1) if len(self._network.sizes[node.name]) == 1 else value

        args, kwargs = fx.node.map_arg((step.node.args, step.node.kwargs), load)
        target: Any = step.node.target
        if step.node.op == "call_module":
            target = copy.deepcopy(self._network.modules[str(target)]).cpu()
            target = target.to(self._form.dtype).double()
        elif step.node.op == "call_method":
            args, target = args[1:], getattr(args[0], str(target))
        value: torch.Tensor = target(*args, **kwargs)
        return value

    # ---- weights as the kernels see them

    def _conv_weight(self, step: ConvStep, packed: PackedWeight) -> torch.Tensor:
        """[K, C, R, S] in float64."""
        channels, side = self._network.sizes[step.source][0], packed.window_width
        values = decode(packed.values, packed.scale.view(-1, 1)).double()
        depth: Optional[int] = STEM_PIXEL if packed.stem else packed.depth
        walked = values.view(values.shape[0], side, -1, depth)[:, :, :side, :channels]
        return walked.permute(0, 3, 1, 2)

    def _linear_weight(self, packed: PackedWeight, source: str) -> torch.Tensor:
        """[features out, features in] in float64, columns in the order of channels first."""
        channels, height, width = _pixels(self._network.sizes[source])
        values = decode(packed.values, packed.scale.view(-1, 1)).double()[:, : packed.channels]
        walked = values.reshape(-1, height, width, channels)
        return walked.permute(0, 3, 1, 2).reshape(values.shape[0], -1)


def _depthwise_weight(packed: PackedWeight) -> torch.Tensor:
    """[C, 1, R, S] in float64."""
    values = decode(packed.values, packed.scale.view(1, -1)).double()
    return values.t().reshape(-1, 1, packed.rows, packed.columns)


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    low, high = ACTIVATIONS[activation]
    return x.clamp(low, high)


def _pixels(size: Tuple[int, ...]) -> Tuple[int, int, int]:
    return (size[0], size[1], size[2]) if len(size) == 3 else (size[0], 1, 1)
