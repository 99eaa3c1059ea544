"""What the tests of the MAC policies and of the manual operators share, CPU and CUDA."""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np
import torch

from narrowgauge_kernels.mac import Mac
from narrowgauge_kernels.manual import conv2d_ref


class Case(NamedTuple):
    """A convolution: shapes of x and weight, and its window."""

    x: Tuple[int, ...]
    weight: Tuple[int, ...]
    stride: Tuple[int, int] = (1, 1)
    padding: Tuple[int, int] = (0, 0)
    dilation: Tuple[int, int] = (1, 1)
    groups: int = 1

    def __str__(self) -> str:
        return "-".join("x".join(map(str, each)) for each in self[:5]) + f"-{self.groups}"


MACS = (
    Mac("exact_fp32"),
    Mac("axfpm_faithful"),
    Mac("axfpm_fixed"),
    Mac("axbf16"),
    Mac("truncated", bits=7),
    Mac("truncated", bits=20),
    Mac("mitchell"),
)

#: NaNs (one whose payload a cut would drop), infinities, zeros, subnormals, the thresholds of every
#: policy with their neighbours, the ends of the range, and ordinary numbers.
SPECIALS = np.array(
    [
        0x7FC00000, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000,
        0x00000001, 0x80000001, 0x000FFFFF, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800001,
        0x03AA2424, 0x03AA2425, 0x83AA2426, 0x1F800000, 0x20000000, 0x7F7FFFFF, 0xFF7FFFFF,
        0x7F000000, 0x7EFFFFFF, 0x7E800000, 0x3F800000, 0xBF800000, 0x3F800001, 0x3FFFFFFF,
        0x3F5B22D1, 0x3EF126E9,
    ],
    np.uint32,
).view(np.float32)  # fmt: skip

#: Around the edges of the tiles (1 to 12 filters, 4 to 32 pixels), rows shorter and longer than a
#: vector, several images in one, kernels larger than the image, and more than 256 terms.
CONVOLUTIONS = (
    Case((1, 1, 1, 1), (1, 1, 1, 1)),
    Case((2, 3, 9, 13), (13, 3, 3, 3), padding=(1, 1)),
    Case((1, 5, 17, 8), (7, 5, 5, 2), (2, 3), (2, 0), (1, 2)),
    Case((3, 8, 7, 7), (12, 4, 3, 3), (1, 1), (1, 1), (2, 2), 2),
    Case((2, 10, 12, 33), (10, 1, 3, 3), (1, 2), (1, 1), (1, 1), 10),
    Case((1, 6, 6, 6), (12, 1, 5, 5), (3, 3), (4, 4), (2, 1), 6),
    Case((4, 40, 3, 3), (25, 40, 3, 3), padding=(1, 1)),
    Case((5, 30, 2, 3), (6, 30, 1, 1), (2, 2)),
    Case((1, 2, 3, 70), (3, 2, 1, 3), (1, 1), (0, 1), (1, 30)),
    Case((1, 1, 1, 1), (2, 1, 3, 3), (1, 1), (7, 7), (3, 3)),
    Case((2, 20, 4, 3), (70, 10, 3, 3), (2, 1), (0, 0), (1, 1), 2),
    Case((1, 7, 2, 2), (33, 7, 2, 3), (1, 1), (0, 1)),
)

EMPTY = (
    Case((0, 3, 5, 5), (4, 3, 3, 3)),
    Case((2, 3, 5, 5), (0, 3, 3, 3)),
    Case((2, 0, 5, 5), (4, 0, 3, 3)),
)


def operands(case, device="cpu"):
    """Normal x, weight and bias, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    shapes = (case.x, case.weight, case.weight[:1])
    return tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes)


def roundoff_of(x, weight, bias, mac, *window):
    """What sums in float32 in any order, of products that may be rounded, are off by at most."""
    terms = weight[0].numel() + 2
    size = conv2d_ref(x.abs(), weight.abs(), bias.abs(), mac, *window)
    return terms * 2.0**-23 * size + 2.0**-140


def same_words(left, right):
    """Equal float32 arrays to the bit; any NaN equals any NaN."""
    if left.dtype != np.float32 or right.dtype != np.float32 or left.shape != right.shape:
        return False
    nan = np.isnan(left)
    same = np.ascontiguousarray(left).view(np.uint32) == np.ascontiguousarray(right).view(np.uint32)
    return bool(np.array_equal(nan, np.isnan(right)) and (same | nan).all())
