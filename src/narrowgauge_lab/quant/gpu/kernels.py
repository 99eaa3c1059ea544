"""The Triton kernels of the 8-bit network: the only module that imports triton.

Activations are NHWC in one byte an element. Every kernel reads and writes whole tensors once.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["average_pool_kernel", "conv_kernel", "max_pool_kernel", "quantize_input_kernel"]

INT8 = tl.constexpr(0)
FP8 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)
#: Adding and taking away 1.5·2^23 rounds a float32 below 2^22 half to even, without a library call.
_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _to_format(value, OUT: tl.constexpr, POSITIVE: tl.constexpr):
    """float32, scaled already, to the output's format, saturating; int8 rounds half to even.

    POSITIVE: no value is below zero, so none can leave the format downwards.
    """
    if OUT == INT8:
        saturated = tl.minimum(value, 127.0)
        if not POSITIVE:
            saturated = tl.maximum(saturated, -127.0)
        # The rounded integer stands in the low bits of the sum.
        result = (saturated + _MAGIC).to(tl.int32, bitcast=True).to(tl.int8)
    elif OUT == FP8:
        result = value.to(tl.float8e4nv)  # the instruction saturates
    else:
        result = value
    return result


@triton.jit
def conv_kernel(
    x, w, scale, bias, residual, y,
    pixels, count, depth, out_h, out_w, in_h, in_w, x_n, x_h, x_w, residual_scale,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, WINDOW: tl.constexpr,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[m, k] = format(relu?(scale[k] · Σ x · w + bias[k] + residual[m, k] · residual_scale)).

    An implicit matrix product: m = (n, p, q) counts the output's `pixels`, the sum runs over the
    WINDOW positions and `depth` channels. x has strides x_n, x_h, x_w in bytes and contiguous
    channels; w is [count, WINDOW·depth]; y and residual are [pixels, count]. BLOCK_K divides depth.
    """
    blocks_n = tl.cdiv(count, BLOCK_N)
    # Neighbouring programs share their pixels and differ in output channels: the activations, much
    # larger than the weights, then come from memory once.
    m = (tl.program_id(0) // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_K)
    m_inside = m < pixels
    q = m % out_w
    p = (m // out_w) % out_h
    n = m // (out_w * out_h)
    h0 = p * STRIDE - PADDING
    w0 = q * STRIDE - PADDING
    place = m.to(tl.int64)[:, None] * count + k[None, :]
    result_inside = m_inside[:, None] & (k < count)[None, :]
    if RESIDUAL:
        # Asked for before the sum, so that it arrives while the sum is made.
        added = tl.load(residual + place, mask=result_inside, other=0.0)
    x_rows = x + n.to(tl.int64) * x_n + h0 * x_h + w0 * x_w
    w_rows = w + k.to(tl.int64) * (WINDOW * depth)
    w_inside = (k < count)[None, :]
    steps = depth // BLOCK_K
    if OUT == INT8:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    elif OUT == FP8:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        total = tl.zeros(
            (BLOCK_M, BLOCK_N), tl.int32 if w.dtype.element_ty == tl.int8 else tl.float32
        )
    for step in range(WINDOW * steps):
        position = step // steps
        channel = (step - position * steps) * BLOCK_K
        row = position // COLUMNS
        column = position - row * COLUMNS
        if PADDING > 0:
            inside = m_inside & (h0 + row >= 0) & (h0 + row < in_h)
            inside = inside & (w0 + column >= 0) & (w0 + column < in_w)
        else:
            inside = m_inside
        offset = row * x_h + column * x_w + channel
        a = tl.load(x_rows[:, None] + (offset + c)[None, :], mask=inside[:, None], other=0.0)
        b = tl.load(w_rows[None, :] + (step * BLOCK_K + c)[:, None], mask=w_inside, other=0.0)
        total = tl.dot(a, b, total, out_dtype=total.dtype)
    channel_scale = tl.load(scale + k, mask=k < count, other=0.0)
    channel_bias = tl.load(bias + k, mask=k < count, other=0.0)
    value = total.to(tl.float32) * channel_scale[None, :] + channel_bias[None, :]
    if RESIDUAL:
        value += added.to(tl.float32) * residual_scale
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + place, _to_format(value, OUT, RELU), mask=result_inside)


@triton.jit
def quantize_input_kernel(
    x, y, x_n, x_c, x_h, x_w, height, width, padded_h, padded_w, inverse_scale,
    CHANNELS: tl.constexpr, PADDING: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Images [N, C < 4, H, W] of any float type and strides to [N, H + 2P, padded_w, 4].

    Four bytes a pixel, written as one 32-bit word; borders and the fourth channel are zero.
    """
    row = tl.program_id(0)  # n · padded_h + h
    n = row // padded_h
    h = row % padded_h - PADDING
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = column - PADDING
    inside = (h >= 0) & (h < height) & (w >= 0) & (w < width) & (column < padded_w)
    word = tl.zeros((BLOCK,), tl.int32)
    for channel in tl.static_range(CHANNELS):
        place = n.to(tl.int64) * x_n + channel * x_c + h * x_h + w * x_w
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * inverse_scale
        byte = _to_format(value, OUT, False).to(tl.uint8, bitcast=True).to(tl.int32)
        word = word | (byte << (8 * channel))
    tl.store(y + row.to(tl.int64) * padded_w + column, word, mask=column < padded_w)


@triton.jit
def max_pool_kernel(
    x, y, pixels, channels, out_h, out_w, in_h, in_w,
    WINDOW: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """NHWC maximum over WINDOW² pixels, of values in the format; its scale stays."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    q = m % out_w
    p = (m // out_w) % out_h
    n = m // (out_w * out_h)
    best = tl.full((BLOCK_M, BLOCK_C), float("-inf"), tl.float32)
    for row in tl.static_range(WINDOW):
        for column in tl.static_range(WINDOW):
            h = p * STRIDE - PADDING + row
            w = q * STRIDE - PADDING + column
            inside = (m < pixels) & (h >= 0) & (h < in_h) & (w >= 0) & (w < in_w)
            place = ((n.to(tl.int64) * in_h + h) * in_w + w) * channels
            mask = inside[:, None] & (c < channels)[None, :]
            value = tl.load(x + place[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
            best = tl.maximum(best, tl.where(mask, value, float("-inf")))
    place = m.to(tl.int64)[:, None] * channels + c[None, :]
    mask = (m < pixels)[:, None] & (c < channels)[None, :]
    tl.store(y + place, tl.where(mask, best, 0.0).to(y.dtype.element_ty), mask=mask)


@triton.jit
def average_pool_kernel(x, y, area, channels, factor, OUT: tl.constexpr, BLOCK_C: tl.constexpr):
    """[N, area, channels] to [N, channels]: the sum over the area times `factor`, in the format."""
    n = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for pixel in range(area):
        place = (n.to(tl.int64) * area + pixel) * channels + c
        total += tl.load(x + place, mask=c < channels, other=0.0).to(tl.float32)
    place = n.to(tl.int64) * channels + c
    tl.store(y + place, _to_format(total * factor, OUT, False), mask=c < channels)
