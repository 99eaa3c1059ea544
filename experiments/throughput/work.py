"""All workers of a row at once: threads with a stream each on a GPU, processes on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.engines.serving import Report, Serving, kept_engines, make_ready
from narrowgauge_lab.measure.concurrent import Program, ThreadWorker, run_processes, run_threads
from narrowgauge_lab.measure.steady import Worked
from narrowgauge_lab.networks.subject import Subject

from .stations import Station

__all__ = ["Outcome", "work_together"]

#: What all workers did, and the report of each (None of one that died).
Outcome = Tuple[Tuple[Worked, ...], Tuple[Any, ...]]


def work_together(
    ctx: RowContext, subject: Subject, stations: Sequence[Station]
) -> Callable[[], Outcome]:
    """What lets the stations work on the subject for the row's seconds, all at once, each time that
    it is called. On a GPU engines are built now; processes build theirs, or find them kept.
    """
    servings = _servings(ctx, subject, stations)
    seconds = ctx.parameters["warm_up_s"] + ctx.parameters["seconds"]
    if ctx.device.type == "cuda":
        workers, reports = _on_streams(stations, servings, ctx.device)
        return lambda: (run_threads(workers, seconds), reports)
    function = "narrowgauge_lab.engines.serving:make_ready"
    programs = [
        Program(station.name, station.batch, function, serving)
        for station, serving in zip(stations, servings)
    ]
    return lambda: run_processes(programs, seconds)


def _servings(ctx: RowContext, subject: Subject, stations: Sequence[Station]) -> List[Serving]:
    """One for each station; those that are to do the same share one."""
    made: Dict[Station, Serving] = {}
    found = []
    for station in stations:
        alike = dataclasses.replace(station, name="")
        if alike not in made:
            made[alike] = _serving(ctx, subject, station)
        found.append(made[alike])
    return found


def _serving(ctx: RowContext, subject: Subject, station: Station) -> Serving:
    precision = ctx.parameters["precision"]
    return Serving(
        engine=ctx.parameters["engine"],
        model=subject.model,
        example=subject.images[: station.batch].to(DTYPES[precision]),
        precision=precision,
        device=str(ctx.device),
        calibration=subject.calibration if precision in ("int8", "fp8") else (),
        options=dict(station.options),
        threads=station.threads,
        cache=str(kept_engines()),
        labelled=subject.labelled,
    )


def _on_streams(
    stations: Sequence[Station], servings: Sequence[Serving], device: torch.device
) -> Tuple[List[ThreadWorker], Tuple[Report, ...]]:
    """Runners made one after another, each on a stream of its own: a graph that is being captured
    takes it amiss when another thread allocates."""
    workers: List[ThreadWorker] = []
    reports: List[Report] = []
    for station, serving in zip(stations, servings):
        entered = _stream(torch.cuda.Stream(device))
        with entered():
            call, report = make_ready(serving)
            torch.cuda.current_stream(device).synchronize()
        workers.append(ThreadWorker(station.name, station.batch, call, entered))
        reports.append(report())
    return workers, tuple(reports)


def _stream(stream: Any) -> Callable[[], Any]:
    """Which stream is current is every thread's own matter."""

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    return entered
