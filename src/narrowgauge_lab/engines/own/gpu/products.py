"""Launches of convolutions and linear layers."""

from __future__ import annotations

import dataclasses
from typing import Callable, List, Mapping, Optional

import torch
from torch import nn

from narrowgauge_lab.engines.own.gpu.ahead import ahead
from narrowgauge_lab.engines.own.gpu.candidate import (
    Candidate,
    Launch,
    problem_key,
    triton_candidate,
)
from narrowgauge_lab.engines.own.gpu.formats import FLOAT32_CODE
from narrowgauge_lab.engines.own.gpu.libraries import convolutions
from narrowgauge_lab.engines.own.gpu.memory import Lane, Memory
from narrowgauge_lab.engines.own.gpu.packing import PackedWeight
from narrowgauge_lab.engines.own.gpu.scaling import Before, Epilogue, Numbers
from narrowgauge_lab.engines.own.gpu.steps import ConvStep, LinearStep
from narrowgauge_lab.engines.own.gpu.tiles import (
    MOVING,
    Block,
    ProductShape,
    Tile,
    candidates,
    linear_tiles,
)
from narrowgauge_lab.measure.watch import declare

__all__ = ["Products"]


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """How an output pixel finds its inputs: sizes in pixels, strides in elements."""

    out_h: int
    out_w: int
    in_h: int
    in_w: int
    x_n: int
    x_h: int
    x_w: int
    columns: int
    stride: int
    padding: int


@dataclasses.dataclass(frozen=True)
class _Operands:
    """What a product reads and writes. `residual_pixel` 0: nothing is added."""

    x: torch.Tensor
    packed: PackedWeight
    y: torch.Tensor
    y_pixel: int
    residual: torch.Tensor
    residual_pixel: int
    residual_scale: float
    out: int


