"""Drop-in layers whose multiply-accumulate can be replaced."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Tuple, Union

import torch
from torch import nn
from torch.nn import functional

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_lab.layers.manual import dispatch
from narrowgauge_lab.layers.manual.codes import CodeLayer
from narrowgauge_lab.layers.manual.function import run
from narrowgauge_lab.layers.manual.policies import Gradient, Policy
from narrowgauge_lab.layers.manual.quantise import Scales
from narrowgauge_lab.layers.manual.settings import AUTO, Settings, settings_of
from narrowgauge_lab.layers.passes import Problem

__all__ = ["LAYERS", "ManualConv2d", "ManualLinear", "depth_of"]

_DEVICES = ("cpu", "cuda")
_Size = Union[int, Tuple[int, int]]


class ManualConv2d(nn.Conv2d):
    """nn.Conv2d with its constructor, parameters and state dict, of products by `policy`.

    The rest are as in `settings`. `scales`: calibrated ones of an 8-bit policy; they are no part of
    the state dict.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        stride: _Size = 1,
        padding: Union[str, _Size] = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        *,
        policy: Union[str, Policy] = "exact_fp32",
        gradient: Union[str, Gradient] = "straight-through",
        per_channel: bool = True,
        path: str = AUTO,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode,
        )  # fmt: skip
        # torch 1.8's constructor has no device and no dtype.
        self.to(device=device, dtype=dtype)
        self.settings: Settings = settings_of(policy, gradient, per_channel, path)
        self.scales: Scales = Scales()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check(self, x)
        if x.dim() == 3:
            # torch 1.11 took images without a batch.
            return self.forward(x.unsqueeze(0)).squeeze(0)
        padding, outside = self._paddings()
        if outside is not None:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = functional.pad(x, outside, mode=mode)
        stride, dilation = _pair(self.stride), _pair(self.dilation)
        problem = Problem("conv2d", stride, padding, dilation, self.groups)
        layer = _layer(self, problem, x.device)
        if x.is_cuda and isinstance(layer, CodeLayer) and layer.asks_for_zero():
            # Zeros get the padding's code on the GPU, and nothing waits to be told it.
            down, right = padding
            x = functional.pad(x, [right, right, down, down])
            layer = dataclasses.replace(layer, problem=dataclasses.replace(problem, padding=(0, 0)))
        return run(layer, x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_described(self.settings)}"

    def _paddings(self) -> Tuple[Tuple[int, int], Optional[List[int]]]:
        """What the layer pads with zeros by itself, and what is padded before it, as F.pad has it:
        other modes, and sides that differ."""
        sides = self._sides()
        if self.padding_mode == "zeros" and all(before == after for before, after in sides):
            return (sides[0][0], sides[1][0]), None
        return (0, 0), [*sides[1], *sides[0]]

    def _sides(self) -> List[Tuple[int, int]]:
        """Padding before and after, of rows and of columns."""
        padding: Any = self.padding
        if padding == "valid":
            return [(0, 0), (0, 0)]
        if isinstance(padding, str):
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
            return [(each // 2, each - each // 2) for each in total]
        return [(each, each) for each in padding]


class ManualLinear(nn.Linear):
    """nn.Linear, in the same way; the input may have any number of dimensions."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        *,
        policy: Union[str, Policy] = "exact_fp32",
        gradient: Union[str, Gradient] = "straight-through",
        per_channel: bool = True,
        path: str = AUTO,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.to(device=device, dtype=dtype)
        self.settings: Settings = settings_of(policy, gradient, per_channel, path)
        self.scales: Scales = Scales()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check(self, x)
        layer = _layer(self, Problem("linear"), x.device)
        if x.dim() == 2:
            return run(layer, x, self.weight, self.bias)
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        result = run(layer, rows, self.weight, self.bias)
        return result.reshape(*x.shape[:-1], result.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_described(self.settings)}"


LAYERS = (ManualConv2d, ManualLinear)
_Layer = Union[ManualConv2d, ManualLinear]


def depth_of(module: nn.Module) -> int:
    """Products that one result is the sum of."""
    return int(module.weight[0].numel()) if len(module.weight) else 0


def _layer(module: _Layer, problem: Problem, device: torch.device) -> Any:
    scales = module.scales
    if module.settings.policy.eight_bit:
        scales = module.scales = scales.to(device)
    return dispatch.layer_for(module.settings, problem, device, depth_of(module), scales)


def _check(module: _Layer, x: torch.Tensor) -> None:
    kind, weight = type(module).__name__, module.weight
    for name, tensor in (("input", x), ("weight", weight)):
        if tensor.dtype != torch.float32:
            raise UsageError(
                f"a {kind} got {name} of {tensor.dtype}, and takes float32",
                why="its policy says what it computes in; autocast, or another dtype, would say it "
                "too",
                next_step="no autocast around it, and float32 tensors",
            )
    if x.device != weight.device:
        raise UsageError(
            f"a {kind} on {weight.device} got a tensor on {x.device}",
            next_step=f"move the model and its input to one device: x.to('{weight.device}')",
        )
    if x.device.type not in _DEVICES:
        raise NotApplicableError(
            f"a {kind} cannot run on {x.device}",
            why="its kernels are for the CPU and for CUDA",
            next_step="move the model to one of them",
        )
    _check_shape(module, x)


def _check_shape(module: _Layer, x: torch.Tensor) -> None:
    if isinstance(module, ManualConv2d):
        fits = x.dim() in (3, 4) and x.shape[-3] == module.in_channels
        wanted = f"[B, {module.in_channels}, H, W]"
    else:
        fits = x.dim() >= 1 and x.shape[-1] == module.in_features
        wanted = f"[..., {module.in_features}]"
    if not fits:
        raise UsageError(
            f"a {type(module).__name__} got an input of shape {list(x.shape)}, and takes {wanted}"
        )


def _pair(values: Tuple[int, ...]) -> Tuple[int, int]:
    first, second = values
    return first, second


def _described(settings: Settings) -> str:
    return f"policy={settings.policy}, gradient={settings.gradient}"
