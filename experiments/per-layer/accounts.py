"""Where a step's time goes, stage by stage, and what it moves: by the placed layer's ledger."""

from __future__ import annotations

import bisect
import statistics
import time
from typing import Dict, List, Sequence, Tuple

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.coverage import coverage
from narrowgauge_lab.layers.hetero.ledger import STAGES, Interval, Ledger
from narrowgauge_lab.layers.hetero.original_table import VARIANTS, original_table
from narrowgauge_lab.spans import RecordedSpans

from .subject import LAYER, Training

__all__ = ["column", "record_stages", "trace_steps"]

#: How far stages and wall time may be apart.
_TOLERANCE = 0.03
#: What moves tensors or weights.
_COPIES = ("to_device", "refit", "from_device")
#: Steps in a trace.
_TRACED = 3

Window = Tuple[float, float]


def record_stages(
    ctx: RowContext, training: Training, mode: str, iterations: int
) -> Tuple[Interval, ...]:
    """Record `stage_…` and `bytes_…` of each of so many steps; in serial mode also the original's
    columns. Gives the stages of the last step.

    The row is INVALID where stages and wall time are more than 3 % apart.
    """
    ledger = training.account(mode)
    for _ in range(max(1, iterations // 2)):
        training.step()
    training.finish()
    ledger.clear()
    windows = _run(ctx, training, iterations)
    intervals, calls = ledger.intervals(), ledger.calls()
    margin = ledger.clock.get("gpu_uncertainty_us", 0.0) / 1e6
    steps = _by_step(intervals, windows)
    source = f"ledger, {mode}"
    for stage in STAGES:
        seconds = [sum(e.seconds for e in step if e.stage == stage) for step in steps]
        ctx.metric(f"stage_{stage}", seconds, unit="s", source=source)
    for direction in ("to_device", "from_device"):
        moved = [float(sum(getattr(each, direction) for each in step)) for step in steps]
        ctx.metric(f"bytes_{direction}", moved, unit="B", source="ledger, as queued")
    if mode == "serial":
        _record_tables(ctx, ledger, steps)
    else:
        _record_coverage(ctx, intervals, windows, margin)
    if ledger.clock:
        ctx.fact("clock", ledger.clock)
    assert len(calls) in (0, 2 * iterations)
    training.account("off")
    return steps[-1]


def column(variant: str, name: str) -> str:
    """A column of the original's tables as a metric: tensorrt_bwd_pre_post."""
    word = name.replace(" ", "_").replace("-", "_").replace("/", "_")
    return f"{variant}_{word}"


def trace_steps(training: Training, mode: str, spans: RecordedSpans) -> None:
    """Put a few steps into the row's trace, stage by stage in lanes of their own."""
    training.step()
    training.finish()
    ledger = training.account(mode)
    for _ in range(_TRACED):
        training.step()
    training.finish()
    spans.add(ledger.trace_events())
    training.account("off")


def _run(ctx: RowContext, training: Training, iterations: int) -> List[Window]:
    windows = []
    for number in range(iterations):
        began = time.perf_counter()
        training.step()
        training.finish()
        windows.append((began, time.perf_counter()))
        if number % 10 == 9:
            ctx.progress(number + 1, iterations, "steps", "stages")
    return windows


def _by_step(
    intervals: Sequence[Interval], windows: Sequence[Window]
) -> List[Tuple[Interval, ...]]:
    """The stages of each step: those whose middle is in its window, since clocks are uncertain."""
    begins = [began for began, _ in windows]
    steps: List[List[Interval]] = [[] for _ in windows]
    for each in intervals:
        number = bisect.bisect_right(begins, each.start + each.seconds / 2) - 1
        steps[max(0, number)].append(each)
    return [tuple(step) for step in steps]


def _record_tables(ctx: RowContext, ledger: Ledger, steps: Sequence[Sequence[Interval]]) -> None:
    calls, intervals = ledger.calls(), ledger.intervals()
    for variant in VARIANTS:
        rows = original_table(calls, intervals, LAYER, variant)
        for name in rows[0]:
            values = [row[name] for row in rows]
            ctx.metric(column(variant, name), values, unit="s", source="ledger, serial")
    sums = [sum(each.seconds for each in step) for step in steps]
    rows = original_table(calls, intervals, LAYER, VARIANTS[0])
    ratios = [total / row["total"] for total, row in zip(sums, rows)]
    ctx.metric("stages_over_wall", ratios, unit="1", source="ledger, serial")
    shares = [
        sum(each.seconds for each in step if each.stage in _COPIES) / total
        for step, total in zip(steps, sums)
    ]
    ctx.metric("copy_share", shares, unit="1", source="ledger, serial")
    _require_close(
        ctx, statistics.median(ratios), "the stages of a step, one after another, add up to"
    )


def _record_coverage(
    ctx: RowContext, intervals: Sequence[Interval], windows: Sequence[Window], margin: float
) -> None:
    found = coverage(intervals, windows[0][0], windows[-1][1], margin)
    summed: Dict[str, float] = {"wall": found.wall, "union": found.union, "idle": found.idle}
    ctx.fact("coverage", {**summed, "ratio": found.ratio, "steps": len(windows)})
    _require_close(
        ctx, found.ratio, "the union of all stages, and the time in which none ran, make up"
    )


def _require_close(ctx: RowContext, ratio: float, what: str) -> None:
    if not abs(ratio - 1.0) <= _TOLERANCE:
        ctx.invalid(
            f"{what} {ratio:.1%} of the wall time; within {_TOLERANCE:.0%} of it was asked for"
        )
