"""Copies and conversions of any size: a start and so much per byte, fitted to what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from narrowgauge.planner.whatif import Machine
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.placement_costs import Costs

__all__ = ["WIDTH", "Line", "Rates", "fitted"]

#: Bytes of an element on the wire.
WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Line:
    """Seconds of something of a size: `start + size * per_unit`."""

    start: float
    per_unit: float

    def __call__(self, size: float) -> float:
        return self.start + size * self.per_unit


def fitted(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (size, seconds) with the least relative errors, neither part negative."""
    sizes, seconds = zip(*points, strict=True)
    taken = np.maximum(np.array(seconds, dtype=float), 1e-12)
    rows = np.column_stack([np.ones(len(taken)), np.array(sizes, dtype=float)])
    # Columns of the same length: HiGHS and NNLS alike go wrong where one is 1e7 times the other.
    scale = np.array([1.0, max(sizes)])
    found, _ = nnls(rows / scale / taken[:, None], np.ones(len(taken)))
    start, per_unit = found / scale
    return Line(float(start), float(per_unit))


class Rates:
    """Of one machine: the measured one, or that with changes."""

    def __init__(self, costs: Costs, machine: Machine) -> None:
        self._costs, self._machine = costs, machine
        self._copies = {
            (policy, direction): self._copied(policy, direction)
            for policy, direction in {(each.policy, each.direction) for each in costs.copies}
        }
        self._conversions = {
            key: self._converted(*key)
            for key in {(each.side, each.direction, each.wire) for each in costs.conversions}
        }

    def policies(self) -> tuple[str, ...]:
        """Those by which passes overlap: `mapped` where it was measured."""
        mapped = any(policy == "mapped" for policy, _ in self._copies)
        return ("overlapped", "mapped") if mapped else ("overlapped",)

    def copy(self, policy: str, direction: str, size: float) -> float:
        """Seconds of one copy of `size` bytes by a policy."""
        if self._machine.coherent or size <= 0:
            return 0.0
        queued = self._line(self._copies, (_MEASURED.get(policy, policy), direction))(size)
        if policy != "mapped":
            return queued
        return min(queued, self._line(self._copies, ("mapped", direction))(size))

    def per_byte(self, direction: str) -> float:
        """Of a copy so large that its start is nothing."""
        if self._machine.coherent:
            return 0.0
        return self._line(self._copies, ("pinned", direction)).per_unit

    def conversion(self, side: str, direction: str, wire: str, elements: float) -> float:
        """Seconds of packing or unpacking; nothing is done to fp32 that nobody has to copy aside.

        On the host fp32 is copied into page-locked memory, where tensors are not page-locked as
        they are.
        """
        if self._machine.coherent or elements <= 0:
            return 0.0
        if wire == "fp32" and (direction == "unpack" or side != "cpu" or not self._stages()):
            return 0.0
        if wire in ("fp16", "bf16") and side == "accelerator":
            return 0.0  # products take and give these themselves
        return self._line(self._conversions, (side, direction, wire))(elements)

    def _stages(self) -> bool:
        return not self._costs.stand_in and self._costs.page_locked != "all CPU tensors"

    def _line(self, lines: Mapping[Any, Line], key: tuple[str, ...]) -> Line:
        if key not in lines:
            raise DamagedRecordError(
                f"the costs have nothing measured for {' '.join(key)}",
                next_step="measure again: narrowgauge run hetero-plan",
            )
        return lines[key]

    def _copied(self, policy: str, direction: str) -> Line:
        line = _fit(
            self._costs.copies,
            lambda each: (each.policy, each.direction) == (policy, direction),
            lambda each: each.bytes,
        )
        bus, latency = self._machine.bus, self._machine.latency
        per_byte = 1.0 / bus.per_second if bus.per_second else line.per_unit / bus.factor
        start = line.start if latency is None else min(line.start, latency)
        return Line(start, per_byte)

    def _converted(self, side: str, direction: str, wire: str) -> Line:
        line = _fit(
            self._costs.conversions,
            lambda each: (each.side, each.direction, each.wire) == (side, direction, wire),
            lambda each: each.elements,
        )
        factor = self._machine.cpu if side == "cpu" else self._machine.accelerator
        return Line(line.start / factor, line.per_unit / factor)


#: What was measured for a policy: its copies are queued from page-locked memory.
_MEASURED = {"overlapped": "pinned", "mapped": "pinned"}


def _fit(costs: Sequence[Any], wanted: Callable[[Any], bool], size: Callable[[Any], float]) -> Line:
    return fitted([(size(each), median(each.seconds)) for each in costs if wanted(each)])
