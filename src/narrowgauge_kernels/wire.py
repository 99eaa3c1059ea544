"""Tensors on the wire: int8 with a scale per channel, and copies that a kernel makes by itself.

| name   | shape        | meaning                                                                |
|--------|--------------|------------------------------------------------------------------------|
| x      | [B, C, ...]  | float32, float16 or bfloat16                                           |
| values | as x         | int8 from -127 to 127, in the order of memory of x                     |
| scale  | [C]          | float32; x is about values · scale                                     |

scale is the largest magnitude of the channel / 127, at least 2^-126, at most what 127 times is
still finite, and 1 where all are zero. A channel with a NaN has a NaN for its scale, one with an
infinity an infinity; their values are 0, so that both unpack to NaN: what overflowed never comes
back as a number.

v = x times the rounded reciprocal of scale, in float32, lowered or raised to ±127. Without a seed v
is rounded half to even. With one it goes to the integer on either side with the probability of its
nearness, by a hash of the seed and of the element's index in the order of [B, C, ...]: the same
bits on every device, in every memory format, by any number of threads.

A CUDA kernel also reads and writes page-locked tensors of the CPU, wherever one stands in the place
of a CUDA tensor here: they are *mapped*. It does so when the stream gets there, so such a tensor
must live until then; one of `narrowgauge_kernels.pinned` is kept by itself.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from narrowgauge_kernels.library import require

__all__ = [
    "mapped_copy",
    "pack_int8",
    "pack_int8_example",
    "pack_int8_into",
    "pack_int8_ref",
    "unpack_int8",
    "unpack_int8_example",
    "unpack_int8_into",
    "unpack_int8_ref",
]

_LARGEST = 127
#: Of scales: the reciprocal of one and 127 times the other are finite.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, float.fromhex("0x1.020406p+121")
_M32, _M64 = 2**32 - 1, 2**64 - 1


def pack_int8(
    x: torch.Tensor, seed: Optional[int] = None, first: int = 0
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) of x. `first` is the index of x[0] in the whole, where x is a piece of it.

    Contiguous and channels_last tensors keep their strides; of others, values are contiguous.
    """
    x = x.detach()
    kept = x if _has_order(x) else x.contiguous()
    values = torch.empty_like(kept, dtype=torch.int8)
    scale = torch.empty(x.shape[1:2], dtype=torch.float32, device=x.device)
    pack_int8_into(values, scale, kept, seed, first)
    return values, scale


def pack_int8_into(
    values: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    seed: Optional[int] = None,
    first: int = 0,
) -> None:
    """Write `pack_int8(x, seed, first)` to tensors that are there; either may be mapped.

    Raises RuntimeError naming both sides when shapes, dtypes or devices disagree, when values are
    neither contiguous nor channels_last, and when a CUDA kernel would need a CPU tensor that is not
    page-locked; KernelsNotBuiltError where there are no kernels for the device.
    """
    _require(values, scale, x)
    torch.ops.narrowgauge.wire_pack_int8(x.detach(), seed, first, values, scale)


