"""Published weights-only formulas, to the bit.

`narrow_range` is the 8-bit narrow-range fake quantisation of NVIDIA's pytorch-quantization toolkit
(tensor_quant.py), per tensor, in float32: scale = 127 / amax, round half to even, clip to ±127,
divide by the scale. An amax of 2^-24 or less counts as zero, and so does every value then; the sign
of zero stays. It differs in the last bit from q · step with step = amax / 127, so it is not a
`QuantParams`.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.layers import LAYERS

__all__ = ["narrow_range", "narrow_range_weights"]

_BOUND = 127.0
#: What the toolkit calls the least that float16 represents.
_LEAST = 2.0**-24


def narrow_range(x: torch.Tensor) -> torch.Tensor:
    """`x` (float32) with the values that the published formula gives it."""
    if x.dtype != torch.float32:
        raise BadValueError(
            f"narrow_range of {x.dtype}",
            why="the published figures are of float32",
            next_step="convert the tensor to float32 first",
        )
    if x.numel() == 0:
        return x.clone()
    amax = x.abs().max()
    if not bool(torch.isfinite(amax)):
        raise CalibrationError(
            "a weight to quantise is NaN or infinite",
            next_step="find out where it comes from (a training that diverged) before quantising",
        )
    if bool(amax <= _LEAST):
        return x * 0.0
    # A tensor on x's device: by a number of the host, CUDA multiplies by the reciprocal instead.
    scale = torch.full_like(amax, _BOUND) / amax
    return torch.clamp(torch.round(x * scale), -_BOUND, _BOUND) / scale


def narrow_range_weights(model: nn.Module) -> nn.Module:
    """A copy of `model` with `narrow_range` weights and biases in every convolution and linear
    layer, each tensor by its own amax; activations stay as they are."""
    new = copy.deepcopy(model)
    for module in new.modules():
        if isinstance(module, LAYERS):
            for parameter in module.parameters(recurse=False):
                parameter.data = narrow_range(parameter.data)
    return new
