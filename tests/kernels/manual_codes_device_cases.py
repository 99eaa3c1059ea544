"""Shapes and tables for the device code over 8-bit codes, and what it should give: numpy, by table.

Nothing here imports torch, so that tests on emulated threads and on a GPU share it.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

import numpy

Term = Tuple[int, int, int, int, int]  # a_mask, b_mask, coefficient, a_shift, b_shift


class Shape(NamedTuple):
    """A convolution; linear is one of height, width and kernel 1."""

    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel: Tuple[int, int] = (1, 1)
    stride: Tuple[int, int] = (1, 1)
    padding: Tuple[int, int] = (0, 0)
    dilation: Tuple[int, int] = (1, 1)
    groups: int = 1

    def sizes(self) -> List[int]:
        """As the operators' geometry has them."""
        return [
            *self[:5],
            *self.kernel,
            *self.stride,
            *self.padding,
            *self.dilation,
            self.groups,
        ]

    def out(self) -> Tuple[int, int]:
        """Height and width of the result."""
        each = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation)
        height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each)
        return height, width


#: name -> one of each class: padding and stride, channels that are a multiple of 16, of 4, of
#: neither, dilation, groups, kernels and images that are not square, remainders in every tile.
SHAPES = {
    "linear": Shape(33, 80, 1, 1, 37),
    "linear, odd": Shape(5, 7, 1, 1, 3),
    "3x3": Shape(2, 16, 6, 5, 40, (3, 3), padding=(1, 1)),
    "first layer": Shape(1, 3, 9, 11, 33, (5, 3), (2, 2), (2, 1)),
    "words": Shape(1, 12, 7, 6, 9, (2, 3), (1, 2), (0, 2), (2, 3)),
    "grouped": Shape(2, 24, 5, 7, 20, (3, 2), (2, 1), (1, 0), groups=2),
    "depthwise": Shape(2, 6, 6, 5, 6, (3, 3), padding=(1, 1), groups=6),
    "wide padding": Shape(1, 4, 2, 3, 5, (2, 2), (2, 3), (3, 2), (2, 2)),
}

#: name -> terms: the exact product, masks, a sign, coefficients and shifts (the AMA5 multiplier's).
TERMS = {
    "exact": (),
    "masked": ((0xF0, 0xFF, 1, 0, 0), (0x0C, 0xF8, 1, 0, 0), (0x03, 0xC0, 1, 0, 0)),
    "signs": ((0xFF, 0xFF, 1, 0, 0), (0x0F, 0x07, -3, 0, 0)),
    "shifted": ((0x11, 0xFF, 1, 0, 0), (0xEE, 0x88, 16, 0, 3), (0xFE, 0x7C, -5, 1, 2)),
    "none": ((0x01, 0xFF, 4, 1, 0), (0xFF, 0xFF, 0, 0, 0)),
}  # type: dict[str, Sequence[Term]]


def term_table(terms: Sequence[Term], a_signed: bool, b_signed: bool) -> numpy.ndarray:
    """The table of a sum of terms, as the operators' schema says; exact without a term."""
    a = _values(a_signed)[:, None]
    b = _values(b_signed)[None, :]
    table = numpy.zeros((256, 256), numpy.int64)
    for a_mask, b_mask, coefficient, a_shift, b_shift in terms or ((255, 255, 1, 0, 0),):
        a_factor = (a & _extended(a_mask, a_signed)) >> a_shift
        b_factor = (b & _extended(b_mask, b_signed)) >> b_shift
        table += coefficient * a_factor * b_factor
    return table.astype(numpy.int32)


def _values(signed: bool) -> numpy.ndarray:
    return numpy.arange(256, dtype=numpy.int64) - (128 if signed else 0)


def _extended(mask: int, signed: bool) -> int:
    return mask - 256 if signed and mask >= 128 else mask


def random_table(least: int, most: int, seed: int = 0) -> numpy.ndarray:
    """Any products from least to most, both of which are there; not symmetric."""
    table = numpy.random.RandomState(seed).randint(least, most + 1, (256, 256)).astype(numpy.int32)
    table[3, 250], table[250, 3] = least, most
    return table


def codes(shape: Tuple[int, ...], signed: bool, seed: int) -> numpy.ndarray:
    """Codes over the full range, both ends of which are there."""
    raw = numpy.random.RandomState(seed).randint(0, 256, shape)
    raw.reshape(-1)[:2] = (0, 255)[: raw.size]
    return (raw - 128).astype(numpy.int8) if signed else raw.astype(numpy.uint8)


def operands(
    shape: Shape, a_signed: bool, b_signed: bool, seed: int = 1
) -> Tuple[numpy.ndarray, numpy.ndarray]:
    """x [N, C, H, W] and weight [O, C / groups, R, S]."""
    x = codes((shape.batch, shape.channels, shape.height, shape.width), a_signed, seed)
    each = (shape.outputs, shape.channels // shape.groups, *shape.kernel)
    return x, codes(each, b_signed, seed + 1)


def expected(
    shape: Shape, x: numpy.ndarray, weight: numpy.ndarray, table: numpy.ndarray, x_zero: int
) -> numpy.ndarray:
    """int32 [N, O, Ho, Wo]: every product by the table, summed in int64."""
    rows, columns = shape.padding
    padded = numpy.pad(
        x.astype(numpy.int64), ((0, 0), (0, 0), (rows,) * 2, (columns,) * 2), constant_values=x_zero
    )
    left = padded + (128 if x.dtype == numpy.int8 else 0)
    right = weight.astype(numpy.int64) + (128 if weight.dtype == numpy.int8 else 0)
    height, width = shape.out()
    result = numpy.zeros((shape.batch, shape.outputs, height, width), numpy.int64)
    in_group, out_group = shape.channels // shape.groups, shape.outputs // shape.groups
    for output in range(shape.outputs):
        first = output // out_group * in_group
        for channel, row, column in numpy.ndindex(in_group, *shape.kernel):
            top, side = row * shape.dilation[0], column * shape.dilation[1]
            seen = left[
                :,
                first + channel,
                top : top + (height - 1) * shape.stride[0] + 1 : shape.stride[0],
                side : side + (width - 1) * shape.stride[1] + 1 : shape.stride[1],
            ]
            result[:, output] += table[seen, right[output, channel, row, column]]
    assert numpy.abs(result).max(initial=0) < 2**31
    return result.astype(numpy.int32)
