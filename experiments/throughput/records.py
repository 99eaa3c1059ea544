"""What a row of `throughput` records of its workers."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Sequence

import numpy as np
import torch

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.account import check_precision, precision_of_layers, record_layers
from narrowgauge_lab.engines.serving import Report
from narrowgauge_lab.measure.agreement import check_output
from narrowgauge_lab.measure.steady import Steady, Worked

from .stations import Station

__all__ = ["record_calls", "record_ran", "record_steady"]

#: So many samples of a worker's latency go into the record; all of them are in its side file.
_MOST_SAMPLES = 2000


def record_steady(ctx: RowContext, steady: Steady, warm_up_s: float) -> None:
    """Record the rates of all workers together, and each worker's latency in the window."""
    ctx.metric("images_per_second", steady.images_per_second, unit="image/s", source="monotonic")
    counted = steady.images_counted_per_second
    ctx.metric("images_counted_per_second", counted, unit="image/s", source="monotonic")
    workers, seconds, thinned = [], [], []
    for each in steady.workers:
        step = math.ceil(len(each.seconds) / _MOST_SAMPLES)
        kept = each.seconds[::step]
        seconds += kept
        thinned.append(
            {"worker": each.name, "batch": each.batch, "samples": len(kept), "every": step}
        )
        workers.append(
            {
                "worker": each.name,
                "batch": each.batch,
                "calls_in_window": len(each.seconds),
                "images": each.images,
                "images_per_second": each.images_per_second,
            }
        )
    # One call of ctx.metric: a metric has the conditions of its first samples.
    conditions = {"workers": thinned}
    ctx.metric("latency", seconds, unit="s", source="monotonic", conditions=conditions)
    ctx.fact("window", {"seconds": steady.seconds, "warm_up_s": warm_up_s, "workers": workers})


def record_calls(ctx: RowContext, worked: Sequence[Worked]) -> None:
    """Keep begin and end of every call of every worker, from the earliest on: a side file each,
    float64 [calls, 2] in numpy's format."""
    begins = [each.spans[0][0] for each in worked if each.spans]
    origin = min(begins) if begins else 0.0
    for each in worked:
        values = np.asarray(each.spans, dtype=np.float64).reshape(-1, 2) - origin
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        ctx.side_file(f"calls-{each.name}.npy").write_bytes(buffer.getvalue())


def record_ran(
    ctx: RowContext,
    stations: Sequence[Station],
    reports: Sequence[Report],
    reference: torch.Tensor,
) -> None:
    """Record what each worker ran, hold its results against `reference`, and count right answers.

    The row is INVALID where a worker computes something else, or in another precision.
    """
    precision = ctx.parameters["precision"]
    for station, report in zip(stations, reports):
        check_output(ctx, report.logits, reference[: station.batch], precision, source="fp64")
        ctx.metric("build_seconds", report.build_seconds, unit="s", source="monotonic")
    ctx.fact("workers", [_told(*each) for each in zip(stations, reports)])
    notes = dict.fromkeys(report.cache_note for report in reports if report.cache_note)
    cached = all(report.from_cache for report in reports)
    ctx.fact("engine_cache", {"from_cache": cached, "note": "; ".join(notes)})
    told = {station.name: report.layers for station, report in zip(stations, reports)}
    check_precision(ctx, precision, reports[-1].observations, told)
    record_layers(ctx, reports[-1].layers)
    right = reports[-1].right
    if right is not None:
        ctx.metric("top1", right.first / right.images, unit="1", source="imagenet-20")
        ctx.metric("top5", right.first_five / right.images, unit="1", source="imagenet-20")


def _told(station: Station, report: Report) -> object:
    return {
        **dataclasses.asdict(station),
        "options": dict(station.options),
        "threads_ran": report.threads,
        "from_cache": report.from_cache,
        "cache_note": report.cache_note,
        "precision_told": precision_of_layers(report.layers),
        "choice": {name: report.choice[name] for name in ("form", "threads", "reason")}
        if report.choice
        else {},
    }
