"""The Triton kernels of the 8-bit passes: beside our engine's, the only module that imports triton.

Images are NHWC. `LIMIT` is the largest magnitude of the format that is written: 127 is int8's.
"""

# unverified: 8-bit passes on Ampere and Ada | run on Hopper only | tests/lab/test_passes_gpu.py

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from narrowgauge_lab.triton_hashes import hash_functions

__all__ = [
    "OutOfResources",
    "absmax_kernel",
    "fold_absmax_kernel",
    "fold_kernel",
    "product_kernel",
    "quantise_kernel",
    "reduce_kernel",
    "turn_kernel",
    "weight_grad_kernel",
]

#: Adding and taking away 1.5·2^23 rounds a float32 below 2^22 half to even.
_MAGIC = tl.constexpr(12582912.0)
_LEAST_SCALE = tl.constexpr(2.0**-126)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _magnitude(value):
    """The bits of |value|, float32, as int32: in the order of the values, NaN above infinity."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(bits, LIMIT: tl.constexpr):
    """(scale, its reciprocal) of a channel whose largest magnitude has these bits; the reciprocal
    of one that is not finite is 0."""
    most = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(most, tl.full(most.shape, LIMIT, tl.float32))
    scale = tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)
    scale = tl.where(bits == 0, 1.0, scale)
    inverse = tl.div_rn(tl.full(most.shape, 1.0, tl.float32), scale)
    return scale, tl.where(scale < _INFINITY, inverse, 0.0)


@triton.jit
def _steps(value, inverse, LIMIT: tl.constexpr):
    """value / scale within ±LIMIT; 0 where that is NaN."""
    steps = value * inverse
    steps = tl.where(steps == steps, steps, 0.0)
    return tl.minimum(tl.maximum(steps, -LIMIT), LIMIT)


@triton.jit
def absmax_kernel(
    x, largest, pixels, channels, blocks_each, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """largest[c] = the bits of the largest magnitude of x[:, c]; zeros before. x: [pixels, C]."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < channels
    most = tl.zeros((BLOCK_P, BLOCK_C), tl.int32)
    first = tl.program_id(0) * blocks_each
    for block in range(first, first + blocks_each):
        p = block * BLOCK_P + tl.arange(0, BLOCK_P)
        place = p.to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(x + place, mask=(p < pixels)[:, None] & real[None, :], other=0.0)
        most = tl.maximum(most, _magnitude(value))
    tl.atomic_max(largest + c, tl.max(most, 0), mask=real)


@triton.jit
def _draw(place, key, other_key):
    """Numbers within (0, 1) in steps of 2^-23: `narrowgauge_kernels.wire`'s hash of an index."""
    bits = place.to(tl.uint32) ^ key.to(tl.uint32)
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = (bits + other_key.to(tl.uint32)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    return ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)


@triton.jit
def _keys(base, offset):
    """The two keys of the seed base + offset: `narrowgauge_kernels.wire`'s, of a lower half."""
    mixed = base.to(tl.uint64) + offset.to(tl.uint64) + 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    return (mixed & 0xFFFFFFFF).to(tl.uint32), (mixed >> 32).to(tl.uint32)