def unpack_int8(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """values · scale in float32, rounded to `dtype`, on the device of `values`."""
    kept = values if _has_order(values) else values.contiguous()
    out = torch.empty_like(kept, dtype=dtype)
    unpack_int8_into(out, kept, scale)
    return out


def unpack_int8_into(out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Write `unpack_int8(values, scale, out.dtype)` to `out`; each of the three may be mapped.

    Raises as `pack_int8_into` does.
    """
    _require(out, values, scale)
    torch.ops.narrowgauge.wire_unpack_int8(values, scale, out)


def mapped_copy(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out.copy_(x)` by a kernel with 16-byte accesses, of one dtype, shape and order of memory.

    Where one of the two is on the CPU and the other is not, it is mapped; between CPU tensors this
    is an ordinary copy. Raises as `pack_int8_into` does.
    """
    _require(out, x)
    torch.ops.narrowgauge.mapped_copy(x.detach(), out)


def _require(*tensors: torch.Tensor) -> None:
    """Load the kernels. Where tensors are on several devices, the work is the CUDA device's."""
    require("cuda" if any(each.is_cuda for each in tensors) else tensors[0].device.type)


def _has_order(x: torch.Tensor) -> bool:
    """Whether x is contiguous in one of the orders that the kernels know."""
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def pack_int8_ref(
    x: torch.Tensor, seed: Optional[int] = None, first: int = 0
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`pack_int8` in torch's operators, on any device: the same bits, and no kernels needed.

    A float64 x is computed in float64: exact beside the rest, for checks.
    """
    x = x.detach()
    wide = x if x.dtype == torch.float64 else x.float()
    channels = x.shape[1]
    along = [1, channels] + [1] * (x.dim() - 2)
    if x.numel():
        largest = wide.abs().transpose(0, 1).reshape(channels, -1).max(dim=1)[0]
    else:
        largest = wide.new_zeros(channels)
    # By a tensor: CUDA divides by a number as it multiplies by the reciprocal, one bit off.
    scale = (largest / torch.full_like(largest, _LARGEST)).clamp(_LEAST_SCALE, _MOST_SCALE)
    scale = torch.where(torch.isfinite(largest), scale, largest)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    finite = torch.isfinite(scale)
    reciprocal = torch.where(finite, 1 / scale, torch.zeros_like(scale)).reshape(along)
    v = (wide * reciprocal).clamp(-_LARGEST, _LARGEST)
    v = torch.where(finite.reshape(along), v, torch.zeros_like(v))
    rounded = torch.round(v)
    if seed is not None:
        rest = v - rounded
        draw = _draws(tuple(x.shape), seed, first, x.device).to(wide.dtype)
        rounded = rounded + torch.where(draw < rest.abs(), rest.sign(), torch.zeros_like(rest))
    return rounded.to(torch.int8), scale.to(torch.float32)


def unpack_int8_ref(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`unpack_int8` in torch's operators, on any device; in float64 where scale is."""
    along = [1, -1] + [1] * (values.dim() - 2)
    product = values.to(scale.dtype) * scale.detach().reshape(along)
    return product if scale.dtype == torch.float64 else product.to(dtype)


def _draws(shape: Tuple[int, ...], seed: int, first: int, device: torch.device) -> torch.Tensor:
    """Numbers within (0, 1) in steps of 2^-23, for the elements `first` and on."""
    # Under torch 1.8's tracer, by which the precision probe looks at it, sizes are int8 tensors.
    count = 1
    for size in shape:
        count *= int(size)
    pieces = []
    begin = first = int(first)
    while begin < first + count:
        high = begin >> 32
        end = min(first + count, (high + 1) << 32)
        low = torch.arange(begin & _M32, (begin & _M32) + end - begin, device=device)
        pieces.append(_hash(low, *_keys(seed, high)))
        begin = end
    bits = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64, device=device)
    # Exact in float32: 23 bits and a half.
    return (((bits >> 9).float() + 0.5) * 2.0**-23).reshape(shape)


def _keys(seed: int, high: int) -> Tuple[int, int]:
    """Two 32-bit keys of a seed, for the 2^32 elements whose index has this upper half."""
    mixed = (seed + 0x9E3779B97F4A7C15 * (high + 1)) & _M64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _M64
    mixed ^= mixed >> 31
    return mixed & _M32, mixed >> 32


def _hash(low: torch.Tensor, key: int, other_key: int) -> torch.Tensor:
    """32 bits of the lower half of an index. int64 products wrap, which their low half survives."""
    bits = low ^ key
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _M32
    bits = bits ^ (bits >> 15)
    bits = ((bits + other_key) * 0x846CA68B) & _M32
    return bits ^ (bits >> 16)


def pack_int8_example(generator: torch.Generator) -> Tuple[torch.Tensor, int]:
    """Inputs for the self-check: numbers whose draws float64 decides as float32 does; a seed."""
    return torch.randn((3, 5, 7, 9), generator=generator), 0


def unpack_int8_example(generator: torch.Generator) -> Tuple[torch.Tensor, torch.Tensor]:
    """Inputs for the self-check."""
    values = torch.randint(-127, 128, (3, 5, 37), generator=generator).to(torch.int8)
    return values, torch.rand(5, generator=generator) * 0.01
