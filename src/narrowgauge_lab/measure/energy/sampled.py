"""Energy from a power that can only be read: a thread reads it, and the readings are integrated.

Linear between two readings. What lies in a gap far longer than is usual was not observed, and
lowers the coverage; a window too little of which was observed is no measurement.
"""

from __future__ import annotations

import statistics
import threading
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from narrowgauge_lab.measure.energy.source import (
    Clock,
    Energy,
    EnergyError,
    Rail,
    Sampling,
    Source,
    Total,
)

__all__ = [
    "LEAST_COVERAGE",
    "SampledSource",
    "ThreadTicker",
    "covered",
    "integrate",
    "observed",
    "usual_gap",
]

#: Below this share of observed time a window says nothing.
LEAST_COVERAGE = 0.95
#: A gap of more than so many usual ones is a hole in the observation.
_HOLE = 5
#: How long the first and the last reading of a window are waited for.
_PATIENCE_S = 5.0

Watts = Dict[str, float]


class ThreadTicker:
    """Calls `action` every so often in a thread, until it says False or is stopped.

    Torch lets go of the interpreter's lock while it computes, so the thread gets its turns; where
    it does not, the readings' times say so.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self, interval_s: float, action: Callable[[], bool]) -> None:
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(interval_s, action), name="power-sampler", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread is gone. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()

    def _run(self, interval_s: float, action: Callable[[], bool]) -> None:
        due = self._clock.now()
        while not self._stop.is_set() and action():
            # A reading that took long is not made up for by a burst of them.
            due = max(due + interval_s, self._clock.now())
            self._stop.wait(max(0.0, due - self._clock.now()))


def integrate(times: Sequence[float], watts: Sequence[float], begin: float, end: float) -> float:
    """The area below the readings between two times, in J, by trapezoids.

    The readings must reach from `begin` or before to `end` or after; between two of them power is
    taken to be linear, at the window's edges too.
    """
    area = 0.0
    for index in range(1, len(times)):
        left, right = max(times[index - 1], begin), min(times[index], end)
        if right <= left:
            continue
        slope = (watts[index] - watts[index - 1]) / (times[index] - times[index - 1])
        at_left = watts[index - 1] + slope * (left - times[index - 1])
        at_right = watts[index - 1] + slope * (right - times[index - 1])
        area += (at_left + at_right) / 2 * (right - left)
    return area


def covered(times: Sequence[float], begin: float, end: float, longest_s: float) -> float:
    """The share of a window that lies between readings no further apart than `longest_s`."""
    seen = 0.0
    for before, after in zip(times, times[1:]):
        if after - before <= longest_s:
            seen += max(0.0, min(after, end) - max(before, begin))
    return seen / (end - begin) if end > begin else 0.0


def usual_gap(times: Sequence[float]) -> float:
    """The usual distance of two readings, in s: the median; 0 where there is only one."""
    gaps = [after - before for before, after in zip(times, times[1:])]
    return statistics.median(gaps) if gaps else 0.0


def observed(
    times: Sequence[float], begin: float, end: float, usual_s: float, next_step: str
) -> float:
    """The share of a window that lies in no hole between readings that are usually so far apart.

    Raises EnergyError below LEAST_COVERAGE, and says what to do.
    """
    share = covered(times, begin, end, _HOLE * usual_s)
    if share < LEAST_COVERAGE:
        raise EnergyError(
            f"only {share:.0%} of the energy window was observed",
            why=f"the rest of its {end - begin:.1f} s lies between readings that are more than"
            f" {_HOLE} times the usual {usual_s * 1e3:.3g} ms apart",
            next_step=next_step,
        )
    return share


class SampledSource(Source):
    """`read` gives each rail's power in W, now; it may raise EnergyError, which ends the window.

    `quanta_w`: the smallest step of each rail's reading. `interval_s`: how often is tried; what
    came of it is in each window's sampling.
    """

    def __init__(
        self,
        name: str,
        rails: Tuple[Rail, ...],
        total: Total,
        read: Callable[[], Watts],
        *,
        clock: Clock,
        interval_s: float,
        quanta_w: Watts,
        period_s: float = 0.0,
        caveat: str = "",
        close: Optional[Callable[[], None]] = None,
        ticker: Optional[ThreadTicker] = None,
    ) -> None:
        """`period_s`: the sensor's own, where it is longer than the interval."""
        self.name = name
        self.rails = rails
        self.total = total
        self.caveat = caveat
        self.period_s = max(interval_s, period_s)
        self._read = read
        self._clock = clock
        self._interval_s = interval_s
        self._quanta_w = quanta_w
        self._close = close
        self._ticker = ticker or ThreadTicker(clock)
        self._samples: List[Tuple[float, Watts]] = []
        self._busy_s = 0.0
        self._failure: Optional[Exception] = None
        self._began: Optional[float] = None

    def begin(self) -> None:
        self.abandon()
        self._samples, self._busy_s, self._failure = [], 0.0, None
        self._ticker.start(self._interval_s, self._take)
        self._wait(lambda: bool(self._samples))
        self._began = self._clock.now()

    def end(self) -> Energy:
        if self._began is None:
            raise EnergyError("an energy window is ended that was not begun")
        began, self._began = self._began, None
        ended = self._clock.now()
        self._wait(lambda: self._samples[-1][0] >= ended)
        self._ticker.stop()
        sampling = self._sampling()
        joules = {
            rail.name: integrate(sampling.times, sampling.watts[rail.name], began, ended)
            for rail in self.rails
        }
        share = observed(
            sampling.times,
            began,
            ended,
            # A bus may be slower than the interval, always; then that is no hole.
            max(self.period_s, usual_gap(sampling.times)),
            "leave a processor core free for the reading",
        )
        counted = self.total.rails or tuple(joules)
        quantum = sum(self._quanta_w[name] for name in counted)
        seconds = ended - began
        return Energy(joules, seconds, 0.0, share, quantum * seconds, sampling)

    def abandon(self) -> None:
        self._began = None
        self._ticker.stop()

    def close(self) -> None:
        self.abandon()
        if self._close is not None:
            closing, self._close = self._close, None
            closing()

    def _take(self) -> bool:
        """One reading, at the middle of the time that it took. False: there will be no more."""
        before = self._clock.now()
        try:
            watts = self._read()
        except Exception as error:  # raised again where the window is waited for
            self._failure = error
            return False
        after = self._clock.now()
        self._busy_s += after - before
        self._samples.append(((before + after) / 2, watts))
        return True

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = self._clock.now() + _PATIENCE_S
        while True:
            if self._failure is not None:
                self.abandon()
                raise self._failure
            if done():
                return
            if self._clock.now() >= deadline:
                self.abandon()
                raise EnergyError(f"no power was read for {_PATIENCE_S:g} s")
            self._clock.sleep(self._interval_s / 4)

    def _sampling(self) -> Sampling:
        return Sampling(
            interval_s=self._interval_s,
            times=tuple(at for at, _ in self._samples),
            watts={
                rail.name: tuple(watts[rail.name] for _, watts in self._samples)
                for rail in self.rails
            },
            busy_s=self._busy_s,
        )
