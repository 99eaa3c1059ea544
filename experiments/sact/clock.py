"""Whether leaving positions out saves time on this device, and from which density on."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any, Callable, Dict, Optional, Sequence

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.systems.breaking_even import Case, break_even, measure_shares
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.anytime.systems.sparse_sact import SparseSact
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure import TimingPlan, interleave

__all__ = ["record_clock"]

_PAIRS = 200
#: Largest difference of a logit, over the largest logit, for sparse to be called the same network.
_AGREEMENT = 1e-3


def record_clock(ctx: RowContext, net: AdaptiveResNet, test: Feed, batches: Sequence[int]) -> None:
    """Time the first test images of each of `batches` (all, where there are fewer) by the sparse
    network, by the masked dense one and by the plain one, in turns, and check that sparse says what
    dense says; then the break-even densities.

    All compute in float32. INVALID where they disagree.
    """
    speedups = []
    for batch in batches:
        speedup = _clock_batch(ctx, net, test, batch)
        if speedup is None:
            return
        speedups.append(speedup)
        _record_break_even(ctx, net, batch)
    if batches:
        ctx.fact("clock_batches", list(batches))
        # The medians of what batch<n>_speedup_over_plain has in full.
        ctx.metric("sparse_speedup", speedups, unit="1", source=_source(ctx.device), index="batch")


def _clock_batch(ctx: RowContext, net: AdaptiveResNet, test: Feed, batch: int) -> Optional[float]:
    count = min(batch, len(test))
    images, _ = test.batch(torch.arange(count, device=ctx.device))
    plain = AdaptiveResNet("plain", len(net.blocks[0].units), net.conv.out_channels, net.classes)
    plain.to(ctx.device).eval()
    with in_eval_mode(net), torch_compat.inference_mode():
        sparse = SparseSact(net)
        ctx.fact("sparse_by", sparse.by)
        answer, thought = sparse(images), net.think(images)
        difference = float((answer - thought.logits).abs().max() / thought.logits.abs().max())
        ctx.metric(f"batch{batch}_difference", difference, unit="1", source="computed")
        if not difference <= _AGREEMENT:
            ctx.invalid(f"sparse and dense disagree in batches of {batch}: {difference:.2g}")
            return None
        share = 100.0 * float(thought.active.mean())
        ctx.metric(f"batch{batch}_active_share", share, unit="%", source="computed")
        prefix = f"batch{batch}_"
        calls = {
            each: functools.partial(each.think, images, account=False) for each in (net, plain)
        }
        _compare(ctx, prefix, "masked", calls[net], lambda: sparse(images))
        return _compare(ctx, prefix, "plain", calls[plain], lambda: sparse(images))


def _compare(
    ctx: RowContext, prefix: str, name: str, other: Callable[[], Any], sparse: Callable[[], Any]
) -> float:
    """How many times as fast sparse is: the median over pairs."""
    both = interleave(sparse, other, ctx.device, _plan(ctx), _PAIRS, **_clock(ctx.device))
    source = _source(ctx.device)
    times = {f"{name}_time": both.second, f"sparse_beside_{name}_time": both.first}
    for label, samples in times.items():
        ctx.metric(
            prefix + label, samples.seconds, unit="s", source=source,
            conditions=samples.conditions(),
        )  # fmt: skip
    ctx.metric(f"{prefix}speedup_over_{name}", both.ratios, unit="1", source=source)
    return statistics.median(both.ratios)


def _record_break_even(ctx: RowContext, net: AdaptiveResNet, batch: int) -> None:
    """The share of active positions up to which a unit of each block is faster sparse."""
    facts: Dict[str, Any] = {}
    with torch_compat.inference_mode():
        for number, block in enumerate(net.blocks):
            channels = block.units[-1].conv2.out_channels
            case = Case(channels, 32 // 2**number, batch)
            clock = _clock(ctx.device)
            points = measure_shares(case, ctx.device, _plan(ctx), **clock)
            facts[str(case)] = [point.to_fact() for point in points]
            ctx.metric(
                f"batch{batch}_block{number}_break_even", 100.0 * break_even(points), unit="%",
                source=_source(ctx.device),
            )  # fmt: skip
    ctx.fact(f"batch{batch}_break_even", facts)


def _plan(ctx: RowContext) -> TimingPlan:
    seconds = ctx.parameters["limit_s"]
    return TimingPlan(limit_s=seconds, warm_up_limit_s=min(seconds, 5.0))


def _clock(device: torch.device) -> Dict[str, Any]:
    """On a CPU the time of this process's threads: others share its cores."""
    return {} if device.type == "cuda" else {"now": time.process_time}


def _source(device: torch.device) -> str:
    return "cuda-event" if device.type == "cuda" else "process-cpu-time"
