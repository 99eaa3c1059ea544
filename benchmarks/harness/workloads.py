"""Kernels of chosen length: twenty from 2 us to 20 ms, half bound by latency and half by memory.

Their lengths need not be exact, only known to be what both harnesses are given.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from narrowgauge_kernels.harness import time_kernel

COUNT, SHORTEST_S, LONGEST_S = 20, 2e-6, 20e-3
#: Large enough to pass every L2, and to be copied in some 0.1 ms.
BUFFER_BYTES = 512 << 20
_LIMIT_S = 5.0
_LEAST_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Workload:
    """A calibration kernel by its kind, the bytes of the buffer that it uses, and its repeats."""

    name: str
    kind: str
    bytes: int
    repeats: int
    seconds: float

    def part(self, buffer: torch.Tensor) -> torch.Tensor:
        """What it uses of a float32 buffer."""
        return buffer[: self.bytes // 4]


def make_buffer(device: torch.device) -> torch.Tensor:
    """float32, zeroed: multiplying and copying zeros draws the least power, so clocks stay."""
    return torch.zeros(BUFFER_BYTES // 4, device=device)


def make_workloads(buffer: torch.Tensor) -> list[Workload]:
    """COUNT kernels, their lengths equally far apart on a logarithmic scale."""
    chain, copy = _Line.of_chain(buffer), _Line.of_copy(buffer)
    step = (LONGEST_S / SHORTEST_S) ** (1 / (COUNT - 1))
    found = []
    for index in range(COUNT):
        seconds = SHORTEST_S * step**index
        made = _chain(chain, seconds) if index % 2 == 0 else _copy(copy, seconds)
        found.append(dataclasses.replace(made, name=f"{made.kind} {_readable(seconds)}"))
    return found


def chain_of(buffer: torch.Tensor, seconds: float) -> Workload:
    """A chain of dependent steps: their number sets its length exactly."""
    made = _chain(_Line.of_chain(buffer), seconds)
    return dataclasses.replace(made, name=f"{made.kind} {_readable(seconds)}")


@dataclasses.dataclass(frozen=True)
class _Line:
    """Length = `start` + `slope` · (steps of a chain, or bytes of a buffer that is copied)."""

    start: float
    slope: float

    @staticmethod
    def of_chain(buffer: torch.Tensor) -> _Line:
        return _Line._through(
            *((steps, _median("multiply-add", buffer, steps)) for steps in (10_000, 100_000))
        )

    @staticmethod
    def of_copy(buffer: torch.Tensor) -> _Line:
        sizes = (BUFFER_BYTES // 2, BUFFER_BYTES)
        return _Line._through(*((size, _median("copy", buffer[: size // 4], 1)) for size in sizes))

    @staticmethod
    def _through(one: tuple[int, float], other: tuple[int, float]) -> _Line:
        slope = (other[1] - one[1]) / (other[0] - one[0])
        return _Line(one[1] - slope * one[0], slope)


def _median(kind: str, buffer: torch.Tensor, repeats: int) -> float:
    samples = time_kernel(kind, buffer, repeats, 60, 1, None, _LIMIT_S)
    return float(samples[0, 10:].median())


def _chain(line: _Line, seconds: float) -> Workload:
    steps = max(1, round((seconds - line.start) / line.slope))
    return Workload("", "multiply-add", 1 << 20, steps, seconds)


def _copy(line: _Line, seconds: float) -> Workload:
    """One pass over part of the buffer, or several over as much of it as they need."""
    wanted = max(_LEAST_BYTES, int(max(0.0, seconds - line.start) / line.slope))
    repeats = math.ceil(wanted / BUFFER_BYTES)
    return Workload("", "copy", wanted // repeats // 64 * 64, repeats, seconds)


def _readable(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