class Products:
    """Makes the launches of steps that multiply. `weights`: packed, on the device, by module."""

    def __init__(
        self,
        memory: Memory,
        modules: Mapping[str, nn.Module],
        weights: Mapping[str, PackedWeight],
        numbers: Numbers,
    ) -> None:
        from narrowgauge_lab.engines.own.gpu import kernels

        self._kernels = kernels
        self._ahead, self._turn = ahead(memory.device), memory.turn
        self._memory, self._modules, self._weights = memory, modules, weights
        self._numbers, self._form = numbers, memory.form

    def conv(self, step: ConvStep, lane: Lane) -> Launch:
        memory, packed = self._memory, self._weights[step.module]
        where, into = memory.place(step.source), memory.place(step.output)
        shape = ProductShape(
            memory.batch * into.height * into.width, into.channels, packed.depth,
            packed.rows * packed.columns, self._form.width, self._form.math == "ieee",
        )  # fmt: skip
        row = where.width * where.pixel
        padding = 0 if packed.stem else packed.padding
        geometry = _Geometry(
            into.height, into.width, where.height, where.width, where.height * row, row,
            where.pixel, packed.columns, packed.stride, padding,
        )  # fmt: skip
        y = memory.start(step.output)
        added: tuple = (y, 0, 0.0)
        if step.residual is not None:
            ratio = self._numbers.scale(step.residual) / self._numbers.scale(step.output)
            added = (memory.start(step.residual), memory.place(step.residual).pixel, ratio)
        operands = _Operands(
            memory.start(step.source), packed, y, into.pixel, *added, self._form.code
        )
        after = self._numbers.epilogue(
            packed, step.activation, step.source, step.output, step.prologue
        )
        before = None
        if step.prologue is not None:
            before = self._numbers.before(step.prologue, step.source)
        key = problem_key(
            "conv", self._form.name, shape, packed.channels, packed.columns, packed.stride,
            padding, where, into, operands.residual_pixel, step.activation, before is not None,
        )  # fmt: skip
        ways = self._tiled(shape, geometry, operands, before, after, lane)
        theirs = convolutions(memory, lane, step, self._modules[step.module], packed)
        return Launch(step.module, "conv2d", key, ways, theirs.candidates, theirs.restore)

    def linear(self, step: LinearStep, lane: Lane) -> Launch:
        memory, packed, form = self._memory, self._weights[step.module], self._form
        count, where = packed.values.shape[0], memory.place(step.source)
        final = memory.is_result(step)
        y = memory.result() if final else memory.start(step.output)
        pixel = count if final else memory.place(step.output).pixel
        out = FLOAT32_CODE if final else form.code
        target = "" if final else step.output
        after = self._numbers.epilogue(packed, step.activation, step.source, target)
        # From one image to the next; of a value with several pixels all of them are features.
        between = where.pixel if where.height * where.width == 1 else packed.channels
        shape = ProductShape(memory.batch, count, packed.depth, 1, form.width, form.math == "ieee")
        geometry = _Geometry(1, 1, 1, 1, between, between, between, 1, 1, 0)
        operands = _Operands(memory.start(step.source), packed, y, pixel, y, 0, 0.0, out)
        ways = self._tiled(shape, geometry, operands, None, after, lane)
        if memory.batch == 1:
            ways = [
                triton_candidate("linear_kernel", tile, self._start_single(operands, after, tile))
                for tile in linear_tiles()
            ] + ways
        key = problem_key("linear", form.name, shape, packed.channels, out, between, pixel)
        return Launch(step.module, "linear", key, ways)

    def depthwise(self, step: ConvStep) -> Launch:
        packed, memory, form = self._weights[step.module], self._memory, self._form
        where, into = memory.place(step.source), memory.place(step.output)
        after = self._numbers.epilogue(packed, step.activation, step.source, step.output)
        x, y = memory.start(step.source), memory.start(step.output)
        pixels = memory.batch * into.height * into.width
        kernel = self._kernels.depthwise_kernel
        multiplied = pixels * into.channels * packed.rows * packed.columns

        def starter(block: Block) -> Callable[[], None]:
            grid = (-(-pixels // block.pixels), -(-into.channels // block.channels))

            def start() -> None:
                declare("triton::depthwise_kernel", x, packed.values, y, multiplied)
                kernel[grid](
                    x, packed.values, after.scale, after.bias, y,
                    pixels, into.channels, into.height, into.width, where.height, where.width,
                    where.pixel, into.pixel, after.low, after.high, self._turn.allow_next,
                    SIDE=packed.rows, STRIDE=packed.stride, PADDING=packed.padding,
                    SCALED=form.scaled, OUT=form.code, BLOCK_M=block.pixels,
                    BLOCK_C=block.channels, **self._ahead,
                )  # fmt: skip

            return start

        key = problem_key(
            "depthwise", form.name, memory.batch, where, into, packed.rows, packed.stride,
            packed.padding,
        )  # fmt: skip
        ways = [triton_candidate("depthwise_kernel", block, starter(block)) for block in MOVING]
        return Launch(step.module, "conv2d", key, ways)

    def _tiled(
        self,
        shape: ProductShape,
        at: _Geometry,
        on: _Operands,
        before: Optional[Before],
        after: Epilogue,
        lane: Lane,
    ) -> List[Candidate]:
        """`conv_kernel` with every tile that may suit the shape."""
        return [
            triton_candidate(
                "conv_kernel", tile, self._start(shape, at, on, before, after, tile, lane)
            )
            for tile in candidates(shape)
        ]

    def _start(
        self,
        shape: ProductShape,
        at: _Geometry,
        on: _Operands,
        before: Optional[Before],
        after: Epilogue,
        tile: Tile,
        lane: Lane,
    ) -> Callable[[], None]:
        """`conv_kernel` for one tile. A sum of fewer steps than parts has as many as steps."""
        kernel, form, packed = self._kernels.conv_kernel, self._form, on.packed
        tiles = -(-shape.pixels // tile.m) * -(-shape.count // tile.n)
        steps = shape.window * -(-packed.channels // tile.k)
        each = -(-steps // tile.parts)
        parts = -(-steps // each)
        accumulated = torch.int32 if form.name == "int8" else torch.float32
        size = tiles * parts * tile.m * tile.n if parts > 1 else 1
        partial, tickets = lane.parts(size, tiles, accumulated)
        first = before or Before(self._numbers.nothing, self._numbers.nothing, 0.0, 0.0)
        math = form.math if form.dtype == torch.float32 else "tf32"
        multiplied = shape.pixels * shape.count * packed.channels * shape.window

        def start() -> None:
            declare("triton::conv_kernel", on.x, packed.values, on.y, multiplied)
            kernel[(tiles, parts)](
                on.x, packed.values, after.scale, after.bias, on.residual, on.y,
                first.scale, first.shift, partial, tickets,
                shape.pixels, shape.count, packed.channels, packed.depth,
                at.out_h, at.out_w, at.in_h, at.in_w, at.x_n, at.x_h, at.x_w,
                on.y_pixel, on.residual_pixel, on.residual_scale,
                first.low, first.high, after.low, after.high, each, self._turn.allow_next,
                COLUMNS=at.columns, STRIDE=at.stride, PADDING=at.padding, WINDOW=shape.window,
                MASKED=packed.channels % tile.k != 0, BEFORE=before is not None,
                RESIDUAL=on.residual_pixel > 0, SCALED=form.scaled, OUT=on.out, MATH=math,
                SPLIT=parts > 1, BEFORE_OUT=form.code,
                BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
                num_warps=tile.warps, num_stages=tile.stages, **self._ahead,
            )  # fmt: skip

        return start

    def _start_single(self, on: _Operands, after: Epilogue, tile: Tile) -> Callable[[], None]:
        """`linear_kernel`, for one image."""
        kernel, form, packed = self._kernels.linear_kernel, self._form, on.packed
        count = packed.values.shape[0]

        def start() -> None:
            declare("triton::linear_kernel", on.x, packed.values, on.y, count * packed.channels)
            kernel[(-(-count // tile.n),)](
                on.x, packed.values, after.scale, after.bias, on.y, count, packed.channels,
                packed.depth, after.low, after.high, self._turn.allow_next, SCALED=form.scaled,
                OUT=on.out, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps, **self._ahead,
            )  # fmt: skip

        return start
