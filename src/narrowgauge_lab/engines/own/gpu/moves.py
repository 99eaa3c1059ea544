"""Launches of what moves data and multiplies nothing: pooling, batch norms, copies, the images."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import torch

from narrowgauge_lab.engines.own.gpu.ahead import ahead
from narrowgauge_lab.engines.own.gpu.candidate import (
    Candidate,
    Launch,
    problem_key,
    triton_candidate,
)
from narrowgauge_lab.engines.own.gpu.memory import Memory
from narrowgauge_lab.engines.own.gpu.scaling import Before, Numbers
from narrowgauge_lab.engines.own.gpu.steps import AffineStep, ConcatStep, PoolStep, Prologue
from narrowgauge_lab.engines.own.gpu.tiles import MEAN, MOVING, Block

__all__ = ["Moves"]

#: Elements that a program reads images in.
_READ = 1024


class Moves:
    """Makes the launches of steps that multiply nothing."""

    def __init__(self, memory: Memory, numbers: Numbers) -> None:
        from narrowgauge_lab.engines.own.gpu import kernels

        self._kernels = kernels
        self._ahead, self._turn = ahead(memory.device), memory.turn
        self._memory, self._numbers, self._form = memory, numbers, memory.form

    def read(self, images: torch.Tensor) -> Callable[[], None]:
        """Takes `images` [N, C, H, W] of any float type and strides into the first buffer."""
        memory, form, kernel = self._memory, self._form, self._kernels.read_kernel
        batch, channels, height, width = images.shape
        where, border = memory.input_place, memory.border
        source = memory.plan.source
        y, inverse = memory.start(source), 1.0 / self._numbers.scale(source)
        block_c = 1 << (where.pixel - 1).bit_length()
        block = max(1, _READ // block_c)

        def start() -> None:
            kernel[(batch * where.height, -(-where.width // block))](
                images, y, *images.stride(), channels, height, width, where.height, where.width,
                inverse, self._turn.allow_next, PADDING=border, PIXEL=where.pixel, OUT=form.code,
                BLOCK=block, BLOCK_C=block_c, **self._ahead,
            )  # fmt: skip

        return start

    def pool(self, step: PoolStep) -> Launch:
        """A mean or maximum; the sum of a mean is in real numbers where something comes before."""
        memory, form = self._memory, self._form
        where, into = memory.place(step.source), memory.place(step.output)
        everything = step.window == 0
        height, width = (where.height, where.width) if everything else (step.window, step.window)
        mean = step.kind == "mean"
        made = 1.0 if step.prologue is not None else self._numbers.scale(step.source)
        units = made / self._numbers.scale(step.output)
        factor = units / (height * width) if mean else 1.0
        before = self._numbers.before(step.prologue, step.source, real=True)
        early = step.prologue is not None
        key = problem_key(
            "pool", form.name, memory.batch, step.kind, where, into, height, width, step.stride,
            step.padding, early,
        )  # fmt: skip
        name = f"{step.kind}_pool2d"
        if everything:
            return Launch(step.output, name, key, self._means(step, factor, before, early))
        return Launch(
            step.output, name, key, self._windows(step, height, width, factor, before, early)
        )

    def _windows(
        self, step: PoolStep, rows: int, columns: int, factor: float, before: Before, early: bool
    ) -> List[Candidate]:
        memory, form, kernel = self._memory, self._form, self._kernels.pool_kernel
        where, into = memory.place(step.source), memory.place(step.output)
        x, y = memory.start(step.source), memory.start(step.output)
        pixels = memory.batch * into.height * into.width

        def starter(block: Block) -> Callable[[], None]:
            grid = (-(-pixels // block.pixels), -(-into.channels // block.channels))

            def start() -> None:
                kernel[grid](
                    x, y, before.scale, before.shift,
                    pixels, into.channels, into.height, into.width, where.height, where.width,
                    where.pixel, into.pixel, factor, before.low, before.high, rows, columns,
                    self._turn.allow_next, STRIDE=step.stride, PADDING=step.padding,
                    MEAN=step.kind == "mean", BEFORE=early, OUT=form.code, BLOCK_M=block.pixels,
                    BLOCK_C=block.channels, **self._ahead,
                )  # fmt: skip

            return start

        return [triton_candidate("pool_kernel", block, starter(block)) for block in MOVING]

    def _means(self, step: PoolStep, factor: float, before: Before, early: bool) -> List[Candidate]:
        memory, form, kernel = self._memory, self._form, self._kernels.mean_kernel
        where, into = memory.place(step.source), memory.place(step.output)
        x, y = memory.start(step.source), memory.start(step.output)

        def starter(block: Block) -> Callable[[], None]:
            grid = (memory.batch, -(-into.channels // block.channels))

            def start() -> None:
                kernel[grid](
                    x, y, before.scale, before.shift, where.height * where.width, into.channels,
                    where.pixel, into.pixel, factor, before.low, before.high,
                    self._turn.allow_next, BEFORE=early, OUT=form.code, BLOCK_M=block.pixels,
                    BLOCK_C=block.channels, **self._ahead,
                )  # fmt: skip

            return start

        return [triton_candidate("mean_kernel", block, starter(block)) for block in MEAN]

    def affine(self, step: AffineStep) -> Launch:
        before = self._numbers.before(
            Prologue(step.module, step.activation, step.output), step.source
        )
        name = "batch_norm" if step.module else step.activation
        y = self._memory.start(step.output)
        return self._rewrite(
            (step.module or step.output, name), ("affine", step.activation, step.module != ""),
            step.source, y, step.output, before,
        )  # fmt: skip

    def copy(self, step: ConcatStep, source: str, channel: int) -> Launch:
        """A source of a concatenation that could not be written to its place."""
        y = self._memory.start(step.output)[channel:]
        before = self._numbers.before(Prologue("", "none", step.output), source)
        return self._rewrite(
            (step.output, "cat"), ("copy", channel), source, y, step.output, before
        )

    def _rewrite(
        self,
        names: Tuple[str, str],
        kind: Tuple[Any, ...],
        source: str,
        y: torch.Tensor,
        target: str,
        before: Before,
    ) -> Launch:
        memory, form, kernel = self._memory, self._form, self._kernels.affine_kernel
        where, into = memory.place(source), memory.place(target)
        x, pixels = memory.start(source), memory.batch * where.height * where.width

        def starter(block: Block) -> Callable[[], None]:
            grid = (-(-pixels // block.pixels), -(-where.channels // block.channels))

            def start() -> None:
                kernel[grid](
                    x, y, before.scale, before.shift, pixels, where.channels, where.pixel,
                    into.pixel, before.low, before.high, self._turn.allow_next, OUT=form.code,
                    BLOCK_M=block.pixels, BLOCK_C=block.channels, **self._ahead,
                )  # fmt: skip

            return start

        key = problem_key(*kind, form.name, memory.batch, where, into)
        ways = [triton_candidate("affine_kernel", block, starter(block)) for block in MOVING]
        return Launch(*names, key, ways)
