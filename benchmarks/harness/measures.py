"""The parts of the bench: overhead, agreement with nvbench, alarms and power, and processes."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import nvbench_side
import torch
from figures import Make
from scipy.stats import binom
from workloads import Workload, chain_of, make_buffer, make_workloads

import narrowgauge_kernels
from narrowgauge.statistics import log_ratio_interval, median_interval
from narrowgauge_kernels.harness import time_bare, time_kernel
from narrowgauge_lab.measure import Comparison, TimingPlan
from narrowgauge_lab.measure.harness import Kernel, interleave_compiled, measure_compiled

DEVICE = torch.device("cuda", 0)
ROUNDS = 20
HOLD_S = 5.0
#: Of both comparisons: what it takes to be sure of 2 % within a fraction of a second.
PAIRS = 20
ALARMS, PLANTS = 400, 200
COMPARED_S = 100e-6
SLOWDOWN = 1.02
PROCESSES = 6
#: "kernels >= 50 us" of the target.
LONG_S = 50e-6
#: Intervals of nvbench's narrower than this are cut by the resolution of events, not by samples.
FINEST = 0.001

BATCH = TimingPlan(
    interval=0.005, least_samples=10, limit_s=2.0, hide_launches=True, warm_up_limit_s=1.0
)
COLD = dataclasses.replace(BATCH, cache="cold")


def everything(figure: Make, wheels: str | None) -> tuple[list[Any], list[dict[str, Any]]]:
    """All figures, and nvbench's and ours kernel by kernel."""
    nvbench_side.importable(wheels)
    narrowgauge_kernels.load()
    torch.cuda.set_device(DEVICE)
    buffer = make_buffer(DEVICE)
    workloads = make_workloads(buffer)
    overhead = _overhead(figure, buffer)
    kernels = _agreement(workloads, buffer)
    return [
        *overhead,
        *figures.agreement(figure, kernels),
        *_alarms(figure, buffer),
        *_processes(figure, workloads),
    ], kernels


def machine() -> dict[str, str]:
    """What the figures depend on."""
    return {
        "GPU": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
    }


def _overhead(figure: Make, buffer: torch.Tensor) -> list[Any]:
    """An empty kernel by the harness minus the same by the bare loop, interleaved."""
    found = []
    for calls, samples in ((1, 500), (128, 20)):
        rounds = [_round(buffer, samples, calls) for _ in range(ROUNDS + 1)]
        # The first round loads kernels and makes events.
        device, held, host = zip(*rounds[1:], strict=True)
        found += figures.overhead(figure, calls, device, held, host)
    return found


def _round(buffer: torch.Tensor, samples: int, calls: int) -> tuple[float, float, float]:
    """Microseconds per call beyond the bare loop: on the device, on it when held, on the host."""
    bare, bare_s = _walled(lambda: time_bare(DEVICE, samples, calls))
    ours, _ = _walled(lambda: time_kernel("nothing", buffer, 1, samples, calls))
    held, held_s = _walled(lambda: time_kernel("nothing", buffer, 1, samples, calls, None, HOLD_S))
    medians = [float(each[0].median()) for each in (bare, ours, held)]
    host = (held_s - bare_s) / (samples * calls)
    return (medians[1] - medians[0]) * 1e6, (medians[2] - medians[0]) * 1e6, host * 1e6


