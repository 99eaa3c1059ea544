"""The Triton kernels of our engine: the only module that imports triton.

Activations are NHWC, `…_pixel` elements from one pixel to the next. OUT is the code of the format
that is written (see formats.py). Scaled formats hold value / scale; scales and biases come to the
kernels with that already in them. NaN stays NaN, but int8 has none.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.compiler import compiler
from triton.runtime import cache
from triton.runtime.errors import OutOfResources

from narrowgauge_lab.triton_hashes import hash_functions

__all__ = [
    "HASHED_BY",
    "VERSION",
    "OutOfResources",
    "affine_kernel",
    "conv_kernel",
    "depthwise_kernel",
    "linear_kernel",
    "mean_kernel",
    "pool_kernel",
    "read_kernel",
]

VERSION = triton.__version__


#: Where Triton's hash of itself is, by its version.
HASHED_BY = (cache, compiler)

INT8 = tl.constexpr(0)
FP8 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)
#: Adding and taking away 1.5·2^23 rounds a float32 below 2^22 half to even, without a library call.
_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _await_turn(allow_next, AHEAD: tl.constexpr):
    """First of all in every kernel: until what was launched before it has ended, its stores done.
    Then, unless `allow_next` is 0, the next one may be put beside it and waits likewise: there is
    never a third."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        if allow_next != 0:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _to_format(value, OUT: tl.constexpr):
    """float32, scaled already, to the output's format; the 8-bit ones saturate, int8 rounds half to
    even."""
    if OUT == INT8:
        saturated = tl.minimum(tl.maximum(value, -127.0), 127.0)
        # The rounded integer stands in the low bits of the sum.
        result = (saturated + _MAGIC).to(tl.int32, bitcast=True).to(tl.int8)
    elif OUT == FP8:
        result = value.to(tl.float8e4nv)  # the instruction saturates
    elif OUT == FLOAT32:
        result = value
    elif OUT == FLOAT16:
        result = value.to(tl.float16)
    else:
        result = value.to(tl.bfloat16)
    return result


