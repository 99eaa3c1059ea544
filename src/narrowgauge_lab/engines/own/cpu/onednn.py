"""oneDNN's fused operators as torch 2 has them for its own compiler: which of them work here, and
layers that call them.

They are not documented and may change, so each is run once and held against float64 before a
network gets it.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional

from narrowgauge_lab.measure.probe import declare

__all__ = ["Activation", "FusedConv", "FusedLinear", "conv_obstacle", "works"]

#: The operator's name for an activation, and its scalars.
Activation = Tuple[str, Tuple[float, ...]]

#: Rounding of one small layer, relative to its largest result.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class FusedConv(nn.Module):
    """A Conv2d with its bias, another tensor added if one is given, and an activation, in one
    operator of oneDNN.

    `image` [B, C, H, W] is the shape of inputs that the weight is packed for; others work too. With
    `in_place` the sum is written over the tensor that was given.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        activation: Activation,
        image: Tuple[int, ...],
        *,
        adds: bool = False,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.adds, self.in_place = adds, in_place
        weight = conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self._bias = None if conv.bias is None else conv.bias.detach()
        place = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)
        self._place = place
        self.packed = _packs(weight.dtype)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_convolution_weight(weight, *place, list(image))
        self._weight = weight
        self._macs_each = int(conv.weight[0].numel())
        operators = torch.ops.mkldnn
        self._run = (
            operators._convolution_pointwise_ if in_place else (operators._convolution_pointwise)
        )
        name, scalars = activation
        self._tail: Tuple[Any, ...] = (name, list(scalars), "")
        if adds:
            self._tail = ("add", 1.0, None if name == "none" else name, list(scalars), "")

    @property
    def kernel(self) -> str:
        name = "_convolution_pointwise" + ("_" if self.in_place else "")
        overload = ".binary" if self.adds else ""
        packed = "weight packed" if self.packed else "weight packed at every call"
        return f"mkldnn::{name}{overload}, {packed}"

    def forward(self, x: torch.Tensor, other: Optional[torch.Tensor] = None) -> torch.Tensor:
        rest = (self._weight, self._bias, *self._place, *self._tail)
        result: torch.Tensor
        if other is None:
            result = self._run(x, *rest)
        elif self.in_place:
            result = self._run(other, x, *rest)
        else:
            result = self._run(x, other, *rest)
        declare(self.kernel, x, self._weight, result, result.numel() * self._macs_each)
        return result


class FusedLinear(nn.Module):
    """A Linear with its bias and an activation in one operator of oneDNN, its weight packed for
    `rows` rows."""

    def __init__(self, linear: nn.Linear, activation: Activation, rows: int) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self._bias = None if linear.bias is None else linear.bias.detach()
        name, scalars = activation
        self._tail = (name, list(scalars), "")

    kernel = "mkldnn::_linear_pointwise, weight packed"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, *self._tail
        )
        declare(self.kernel, x, self._weight, result, result.numel() * int(x.shape[-1]))
        return result


def conv_obstacle(conv: nn.Module) -> str:
    """Why a layer cannot be a FusedConv, or nothing."""
    if type(conv) is not nn.Conv2d:
        return f"{type(conv).__name__} is not fused"
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return f"padding {conv.padding}, {conv.padding_mode} is not fused"
    return ""


@functools.lru_cache(maxsize=None)
def works(kind: str, activation: str, dtype: torch.dtype) -> str:
    """Why the fused operator of this kind (`conv`, `conv-add`, `conv-add-in-place`, `linear`) does
    not work here, or nothing: it was run once and gave what float64 gives."""
    name, scalars = activation, ((0.0, 6.0) if activation == "hardtanh" else ())
    try:
        found, strict = _TRIALS[kind]((name, scalars), dtype)
    # Operators that are not there, take other arguments, or are not for this processor.
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    wrong = float((found.double() - strict).abs().max() / strict.abs().max())
    return "" if wrong <= _TOLERANCE[dtype] else f"its results are off by {wrong:.2g}"


def _strictly(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    name, scalars = activation
    if name == "none":
        return y
    return y.clamp(*scalars) if name == "hardtanh" else y.clamp(min=0.0)


def _images(*shape: int) -> torch.Tensor:
    """Numbers of both signs, the same each time, that no operator leaves alone."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).mul(0.7391).sin() * 4).reshape(shape)


def _try_conv(
    activation: Activation, dtype: torch.dtype, adds: bool = False, in_place: bool = False
) -> Tuple[torch.Tensor, torch.Tensor]:
    conv = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2).double()
    with torch.no_grad():
        conv.weight.copy_(_images(16, 4, 3, 3))
        conv.bias.copy_(_images(16))
        conv.to(dtype)
        x = _images(2, 8, 9, 9).to(dtype).contiguous(memory_format=torch.channels_last)
        other = _images(2, 16, 5, 5).to(dtype).contiguous(memory_format=torch.channels_last)
        strict = functional.conv2d(x.double(), conv.weight.double(), conv.bias.double(), 2, 1, 1, 2)
        if not adds:
            fused = FusedConv(conv, activation, (2, 8, 9, 9))
            return fused(x), _strictly(strict, activation)
        strict = _strictly(strict + other.double(), activation)
        fused = FusedConv(conv, activation, (2, 8, 9, 9), adds=True, in_place=in_place)
        return fused(x, other), strict


def _try_linear(activation: Activation, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
    linear = nn.Linear(24, 10).double()
    with torch.no_grad():
        linear.weight.copy_(_images(10, 24))
        linear.bias.copy_(_images(10))
        linear.to(dtype)
        x = _images(3, 24).to(dtype)
        strict = functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        return FusedLinear(linear, activation, 3)(x), _strictly(strict, activation)


_Trial = Callable[[Activation, torch.dtype], Tuple[torch.Tensor, torch.Tensor]]
_TRIALS = {
    "conv": _try_conv,
    "conv-add": functools.partial(_try_conv, adds=True),
    "conv-add-in-place": functools.partial(_try_conv, adds=True, in_place=True),
    "linear": _try_linear,
}


@functools.lru_cache(maxsize=None)
def _packs(dtype: torch.dtype) -> bool:
    """Whether weights can be put into oneDNN's own order beforehand. Without, it does that itself
    at every call."""
    weight = _images(8, 8, 3, 3).to(dtype)
    try:
        torch.ops.mkldnn._reorder_convolution_weight(
            weight, [1, 1], [1, 1], [1, 1], 1, [1, 8, 8, 8]
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True
