"""Convolution and linear with a float MAC policy (mac.py): references and public functions.

| name   | conv2d           | linear   |                                                          |
|--------|------------------|----------|----------------------------------------------------------|
| x      | [B, C, H, W]     | [..., K] | activations, any strides                                 |
| weight | [F, C/g, kh, kw] | [N, K]   | any strides                                              |
| bias   | [F]              | [N]      | optional, added last                                     |
| result | [B, F, H', W']   | [..., N] | channels_last where x is, else contiguous                |

All float32 on one device; the batch, C, F, K and N may be 0. Pixels of the padding are zeros and
are multiplied like others: with an infinite weight they give NaN, as a product with zero does, and
a custom function may make of them what it likes.

Sums are as mac.py says. The bits depend neither on threads nor on the CPU's instruction set. On
CUDA, terms may be added in another order. These functions are autograd-free: the result requires no
gradient.
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

import numpy as np
import torch

from narrowgauge_kernels.library import require
from narrowgauge_kernels.mac import Mac, reference

__all__ = [
    "conv2d",
    "conv2d_example",
    "conv2d_ref",
    "linear",
    "linear_example",
    "linear_ref",
]

#: One number for both directions, or (height, width).
Pair = Union[int, Tuple[int, int]]


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    mac: Mac,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> torch.Tensor:
    """The convolution whose products are those of `mac`; shapes as in the module's table.

    Raises RuntimeError naming both sides when shapes, dtypes or devices disagree, and for a policy
    of 8-bit codes; KernelsNotBuiltError, with the command that builds, when there are no kernels
    for this torch and device.
    """
    require(x.device.type)
    return torch.ops.narrowgauge.manual_conv2d(
        x.detach(),
        weight.detach(),
        None if bias is None else bias.detach(),
        mac.name,
        mac.bits,
        mac.library,
        _pair(stride),
        _pair(padding),
        _pair(dilation),
        groups,
    )


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], mac: Mac
) -> torch.Tensor:
    """The linear layer whose products are those of `mac`. Raises as `conv2d` does."""
    require(x.device.type)
    return torch.ops.narrowgauge.manual_linear(
        x.detach(),
        weight.detach(),
        None if bias is None else bias.detach(),
        mac.name,
        mac.bits,
        mac.library,
    )


def conv2d_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    mac: Mac,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> torch.Tensor:
    """What `conv2d` should give: `mac.reference` products of an unfolded x, summed in float64.

    float64, on the CPU. For small shapes: every product is in memory at once.
    """
    batch, channels = x.shape[:2]
    filters, depth = weight.shape[0], weight[0].numel()
    kernel, (high, wide) = weight.shape[2:], _pair(padding)
    unfolded = _unfolded(x, kernel, _pair(stride), (high, wide), _pair(dilation))
    height, width = unfolded.shape[4:]
    a = unfolded.reshape(batch, groups, 1, channels // groups * kernel.numel(), height, width)
    b = weight.detach().cpu().numpy().reshape(1, groups, filters // groups, depth, 1, 1)
    sums = _summed(reference(mac, a, b), axis=3)
    return _with_bias(sums.reshape(batch, filters, height, width), bias, (1, -1, 1, 1))


def linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], mac: Mac
) -> torch.Tensor:
    """What `linear` should give: float64, on the CPU, as `conv2d_ref`."""
    a = x.detach().cpu().numpy()[..., np.newaxis, :]
    b = weight.detach().cpu().numpy()
    return _with_bias(_summed(reference(mac, a, b), axis=-1), bias, (-1,))


def _summed(products: np.ndarray, axis: int) -> np.ndarray:
    # Infinities of both signs are NaN together, which is what a layer should give too.
    with np.errstate(invalid="ignore"):
        return products.astype(np.float64).sum(axis=axis)


def _with_bias(
    sums: np.ndarray, bias: Optional[torch.Tensor], along: Tuple[int, ...]
) -> torch.Tensor:
    result = torch.from_numpy(np.ascontiguousarray(sums))
    return result if bias is None else result + bias.detach().cpu().double().reshape(along)


def _unfolded(
    x: torch.Tensor,
    kernel: Tuple[int, ...],
    stride: Tuple[int, int],
    padding: Tuple[int, int],
    dilation: Tuple[int, int],
) -> np.ndarray:
    """[B, C, kh, kw, H', W'] of x. By slices: torch's unfold refuses an empty batch."""
    (high, wide), images = padding, x.detach().cpu().numpy()
    padded = np.pad(images, ((0, 0), (0, 0), (high, high), (wide, wide)), mode="constant")
    sizes = [
        (padded.shape[2 + axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in (0, 1)
    ]
    taps = np.empty((*images.shape[:2], *kernel, *sizes), np.float32)
    for r in range(kernel[0]):
        for s in range(kernel[1]):
            top, left = r * dilation[0], s * dilation[1]
            bottom = top + stride[0] * (sizes[0] - 1) + 1
            right = left + stride[1] * (sizes[1] - 1) + 1
            taps[:, :, r, s] = padded[:, :, top : bottom : stride[0], left : right : stride[1]]
    return taps


def _pair(value: Pair) -> Tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def conv2d_example(generator: torch.Generator) -> Tuple[object, ...]:
    """Inputs for the self-check: every remainder, with the policy that has the most arithmetic."""
    x = torch.randn((2, 6, 9, 11), generator=generator)
    weight = torch.randn((10, 3, 3, 2), generator=generator) * 0.1
    bias = torch.randn(10, generator=generator)
    return x, weight, bias, Mac("axfpm_faithful"), (2, 1), (1, 2), (1, 2), 2


def linear_example(generator: torch.Generator) -> Tuple[object, ...]:
    """Inputs for the self-check: a policy whose steps round their sums only."""
    x = torch.randn((5, 37), generator=generator)
    return x, torch.randn((11, 37), generator=generator), None, Mac("mitchell")