@triton.jit
def _clamp(value, low, high):
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finish(
    total, m, k, scale, bias, added, residual_scale, low, high, y, y_pixel, pixels, count,
    RESIDUAL: tl.constexpr, SCALED: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """y[m, k] = format(clamp(scale[k] · total + bias[k] + added · residual_scale))."""
    value = total.to(tl.float32)
    if SCALED:
        value = value * tl.load(scale + k, mask=k < count, other=0.0)[None, :]
    value += tl.load(bias + k, mask=k < count, other=0.0)[None, :]
    if RESIDUAL:
        value += added.to(tl.float32) * residual_scale
    value = _clamp(value, low, high)
    place = m.to(tl.int64)[:, None] * y_pixel + k[None, :]
    inside = (m < pixels)[:, None] & (k < count)[None, :]
    tl.store(y + place, _to_format(value, OUT), mask=inside)


@triton.jit
def _sum(
    x, w, before_scale, before_shift, m, k, first, end,
    pixels, count, channels, depth, out_h, out_w, in_h, in_w, x_n, x_h, x_w,
    before_low, before_high, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, BEFORE: tl.constexpr, MATH: tl.constexpr,
    BEFORE_OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[m, k] of the implicit matrix product over its steps first to end: one is BLOCK_K channels at
    one position of the window. See `conv_kernel`."""
    c = tl.arange(0, BLOCK_K)
    q = m % out_w
    p = (m // out_w) % out_h
    n = m // (out_w * out_h)
    h0 = p * STRIDE - PADDING
    w0 = q * STRIDE - PADDING
    x_rows = x + n.to(tl.int64) * x_n + h0 * x_h + w0 * x_w
    w_rows = w + k.to(tl.int64) * (WINDOW * depth)
    steps = tl.cdiv(channels, BLOCK_K)  # what only fills the weights up is not read
    if w.dtype.element_ty == tl.int8:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, end):
        position = step // steps
        channel = (step - position * steps) * BLOCK_K
        row = position // COLUMNS
        column = position - row * COLUMNS
        inside = m < pixels
        if PADDING > 0:
            inside = inside & (h0 + row >= 0) & (h0 + row < in_h)
            inside = inside & (w0 + column >= 0) & (w0 + column < in_w)
        inside_a = inside[:, None]
        if MASKED:
            inside_a = inside_a & (channel + c < channels)[None, :]
        offset = row * x_h + column * x_w + channel
        a = tl.load(x_rows[:, None] + (offset + c)[None, :], mask=inside_a, other=0.0)
        if BEFORE:
            real = channel + c < channels
            factor = tl.load(before_scale + channel + c, mask=real, other=0.0)
            shift = tl.load(before_shift + channel + c, mask=real, other=0.0)
            scaled = _clamp(a.to(tl.float32) * factor[None, :] + shift[None, :],
                            before_low, before_high)  # fmt: skip
            a = _to_format(scaled, BEFORE_OUT)
        b = tl.load(
            w_rows[None, :] + (position * depth + channel + c)[:, None],
            mask=(k < count)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision=MATH, out_dtype=total.dtype)
    return total


@triton.jit(do_not_specialize=["allow_next"])
def conv_kernel(
    x, w, scale, bias, residual, y, before_scale, before_shift, partial, tickets,
    pixels, count, channels, depth, out_h, out_w, in_h, in_w, x_n, x_h, x_w,
    y_pixel, residual_pixel, residual_scale, before_low, before_high, low, high, steps_each,
    allow_next,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, BEFORE: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr,
    OUT: tl.constexpr, MATH: tl.constexpr, SPLIT: tl.constexpr, BEFORE_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """y[m, k] = format(clamp(scale[k] · Σ before(x) · w + bias[k] + residual[m, k] · …)).

    An implicit matrix product: m = (n, p, q) counts the output's `pixels`, the sum runs over the
    WINDOW positions and `channels`, which in w are filled up to `depth` (MASKED: they are no
    multiple of BLOCK_K, which divides depth). x has strides x_n, x_h, x_w in elements; w is
    [count, WINDOW·depth]. BEFORE: each x becomes clamp(x · before_scale[c] + before_shift[c])
    first.

    SPLIT: program_id(1) sums `steps_each` of the steps. Each leaves its part in `partial`; whoever
    draws the last of the tile's `tickets` adds the parts in order and finishes, so the result does
    not depend on who that is. Tickets are 0 before and after.
    """
    _await_turn(allow_next, AHEAD)
    blocks_n = tl.cdiv(count, BLOCK_N)
    # Neighbouring programs share their pixels and differ in output channels: the activations, much
    # larger than the weights, then come from memory once.
    tile = tl.program_id(0)
    m = (tile // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tile % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    added = 0.0
    if RESIDUAL:
        # Asked for before the sum, so that it arrives while the sum is made.
        place = m.to(tl.int64)[:, None] * residual_pixel + k[None, :]
        added = tl.load(residual + place, mask=(m < pixels)[:, None] & (k < count)[None, :],
                        other=0.0)  # fmt: skip
    first = 0
    end = WINDOW * tl.cdiv(channels, BLOCK_K)
    if SPLIT:
        first = tl.program_id(1) * steps_each
        end = tl.minimum(first + steps_each, end)
    total = _sum(
        x, w, before_scale, before_shift, m, k, first, end,
        pixels, count, channels, depth, out_h, out_w, in_h, in_w, x_n, x_h, x_w,
        before_low, before_high, COLUMNS, STRIDE, PADDING, WINDOW, MASKED, BEFORE, MATH, BEFORE_OUT,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if SPLIT:
        parts = tl.num_programs(1)
        size: tl.constexpr = BLOCK_M * BLOCK_N
        within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        begin = partial + tile.to(tl.int64) * parts * size
        tl.store(begin + tl.program_id(1) * size + within, total)
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == parts - 1:
            whole = tl.zeros_like(total)
            for part in range(parts):
                whole += tl.load(begin + part * size + within, cache_modifier=".cg")
            tl.store(tickets + tile, 0)
            _finish(
                whole, m, k, scale, bias, added, residual_scale, low, high, y, y_pixel, pixels,
                count, RESIDUAL, SCALED, OUT,
            )  # fmt: skip
    else:
        _finish(
            total, m, k, scale, bias, added, residual_scale, low, high, y, y_pixel, pixels, count,
            RESIDUAL, SCALED, OUT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["allow_next"])
def linear_kernel(
    x, w, scale, bias, y, count, channels, depth, low, high, allow_next,
    SCALED: tl.constexpr, OUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """y[k] = format(clamp(scale[k] · Σ x · w[k] + bias[k])) of one image: each weight is read once,
    and nothing else counts."""
    _await_turn(allow_next, AHEAD)
    k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_K)
    rows = w + k.to(tl.int64)[:, None] * depth
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for begin in range(0, depth, BLOCK_K):
        real = begin + c < channels
        a = tl.load(x + begin + c, mask=real, other=0.0).to(tl.float32)
        inside = (k < count)[:, None] & real[None, :]
        b = tl.load(rows + (begin + c)[None, :], mask=inside, other=0.0).to(tl.float32)
        total += a[None, :] * b
    value = tl.sum(total, 1)
    if SCALED:
        value = value * tl.load(scale + k, mask=k < count, other=0.0)
    value += tl.load(bias + k, mask=k < count, other=0.0)
    tl.store(y + k, _to_format(_clamp(value, low, high), OUT), mask=k < count)


@triton.jit(do_not_specialize=["allow_next"])
def depthwise_kernel(
    x, w, scale, bias, y,
    pixels, channels, out_h, out_w, in_h, in_w, x_pixel, y_pixel, low, high, allow_next,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, SCALED: tl.constexpr,
    OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """A convolution of each channel by itself: w is [SIDE², channels]."""
    _await_turn(allow_next, AHEAD)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    q = m % out_w
    p = (m // out_w) % out_h
    n = m // (out_w * out_h)
    real = c < channels
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for row in tl.static_range(SIDE):
        for column in tl.static_range(SIDE):
            h = p * STRIDE - PADDING + row
            v = q * STRIDE - PADDING + column
            inside = (m < pixels) & (h >= 0) & (h < in_h) & (v >= 0) & (v < in_w)
            place = ((n.to(tl.int64) * in_h + h) * in_w + v) * x_pixel
            a = tl.load(
                x + place[:, None] + c[None, :], mask=inside[:, None] & real[None, :], other=0.0
            )
            b = tl.load(w + (row * SIDE + column) * channels + c, mask=real, other=0.0)
            total += a.to(tl.float32) * b.to(tl.float32)[None, :]
    _finish(
        total, m, c, scale, bias, 0.0, 0.0, low, high, y, y_pixel, pixels, channels, False, SCALED,
        OUT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["allow_next"])
def pool_kernel(
    x, y, before_scale, before_shift,
    pixels, channels, out_h, out_w, in_h, in_w, x_pixel, y_pixel, factor, before_low, before_high,
    rows, columns, allow_next, STRIDE: tl.constexpr, PADDING: tl.constexpr, MEAN: tl.constexpr,
    BEFORE: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The maximum, or the sum times `factor`, over windows of rows × columns pixels."""
    _await_turn(allow_next, AHEAD)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    q = m % out_w
    p = (m // out_w) % out_h
    n = m // (out_w * out_h)
    real = c < channels
    if BEFORE:
        scale = tl.load(before_scale + c, mask=real, other=0.0)
        shift = tl.load(before_shift + c, mask=real, other=0.0)
    if MEAN:
        result = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    else:
        result = tl.full((BLOCK_M, BLOCK_C), float("-inf"), tl.float32)
    for position in range(rows * columns):
        h = p * STRIDE - PADDING + position // columns
        v = q * STRIDE - PADDING + position % columns
        inside = (m < pixels) & (h >= 0) & (h < in_h) & (v >= 0) & (v < in_w)
        place = ((n.to(tl.int64) * in_h + h) * in_w + v) * x_pixel
        mask = inside[:, None] & real[None, :]
        value = tl.load(x + place[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if BEFORE:
            value = _clamp(value * scale[None, :] + shift[None, :], before_low, before_high)
        if MEAN:
            result += tl.where(mask, value, 0.0)
        else:
            value = tl.where(mask, value, float("-inf"))
            result = tl.maximum(result, value, propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        result = result * factor
    place = m.to(tl.int64)[:, None] * y_pixel + c[None, :]
    mask = (m < pixels)[:, None] & real[None, :]
    result = tl.where(mask, result, 0.0)
    tl.store(y + place, _to_format(result, OUT), mask=mask)


@triton.jit(do_not_specialize=["allow_next"])
def mean_kernel(
    x, y, before_scale, before_shift, area, channels, x_pixel, y_pixel, factor, before_low,
    before_high, allow_next, BEFORE: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The sum over all `area` pixels of an image times `factor`, BLOCK_M pixels at a time."""
    _await_turn(allow_next, AHEAD)
    n = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m = tl.arange(0, BLOCK_M)
    real = c < channels
    if BEFORE:
        scale = tl.load(before_scale + c, mask=real, other=0.0)
        shift = tl.load(before_shift + c, mask=real, other=0.0)
    rows = x + n.to(tl.int64) * area * x_pixel
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for begin in range(0, area, BLOCK_M):
        mask = (begin + m < area)[:, None] & real[None, :]
        place = (begin + m)[:, None] * x_pixel + c[None, :]
        value = tl.load(rows + place, mask=mask, other=0.0).to(tl.float32)
        if BEFORE:
            value = _clamp(value * scale[None, :] + shift[None, :], before_low, before_high)
            value = tl.where(mask, value, 0.0)
        total += value
    result = tl.sum(total, 0) * factor
    tl.store(y + n.to(tl.int64) * y_pixel + c, _to_format(result, OUT), mask=real)


@triton.jit(do_not_specialize=["allow_next"])
def affine_kernel(
    x, y, scale, shift, pixels, channels, x_pixel, y_pixel, low, high, allow_next,
    OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """y = format(clamp(x · scale[c] + shift[c])), pixel by pixel."""
    _await_turn(allow_next, AHEAD)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (m < pixels)[:, None] & (c < channels)[None, :]
    a = tl.load(x + m.to(tl.int64)[:, None] * x_pixel + c[None, :], mask=mask, other=0.0)
    factor = tl.load(scale + c, mask=c < channels, other=0.0)
    added = tl.load(shift + c, mask=c < channels, other=0.0)
    value = _clamp(a.to(tl.float32) * factor[None, :] + added[None, :], low, high)
    tl.store(y + m.to(tl.int64)[:, None] * y_pixel + c[None, :], _to_format(value, OUT), mask=mask)


@triton.jit(do_not_specialize=["allow_next"])
def read_kernel(
    x, y, x_n, x_c, x_h, x_w, channels, height, width, padded_h, padded_w, inverse_scale,
    allow_next,
    PADDING: tl.constexpr, PIXEL: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Images [N, C, H, W] of any float type and strides to [N, padded_h, padded_w, PIXEL] in the
    format; borders and channels beyond C are zero."""
    _await_turn(allow_next, AHEAD)
    row = tl.program_id(0)  # n · padded_h + h
    n = row // padded_h
    h = row % padded_h - PADDING
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_C)
    w = column - PADDING
    inside = (h >= 0) & (h < height) & (w >= 0) & (w < width) & (column < padded_w)
    # Each of them: where images lie side by side, a row or a channel spans the whole batch.
    place = n.to(tl.int64) * x_n + h.to(tl.int64) * x_h + w.to(tl.int64) * x_w
    value = tl.load(
        x + place[:, None] + c.to(tl.int64)[None, :] * x_c,
        mask=inside[:, None] & (c < channels)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    target = (row.to(tl.int64) * padded_w + column)[:, None] * PIXEL + c[None, :]
    mask = (column < padded_w)[:, None] & (c < PIXEL)[None, :]
    tl.store(y + target, _to_format(value * inverse_scale, OUT), mask=mask)


hash_functions(vars())
