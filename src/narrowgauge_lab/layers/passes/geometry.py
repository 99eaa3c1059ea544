"""Convolutions, forward and backward, as one implicit matrix product: which pixels meet which taps.

Along one dimension, the result's pixel t is the sum over i < count of the operand's pixel
`stride · t + base + reach · i` (outside it is zero) times the window's tap `first + step · i`.
"""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

from narrowgauge_lab.layers.passes.problem import Problem

__all__ = ["Axis", "Phase", "forward_phase", "input_grad_phases"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """One dimension of the module's formula. `size`: pixels of the result that it gives."""

    size: int
    stride: int
    base: int
    reach: int
    count: int
    first: int
    step: int

    def inside(self, operand: int) -> bool:
        """Whether no pixel meets zeros around an operand of that size."""
        last = self.stride * (self.size - 1) + self.base + self.reach * (self.count - 1)
        return self.base >= 0 and last < operand


@dataclasses.dataclass(frozen=True)
class Phase:
    """The result's pixels from `start` on, every `spacing`, along both dimensions."""

    rows: Axis
    columns: Axis
    start: Tuple[int, int] = (0, 0)
    spacing: Tuple[int, int] = (1, 1)


def forward_phase(problem: Problem, window: Tuple[int, int], result: Tuple[int, int]) -> Phase:
    """All pixels of the forward pass."""
    axes = [
        Axis(result[at], problem.stride[at], -problem.padding[at], problem.dilation[at],
             window[at], 0, 1)
        for at in range(2)
    ]  # fmt: skip
    return Phase(axes[0], axes[1])


def input_grad_phases(
    problem: Problem, window: Tuple[int, int], image: Tuple[int, int]
) -> Tuple[Phase, ...]:
    """The input gradient, each of the stride's phases by itself: pixels that are as far apart as
    the stride meet the same taps. Pixels that no tap meets are in no phase; they are zero."""
    phases = []
    for down in range(min(problem.stride[0], image[0])):
        for right in range(min(problem.stride[1], image[1])):
            rows = _backward(problem, 0, down, window[0], image[0])
            columns = _backward(problem, 1, right, window[1], image[1])
            if rows is not None and columns is not None:
                phases.append(Phase(rows, columns, (down, right), problem.stride))
    return tuple(phases)


def _backward(problem: Problem, at: int, start: int, window: int, image: int) -> Optional[Axis]:
    """Tap r brings the gradient's pixel o to the input's pixel h = stride · o - padding +
    dilation · r. Of h = stride · t + start: o = t + (start + padding - dilation · r) / stride."""
    stride, far = problem.stride[at], start + problem.padding[at]
    taps: List[int] = [r for r in range(window) if (far - problem.dilation[at] * r) % stride == 0]
    if not taps:
        return None
    taps.reverse()  # the gradient's pixels then come in order
    shifts = [(far - problem.dilation[at] * r) // stride for r in taps]
    several = len(taps) > 1
    return Axis(
        size=-(-(image - start) // stride),
        stride=1,
        base=shifts[0],
        reach=shifts[1] - shifts[0] if several else 1,
        count=len(taps),
        first=taps[0],
        step=taps[1] - taps[0] if several else 1,
    )
