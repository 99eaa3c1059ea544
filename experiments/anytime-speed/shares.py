"""The heads beside the backbone, and compaction beside masking; both sides take turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_kernels.errors import KernelsError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.adaptive import Adaptive, adaptive, masked
from narrowgauge_lab.anytime.buckets import BucketedExits
from narrowgauge_lab.anytime.deadline import measure_stages
from narrowgauge_lab.anytime.device_exit import CapturedStages, all_stages
from narrowgauge_lab.anytime.policies import Policy
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.graph import captured_alike
from narrowgauge_lab.graphs import CaptureError
from narrowgauge_lab.measure import (
    Comparison,
    TimingPlan,
    interleave,
    measure_time,
    with_hidden_launches,
)
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily

from .nets import Subject

__all__ = ["beside", "compaction", "heads", "plan_of"]

Call = Callable[[], Any]

#: Libraries sum in another order for another batch size, so who is on the threshold may stay.
_DIFFERENT = 0.02
#: How far logits of the same exit may be apart, over the largest: that other order again, in as
#: many digits as the products have (23 bits of fraction, and 10).
_APART = {"fp32": 1e-3, "tf32": 5e-2}
_STAGE_PASSES, _STAGE_SECONDS = 5, 0.2


def plan_of(ctx: RowContext) -> TimingPlan:
    """How the row's samples are taken."""
    limit = ctx.parameters["limit_s"]
    return TimingPlan(limit_s=limit, warm_up_limit_s=limit)


def heads(ctx: RowContext, subject: Subject) -> None:
    """Record `heads_share`: what all heads but the last add to the time until the last answer, over
    that time. Raises SkippedError for a network whose exits have no backbone in common."""
    net, images, costs = subject.net, subject.images, subject.costs
    if sum(costs.trunk[:-1]) == 0:
        raise SkippedError(
            f"{ctx.parameters['net']} has no heads to set apart",
            why="each of its exits is a network from the images on",
            next_step="-p net=iresnext-incremental has the same branches on one backbone",
        )
    last = net.exits - 1
    with torch.no_grad():
        (alone, whole), how = captured_alike(
            (lambda: net.forward_until(last, images), lambda: net(images)), ctx.device
        )
        pair = _turns(ctx, alone, whole)
    ctx.fact("way", how)
    ctx.fact("heads_macs_share", costs.heads_share)
    record_samples(ctx, "seconds_until_last", pair.first)
    record_samples(ctx, "seconds_all_exits", pair.second)
    record_samples(ctx, "heads_share", pair.first, [ratio - 1 for ratio in pair.ratios], "1")


def compaction(ctx: RowContext, subject: Subject) -> None:
    """Record `saving_realised`: the share of time that compaction saves beside masking, over the
    share of MACs that it saves; `compaction_speedup` is how many times as fast it is, and
    `saving_of_stages` the share of the time that the stages' own times say can be saved.
    INVALID where both do not answer alike (exits; and where these are the same, logits and MACs),
    or nothing is saved."""
    parameters, images = ctx.parameters, subject.images
    policy = subject.leaving(parameters["policy"], parameters["share"])
    ways = _ways(ctx, subject, policy)
    fast, slow = (_kept(way()) for way in (ways.compacted, ways.masked))
    saved = 1.0 - float(fast.macs.mean()) / subject.costs.cumulative[-1]
    differ = float((fast.exits != slow.exits).double().mean())
    counts = torch.bincount(fast.exits.cpu(), minlength=subject.net.exits)
    ctx.fact("way", ways.how)
    ctx.fact("policy", str(policy))
    ctx.fact("left_at", [count / images.shape[0] for count in counts.tolist()])
    ctx.fact("macs_saved", saved)
    ctx.fact("exits_differ", differ)
    if not differ <= _DIFFERENT:
        ctx.invalid(f"{differ:.1%} of the images leave elsewhere with compaction than by masking")
    apart, macs_apart = beside(fast, slow)
    ctx.fact("logits_differ", apart)
    ctx.fact("macs_differ", macs_apart)
    allowed = _APART[parameters["precision"]]
    if not apart <= allowed:
        ctx.invalid(
            f"logits by compaction are {apart:.3g} of the largest away from those by masking; "
            f"summing in another order can be {allowed:g}"
        )
    if macs_apart:
        ctx.invalid(f"of {macs_apart:.1%} of the images, both sides count other MACs to one exit")
    if saved <= 0:
        ctx.invalid("nobody leaves early, so there is nothing to save")
        return
    pair = _turns(ctx, ways.compacted, ways.masked)
    record_samples(ctx, "seconds_adaptive", pair.first)
    record_samples(ctx, "seconds_masked", pair.second)
    record_samples(ctx, "compaction_speedup", pair.first, list(pair.ratios), "1")
    realised = [(1 - 1 / ratio) / saved for ratio in pair.ratios]
    record_samples(ctx, "saving_realised", pair.first, realised, "1")
    came = [images.shape[0] - sum(counts.tolist()[:number]) for number in range(len(counts))]
    _record_possible(ctx, ways, pair, came)


