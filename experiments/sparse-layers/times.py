"""The times of a layer by our kernel and by what is beside it, and the figures that rows make."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Callable, Dict, List, Sequence, Tuple

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.measure import Comparison, Samples, TimingPlan, interleave, measure_time
from narrowgauge_lab.measure.recording import record_samples

from .gemm import ALGORITHMS
from .maps import Layer
from .ours import Ours
from .peers import Peer

__all__ = [
    "DENSE",
    "SELECTED",
    "Times",
    "measure_layer",
    "plan_of",
    "record_layer",
    "record_together",
]

_WARM_UP_LIMITS = 2.0
#: What `times_dense` is the fastest of: with their ReLU, at the row's precision.
DENSE = ("torch", "cudnn")
#: The layer that chooses between dense and sparse itself.
SELECTED = "selected"
#: Ratios of several peers: by metric, the peers of which the fastest counts.
_FASTEST: Dict[str, Tuple[str, ...]] = {"times_gemm": tuple(ALGORITHMS), "times_dense": DENSE}
_RATE = "macs_per_second"


@dataclasses.dataclass(frozen=True, eq=False)
class Times:
    """Of one layer. `samples`: of ours, alone or in turns with the first peer; `beside`: by peer,
    ours and the peer in turns."""

    layer: Layer
    samples: Samples
    beside: Dict[str, Comparison]

    def median(self, peer: str = "") -> float:
        """Seconds of ours, or of a peer."""
        samples = self.beside[peer].second if peer else self.samples
        return statistics.median(samples.seconds)

    def ratios(self) -> Dict[str, Tuple[float, ...]]:
        """By metric, one for each pair: how many times as fast ours is."""
        made = {
            f"times_{name}": beside.ratios
            for name, beside in self.beside.items()
            if name != SELECTED
        }
        for metric, names in _FASTEST.items():
            having = [name for name in names if name in self.beside]
            if having:
                made[metric] = self.beside[min(having, key=self.median)].ratios
        if SELECTED in self.beside:
            made["selector_over_best"] = self._selected()
        return made

    def _selected(self) -> Tuple[float, ...]:
        """Time of the layer that chooses, over that of the better one of sparse and dense."""
        over_ours = self.beside[SELECTED].ratios
        dense = [self.median(name) for name in DENSE if name in self.beside]
        ours = self.median()
        best = min([ours, *dense])
        return tuple(ratio * ours / best for ratio in over_ours)


def plan_of(ctx: RowContext) -> TimingPlan:
    """How the row's samples are taken."""
    limit = ctx.parameters["limit_s"]
    return TimingPlan(
        limit_s=limit,
        warm_up_limit_s=_WARM_UP_LIMITS * limit,
        hide_launches=ctx.device.type == "cuda",
    )


def measure_layer(ctx: RowContext, layer: Layer, ours: Ours, peers: Sequence[Peer]) -> Times:
    """Each peer in turns with ours; without any, ours alone. Records nothing."""
    plan, device, pairs = plan_of(ctx), ctx.device, ctx.parameters["pairs"]
    beside: Dict[str, Comparison] = {}
    for peer in peers:
        try:
            beside[peer.name] = interleave(ours.call, peer.call, device, plan, pairs)
        except HeldTooLongError:
            # With launches in the times where so many cannot be hidden: the samples say so.
            shown = dataclasses.replace(plan, hide_launches=False)
            beside[peer.name] = interleave(ours.call, peer.call, device, shown, pairs)
    first = next(iter(beside.values()), None)
    samples = measure_time(ours.call, device, plan) if first is None else first.first
    return Times(layer, samples, beside)


def record_layer(ctx: RowContext, times: Times) -> None:
    """`seconds.NAME`, `macs_per_second.NAME` (of the dense convolution, zeros counted) and the
    ratios, `times_….NAME`: raw, in order."""
    name, samples = times.layer.shape.name, times.samples
    record_samples(ctx, f"seconds.{name}", samples)
    rates = [times.layer.macs / seconds for seconds in samples.seconds]
    record_samples(ctx, f"{_RATE}.{name}", samples, rates, "MAC/s")
    for metric, ratios in times.ratios().items():
        record_samples(ctx, f"{metric}.{name}", samples, ratios, "1")


def record_together(ctx: RowContext, layers: Sequence[Times]) -> None:
    """Of all layers: geometric means, arithmetic ones behind `_mean`, and the geometric ones of
    layers with real maps behind `_real`. Sample i is made of each layer's sample i; the fact
    `layers_beside` counts the layers that have each ratio."""
    if not layers:
        return
    total = sum(times.layer.macs for times in layers)
    rates = [total / sum(seconds) for seconds in zip(*(each.samples.seconds for each in layers))]
    record_samples(ctx, _RATE, layers[0].samples, rates, "MAC/s")
    ratios = [(times, times.ratios()) for times in layers]
    counts: Dict[str, int] = {}
    for metric in dict.fromkeys(metric for _, made in ratios for metric in made):
        having = [(times, made[metric]) for times, made in ratios if metric in made]
        counts[metric] = len(having)
        _record_means(ctx, metric, having)
    ctx.fact("layers_beside", counts)


def _record_means(
    ctx: RowContext, metric: str, having: List[Tuple[Times, Tuple[float, ...]]]
) -> None:
    every = [made for _, made in having]
    real = [made for times, made in having if times.layer.source == "real"]
    samples = having[0][0].samples
    record_samples(ctx, metric, samples, _by_sample(every, _geometric), "1")
    record_samples(ctx, f"{metric}_mean", samples, _by_sample(every, statistics.mean), "1")
    if real:
        record_samples(ctx, f"{metric}_real", samples, _by_sample(real, _geometric), "1")


def _by_sample(
    layers: Sequence[Sequence[float]], mean: Callable[[Sequence[float]], float]
) -> List[float]:
    return [mean(each) for each in zip(*layers)]


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