def _walled(action: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def _agreement(workloads: list[Workload], buffer: torch.Tensor) -> list[dict[str, Any]]:
    """Ours right after nvbench's, kernel by kernel; then the time that equal intervals take us."""
    ours: list[dict[str, Any]] = []

    def between(workload: Workload) -> None:
        work = Kernel(workload.kind, workload.part(buffer), workload.repeats)
        began = time.perf_counter()
        batch = measure_compiled(work, DEVICE, BATCH)
        batch_wall = time.perf_counter() - began
        cold = measure_compiled(work, DEVICE, COLD)
        medians = {"batch": statistics.median(batch.seconds)}
        medians["cold"] = statistics.median(cold.seconds)
        ours.append({"work": work, "wall": batch_wall, **medians})

    theirs = nvbench_side.run(workloads, buffer, between)
    kernels = []
    for workload, mine, other in zip(workloads, ours, theirs, strict=True):
        width = _width(other.cold)
        plan = dataclasses.replace(
            COLD, interval=max(width, FINEST), limit_s=nvbench_side.TIMEOUT_S,
            most_samples=1_000_000,
        )  # fmt: skip
        began = time.perf_counter()
        samples = measure_compiled(mine["work"], DEVICE, plan)
        wall = mine["wall"] + time.perf_counter() - began
        kernels.append(
            {
                "name": workload.name,
                "cold": {"ours": mine["cold"], "nvbench": statistics.median(other.cold)},
                "batch": {"ours": mine["batch"], "nvbench": other.batch},
                "stopped": samples.stopped,
                "wall": {"ours": wall, "nvbench": other.wall},
                "samples": {"ours": len(samples.seconds), "nvbench": len(other.cold)},
                "width": {"ours": _width(samples.seconds), "nvbench": width},
            }
        )
    return kernels


def _width(seconds: tuple[float, ...]) -> float:
    """The 95 % interval of the median, end to end, as a share of it."""
    interval = median_interval(seconds)
    if interval is None:
        raise RuntimeError(f"{len(seconds)} samples have no interval")
    return (interval.high - interval.low) / statistics.median(seconds)


def _alarms(figure: Make, buffer: torch.Tensor) -> list[Any]:
    """How often equal kernels are told apart, and one that is 2 % longer from one that is not.

    Told apart: the 95 % order-statistic interval of the median log ratio of pairs, as the product
    reports it, does not hold 0. All is measured first, for statistics would leave the device idle
    between.
    """
    chain = chain_of(buffer, COMPARED_S)
    first = Kernel(chain.kind, chain.part(buffer), chain.repeats)
    slower = dataclasses.replace(first, repeats=round(chain.repeats * SLOWDOWN))
    plan = TimingPlan(calls=2, hide_launches=True, warm_up_limit_s=0.0)
    equal = [interleave_compiled(first, first, DEVICE, plan, PAIRS) for _ in range(ALARMS)]
    planted = [interleave_compiled(first, slower, DEVICE, plan, PAIRS) for _ in range(PLANTS)]
    alarms = sum(_told_apart(each) is not None for each in equal)
    found = sum(_told_apart(each) == "slower" for each in planted)
    note = f"{alarms} of {ALARMS} comparisons of {PAIRS} pairs"
    chance = float(binom.sf(alarms - 1, ALARMS, 0.05))
    return [
        figure("A/A false alarms", "%", 5, (alarms / ALARMS * 100,), note),
        figure("chance of as many if 5 % is true", "", None, (chance,)),
        figure(
            "power to find a planted 2 % slowdown",
            "%",
            95,
            (found / PLANTS * 100,),
            f"{found} of {PLANTS} comparisons of {PAIRS} pairs",
            True,
        ),
    ]


def _told_apart(comparison: Comparison) -> str | None:
    """`slower` or `faster`: how the second differs from the first; None where it may not."""
    ratio = log_ratio_interval(comparison.second.seconds, comparison.first.seconds, paired=True)
    if ratio.holds_one is not False:
        return None
    return "slower" if ratio.ratio > 1 else "faster"


def _processes(figure: Make, workloads: list[Workload]) -> list[Any]:
    """Medians of the same kernels in processes of their own: the spread from one to the next."""
    long = [each for each in workloads if each.seconds >= LONG_S][::3]  # of both kinds in turn
    words = json.dumps([dataclasses.asdict(each) for each in long])
    command = [sys.executable, str(Path(__file__).with_name("bench.py")), "--process", words]
    found = []
    for _ in range(PROCESSES):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ)
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    spreads = tuple(
        statistics.stdev(medians) / statistics.fmean(medians) * 100
        for medians in zip(*found, strict=True)
    )
    note = f"{PROCESSES} processes, {len(long)} kernels of 50 us and longer"
    return [
        figure("CV between processes, median kernel", "%", 1, spreads, note),
        figure("CV between processes, worst kernel", "%", None, (max(spreads),)),
    ]


def medians(workloads: list[dict[str, Any]]) -> list[float]:
    """What one such process measures: the median of each, hot, launches hidden."""
    narrowgauge_kernels.load()
    torch.cuda.set_device(DEVICE)
    buffer = make_buffer(DEVICE)
    found = []
    for each in (Workload(**words) for words in workloads):
        work = Kernel(each.kind, each.part(buffer), each.repeats)
        found.append(statistics.median(measure_compiled(work, DEVICE, BATCH).seconds))
    return found
