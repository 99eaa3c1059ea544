"""How many bits of float32 operands survive in products here and now, found by arithmetic.

Flags say what may be used; environment variables, libraries and shapes decide what is. A product of
an operand `1 + 2^-k` with one tells: it comes back as 1 where fewer than k bits are kept.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

import torch

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError

__all__ = ["ReducedFloat32Error", "float32_bits", "tf32_by_arithmetic"]

#: Explicit bits of the mantissa: TF32 keeps 10, float32 has 23. Strict algorithms that transform
#: their input (Winograd's) lose a few of those, TF32 gains none.
_TF32_BITS = 10
_STRICT_BITS = 13
#: Rows of square products; [images, channels, side, kernel] of convolutions. Large enough that the
#: libraries take the kernels that real layers get.
_PRODUCTS = {"cuda": (256, 1024), "cpu": (192,)}
_CONVOLUTIONS = {"cuda": ((8, 64, 56, 3), (8, 256, 28, 1)), "cpu": ((2, 32, 14, 3), (2, 64, 14, 1))}


class ReducedFloat32Error(NarrowgaugeError):
    """Float32 products were neither IEEE float32 nor TF32."""

    exit_code = ExitCode.RUN_FAILED


def tf32_by_arithmetic(device: torch.device) -> Dict[str, bool]:
    """Whether float32 products and convolutions on `device` use TF32 under the flags now in force.

    True where any of the shapes tried did. Not to be called inside autocast. Raises
    ReducedFloat32Error where fewer bits than TF32's are kept: that is a third arithmetic.
    """
    bits = float32_bits(device)
    low = {name: kept for name, kept in bits.items() if kept < _TF32_BITS}
    if low:
        raise ReducedFloat32Error(
            "float32 products here keep fewer bits than even TF32 does",
            why=", ".join(f"{name}: {kept} of 23" for name, kept in low.items()),
            next_step="torch.set_float32_matmul_precision('highest'), or unset what lets libraries "
            "compute float32 in bfloat16",
        )
    return {name: kept < _STRICT_BITS for name, kept in bits.items()}


def float32_bits(device: torch.device) -> Dict[str, int]:
    """Bits of the mantissa that survive in `matmul` and `conv`: the least over the shapes tried."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    with torch.no_grad():
        return {
            "matmul": min(_product_bits(size, device) for size in _PRODUCTS[kind]),
            "conv": min(_convolution_bits(shape, device) for shape in _CONVOLUTIONS[kind]),
        }


def _product_bits(size: int, device: torch.device) -> int:
    """Ones on the diagonal, so every result is one operand: float32 gives it back whole."""
    operand = _graded(size, device).expand(size, size).contiguous()
    return _surviving(_product(torch.eye(size, device=device), operand), operand)


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """By the operator itself: `torch.mm` may have been replaced in this process."""
    result: torch.Tensor = torch.ops.aten.mm(one, other)
    return result


def _convolution_bits(shape: Tuple[int, int, int, int], device: torch.device) -> int:
    """The kernel gives each pixel back: one in its middle for the same channel, else zero."""
    images, channels, side, kernel = shape
    operand = _graded(channels, device).view(1, channels, 1, 1)
    operand = operand.expand(images, channels, side, side).contiguous()
    weight = torch.zeros(channels, channels, kernel, kernel, device=device)
    weight[:, :, kernel // 2, kernel // 2] = torch.eye(channels, device=device)
    pair, padding = [1, 1], [kernel // 2, kernel // 2]
    result = torch.ops.aten.conv2d(operand, weight, None, pair, padding, pair, 1)
    return _surviving(result.transpose(1, 3), operand.transpose(1, 3))


def _graded(count: int, device: torch.device) -> torch.Tensor:
    """1 + 2^-k with k = 1, 2, …, 23, 1, 2, …"""
    exponents = torch.arange(count, device=device) % 23 + 1
    return 1.0 + torch.pow(2.0, -exponents.float())


def _surviving(result: torch.Tensor, operand: torch.Tensor) -> int:
    """The largest k up to which every `1 + 2^-k` came back; the last dimension is the graded one.

    A kernel or a wrapper that gives another dtype keeps what that dtype keeps.
    """
    error = (result.double() - operand.double()).abs()
    wrong = ~(error <= 0.25 * (operand.double() - 1.0))  # NaN is wrong too
    columns = wrong.reshape(-1, wrong.shape[-1]).any(0).tolist()
    lost: List[int] = [index % 23 + 1 for index, bad in enumerate(columns) if bad]
    return min(lost) - 1 if lost else 23
