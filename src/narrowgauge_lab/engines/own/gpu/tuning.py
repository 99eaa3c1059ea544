"""Settling which kernel runs each step, by measuring the candidates where they will run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, Sequence, Set

import torch

from narrowgauge_lab.engines.own.cudnn import CudnnPlanError
from narrowgauge_lab.engines.own.gpu.candidate import Candidate, Launch
from narrowgauge_lab.engines.own.gpu.phases import Phases

__all__ = ["Settled", "Tuned", "faster", "key_of", "restore", "tune"]

_LAUNCHES = 4
_REPLAYS = 5
_COMPILERS = 16
#: Of the seconds for a search, the parts that are over when compilers, and when libraries, stop:
#: what is left goes into measuring.
_COMPILED_BY, _FOUND_BY = 0.4, 0.8
#: Seconds that libraries may take for one problem, however much is left.
_MOST_EACH = 3.0
#: Candidates this much slower than the best after the first look are not looked at again.
_HOPELESS = 1.3

#: By problem: the candidate's `spec`.
Settled = Dict[str, Mapping[str, Any]]


def key_of(launch: Launch) -> str:
    """A problem as a cache names it."""
    return json.dumps(launch.key, separators=(",", ":"))


@dataclasses.dataclass(frozen=True)
class Tuned:
    """`problems`: how many were measured; `left_out`: how many of our own candidates were not
    compiled in time."""

    problems: int
    left_out: int


def restore(launches: Sequence[Launch], settled: Settled) -> Dict[str, Launch]:
    """Give every launch the candidate that is known; one launch of each problem that has none."""
    fresh: Dict[str, Launch] = {}
    for launch in launches:
        known = settled.get(key_of(launch))
        launch.chosen = launch.stored(known) if known is not None else None
        if launch.chosen is None:
            fresh.setdefault(key_of(launch), launch)
    return fresh


def tune(
    launches: Sequence[Launch],
    fresh: Mapping[str, Launch],
    settled: Settled,
    run: Callable[[], Any],
    seconds: float,
    phases: Phases,
) -> Tuned:
    """Give every launch its fastest candidate, of those that can be looked at in about `seconds`.

    `fresh`: of `restore`. Equal problems share one measurement, which is put into `settled`. `run`
    runs the network once, so that the buffers hold what they will hold. A candidate that the device
    has not the shared memory or registers for is left out, and so are those whose turn to be
    compiled does not come: the likeliest of every problem come first.
    """
    begin = time.monotonic()
    with phases.of("first"):
        likeliest = [launch.own[:1] for launch in fresh.values()]
        _compile([each for each in likeliest if each[0].is_ours], math.inf)
        run()
    with phases.of("compile"):
        ours = [launch.own[1:] for launch in fresh.values()]
        started = _compile(ours, begin + seconds * _COMPILED_BY)
    usable: Dict[str, List[Candidate]] = {}
    with phases.of("search"):
        end = begin + seconds * _FOUND_BY
        for place, (key, launch) in enumerate(fresh.items()):
            share = max(0.0, end - time.monotonic()) / (len(fresh) - place)
            theirs = launch.others(min(_MOST_EACH, share))
            others = [each for each in launch.own[1:] if id(each) in started]
            usable[key] = [*launch.own[:1], *others, *filter(_starts, theirs)]
    with phases.of("measure"):
        for key, candidates in usable.items():
            settled[key] = _storable(_ranked(candidates))
    for launch in launches:
        if launch.chosen is None:
            launch.chosen = launch.stored(settled[key_of(launch)])
    return Tuned(len(fresh), sum(map(len, ours)) - len(started))


def _compile(groups: Sequence[Sequence[Candidate]], deadline: float) -> Set[int]:
    """The ids of the candidates that start, of those whose turn comes before the deadline: one of
    each group after the other. Compilers run side by side where triton can."""
    in_turn = [each for turn in itertools.zip_longest(*groups) for each in turn if each is not None]
    stream = torch.cuda.current_stream()

    def start(candidate: Candidate) -> bool:
        if time.monotonic() > deadline:
            return False
        # A thread has a device and a stream of its own, and kernels share memory on one stream.
        with torch.cuda.stream(stream):
            return _starts(candidate)

    with ThreadPoolExecutor(_COMPILERS) as pool:
        return {id(each) for each, ran in zip(in_turn, pool.map(start, in_turn)) if ran}


def _starts(candidate: Candidate) -> bool:
    if not candidate.is_ours:
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
