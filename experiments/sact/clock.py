"""Whether leaving positions out saves time on this device, and from which density on."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch

from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.anytime.systems.breaking_even import Case, break_even, faster, measure_shares
from narrowgauge_lab.anytime.systems.folded import FoldedPlain
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.anytime.systems.sparse_sact import SparseSact
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.cpu_threads import cpu_threads
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure import TimingPlan, interleave

__all__ = ["record_clock"]

_PAIRS = 200
#: Largest difference of a logit, over the largest logit, for sparse to be called the same network.
_AGREEMENT = 1e-3
#: Of the CPU.
_THREADS = 1
#: A share that there is not.
_NEVER = 2.0


def record_clock(ctx: RowContext, net: AdaptiveResNet, test: Feed, batches: Sequence[int]) -> None:
    """Time the first test images of each of `batches` (all, where there are fewer: fact
    `clock_images`) by the sparse network, by the masked dense one and by the plain one, in turns,
    and check that sparse says what dense says; before that the break-even densities, from which on
    sparse may be dense.

    All compute in IEEE float32, TF32 is off; on a CPU on one thread, where torch lets the number
    change: idle threads that wait for work would count as time. INVALID where answers differ.
    """
    speedups: List[float] = []
    with cpu_threads(_THREADS) as threads, _full_precision(ctx):
        for batch in batches:
            shares = _record_break_even(ctx, net, batch)
            speedup = _clock_batch(ctx, net, test, batch, shares)
            if speedup is None:
                return
            speedups.append(speedup)
    if batches:
        ctx.fact("clock_batches", list(batches))
        ctx.fact("clock_images", [min(batch, len(test)) for batch in batches])
        ctx.fact("clock_threads", threads)
        # The medians of what batch<n>_speedup_over_plain has in full.
        ctx.metric("sparse_speedup", speedups, unit="1", source=_source(ctx.device), index="batch")


@contextlib.contextmanager
def _full_precision(ctx: RowContext) -> Iterator[None]:
    precision.enter("fp32", ctx.device)
    try:
        yield
    finally:
        precision.enter(ctx.parameters["precision"], ctx.device)


def _clock_batch(
    ctx: RowContext, net: AdaptiveResNet, test: Feed, batch: int, shares: Sequence[float]
) -> Optional[float]:
    count = min(batch, len(test))
    images, _ = test.batch(torch.arange(count, device=ctx.device))
    with in_eval_mode(net), torch_compat.inference_mode():
        sparse = _sparse(ctx, net, images, batch, shares)
        answer, thought = sparse(images), net.think(images)
        difference = float((answer - thought.logits).abs().max() / thought.logits.abs().max())
        ctx.metric(f"batch{batch}_difference", difference, unit="1", source="computed")
        if not difference <= _AGREEMENT:
            ctx.invalid(f"sparse and dense disagree in batches of {batch}: {difference:.2g}")
            return None
        share = 100.0 * float(thought.active.mean())
        ctx.metric(f"batch{batch}_active_share", share, unit="%", source="computed")
        prefix = f"batch{batch}_"
        masked = functools.partial(net.think, images, account=False)
        _compare(ctx, prefix, "masked", masked, lambda: sparse(images))
        plain = _plain(ctx, net, images)
        return _compare(ctx, prefix, "plain", plain, lambda: sparse(images))


def _sparse(
    ctx: RowContext, net: AdaptiveResNet, images: torch.Tensor, batch: int, shares: Sequence[float]
) -> SparseSact:
    """Sparse all the way, or dense from the measured shares on: what takes less time here."""
    never = SparseSact(net)
    ctx.fact("sparse_by", never.by)
    # Where sparse is faster at all shares there is none to be dense from.
    measured = SparseSact(net, [share if share < 1.0 else _NEVER for share in shares])
    calls = [functools.partial(each, images) for each in (never, measured)]
    best = faster(calls[0], calls[1], ctx.device, _plan(ctx), _clock(ctx.device))
    chosen = never if best is calls[0] else measured
    ctx.fact(f"batch{batch}_dense_from", [float(each) for each in chosen.dense_from])
    return chosen


def _plain(ctx: RowContext, net: AdaptiveResNet, images: torch.Tensor) -> Callable[[], Any]:
    """The network without halting, folded as sparse is, in the layout that is faster here. Its
    weights are any: they do not change its time."""
    plain = AdaptiveResNet("plain", len(net.blocks[0].units), net.conv.out_channels, net.classes)
    plain.to(ctx.device).eval()
    first, last = (
        functools.partial(FoldedPlain(plain, layout), images)
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    return faster(first, last, ctx.device, _plan(ctx), _clock(ctx.device))


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


def _record_break_even(ctx: RowContext, net: AdaptiveResNet, batch: int) -> List[float]:
    """The share of active positions up to which a unit of each block is faster sparse."""
    facts: Dict[str, Any] = {}
    shares: List[float] = []
    with torch_compat.inference_mode():
        for number, block in enumerate(net.blocks):
            channels = block.units[-1].conv2.out_channels
            case = Case(channels, 32 // 2**number, batch)
            points = measure_shares(case, ctx.device, _plan(ctx), **_clock(ctx.device))
            facts[str(case)] = [point.to_fact() for point in points]
            shares.append(break_even(points))
            ctx.metric(
                f"batch{batch}_block{number}_break_even", 100.0 * shares[-1], unit="%",
                source=_source(ctx.device),
            )  # fmt: skip
    ctx.fact(f"batch{batch}_break_even", facts)
    return shares


def _plan(ctx: RowContext) -> TimingPlan:
    seconds = ctx.parameters["limit_s"]
    return TimingPlan(limit_s=seconds, warm_up_limit_s=min(seconds, 5.0))


def _clock(device: torch.device) -> Dict[str, Any]:
    """On a CPU the time of this process's threads: others share its cores."""
    return {} if device.type == "cuda" else {"now": time.process_time}


def _source(device: torch.device) -> str:
    return "cuda-event" if device.type == "cuda" else "process-cpu-time"
