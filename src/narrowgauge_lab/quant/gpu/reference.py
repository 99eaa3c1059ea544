"""What the 8-bit network must compute, step by step in float64 on the CPU.

Sums of 8-bit integers are exact in float64, so int8 results may differ from the kernels' in the
rounding of the float32 epilogue only: by one unit where it falls on a half.
"""

from __future__ import annotations

from typing import Dict, Mapping, Tuple

import torch
from torch import nn

from narrowgauge_lab.quant.gpu.number_format import NumberFormat, PackedWeight, decode, encode
from narrowgauge_lab.quant.gpu.plan import AveragePoolStep, ConvStep, LinearStep, MaxPoolStep, Plan

__all__ = ["run_reference"]


def run_reference(
    plan: Plan,
    modules: Mapping[str, nn.Module],
    weights: Mapping[str, PackedWeight],
    scales: Mapping[str, float],
    form: NumberFormat,
    x: torch.Tensor,
) -> Tuple[torch.Tensor, Dict[str, torch.Tensor]]:
    """The logits, float32 [B, classes], and every stored value [B, C, H, W] in the format.

    `modules`: the folded float layers by name, for the shapes of their weights; x [B, C, H, W].
    """
    stored: Dict[str, torch.Tensor] = {}
    units = dict(scales)

    def put(name: str, value: torch.Tensor) -> None:
        stored[name] = encode(value, torch.tensor(units[name]), form)

    def get(name: str) -> torch.Tensor:
        return decode(stored[name], torch.tensor(units[name])).double()

    put(plan.source, x.float())
    for step in plan.steps:
        if isinstance(step, (ConvStep, LinearStep)):
            packed, layer = weights[step.module], modules[step.module]
            kernel = _kernel(packed, layer).double()
            if isinstance(step, LinearStep):
                flat = get(step.source).flatten(1)
                return (flat @ kernel.flatten(1).t() + _bias(packed, kernel)).float(), stored
            value = nn.functional.conv2d(
                get(step.source), kernel, _bias(packed, kernel), packed.stride, packed.padding
            )
            if step.residual is not None:
                value = value + get(step.residual)
            put(step.output, torch.relu(value) if step.relu else value)
        elif isinstance(step, MaxPoolStep):
            units[step.output] = units[step.source]
            pooled = nn.functional.max_pool2d(
                get(step.source), step.window, step.stride, step.padding
            )
            put(step.output, pooled)
        elif isinstance(step, AveragePoolStep):
            put(step.output, get(step.source).mean(dim=(2, 3), keepdim=True))
    raise ValueError("a plan ends in a linear layer")


def _kernel(packed: PackedWeight, layer: nn.Module) -> torch.Tensor:
    """The weights as the kernel sees them, unpacked to [K, C, R, S] float32."""
    weight = getattr(layer, "weight")  # noqa: B009 - a module's attribute, of either kind
    count, channels = weight.shape[:2]
    side = weight.shape[2] if weight.dim() == 4 else 1
    values = decode(packed.values, packed.scale.view(-1, 1)).float()
    if packed.stem:
        walked = values.view(values.shape[0], side, -1, 4)[:, :, :side, :channels]
    else:
        walked = values.view(values.shape[0], side, side, packed.channels)[..., :channels]
    return walked[:count].permute(0, 3, 1, 2)


def _bias(packed: PackedWeight, kernel: torch.Tensor) -> torch.Tensor:
    return packed.bias[: kernel.shape[0]].double()
