"""Which steps may run beside those after them: short kernels do not fill a device alone."""

from __future__ import annotations

import dataclasses
from typing import Dict, Generic, List, Mapping, Sequence, Tuple, TypeVar

from narrowgauge_lab.engines.own.gpu.steps import ConcatStep, ConvStep, Plan, sources

__all__ = ["Queued", "besides", "in_turn"]

T = TypeVar("T")


def besides(plan: Plan, copies: Mapping[str, Tuple[Tuple[str, int], ...]]) -> Dict[int, int]:
    """Convolutions whose result the next step does not need: place in the plan, and the place of
    the step that has to wait for it (the number of steps where none reads it). `copies`: what each
    concatenation copies, by its output."""
    readers: Dict[str, List[int]] = {}
    for place, step in enumerate(plan.steps):
        for name in sources(step):
            readers.setdefault(name, []).append(place)

    def first(name: str) -> int:
        """The first step that reads a value, looking through what finds it in its place."""
        found = [len(plan.steps)]
        for place in readers.get(name, []):
            step = plan.steps[place]
            reads = not isinstance(step, ConcatStep) or name in dict(copies[step.output])
            found.append(place if reads else first(step.output))
        return min(found)

    found: Dict[int, int] = {}
    for place, step in enumerate(plan.steps):
        if not isinstance(step, ConvStep):
            continue
        waiting = first(step.output)
        between = [
            other for other in plan.steps[place + 1 : waiting] if not isinstance(other, ConcatStep)
        ]
        if between:
            found[place] = waiting
    return found


@dataclasses.dataclass(frozen=True)
class Queued(Generic[T]):
    """A launch in its turn.

    `aside`: it is on the second stream. `joins`: before it the first stream waits for the second;
    `forks`: then the second waits for the first. `follows`: it waits for nothing but what was
    launched right before it, on the same stream.
    """

    launch: T
    aside: bool
    joins: bool
    forks: bool
    follows: bool


def in_turn(steps: Sequence[Sequence[T]], waiting: Mapping[int, int]) -> List[Queued[T]]:
    """The launches of all steps in order. `waiting`: of `besides`; without it there is one stream.
    What comes before the first is on the first stream, as is what comes after the last, which has
    to wait for the second."""
    queue: List[Queued[T]] = []
    waited_for: List[int] = []
    joins, before = False, False
    for place, step in enumerate(steps):
        if place in waited_for:
            joins, waited_for = True, []
        aside = place in waiting
        for number, launch in enumerate(step):
            forks = aside and number == 0
            follows = aside == before and not joins and not forks
            queue.append(Queued(launch, aside, joins, forks, follows))
            joins, before = False, aside
        if aside:
            waited_for.append(waiting[place])
    return queue
