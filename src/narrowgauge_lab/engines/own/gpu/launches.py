"""A plan's steps as launches: for each the kernels that could do it, of which one is chosen."""

from __future__ import annotations

from typing import Callable, List, Mapping, Tuple

import torch
from torch import nn

from narrowgauge_lab.engines.own.gpu.candidate import Launch
from narrowgauge_lab.engines.own.gpu.libraries import torch_step
from narrowgauge_lab.engines.own.gpu.memory import Memory
from narrowgauge_lab.engines.own.gpu.moves import Moves
from narrowgauge_lab.engines.own.gpu.packing import PackedWeight
from narrowgauge_lab.engines.own.gpu.products import Products
from narrowgauge_lab.engines.own.gpu.scaling import Numbers
from narrowgauge_lab.engines.own.gpu.steps import (
    AffineStep,
    ConcatStep,
    ConvStep,
    LinearStep,
    PoolStep,
    Step,
)

__all__ = ["Launches"]


class Launches:
    """Makes the launches of a network in its memory; see `network.Lowered` for what it is given."""

    def __init__(
        self,
        memory: Memory,
        modules: Mapping[str, nn.Module],
        weights: Mapping[str, PackedWeight],
        affines: Mapping[str, Tuple[torch.Tensor, torch.Tensor]],
        scales: Mapping[str, float],
    ) -> None:
        self._memory, self._modules = memory, modules
        self._numbers = Numbers(memory, affines, scales)
        self._products = Products(memory, modules, weights, self._numbers)
        self._moves = Moves(memory, self._numbers)

    def read(self, images: torch.Tensor) -> Callable[[], None]:
        """Takes `images` [N, C, H, W] of any float type and strides into the first buffer."""
        return self._moves.read(images)

    def of(self, step: Step, *, beside: bool = False) -> List[Launch]:
        """The launches of a step; none where nothing is left to do. `beside`: on a stream of its
        own, beside those of other steps."""
        lane = self._memory.lane(beside=beside)
        if isinstance(step, ConvStep):
            if step.depthwise:
                return [self._products.depthwise(step)]
            return [self._products.conv(step, lane)]
        if isinstance(step, LinearStep):
            return [self._products.linear(step, lane)]
        if isinstance(step, PoolStep):
            return [self._moves.pool(step)]
        if isinstance(step, AffineStep):
            return [self._moves.affine(step)]
        if isinstance(step, ConcatStep):
            copies = self._memory.placement.copies[step.output]
            return [self._moves.copy(step, *each) for each in copies]
        key = ("torch", self._memory.form.name, step.output)
        way = torch_step(self._memory, step, self._modules)
        return [Launch(step.output, step.operator, key, [way])]

    def finish(self) -> Callable[[], torch.Tensor]:
        """Gives the result as float32; a last linear layer has written that already."""
        memory = self._memory
        result, output = memory.result(), memory.plan.output
        if any(
            isinstance(each, LinearStep) and memory.is_result(each) for each in memory.plan.steps
        ):
            return lambda: result
        scale = self._numbers.scale(output)

        def finish() -> torch.Tensor:
            result.copy_(memory.view(output).reshape(result.shape))
            return result.mul_(scale) if scale != 1.0 else result

        return finish
