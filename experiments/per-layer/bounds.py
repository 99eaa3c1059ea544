"""What each resource alone would take for a step: the bus up, the bus down, the GPU, the CPU.

Nothing can be faster than the busiest of them, however well they overlap. The work is the step's
own: the copies that its ledger counted, by size; the products with their operands as they arrive,
and what the GPU packs; what the host packs, unpacks and copies aside, the loss and the optimiser.
Python between them is not in it.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_contract.placement import PASSES
from narrowgauge_kernels.library import has_kernels
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.layers.hetero.convert import problem_of
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.ledger import Interval
from narrowgauge_lab.layers.hetero.wire import DTYPES, Incoming, Outgoing
from narrowgauge_lab.layers.passes import Operand, Passes, Problem, passes_for
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.timing import Samples, TimingPlan, measure_time

from .subject import LAYER, Training
from .times import PARTS, plan_for

__all__ = ["record_bounds"]

RESOURCES = ("up", "down", "gpu", "cpu")
_CPU = torch.device("cpu")
#: Of the row's limit, for each of twelve measurements.
_SHARE = 0.25

Call = Callable[[], Any]


def record_bounds(
    ctx: RowContext, training: Training, stages: Sequence[Interval], times: Dict[str, Samples]
) -> None:
    """Record `forward_up_alone` and its like, raw, and `…_over_bound`: a part's samples over the
    largest of its resources' medians. The fact `bound` says which it was.

    A plan that does not send all three products over the bus has no such bound; `bound_missing`
    says so. Where the CPU stands in, one CPU is all four resources.
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
            work = works.of(part, resource)
            if not work.calls:
                continue
            samples = _timed(work, training.device, plan, hides and resource != "cpu")
            record_samples(ctx, f"{part}_{resource}_alone", samples)
            medians[resource] = statistics.median(samples.seconds)
        busiest = max(medians, key=lambda name: medians[name])
        bounds[part] = {"seconds": medians[busiest], "resource": busiest}
        ratios = [each / medians[busiest] for each in times[part].seconds]
        record_samples(ctx, f"{part}_over_bound", times[part], ratios, "1")
    ctx.fact("bound", bounds)


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
        self._products = _Products(training, self._memory)

    def of(self, part: str, resource: str) -> _Work:
        if resource in ("up", "down"):
            return _Work(tuple(self._copies(part, resource)), self._device)
        by_part = self._products.gpu if resource == "gpu" else self._products.cpu
        names = ("forward", "backward") if part == "step" else (part,)
        calls = [call for name in names for call in by_part[name]]
        if part == "step" and resource == "cpu":
            calls += self._products.elsewhere
        return _Work(tuple(calls), self._device if resource == "gpu" else _CPU)

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


class _Products:
    """What the GPU and the host compute: by part, on operands that were sent beforehand."""

    def __init__(self, training: Training, memory: HostMemory) -> None:
        self._training, self._memory = training, memory
        self._bus = training.converted.bus
        self._wire = training.plan.transfers.wire
        conv = training.model.conv
        problem = problem_of(conv)
        assert isinstance(problem, Problem)
        images = training.batches[0].detach()
        outputs = problem.output_shape(images.shape, conv.weight.shape)
        above = torch.rand(outputs)
        weight = conv.weight.detach().to(training.device)
        x, fill_x = self._sent(images, "input")
        grad, fill_grad = self._sent(above, "grad_output")
        forward, by_input, by_weight = (self._passes(name, problem) for name in PASSES)
        shape, window = tuple(images.shape), tuple(conv.weight.shape)
        by_weight.weight_grad(grad, x, window)  # some kernels are chosen at a first call
        self.gpu: Dict[str, List[Call]] = {
            "forward": [self._packed(lambda: forward.forward(x, weight, None), outputs, "output")],
            "backward": [
                self._packed(lambda: by_input.input_grad(grad, weight, shape), shape, "grad_input"),
                lambda: by_weight.weight_grad(grad, x, window),
            ],
        }
        self.cpu: Dict[str, List[Call]] = {
            "forward": [*fill_x, *self._unpacked(outputs, "output")],
            "backward": [*fill_grad, *self._unpacked(shape, "grad_input")],
        }
        self.elsewhere = [self._elsewhere(above)]

    def _passes(self, name: str, problem: Problem) -> Passes:
        placed = self._training.plan.placement(LAYER).of(name)
        received = {"forward": "output", "input_grad": "grad_input"}.get(name)
        wire = self._wire[received] if received else "fp32"
        dtype = torch.float32 if wire == "int8" else DTYPES[wire]
        return passes_for(placed.precision, self._training.device, problem, dtype)

    def _sent(self, tensor: torch.Tensor, name: str) -> Tuple[Operand, List[Call]]:
        """The tensor on the device as it arrives there, and what the host does to send it."""
        count = len(tensor)
        outgoing = Outgoing(
            tensor, self._wire[name], name, device=self._training.device, host=self._memory,
            codecs=self._bus.codecs, seed=None, direct=self._bus.direct(tensor),
        )  # fmt: skip
        if outgoing.fills:
            outgoing.fill(0, count)
        self._bus.move(outgoing.copies(0, count), up=True)
        self._training.finish()
        return outgoing.piece(0, count), [lambda: outgoing.fill(0, count)] if outgoing.fills else []

    def _packed(self, product: Call, shape: Sequence[int], name: str) -> Call:
        """A product, and what the GPU does to its result before it goes."""
        incoming = Incoming(
            shape, self._wire[name], name, host=self._memory, codecs=self._bus.codecs
        )
        incoming.begin(product())
        return lambda: incoming.copies(product(), 0, shape[0], None)

    def _unpacked(self, shape: Sequence[int], name: str) -> List[Call]:
        """What the host does to a result that has come, in memory that is new to it as there."""
        wire, near = self._wire[name], self._bus.codecs.near
        if wire == "fp32":
            return []
        came = torch.ones(tuple(shape), dtype=DTYPES[wire])
        if wire != "int8":
            return [lambda: torch.empty(tuple(shape)).copy_(came)]
        scale = torch.ones(shape[1])
        return [lambda: near.unpack(torch.empty(tuple(shape)), came, scale)]

    def _elsewhere(self, outputs: torch.Tensor) -> Call:
        """Loss and optimiser, on tensors of their own."""
        leaf = outputs.clone().requires_grad_()
        weight = torch.nn.Parameter(self._training.weight.detach().clone())
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.RMSprop([weight], lr=1e-3)
        target = self._training.target

        def run() -> None:
            leaf.grad = None
            F.mse_loss(leaf, target, reduction="sum").backward()
            optimizer.step()

        return run
