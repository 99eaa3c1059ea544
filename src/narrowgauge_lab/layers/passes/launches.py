"""Launches of the Triton kernels: layouts, tiles and grids. Nothing here is empty."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import ContextManager, Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.wire import _keys as seed_keys
from narrowgauge_lab.layers.passes import quantise as reference
from narrowgauge_lab.layers.passes import tiling
from narrowgauge_lab.layers.passes import triton_kernels as kernels
from narrowgauge_lab.layers.passes.geometry import Phase
from narrowgauge_lab.layers.passes.matrix import DEEPEST
from narrowgauge_lab.layers.passes.problem import Problem, Quantised
from narrowgauge_lab.layers.passes.quantise import Format
from narrowgauge_lab.layers.passes.seeds import Seed, SeedAt
from narrowgauge_lab.layers.passes.tiling import BLOCK_K, Tile, depth_block, settled
from narrowgauge_lab.measure.watch import declare

__all__ = ["Folded", "convolve", "fold", "quantise", "weight_grad"]

#: As pitch and area of an image that is one row: no place in it needs to be divided by them, and
#: one compiled kernel does for all lengths.
_ENDLESS = 1 << 30
#: Rows and channels of a program that only moves data.
_ROWS, _CHANNELS = 64, 64
_TURNED = 128
#: Channels of a weight's result that a program folds: a sector of memory where they lie in a row.
_FOLDED = 8
#: Programs that look for the largest magnitudes.
_LOOKING = 1024


@dataclasses.dataclass(frozen=True)
class Folded:
    """A weight for the kernels: `values` [all results, taps, depth], `scale` [all results]. The
    window is (`rows`, `columns`); of depth, `inner` are summed over."""

    values: torch.Tensor
    scale: torch.Tensor
    rows: int
    columns: int
    inner: int


def quantise(
    x: torch.Tensor, form: Format, seed: Optional[Seed], *, whole: bool = False
) -> Quantised:
    """`reference.quantise`, int8 bit for bit; values are NHWC."""
    if seed is not None and x.numel() >= 1 << 32:
        # The kernel's index has 32 bits.
        return reference.quantise(x, form, seed, whole=whole)
    if x.numel() == 0:
        return reference.quantise(x, form, seed, whole=whole)
    pixels = _nhwc(x)
    values = torch.empty(pixels.shape, dtype=form.dtype, device=x.device)
    channels = x.shape[1]
    count = x.numel() // channels
    largest = torch.zeros(channels, dtype=torch.int32, device=x.device)
    scale = torch.empty(channels, device=x.device)
    across = -(-channels // _CHANNELS)
    blocks = -(-count // _ROWS)
    each = -(-blocks // max(1, _LOOKING // across))
    far = isinstance(seed, SeedAt)
    key, other_key, base, offset = 0, 0, largest, 0
    if isinstance(seed, SeedAt):
        base, offset = seed.base, seed.offset
    elif seed is not None:
        key, other_key = map(_signed, seed_keys(seed, 0))
    with _on(x.device):
        kernels.absmax_kernel[(-(-blocks // each), across)](
            pixels, largest, count, channels, each, BLOCK_P=_ROWS, BLOCK_C=_CHANNELS
        )
        if whole:
            largest.copy_(largest.max().expand_as(largest))
        kernels.quantise_kernel[(blocks, across)](
            pixels, values, largest, scale, count, channels, count // x.shape[0], key, other_key,
            base, offset, LIMIT=form.limit, DRAWN=seed is not None, FAR=far, BLOCK_P=_ROWS,
            BLOCK_C=_CHANNELS,
        )  # fmt: skip
    if x.dim() == 4:
        values = values.permute(0, 3, 1, 2)
    return Quantised(values, scale)


def fold(
    weight: torch.Tensor, scale: torch.Tensor, groups: int, form: Format, *, transposed: bool
) -> Folded:
    """`reference.folded` in the order of the kernels."""
    if not weight.is_contiguous() and not (
        weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    ):
        weight = weight.contiguous()
    count, channels = weight.shape[:2]
    window = tuple(weight.shape[2:]) or (1, 1)
    taps = window[0] * window[1]
    # A stride of a side of 1 may be anything: taps are one after another in either order.
    by_count = channels * taps
    by_channel, by_tap = (taps, 1) if weight.is_contiguous() else (1, channels)
    each = count // groups
    rows_of_group, inner = (channels, each) if transposed else (each, channels)
    steps = (by_channel, by_count) if transposed else (by_count, by_channel)
    block = depth_block(inner)
    depth = -(-inner // block) * block
    rows = groups * rows_of_group
    values = torch.empty((rows, taps, depth), dtype=form.dtype, device=weight.device)
    own = torch.empty(rows, device=weight.device)
    largest = torch.zeros(rows, dtype=torch.int32, device=weight.device)
    blocks = depth // block
    grid = (-(-rows // _FOLDED), taps * blocks)
    walk = (blocks, rows_of_group, each * by_count, *steps, by_tap)
    with _on(weight.device):
        kernels.fold_absmax_kernel[grid](
            weight, scale, largest, rows, inner, *walk, BLOCK_A=_FOLDED, BLOCK_B=block
        )
        kernels.fold_kernel[grid](
            weight, scale, largest, values, own, rows, inner, depth, taps, *walk,
            LIMIT=form.limit, BLOCK_A=_FOLDED, BLOCK_B=block,
        )  # fmt: skip
    return Folded(values, own, window[0], window[1], inner)


def convolve(
    x: torch.Tensor,
    kernel: Folded,
    phase: Phase,
    result: torch.Tensor,
    bias: Optional[torch.Tensor],
    groups: int,
) -> None:
    """Write the phase's pixels of `result` [B, …], NHWC in memory."""
    image = _nhwc(x)
    in_h, in_w = (image.shape[1], image.shape[2]) if image.dim() == 4 else (1, 1)
    channels, batch = image.shape[-1], image.shape[0]
    rows, columns = phase.rows, phase.columns
    pixels = batch * rows.size * columns.size
    count = kernel.values.shape[0] // groups
    taps, depth = kernel.values.shape[1:]
    block = depth_block(kernel.inner)
    wide = result.shape[1]
    out_h, out_w = (result.shape[2], result.shape[3]) if result.dim() == 4 else (1, 1)
    row = out_w * wide
    target = result
    if result.dim() == 4:
        target = result[:, :, phase.start[0] :, phase.start[1] :]
    added = kernel.scale if bias is None else bias.detach().float().contiguous()
    first = (rows.first * kernel.columns + columns.first) * depth
    macs = pixels * groups * count * kernel.inner * rows.count * columns.count
    inside = rows.inside(in_h) and columns.inside(in_w)

    def start(tile: Tile) -> None:
        grid = (-(-pixels // tile.m) * -(-count // tile.n), groups)
        kernels.product_kernel[grid](
            image, kernel.values, kernel.scale, added, target,
            pixels, count, kernel.inner, rows.size, columns.size, in_h, in_w,
            in_h * in_w * channels, in_w * channels, channels,
            out_h * row, phase.spacing[0] * row, phase.spacing[1] * wide,
            rows.base, columns.base, taps * depth, first,
            rows.step * kernel.columns * depth, columns.step * depth,
            ROWS=rows.count, COLUMNS=columns.count, STRIDE_H=rows.stride, STRIDE_W=columns.stride,
            REACH_H=rows.reach, REACH_W=columns.reach, INSIDE=inside,
            MASKED=kernel.inner % block != 0, BIASED=bias is not None,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=block,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    key = (
        "product", str(image.dtype), str(target.dtype), pixels, count, kernel.inner, groups, phase,
        in_h, in_w, str(x.device),
    )  # fmt: skip
    declare("triton::product_kernel", image, kernel.values, target, macs)
    with _on(x.device):
        start(settled(key, tiling.tiles(pixels, count), start, x.device, kernels.OutOfResources))


def weight_grad(
    grad: Quantised, x: Quantised, problem: Problem, weight_shape: Sequence[int]
) -> torch.Tensor:
    """Both [B, C, H, W] with any strides; the result is float32, contiguous."""
    groups = problem.groups
    window = (weight_shape[2], weight_shape[3]) if len(weight_shape) == 4 else (1, 1)
    batch, every, out_h, out_w = grad.shape
    count, channels = every // groups, weight_shape[1]
    pitch = _pitch(out_w)
    area = out_h * pitch
    blocks = -(-batch * area // BLOCK_K)
    down = problem.stride[0]
    reach = problem.dilation[0]
    rows = (out_h - 1) * down + (window[0] - 1) * reach + 1
    # To the last block's end, so that what lies after the last image is read as zeros.
    images = -(-blocks * BLOCK_K // area)
    above = _turned(grad.values, 1, (out_h, pitch, out_w), blocks * BLOCK_K, (0, 0), 1, 1)
    shifted = _turned(
        x.values, window[1], (rows, pitch, out_w), images * rows * pitch,
        (-problem.padding[0], -problem.padding[1]), problem.stride[1], problem.dilation[1],
    )  # fmt: skip
    columns = window[0] * window[1] * channels
    lone = batch * out_h == 1 and window[0] == 1
    walk = (_ENDLESS, _ENDLESS, 0, 0) if lone else (area, pitch, down * pitch, reach * pitch)
    result = torch.empty(tuple(weight_shape), device=x.device)
    macs = batch * out_h * out_w * every * columns

    offered = tiling.tiles(count, columns, divided=True)
    # One division for all tiles: then fp8 sums come out the same by whichever.
    least = -(-blocks * BLOCK_K // DEEPEST) if x.values.dtype == torch.int8 else 1
    each = -(-blocks // tiling.parts(offered[0], count, columns, groups, blocks, least))
    parts = -(-blocks // each)
    summed = torch.int32 if x.values.dtype == torch.int8 else torch.float32
    partial = torch.empty((parts, every, columns), dtype=summed, device=x.device)

    def start(tile: Tile) -> None:
        grid = (-(-count // tile.m) * -(-columns // tile.n), groups, parts)
        kernels.weight_grad_kernel[grid](
            above, shifted, partial, count, columns, channels, every, above.shape[-1],
            shifted.shape[1] * shifted.shape[2], shifted.shape[2], rows * pitch, blocks, each,
            TAPS=window[1], AREA=walk[0], PITCH=walk[1], DOWN=walk[2], REACH=walk[3],
            PROMOTED=summed == torch.float32, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=BLOCK_K,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    key = (
        "weight_grad", str(x.values.dtype), every, columns, groups, window, area, pitch, blocks,
        problem, str(x.device),
    )  # fmt: skip
    declare("triton::weight_grad_kernel", above, shifted, result, macs)
    with _on(x.device):
        start(settled(key, offered, start, x.device, kernels.OutOfResources))
        kernels.reduce_kernel[(every, -(-columns // 512))](
            partial, grad.scale, x.scale, result, parts, every, columns, channels,
            window[0] * window[1], count, BLOCK=512,
        )  # fmt: skip
    return result


def _turned(
    values: torch.Tensor,
    taps: int,
    plane: Tuple[int, int, int],
    length: int,
    base: Tuple[int, int],
    stride: int,
    reach: int,
) -> torch.Tensor:
    """[taps, C, length] of `turn_kernel`; `plane`: rows of an image, pitch, pixels kept of it."""
    batch, channels, height, width = values.shape
    rows, pitch, kept = plane
    length = -(-length // _TURNED) * _TURNED
    source = _bytes(values)
    turned = torch.empty((taps, channels, length), dtype=torch.int8, device=values.device)
    with _on(values.device):
        kernels.turn_kernel[(length // _TURNED, -(-channels // _CHANNELS), taps)](
            source, turned, batch, channels, height, width, rows, kept, base[0], base[1],
            source.stride(0), source.stride(1), source.stride(2), source.stride(3),
            channels * length, length, PITCH=_ENDLESS if batch * rows == 1 else pitch,
            STRIDE=stride, REACH=reach,
            BLOCK_C=_CHANNELS, BLOCK_P=_TURNED,
        )  # fmt: skip
    return turned.view(values.dtype)


def _pitch(width: int) -> int:
    """Bytes of a row: aligned for the widest copies that do not waste half of it."""
    step = 16 if width > 8 else 8
    return -(-width // step) * step


def _nhwc(x: torch.Tensor) -> torch.Tensor:
    """[B, C] as it is, [B, C, H, W] as [B, H, W, C]; contiguous."""
    if x.dim() == 2:
        return x.contiguous()
    last = _bytes(x) if x.element_size() == 1 else x
    return last.permute(0, 2, 3, 1).contiguous().view(x.dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.int8 else values.view(torch.int8)


def _signed(key: int) -> int:
    """The int32 of the same bits."""
    return key - (1 << 32) if key >= 1 << 31 else key


def _on(device: torch.device) -> ContextManager[object]:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)
