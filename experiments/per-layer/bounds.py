"""What each resource alone would take for a step: the bus up, the bus down, the GPU, the CPU.

Nothing should be faster than the busiest of them, however well they overlap. The work is the step's
own: the copies that its ledger counted, by size; the products with their operands as they arrive,
and what the GPU packs; what the host packs, unpacks and copies aside, the loss and the optimiser.
Python between them is not in it. The products count as they are faster, whole or in the parts that
the pass takes them in: else a pass could be faster than its bound. A row that is so all the same
has a bound that is none, and is INVALID.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Dict, List, Sequence, Tuple

import torch

from narrowgauge_contract.placement import PASSES
from narrowgauge_kernels.library import has_kernels
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.ledger import Interval
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.timing import Samples, TimingPlan, measure_time

from .products import Call, Products
from .subject import LAYER, Training
from .times import PARTS, plan_for

__all__ = ["record_bounds"]

RESOURCES = ("up", "down", "gpu", "cpu")
_CPU = torch.device("cpu")
#: Of the row's limit, for each of up to fourteen measurements.
_SHARE = 0.25
#: A part is measured at another time than its bound; by less than this they may contradict.
_CLEARLY = 0.95


def record_bounds(
    ctx: RowContext, training: Training, stages: Sequence[Interval], times: Dict[str, Samples]
) -> None:
    """Record `forward_up_alone` and its like, raw, and `…_over_bound`: a part's samples over the
    largest of its resources' medians. The fact `bound` says which it was.

    A plan that does not send all three products over the bus has no such bound; `bound_missing`
    says so. Where the CPU stands in, one CPU is all four resources: what else it has to do changes
    any of them, and no row is INVALID for what that makes of their ratios.
    """
    missing = _missing(training)
    if missing:
        ctx.fact("bound_missing", missing)
        return
    plan = plan_for(ctx, _SHARE)
    hides = training.device.type == "cuda" and has_kernels("cuda")
    works = _Works(training, stages)
    bounds: Dict[str, Dict[str, Any]] = {}
    for part in PARTS:
        medians = {}
        for resource in RESOURCES:
            ways = {
                way: _timed(work, training.device, plan, hides and resource != "cpu")
                for way, work in works.of(part, resource).items()
                if work.calls
            }
            if not ways:
                continue
            medians[resource], way = min((_median(each), name) for name, each in ways.items())
            record_samples(ctx, f"{part}_{resource}_alone", ways[way])
            if resource == "gpu":
                works.chosen[part] = way
        busiest = max(medians, key=lambda name: medians[name])
        bounds[part] = {"seconds": medians[busiest], "resource": busiest}
        ratios = [each / medians[busiest] for each in times[part].seconds]
        record_samples(ctx, f"{part}_over_bound", times[part], ratios, "1")
        if not _stands_in(training):
            require_bound(ctx, part, statistics.median(ratios), busiest)
    ctx.fact("bound", bounds)
    ctx.fact("bound_products", {part: works.chosen[part] for part in ("forward", "backward")})


def require_bound(ctx: RowContext, part: str, ratio: float, resource: str) -> None:
    """A part that is clearly faster than what bounds it makes the row INVALID."""
    if ratio < _CLEARLY:
        ctx.invalid(
            f"{part} takes {ratio:.3f} of the time that {resource} alone takes for its work: what "
            "was timed alone is not what runs in it, so that this bounds nothing"
        )


def _stands_in(training: Training) -> bool:
    return training.device.type != "cuda"


def _median(samples: Samples) -> float:
    return float(statistics.median(samples.seconds))


def _missing(training: Training) -> str:
    placed = training.plan.placement(LAYER)
    if training.plan.elsewhere != "cpu":
        return "everything is on the accelerator: no resource waits for another"
    for name in PASSES:
        each = placed.of(name)
        if each.device != "accelerator" or each.backend != "torch":
            return f"{name} runs by {each.backend} on {each.device}: nothing of it overlaps"
    return ""


@dataclasses.dataclass(frozen=True)
class _Work:
    """What one resource does; nothing at all where `calls` is empty."""

    calls: Tuple[Call, ...]
    device: torch.device

    def __call__(self) -> None:
        for call in self.calls:
            call()


def _timed(work: _Work, device: torch.device, plan: TimingPlan, hides: bool) -> Samples:
    if work.device.type != "cuda":
        return measure_time(work, _CPU, plan)
    if hides:
        try:
            return measure_time(work, device, dataclasses.replace(plan, hide_launches=True))
        except HeldTooLongError:
            pass  # it waits for the device itself, as copies from pageable memory do
    return measure_time(work, device, plan)


class _Works:
    """The work of each part and resource."""

    def __init__(self, training: Training, stages: Sequence[Interval]) -> None:
        self._training, self._device = training, training.device
        bus = training.converted.bus
        bus.open()
        self._bus, self._memory = bus, HostMemory(bus.host.locks)
        self._stages = stages
        self._products = Products(training, self._memory)
        #: The way of the GPU's products that was the faster one, by part.
        self.chosen: Dict[str, str] = {}

    def of(self, part: str, resource: str) -> Dict[str, _Work]:
        """By way: one, but for the GPU's products. Those of a step are in the ways that were
        `chosen` for its passes."""
        products = self._products
        if resource in ("up", "down"):
            return {"": _Work(tuple(self._copies(part, resource)), self._device)}
        if resource == "gpu":
            ways = dict(products.gpu[part]) if part != "step" else {"": self._chosen()}
            return {way: _Work(tuple(calls), self._device) for way, calls in ways.items()}
        if part != "step":
            return {"": _Work(tuple(products.cpu[part]), _CPU)}
        calls = [*products.cpu["forward"], *products.cpu["backward"], *products.elsewhere]
        return {"": _Work(tuple(calls), _CPU)}

    def _chosen(self) -> List[Call]:
        gpu = self._products.gpu
        return [call for part in gpu for call in gpu[part][self.chosen[part]]]

    def _copies(self, part: str, resource: str) -> List[Call]:
        sizes = [
            each.to_device if resource == "up" else each.from_device
            for each in self._stages
            if part in ("step", "forward" if each.pass_ == "forward" else "backward")
        ]
        sizes = [size for size in sizes if size]
        if not sizes:
            return []
        near = self._memory.fresh((max(sizes),), torch.uint8).fill_(1)
        far = torch.ones(max(sizes), dtype=torch.uint8, device=self._device)
        into, source = (far, near) if resource == "up" else (near, far)
        waits = self._device.type == "cuda" and not self._bus.queues
        return [_copy(into[:size], source[:size], not waits) for size in sizes]


def _copy(into: torch.Tensor, source: torch.Tensor, queued: bool) -> Call:
    return lambda: into.copy_(source, non_blocking=queued)
