"""What is compared with itself. Nothing is allocated while it runs, where torch lets that be."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Callable, Dict, Tuple

import torch
from torch.nn import functional

from narrowgauge_contract.errors import BadValueError

__all__ = ["SIZES", "repeated", "second_iterations", "workload"]

Operation = Callable[[], Any]

#: copy: floats; matmul: rows of square matrices; conv: images, channels, pixels a side;
#: launch: floats.
SIZES: Dict[str, Dict[str, Tuple[int, ...]]] = {
    "copy": {"tiny": (1 << 12,), "small": (1 << 18,), "medium": (1 << 22,), "large": (1 << 26,)},
    "matmul": {"tiny": (32,), "small": (128,), "medium": (1024,), "large": (4096,)},
    "conv": {
        "tiny": (1, 8, 8),
        "small": (1, 32, 14),
        "medium": (8, 64, 56),
        "large": (32, 256, 56),
    },
    "launch": {"tiny": (1,), "small": (32,), "medium": (256,), "large": (1024,)},
}


def workload(name: str, size: str, device: torch.device) -> Operation:
    """The operation, with its operands already on `device`: random ones, since zeros are faster."""
    shape = SIZES[name][size]
    if name == "copy":
        source = torch.rand(shape[0], device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if name == "matmul":
        left, right = (torch.rand(shape[0], shape[0], device=device) for _ in range(2))
        product = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=product)
    if name == "conv":
        images, channels, pixels = shape
        maps = torch.rand(images, channels, pixels, pixels, device=device)
        kernels = torch.rand(channels, channels, 3, 3, device=device)
        return lambda: functional.conv2d(maps, kernels, padding=1)
    numbers = torch.rand(shape[0], device=device)
    return lambda: numbers.neg_()


def repeated(operation: Operation, iterations: int) -> Operation:
    """One call that runs the operation so many times."""

    def call() -> None:
        for _ in range(iterations):
            operation()

    return call


def second_iterations(iterations: int, planted: float) -> int:
    """How often the second side runs the operation, for a slowdown of exactly `planted` percent.

    Raises BadValueError where that is no whole number: about 2 % planted proves nothing.
    """
    slowed = iterations * (1 + Fraction(str(planted)) / 100)
    if slowed.denominator != 1:
        step = (Fraction(str(planted)) / 100).denominator
        raise BadValueError(
            f"{planted:g} % of {iterations} iterations is no whole number",
            next_step=f"give a multiple of {step}: -p iterations={step}",
        )
    return int(slowed)