@triton.jit(do_not_specialize=["key", "other_key", "offset"])
def quantise_kernel(
    x, y, largest, scale, pixels, channels, area, key, other_key, base, offset,
    LIMIT: tl.constexpr, DRAWN: tl.constexpr, FAR: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = x / scale[c] in y's format, and the scale. x, y: [pixels, C]; `area` pixels an image.

    DRAWN: stochastically, by the element's index in [B, C, area], which 32 bits have to hold. FAR:
    by the seed base[0] + offset instead of by keys."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < channels
    own, inverse = _scale(tl.load(largest + c, mask=real, other=0), LIMIT)
    if tl.program_id(0) == 0:
        tl.store(scale + c, own, mask=real)
    place = p.to(tl.int64)[:, None] * channels + c[None, :]
    mask = (p < pixels)[:, None] & real[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    value = _steps(value, inverse[None, :], LIMIT)
    if LIMIT == 127.0:
        rounded = (value + _MAGIC) - _MAGIC
        if DRAWN:
            image = p // area
            begin = image.to(tl.int64) * channels * area + (p - image * area)
            if FAR:
                first, second = _keys(tl.load(base), offset)
            else:
                first, second = key.to(tl.uint32), other_key.to(tl.uint32)
            draw = _draw(begin[:, None] + c.to(tl.int64)[None, :] * area, first, second)
            rest = value - rounded
            other_side = tl.where(rest > 0, 1.0, -1.0)
            rounded += tl.where(draw < tl.abs(rest), other_side, 0.0)
        value = rounded
    tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _folded(
    w, scale, a, tap, b, real, inner, rows_of_group, group_step, row_step, inner_step, tap_step
):
    """w · scale of the weight's elements [a, b] at a tap; 0 where there is none."""
    group = a // rows_of_group
    row = (a - group * rows_of_group).to(tl.int64) * row_step
    begin = w + group.to(tl.int64) * group_step + row + tap * tap_step
    mask = real[:, None] & (b < inner)[None, :]
    value = tl.load(begin[:, None] + b.to(tl.int64)[None, :] * inner_step, mask=mask, other=0.0)
    place = (group * inner)[:, None] + b[None, :]
    return value * tl.load(scale + place, mask=mask, other=0.0)


@triton.jit
def fold_absmax_kernel(
    w, scale, largest, rows, inner, blocks, rows_of_group, group_step, row_step, inner_step,
    tap_step, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """largest[a] = the bits of the largest |w · scale| of the result's channel a; zeros before.
    See `fold_kernel`."""
    a = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    real = a < rows
    tap = tl.program_id(1) // blocks
    b = (tl.program_id(1) - tap * blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    value = _folded(w, scale, a, tap, b, real, inner, rows_of_group, group_step, row_step,
                    inner_step, tap_step)  # fmt: skip
    tl.atomic_max(largest + a, tl.max(_magnitude(value), 1), mask=real)


@triton.jit
def fold_kernel(
    w, scale, largest, y, own, rows, inner, depth, taps, blocks, rows_of_group, group_step,
    row_step, inner_step, tap_step, LIMIT: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """y[a, tap, b] = w · scale / own[a] in y's format, zero from `inner` to `depth`; and own.

    a counts the result's channels in all groups, b what is summed over within one; `scale` has
    `inner` numbers a group. w is float32, its steps in elements. program_id(1): tap and block of b.
    """
    a = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    real = a < rows
    step, inverse = _scale(tl.load(largest + a, mask=real, other=0), LIMIT)
    if tl.program_id(1) == 0:
        tl.store(own + a, step, mask=real)
    tap = tl.program_id(1) // blocks
    b = (tl.program_id(1) - tap * blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    value = _folded(w, scale, a, tap, b, real, inner, rows_of_group, group_step, row_step,
                    inner_step, tap_step)  # fmt: skip
    value = _steps(value, inverse[:, None], LIMIT)
    if LIMIT == 127.0:
        value = (value + _MAGIC) - _MAGIC
    place = (a.to(tl.int64) * taps + tap)[:, None] * depth + b[None, :]
    inside = real[:, None] & (b < depth)[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(
    x, w, scale, bias, y,
    pixels, count, channels, out_h, out_w, in_h, in_w,
    x_n, x_h, x_w, y_n, y_h, y_w, base_h, base_w, w_row, w_first, w_down, w_right,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    REACH_H: tl.constexpr, REACH_W: tl.constexpr, INSIDE: tl.constexpr, MASKED: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[m, k] = scale[k] · Σ x · w + bias[k], in y's type; see `geometry` for which x meet which w.

    m = (n, p, q) counts the result's `pixels`; program_id(1) is the group, of `count` results and
    `channels` summed over. w: [all results, taps, channels filled up to whole BLOCK_K]; steps are
    in elements. MASKED: channels are no multiple of BLOCK_K. INSIDE: there are no zeros around.
    """
    group = tl.program_id(1)
    blocks_n = tl.cdiv(count, BLOCK_N)
    tile = tl.program_id(0)
    m = (tile // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tile % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_K)
    q = m % out_w
    p = (m // out_w) % out_h
    n = m // (out_w * out_h)
    h0 = p * STRIDE_H + base_h
    w0 = q * STRIDE_W + base_w
    real_m = m < pixels
    real_k = k < count
    x_rows = x + group * channels + n.to(tl.int64) * x_n + h0 * x_h + w0 * x_w
    w_rows = w + (group * count + k).to(tl.int64) * w_row + w_first
    steps = tl.cdiv(channels, BLOCK_K)
    if w.dtype.element_ty == tl.int8:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(ROWS * COLUMNS * steps):
        position = step // steps
        channel = (step - position * steps) * BLOCK_K
        row = position // COLUMNS
        column = position - row * COLUMNS
        inside = real_m
        if not INSIDE:
            h = h0 + row * REACH_H
            v = w0 + column * REACH_W
            inside = inside & (h >= 0) & (h < in_h) & (v >= 0) & (v < in_w)
        inside_a = inside[:, None]
        if MASKED:
            inside_a = inside_a & (channel + c < channels)[None, :]
        offset = row * REACH_H * x_h + column * REACH_W * x_w + channel
        a = tl.load(x_rows[:, None] + (offset + c)[None, :], mask=inside_a, other=0.0)
        tap = row * w_down + column * w_right + channel
        b = tl.load(w_rows[None, :] + (tap + c)[:, None], mask=real_k[None, :], other=0.0)
        total = tl.dot(a, b, total, out_dtype=total.dtype)
    factor = tl.load(scale + group * count + k, mask=real_k, other=0.0)
    value = total.to(tl.float32) * factor[None, :]
    if BIASED:
        value += tl.load(bias + group * count + k, mask=real_k, other=0.0)[None, :]
    place = n.to(tl.int64) * y_n + p * y_h + q * y_w + group * count
    mask = real_m[:, None] & real_k[None, :]
    tl.store(y + place[:, None] + k[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def turn_kernel(
    x, y, images, channels, height, width, rows, kept, base_h, base_w, x_n, x_c, x_h, x_w, y_tap,
    y_channel, PITCH: tl.constexpr, STRIDE: tl.constexpr, REACH: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """y[tap, c, (n, h, w)] = x[n, c, h + base_h, w · STRIDE + tap · REACH + base_w], bytes: images
    with pixels inside, once for each tap of a window's row. A row is PITCH long, an image `rows`
    high; what is outside x, from `kept` on, or after the last image, is zero."""
    at = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(2)
    n = at // (rows * PITCH)
    h = (at // PITCH) % rows + base_h
    column = at % PITCH
    v = column * STRIDE + tap * REACH + base_w
    inside = (n < images) & (column < kept) & (h >= 0) & (h < height) & (v >= 0) & (v < width)
    real = c < channels
    pixel = n.to(tl.int64) * x_n + h * x_h + v * x_w
    mask = real[:, None] & inside[None, :]
    value = tl.load(x + c.to(tl.int64)[:, None] * x_c + pixel[None, :], mask=mask, other=0)
    place = tap.to(tl.int64) * y_tap + c.to(tl.int64) * y_channel
    stored = real[:, None] & (at < y_channel)[None, :]
    tl.store(y + place[:, None] + at[None, :], value, mask=stored)


@triton.jit
def weight_grad_kernel(
    g, u, partial, count, columns, channels, rows_all, g_row, u_tap, u_channel, u_image, blocks,
    blocks_each, TAPS: tl.constexpr, AREA: tl.constexpr, PITCH: tl.constexpr, DOWN: tl.constexpr,
    REACH: tl.constexpr, PROMOTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial[part, k, (r, s, c)] = Σ g[k, p] · u[s, c, p shifted to row r], over a part of p.

    Both from `turn_kernel`: g with one tap, u with TAPS. p = (n, h, w) counts gradient pixels,
    AREA an image and PITCH a row; they are in row h · DOWN + r · REACH of u (in elements, pitches
    in them). g is zero where there is no pixel, to the end of the last of `blocks`. program_id(1)
    is the group, program_id(2) the part. PROMOTED: fp8 is summed in float32 after each block.
    """
    group = tl.program_id(1)
    part = tl.program_id(2)
    blocks_n = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0)
    m = (tile // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = (tile % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    tap = e // channels
    c = e - tap * channels
    row = tap // TAPS
    s = tap - row * TAPS
    real_m = m < count
    real_e = e < columns
    g_rows = g + (group * count + m).to(tl.int64) * g_row
    u_columns = u + s.to(tl.int64) * u_tap + (group * channels + c).to(tl.int64) * u_channel
    u_columns += row * REACH
    if g.dtype.element_ty == tl.int8:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = part * blocks_each
    for block in range(first, tl.minimum(first + blocks_each, blocks)):
        p = block * BLOCK_K + tl.arange(0, BLOCK_K)
        n = p // AREA
        h = (p // PITCH) % (AREA // PITCH)
        place = n.to(tl.int64) * u_image + h * DOWN + p % PITCH
        a = tl.load(g_rows[:, None] + p[None, :], mask=real_m[:, None], other=0.0)
        b = tl.load(u_columns[None, :] + place[:, None], mask=real_e[None, :], other=0.0)
        if PROMOTED:
            total = tl.dot(a, b, total, max_num_imprecise_acc=BLOCK_K, out_dtype=total.dtype)
        else:
            total = tl.dot(a, b, total, out_dtype=total.dtype)
    begin = partial + (part * rows_all + group * count + m).to(tl.int64) * columns
    tl.store(begin[:, None] + e[None, :], total, mask=real_m[:, None] & real_e[None, :])


@triton.jit
def reduce_kernel(
    partial, g_scale, x_scale, y, parts, rows, columns, channels, taps, count, BLOCK: tl.constexpr
):
    """y[k, c, tap] = g_scale[k] · x_scale[c] · the sum of `parts` of [rows, (tap, c)], in order."""
    k = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = e < columns
    if partial.dtype.element_ty == tl.int32:
        total = tl.zeros((BLOCK,), tl.int64)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        row = partial + (part * rows + k).to(tl.int64) * columns
        total += tl.load(row + e, mask=real, other=0).to(total.dtype)
    tap = e // channels
    c = e - tap * channels
    inner = tl.load(x_scale + (k // count) * channels + c, mask=real, other=0.0)
    value = total.to(tl.float32) * tl.load(g_scale + k) * inner
    tl.store(y + k.to(tl.int64) * columns + c * taps + tap, value, mask=real)


hash_functions(vars())
