"""Which steps may run beside those after them: short kernels do not fill a device alone."""

from __future__ import annotations

from typing import Dict, List, Mapping, Tuple

from narrowgauge_lab.engines.own.gpu.steps import ConcatStep, ConvStep, Plan, sources

__all__ = ["besides"]


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
