"""Operands for the operators over 8-bit codes, and the comparison with their reference."""

from __future__ import annotations

import dataclasses
from typing import Tuple

import torch

from narrowgauge_kernels.codes import (
    CodeMac,
    Term,
    conv2d_codes,
    conv2d_codes_ref,
    linear_codes,
    linear_codes_ref,
)

ops = torch.ops.narrowgauge

#: Both types of both operands.
SIGNS = [(False, False), (False, True), (True, False), (True, True)]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A convolution; sizes as torch's."""

    x: Tuple[int, int, int, int]
    weight: Tuple[int, int, int, int]
    stride: Tuple[int, int] = (1, 1)
    padding: Tuple[int, int] = (0, 0)
    dilation: Tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def geometry(self):
        """As the functions take it."""
        return self.stride, self.padding, self.dilation, self.groups


SHAPES = {
    "3x3": Shape((2, 5, 9, 11), (6, 5, 3, 3), padding=(1, 1)),
    "one pixel, one channel": Shape((1, 1, 1, 1), (1, 1, 1, 1)),
    "strides": Shape((1, 4, 13, 10), (7, 4, 3, 2), stride=(3, 2), padding=(2, 1)),
    "dilation": Shape((1, 3, 12, 15), (4, 3, 3, 3), padding=(2, 4), dilation=(2, 3)),
    "groups": Shape((2, 6, 8, 7), (9, 2, 3, 3), padding=(1, 0), groups=3),
    "depthwise": Shape((1, 7, 9, 9), (14, 1, 3, 3), stride=(2, 2), padding=(1, 1), groups=7),
    "more pixels than a block of a table": Shape((1, 2, 48, 47), (5, 2, 1, 2)),
    "more channels than pixels": Shape((1, 3, 5, 5), (260, 3, 3, 3), padding=(1, 1)),
    "more channels than a segment": Shape((1, 1, 14, 14), (530, 1, 1, 1)),
    "depth over a block": Shape((1, 67, 6, 5), (34, 67, 3, 3), padding=(1, 1)),
    "padding beyond the kernel": Shape((1, 2, 3, 3), (3, 2, 2, 2), padding=(3, 4)),
    "kernel as large as x": Shape((3, 4, 5, 6), (8, 4, 5, 6)),
    "depthwise over a segment": Shape((2, 70, 7, 9), (70, 1, 3, 3), padding=(1, 1), groups=70),
    "thin groups over a block of columns": Shape(
        (1, 24, 7, 70), (16, 3, 2, 3), (2, 1), (2, 3), (1, 2), groups=8
    ),
    "depthwise, a kernel that spans much": Shape(
        (1, 2, 3, 3), (4, 1, 3, 3), padding=(400, 400), dilation=(401, 401), groups=2
    ),
    "whole sixteens": Shape((2, 48, 8, 14), (64, 48, 3, 3), padding=(1, 1)),
    "several images in a block of pixels": Shape((5, 17, 5, 7), (33, 17, 3, 3), padding=(1, 1)),
    "channels of several tasks": Shape((2, 130, 40, 33), (20, 130, 1, 1), stride=(2, 1)),
    "one channel out": Shape((2, 5, 20, 13), (1, 5, 3, 3), padding=(1, 1)),
}

#: rows, depth, outputs; up to four rows have kernels of their own.
MATRICES = [
    *[(1, 1, 1), (5, 37, 11), (3, 515, 200), (300, 70, 7), (97, 64, 66), (13, 3, 200)],
    *[(1, 2100, 70), (2, 33, 129), (4, 17, 9)],
]


def codes(shape, signed, seed=0):
    """Every code is as likely as any other."""
    generator = torch.Generator().manual_seed(seed)
    low, dtype = (-128, torch.int8) if signed else (0, torch.uint8)
    return torch.randint(low, low + 256, shape, generator=generator, dtype=dtype)


def random_table(low, high, seed=1):
    """Nothing about it is regular: a wrong look-up is a wrong product."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (256, 256), generator=generator, dtype=torch.int32)


def macs(a_signed, b_signed):
    """One multiplier of every kind that a kernel treats apart, by name."""
    signs = {"a_signed": a_signed, "b_signed": b_signed}
    terms = (
        Term(0xF0, 0xFF),
        Term(0x7F, 0x3C, coefficient=-5, a_shift=2, b_shift=1),
        Term(0xFF, 0xFF, coefficient=1000, a_shift=7, b_shift=3),
        Term(-128, 0x80),
    )
    return {
        "exact": CodeMac("exact_int8", **signs),
        "structured": CodeMac("structured", terms=terms, **signs),
        "16-bit table": CodeMac("lut8x8", random_table(-32768, 32768), **signs),
        "wide table": CodeMac("lut8x8", random_table(-500000, 600000), **signs),
        "positive table": CodeMac("lut8x8", random_table(0, 65536), **signs),
    }


def instruction_sets(mac):
    """What may run this multiplier here."""
    return ops.codes_instruction_sets(mac.name == "lut8x8")


def check_conv2d(shape, mac, x, weight, x_zero=0, device="cpu"):
    """Every kernel gives the bits of the reference, in the memory format of x."""
    expected = conv2d_codes_ref(x, weight, mac, *shape.geometry, x_zero=x_zero)
    assert expected.abs().max() < 2**31
    here, there = x.to(device), weight.to(device)
    results = {"auto": conv2d_codes(here, there, mac, *shape.geometry, x_zero=x_zero)}
    if device == "cpu":
        for isa in instruction_sets(mac):
            results[isa] = ops.conv2d_codes(
                x, weight, *mac.arguments(x.device), *shape.geometry, x_zero, isa=isa
            )
    for isa, result in results.items():
        assert result.dtype == torch.int32
        assert torch.equal(result.cpu().long(), expected), isa
        assert result.is_contiguous(
            memory_format=torch.channels_last
            if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
            else torch.contiguous_format
        )


def check_linear(mac, x, weight, device="cpu"):
    """Every kernel gives the bits of the reference."""
    expected = linear_codes_ref(x, weight, mac)
    results = {"auto": linear_codes(x.to(device), weight.to(device), mac)}
    if device == "cpu":
        for isa in instruction_sets(mac):
            results[isa] = ops.linear_codes(x, weight, *mac.arguments(x.device), isa=isa)
    for isa, result in results.items():
        assert result.dtype == torch.int32
        assert torch.equal(result.cpu().long(), expected), isa
