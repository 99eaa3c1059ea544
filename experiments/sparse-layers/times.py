"""The times of a layer by our kernel and by what is beside it, and the figures that rows make."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Callable, Dict, List, Sequence, Tuple

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure import (
    Comparison,
    Samples,
    TimingPlan,
    interleave,
    measure_time,
    with_hidden_launches,
)
from narrowgauge_lab.measure.recording import record_samples

from .gemm import ALGORITHMS
from .looking import Call
from .maps import Layer
from .ours import Ours
from .problem import Peer

__all__ = [
    "DENSE",
    "SELECTED",
    "WAYS",
    "Times",
    "in_turns",
    "measure_layer",
    "record_layer",
    "record_together",
]

_WARM_UP_LIMITS = 2.0
#: What `times_dense` is the fastest of: with their ReLU, at the row's precision.
DENSE = ("torch", "torch_last", "torch_packed", "cudnn")
#: The layer that chooses between dense and sparse itself.
SELECTED = "selected"
#: The same layer told what to be: by peer, what `SparseConv2d.by` is given.
WAYS = {"selected_sparse": "sparse", "selected_dense": "dense"}
#: Ratios of several peers: by metric, the peers of which the fastest counts.
_FASTEST: Dict[str, Tuple[str, ...]] = {"times_gemm": tuple(ALGORITHMS), "times_dense": DENSE}
_RATE = "macs_per_second"
#: Ratios that a CPU records under a name of its own too, which its claims are of.
_CPU_TOO = ("times_dense", "selector_over_best")


@dataclasses.dataclass(frozen=True, eq=False)
class Times:
    """Of one layer. `samples`: of ours, alone or in turns with the first peer; `beside`: by peer,
    ours and the peer in turns. `ways`: by name of WAYS, the layer told what to be and the one that
    chooses, in turns. `device`: its type."""

    layer: Layer
    samples: Samples
    beside: Dict[str, Comparison]
    ways: Dict[str, Comparison] = dataclasses.field(default_factory=dict)
    device: str = "cpu"

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
                # By what was taken in turns with ours: drift between peers says nothing.
                made[metric] = min((self.beside[name].ratios for name in having), key=_middle)
        if SELECTED in self.beside:
            made["selector_over_all"] = self._over_all()
        if self.ways:
            # The faster way is the one that the layer which chooses is slowest beside.
            made["selector_over_best"] = max(
                (way.ratios for way in self.ways.values()), key=_middle
            )
        if self.device == "cpu":
            made.update({f"{name}_cpu": made[name] for name in _CPU_TOO if name in made})
        return made

    def _over_all(self) -> Tuple[float, ...]:
        """Time of the layer that chooses, over that of the fastest of ours and the dense peers."""
        over_ours = self.beside[SELECTED].ratios
        dense = [self.median(name) for name in DENSE if name in self.beside]
        ours = self.median()
        best = min([ours, *dense])
        return tuple(ratio * ours / best for ratio in over_ours)


def _middle(ratios: Sequence[float]) -> float:
    return statistics.median(ratios)


def in_turns(ctx: RowContext, first: Call, second: Call, waits: bool = False) -> Comparison:
    """Both as the row says; on a GPU without their launches, where those can be hidden. `waits`:
    one of them waits for the device, and nobody has to find out."""

    def take(plan: TimingPlan) -> Comparison:
        return interleave(first, second, ctx.device, plan, ctx.parameters["pairs"])

    return take(_plan(ctx)) if waits else with_hidden_launches(take, ctx.device, _plan(ctx))


def _alone(ctx: RowContext, call: Call) -> Samples:
    return with_hidden_launches(
        lambda plan: measure_time(call, ctx.device, plan), ctx.device, _plan(ctx)
    )


def _plan(ctx: RowContext) -> TimingPlan:
    limit = ctx.parameters["limit_s"]
    return TimingPlan(limit_s=limit, warm_up_limit_s=_WARM_UP_LIMITS * limit)


def measure_layer(ctx: RowContext, layer: Layer, ours: Ours, peers: Sequence[Peer]) -> Times:
    """Each peer in turns with ours, and the layer that chooses in turns with each of WAYS; without
    any, ours alone. Records nothing."""
    calls = {peer.name: peer.call for peer in peers}
    beside = {
        peer.name: in_turns(ctx, ours.call, peer.call, peer.waits)
        for peer in peers
        if peer.name not in WAYS
    }
    ways = {name: in_turns(ctx, calls[name], calls[SELECTED]) for name in WAYS if name in calls}
    first = next(iter(beside.values()), None)
    samples = _alone(ctx, ours.call) if first is None else first.first
    return Times(layer, samples, beside, ways, ctx.device.type)


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
