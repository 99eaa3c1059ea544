"""The times of a layer's kernel and of what is beside it, and the figures that rows make of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.measure import Comparison, Samples, TimingPlan, interleave, measure_time
from narrowgauge_lab.measure.kernels import kernel_names
from narrowgauge_lab.measure.recording import record_samples

from .peers import Peer
from .subject import Call, Subject

__all__ = ["Times", "measure_layer", "record_layer", "record_together"]

#: Of the limit of samples: a warm-up that does not become steady ends after so many.
_WARM_UP_LIMITS = 2.0
_RATE, _COST = "macs_per_second", "cost_over_exact"
#: Where torch's own convolution took none of Winograd's kernels.
_DIRECT = "times_torch_direct"


@dataclasses.dataclass(frozen=True)
class Beside:
    """A ratio for each pair of samples that took turns, and the kernel's own of these."""

    samples: Samples
    ratios: Tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Times:
    """Of one layer. `samples`: of the kernel; `beside`: by metric, what it was in turns with.
    `winograd`: whether torch's convolution was by Winograd's algorithm, where kernels have names.
    """

    name: str
    macs: int
    samples: Samples
    beside: Dict[str, Beside]
    winograd: Optional[bool] = None


def measure_layer(ctx: RowContext, subject: Subject, peers: Sequence[Peer]) -> Times:
    """Each peer in turns with the kernel; without any, the kernel alone. Records nothing."""
    limit, device = ctx.parameters["limit_s"], ctx.device
    plan = TimingPlan(
        limit_s=limit, warm_up_limit_s=_WARM_UP_LIMITS * limit, hide_launches=device.type == "cuda"
    )
    beside: Dict[str, Beside] = {}
    winograd: Optional[bool] = None
    for peer in peers:
        found = _in_turns(subject.call, peer.call, device, plan, ctx.parameters["pairs"])
        if peer.name == "exact":
            beside[_COST] = Beside(found.first, tuple(1.0 / ratio for ratio in found.ratios))
            continue
        beside[f"times_{peer.name}"] = Beside(found.first, found.ratios)
        if peer.name == "torch" and not subject.operands.shape.linear:
            winograd = _by_winograd(peer.call, device)
    if winograd is False:
        beside[_DIRECT] = beside["times_torch"]
    first = next(iter(beside.values()), None)
    samples = measure_time(subject.call, device, plan) if first is None else first.samples
    return Times(subject.operands.shape.name, subject.operands.macs, samples, beside, winograd)


def _in_turns(
    one: Call, other: Call, device: torch.device, plan: TimingPlan, pairs: int
) -> Comparison:
    """With launches in the times where so many cannot be hidden: the samples say which it was."""
    try:
        return interleave(one, other, device, plan, pairs)
    except HeldTooLongError:
        return interleave(one, other, device, dataclasses.replace(plan, hide_launches=False), pairs)


def _by_winograd(call: Call, device: torch.device) -> Optional[bool]:
    """By the names of the kernels; None on a CPU, and where the row is profiled already."""
    if device.type != "cuda":
        return None
    try:
        return any("winograd" in kernel.name.lower() for kernel in kernel_names(call))
    except NotApplicableError:
        return None


def record_layer(ctx: RowContext, times: Times) -> None:
    """Record the layer's own figures, `macs_per_second.NAME` and so on: raw, in order."""
    rates = [times.macs / seconds for seconds in times.samples.seconds]
    record_samples(ctx, f"{_RATE}.{times.name}", times.samples, rates, "MAC/s")
    for name, beside in times.beside.items():
        record_samples(ctx, f"{name}.{times.name}", beside.samples, beside.ratios, "1")


def record_together(ctx: RowContext, layers: Sequence[Times]) -> None:
    """Record the figures of all layers, a layer that is listed twice counting twice.

    `macs_per_second`: the products of all over the time of all. Ratios: their geometric mean over
    the layers that have them, which the fact `layers_beside` counts. Sample i is made of each
    layer's sample i, so their spread is that of such runs through the layers.
    """
    if not layers:
        return
    total = sum(times.macs for times in layers)
    rates = [total / sum(seconds) for seconds in zip(*(times.samples.seconds for times in layers))]
    record_samples(ctx, _RATE, layers[0].samples, rates, "MAC/s")
    counts: Dict[str, int] = {}
    for name in dict.fromkeys(name for times in layers for name in times.beside):
        having = [times.beside[name] for times in layers if name in times.beside]
        together = zip(*(each.ratios for each in having))
        means = [math.exp(sum(map(math.log, ratios)) / len(ratios)) for ratios in together]
        record_samples(ctx, name, having[0].samples, means, "1")
        counts[name] = len(having)
    ctx.fact("layers_beside", counts)
