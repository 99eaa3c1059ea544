"""Settling which kernel runs each step, by measuring the candidates where they will run."""

from __future__ import annotations

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, Sequence

import torch

from narrowgauge_lab.engines.own.cudnn import CudnnPlanError
from narrowgauge_lab.engines.own.gpu.candidate import Candidate, Launch

__all__ = ["Settled", "faster", "key_of", "tune"]

_LAUNCHES = 4
_REPLAYS = 5
_COMPILERS = 16
#: Seconds that libraries may take to find what they offer: for all problems, and for one at most.
_LIBRARIES = 60.0
_MOST_EACH = 3.0
#: Candidates this much slower than the best after the first look are not looked at again.
_HOPELESS = 1.3

#: By problem: the candidate's `spec`.
Settled = Dict[str, Mapping[str, Any]]


def key_of(launch: Launch) -> str:
    """A problem as a cache names it."""
    return json.dumps(launch.key, separators=(",", ":"))


def tune(launches: Sequence[Launch], settled: Settled) -> int:
    """Give every launch its fastest candidate; how many problems had to be measured for that.

    Equal problems share one measurement, which is put into `settled`. Everything must have run
    once, so that the buffers hold what they will hold. A candidate that the device has not the
    shared memory or registers for is left out.
    """
    fresh: Dict[str, Launch] = {}
    for launch in launches:
        known = settled.get(key_of(launch))
        launch.chosen = launch.stored(known) if known is not None else None
        if launch.chosen is None:
            fresh.setdefault(key_of(launch), launch)
    for key, usable in _compile(fresh).items():
        settled[key] = _storable(_ranked(usable))
    for launch in launches:
        if launch.chosen is None:
            launch.chosen = launch.stored(settled[key_of(launch)])
    return len(fresh)


def _compile(fresh: Mapping[str, Launch]) -> Dict[str, List[Candidate]]:
    """By problem the candidates that start. Compilers run side by side where triton can."""
    ours = [each for launch in fresh.values() if len(launch.own) > 1 for each in launch.own]
    stream = torch.cuda.current_stream()

    def start(candidate: Candidate) -> None:
        # A thread has a device and a stream of its own, and kernels share memory on one stream.
        with torch.cuda.stream(stream):
            _starts(candidate)

    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(start, ours))
    usable = {}
    for key, launch in fresh.items():
        theirs = launch.others(min(_MOST_EACH, _LIBRARIES / len(fresh)))
        alone = len(launch.own) + len(theirs) == 1
        usable[key] = [each for each in (*launch.own, *theirs) if alone or _starts(each)]
    return usable


def _starts(candidate: Candidate) -> bool:
    if candidate.provider != "triton":
        candidate.start()
        return True
    from narrowgauge_lab.engines.own.gpu.kernels import OutOfResources

    try:
        candidate.start()
    except OutOfResources:
        return False
    return True


def faster(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Whether replaying `one` takes less time than `other`; they take turns."""
    times: Dict[bool, List[float]] = {True: [], False: []}
    for _ in range(_REPLAYS * _LAUNCHES):
        for which, replay in ((True, one), (False, other)):
            times[which].append(_seconds(replay))
    return statistics.median(times[True]) < statistics.median(times[False])


def _ranked(usable: Sequence[Candidate]) -> List[Candidate]:
    """The fastest first; those that are clearly slow are left out."""
    if len(usable) == 1:
        return list(usable)
    looks = [(_Look(each.start), each) for each in usable]
    best = min(look.seconds for look, _ in looks)
    near = [(look, each) for look, each in looks if look.seconds <= best * _HOPELESS]
    for _ in range(2):  # in turns, so that a drift of the clock is nobody's
        for look, _each in near:
            look.again()
    return [each for _, each in sorted(near, key=lambda pair: pair[0].seconds)]


def _storable(ranked: Sequence[Candidate]) -> Mapping[str, Any]:
    """What is kept of the fastest that can be kept: a library may not let go of a plan."""
    for place, each in enumerate(ranked):
        try:
            return dict(each.store())
        except CudnnPlanError:
            if place == len(ranked) - 1:
                raise
    raise ValueError("nothing runs this step")


class _Look:
    """A graph of a few launches, replayed: no launch latency in its time."""

    def __init__(self, start: Callable[[], None]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(_LAUNCHES):
                start()
        self._graph.replay()
        self._times: List[float] = []
        self.again()

    def again(self) -> None:
        for _ in range(_REPLAYS):
            self._times.append(_seconds(self._graph.replay) / _LAUNCHES)

    @property
    def seconds(self) -> float:
        return statistics.median(self._times)


def _seconds(replay: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