def _record_possible(ctx: RowContext, ways: _Ways, pair: Comparison, came: Sequence[int]) -> None:
    """What would be saved if each stage took time as it has images: MACs of one stage may take
    longer than those of another. All of them come to the first."""
    seconds = ways.stages()
    needed = sum(each * count / came[0] for each, count in zip(seconds, came))
    possible = 1.0 - needed / sum(seconds)
    ctx.fact("stage_seconds", seconds)
    ctx.fact("time_saveable", possible)
    of_time = [(1 - 1 / ratio) / possible for ratio in pair.ratios]
    record_samples(ctx, "saving_of_stages", pair.first, of_time, "1")
    if ways.sized is not None:
        # Smaller batches take longer an image: what would be saved if nothing stood between stages.
        in_sizes = ways.sized(came)
        ctx.fact("stage_seconds_in_sizes", in_sizes)
        ctx.fact("time_saveable_in_sizes", 1.0 - sum(in_sizes) / sum(seconds))


def beside(fast: Adaptive, slow: Adaptive) -> Tuple[float, float]:
    """Of the images that leave at the same exit: how far their logits are apart at most, over the
    largest of the second; and the share of them whose MACs are not equal. Infinity for logits that
    are no numbers, 0 where nobody leaves alike."""
    same = (fast.exits == slow.exits).nonzero().flatten()
    if not same.shape[0]:
        return 0.0, 0.0
    mine, theirs = fast.logits[same].double(), slow.logits[same].double()
    apart = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    others = float((fast.macs[same] != slow.macs[same]).double().mean())
    return (apart if math.isfinite(apart) else math.inf), others


@dataclasses.dataclass(frozen=True)
class _Ways:
    """With compaction and with masking, and what they are; seconds of each stage for all images;
    and for as many as come to each, where sizes are captured."""

    compacted: Callable[[], Adaptive]
    masked: Callable[[], Adaptive]
    how: str
    stages: Callable[[], List[float]]
    sized: Optional[Callable[[Sequence[int]], List[float]]] = None


def _ways(ctx: RowContext, subject: Subject, policy: Policy) -> _Ways:
    """Both captured, or neither: a launch by the host is no part of what compaction saves."""
    net, images, costs = subject.net, subject.images, subject.costs
    why = f"a {ctx.device.type} has no CUDA graphs"
    if torch_compat.graphs_available(ctx.device):
        try:
            bucketed = BucketedExits(net, images, policy, costs)
            stepped = bucketed
            stages = CapturedStages(net, images, policy, costs)
            straight = None
            if bucketed.by_device:  # both sides are one launch then
                stepped = BucketedExits(net, images, policy, costs, by_device=False)
                straight = all_stages(stages)
        except (CaptureError, KernelsError, NotApplicableError) as error:
            why = f"{error.what}: {error.why}"
        else:

            def replayed() -> Adaptive:
                stages.load(images)
                if straight is not None:
                    straight.launch()
                    return stages.answer
                for graph in stages.graphs:
                    graph.replay()
                return stages.answer

            def sized(came: Sequence[int]) -> List[float]:
                asked = [number for number, count in enumerate(came) if count]
                graphs = [stepped.graph_for(number, came[number]) for number in asked]
                return _replay_seconds(graphs, ctx.device)

            return _Ways(
                lambda: bucketed(images), replayed, bucketed.description,
                lambda: _replay_seconds(stages.graphs, ctx.device), sized,
            )  # fmt: skip
    return _Ways(
        lambda: adaptive(net, images, policy, costs),
        lambda: masked(net, images, policy, costs),
        f"launch by launch: {why}",
        lambda: list(measure_stages(net, images, _STAGE_PASSES).typical),
    )


def _replay_seconds(graphs: Sequence[Any], device: torch.device) -> List[float]:
    """The median of replays of each captured stage, without its launches where they can be hidden.
    What it works on may be anything by then, and takes as long."""
    plan = TimingPlan(limit_s=_STAGE_SECONDS, warm_up_limit_s=_STAGE_SECONDS)
    return [
        statistics.median(
            with_hidden_launches(
                lambda plan, graph=graph: measure_time(graph.replay, device, plan), device, plan
            ).seconds
        )
        for graph in graphs
    ]


def _kept(answer: Adaptive) -> Adaptive:
    """Out of what the next call overwrites."""
    return Adaptive(answer.logits.clone(), answer.exits.clone(), answer.macs.clone())


def _turns(ctx: RowContext, first: Call, second: Call) -> Comparison:
    pair: Comparison = steadily(
        ctx,
        lambda: interleave(first, second, ctx.device, plan_of(ctx), ctx.parameters["pairs"]),
        ctx.device,
    )
    return pair
