"""Where each value of a network lies: channels last, pixel after pixel, in one block of memory.

The sources of a concatenation are written to their places in its result, so that it costs nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Sequence, Set, Tuple

from narrowgauge_lab.engines.own.gpu.arena import Need, assign
from narrowgauge_lab.engines.own.gpu.formats import NumberFormat
from narrowgauge_lab.engines.own.gpu.lowering import Sizes
from narrowgauge_lab.engines.own.gpu.scheduling import besides
from narrowgauge_lab.engines.own.gpu.steps import ConcatStep, LinearStep, Plan, sources

__all__ = ["Place", "Placement", "one_scale", "place"]

#: A pixel begins at a multiple of this many bytes, where nothing else says how long it is.
_PIXEL_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Place:
    """`buffer`, whose pixels are `pixel` elements long, from element `offset` of each on.

    Channels, height and width are the value's; of a flat one 1 × 1 pixel.
    """

    buffer: str
    offset: int
    pixel: int
    channels: int
    height: int
    width: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """`places` by value; `begins`, `sizes` and `total` of the buffers in one block, in bytes;
    `copies`: by concatenation, the (source, first channel) that have to be copied after all;
    `waits`: the steps that may run beside those after them, and who has to wait for each."""

    places: Dict[str, Place]
    begins: Dict[str, int]
    sizes: Dict[str, int]
    total: int
    copies: Dict[str, Tuple[Tuple[str, int], ...]]
    waits: Dict[int, int]


def place(plan: Plan, sizes: Sizes, form: NumberFormat, batch: int) -> Placement:
    """Lay out every value that `plan` stores but its input, for `batch` images."""
    return _Placing(plan, sizes, form, batch).placement()


class _Placing:
    def __init__(self, plan: Plan, sizes: Sizes, form: NumberFormat, batch: int) -> None:
        self._plan, self._sizes, self._form, self._batch = plan, sizes, form, batch
        self._made = {step.output: n for n, step in enumerate(plan.steps, start=1)}
        self._last: Dict[str, int] = {}
        for n, step in enumerate(plan.steps, start=1):
            for name in sources(step):
                self._last[name] = n
        # The result is read when all is done.
        self._last[plan.output] = len(plan.steps) + 1
        self._dense = self._flattened()
        self._places: Dict[str, Place] = {}
        self._copies: Dict[str, Tuple[Tuple[str, int], ...]] = {}

    def placement(self) -> Placement:
        concats = [step for step in self._plan.steps if isinstance(step, ConcatStep)]
        # The last first: it has the longest list where a block adds to one again and again.
        for concat in reversed(concats):
            self._place_concat(concat)
        for step in self._plan.steps:
            if step.output not in self._places:
                self._places[step.output] = self._own(step.output)
        waits = besides(self._plan, self._copies)
        for at, waiting in waits.items():
            # What runs beside others reads and writes until somebody has waited for it.
            step = self._plan.steps[at]
            for name in (*sources(step), step.output):
                self._last[name] = max(self._last.get(name, 0), waiting + 1)
        needs = self._needs()
        begins, total = assign(needs)
        sizes = {need.name: need.size for need in needs}
        return Placement(self._places, begins, sizes, total, self._copies, waits)

    def _flattened(self) -> Set[str]:
        """Values that a linear layer reads through all pixels: nothing may lie between them."""
        return {
            step.source
            for step in self._plan.steps
            if isinstance(step, LinearStep) and self._shape(step.source)[1:] != (1, 1)
        }

    def _place_concat(self, concat: ConcatStep) -> None:
        if concat.output not in self._places and not self._is_prefix(concat):
            self._places[concat.output] = self._own(concat.output)
        root = self._places[concat.output]
        copies: List[Tuple[str, int]] = []
        offset = root.offset
        for name in concat.sources:
            channels, height, width = self._shape(name)
            wanted = Place(root.buffer, offset, root.pixel, channels, height, width)
            if self._may_move(name, concat):
                self._places[name] = wanted
            if self._places.get(name) != wanted:
                copies.append((name, offset - root.offset))
            offset += channels
        self._copies[concat.output] = tuple(copies)

    def _is_prefix(self, concat: ConcatStep) -> bool:
        """Place a concatenation whose sources lie side by side already; whether they do."""
        placed = [self._places.get(name) for name in concat.sources]
        first = placed[0]
        if first is None or concat.output in self._dense:
            return False
        offset = first.offset
        for name, each in zip(concat.sources, placed):
            if each is None or (each.buffer, each.offset) != (first.buffer, offset):
                return False
            offset += self._shape(name)[0]
        channels = self._shape(concat.output)[0]
        self._places[concat.output] = dataclasses.replace(first, channels=channels)
        return True

    def _may_move(self, name: str, concat: ConcatStep) -> bool:
        """Whether a source may be written into the concatenation: a step of ours makes it, it lies
        nowhere yet, and it comes once."""
        made_here = name in self._made
        return (
            made_here
            and name not in self._places
            and name not in self._dense
            and concat.sources.count(name) == 1
        )

    def _own(self, name: str) -> Place:
        channels, height, width = self._shape(name)
        step = max(1, _PIXEL_BYTES // self._form.width)
        pixel = channels if name in self._dense else -(-channels // step) * step
        return Place(name, 0, pixel, channels, height, width)

    def _shape(self, name: str) -> Tuple[int, int, int]:
        size = self._sizes[name]
        if len(size) == 3:
            return (size[0], size[1], size[2])
        return (size[0], 1, 1)

    def _needs(self) -> List[Need]:
        """One per buffer, alive from the first value written into it to the last one read."""
        spans: Dict[str, Tuple[int, int]] = {}
        for name, each in self._places.items():
            made = self._made[name]
            last = self._last.get(name, made)
            first, end = spans.get(each.buffer, (made, last))
            spans[each.buffer] = (min(first, made), max(end, last))
        return [
            Need(name, self._bytes(self._places[name]), first, end)
            for name, (first, end) in spans.items()
        ]

    def _bytes(self, root: Place) -> int:
        return self._batch * root.height * root.width * root.pixel * self._form.width


def one_scale(
    plan: Plan, placement: Placement, joined: Sequence[Tuple[str, str]]
) -> Dict[str, str]:
    """For each value the one whose scale it has to have: all in a buffer share one, and so do both
    sides of `joined`."""
    leader: Dict[str, str] = {}

    def find(name: str) -> str:
        while leader.get(name, name) != name:
            name = leader[name]
        return name

    for name, each in placement.places.items():
        leader[find(name)] = find(each.buffer)
    for one, other in joined:
        leader[find(one)] = find(other)
    return {name: find(name) for name in (plan.source, *placement.places)}
