"""What one unit of each stored value is worth in an 8-bit format: ranges seen on real images."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Sequence, Tuple

import torch
from torch import fx

from narrowgauge_lab.engines.own.gpu.formats import NumberFormat
from narrowgauge_lab.engines.own.gpu.steps import ConcatStep, Plan, PoolStep
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.observers import make_observer

__all__ = ["calibrate", "joined"]


def calibrate(
    graph: fx.GraphModule,
    plan: Plan,
    batches: Iterable[torch.Tensor],
    form: NumberFormat,
    observer: str,
    device: torch.device,
    leaders: Mapping[str, str],
) -> Dict[str, float]:
    """The scale of every value of the plan, from float images [B, C, H, W].

    `leaders`: for each stored value the one whose scale it shares; the largest of them counts.
    Raises CalibrationError without images, and for images that are not finite.
    """
    watch = _Watch(graph, {name: make_observer(observer) for name in plan.quantised()})
    count = 0
    with torch.no_grad():
        for batch in batches:
            count += batch.shape[0]
            watch.run(batch.to(device).float())
    if count == 0:
        raise CalibrationError(
            "there are no calibration images",
            why="the ranges of the activations are measured on images",
            next_step="give at least one batch [B, C, H, W]",
        )
    own = {name: _scale(*seen.range(), form) for name, seen in watch.observers.items()}
    shared: Dict[str, float] = {}
    for name, scale in own.items():
        leader = leaders.get(name, name)
        shared[leader] = max(shared.get(leader, 0.0), scale)
    return {name: shared[leaders.get(name, name)] for name in {*own, *leaders}}


def joined(plan: Plan) -> Sequence[Tuple[str, str]]:
    """Values that have to have one scale since they are only moved: before and after a maximum, and
    what is put together."""
    pairs = []
    for step in plan.steps:
        if isinstance(step, PoolStep) and step.kind == "max":
            pairs.append((step.source, step.output))
        elif isinstance(step, ConcatStep):
            pairs += [(source, step.output) for source in step.sources]
    return pairs


class _Watch(fx.Interpreter):
    """Runs the float graph and shows named values to their observers."""

    def __init__(self, graph: fx.GraphModule, observers: Mapping[str, Any]) -> None:
        super().__init__(graph)
        self.observers = dict(observers)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.observers:
            self.observers[n.name].update(value)
        return value


def _scale(low: torch.Tensor, high: torch.Tensor, form: NumberFormat) -> float:
    largest = max(abs(float(low)), abs(float(high)))
    return largest / form.limit if largest > 0 else 1.0
