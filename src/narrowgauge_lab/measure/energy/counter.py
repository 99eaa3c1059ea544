"""Energy from a counter that somebody else keeps: read where it steps, at both ends of a window.

A counter that steps every 100 ms and is read anywhere is wrong by up to a step at either end. So a
window begins when the counter has just stepped, and after its end the next step is waited for.
"""

from __future__ import annotations

import statistics
from typing import Callable, Dict, Optional, Tuple

from narrowgauge_lab.measure.energy.source import (
    Clock,
    Energy,
    EnergyError,
    Rail,
    Source,
    Total,
)

__all__ = ["CounterSource", "detect_period"]

#: How often a counter is looked at while its next step is waited for. What a step is missed by.
_POLL_S = 0.0002
#: Steps whose distances are looked at to find the period.
_STEPS = 5
#: How long a counter may stand still before it is said to: longer than any known period.
_PATIENCE_S = 2.0
#: No device of today draws so much: a counter that says it was reset, or is broken.
_MOST_WATTS = 5000.0
#: Up to this mean power it is certain how often a counter began anew.
_CERTAIN_WATTS = 500.0

Values = Dict[str, float]


def detect_period(read: Callable[[], float], clock: Clock, where: str) -> float:
    """Seconds between a counter's steps, by watching some. Raises EnergyError where it stands."""
    times = []
    value = _next_step(read, clock, read(), where)
    for _ in range(_STEPS):
        times.append(clock.now())
        value = _next_step(read, clock, value, where)
    times.append(clock.now())
    return statistics.median(after - before for before, after in zip(times, times[1:]))


def _next_step(read: Callable[[], float], clock: Clock, value: float, where: str) -> float:
    deadline = clock.now() + _PATIENCE_S
    while True:
        clock.sleep(_POLL_S)
        found = read()
        if found != value:
            return found
        if clock.now() >= deadline:
            raise EnergyError(
                f"the energy counter of {where} stands still",
                why=f"it said {value:g} J for {_PATIENCE_S:g} s, and a device always draws power",
                next_step="see whether its driver or a virtual machine only shows a dummy",
            )


class CounterSource(Source):
    """`read` gives each rail's counter in J. `ranges`: where a counter of a rail goes on from 0
    after so many J; a rail without one never runs backwards. `quantum_j`: its smallest step."""

    def __init__(
        self,
        name: str,
        rails: Tuple[Rail, ...],
        total: Total,
        read: Callable[[], Values],
        *,
        clock: Clock,
        quantum_j: float,
        ranges: Optional[Values] = None,
        caveat: str = "",
        close: Optional[Callable[[], None]] = None,
    ) -> None:
        """Watches the counter for some steps. Raises EnergyError where it has none."""
        self.name = name
        self.rails = rails
        self.total = total
        self.caveat = caveat
        self._read = read
        self._clock = clock
        self._quantum_j = quantum_j
        self._ranges = ranges or {}
        self._close = close
        #: Whose steps are waited for; the others of one device step with it.
        self._leader = (total.rails or tuple(rail.name for rail in rails))[0]
        self._began: Optional[Tuple[float, float, Values]] = None
        self.period_s = detect_period(lambda: read()[self._leader], clock, self._leader)

    def begin(self) -> None:
        self._began = self._at_step()

    def end(self) -> Energy:
        if self._began is None:
            raise EnergyError("an energy window is ended that was not begun")
        (began, blur_before, first), self._began = self._began, None
        asked = self._clock.now()
        ended, blur_after, last = self._at_step()
        seconds = ended - began
        joules = {
            rail.name: self._difference(rail.name, first, last, seconds) for rail in self.rails
        }
        drawn = self.total.of(joules)
        counted = joules[self._leader] if drawn is None else drawn
        for name in self.total.rails:
            if joules[name] <= 0:
                raise EnergyError(
                    f"the energy counter {name} stood still for {seconds:.1f} s",
                    why="the total would lack it, and a device always draws power",
                )
        return Energy(
            joules=joules,
            seconds=seconds,
            tail_s=ended - asked,
            coverage=1.0,
            # A step is seen up to one look late: so much of the mean power, at either end.
            resolution_j=self._quantum_j + counted / seconds * (blur_before + blur_after),
        )

    def abandon(self) -> None:
        self._began = None

    def close(self) -> None:
        if self._close is not None:
            closing, self._close = self._close, None
            closing()

    def _at_step(self) -> Tuple[float, float, Values]:
        """Wait for the next step: when it was seen, how long that may be after it, the values."""
        clock = self._clock
        values = self._read()
        looked = clock.now()
        patience = max(_PATIENCE_S, 20 * self.period_s)
        deadline = looked + patience
        while looked < deadline:
            clock.sleep(_POLL_S)
            found = self._read()
            now = clock.now()
            if found[self._leader] != values[self._leader]:
                return now, now - looked, found
            looked = now
        raise EnergyError(
            f"the energy counter of {self._leader} stands still",
            why=f"it stepped every {self.period_s:.3g} s, and then not for {patience:.3g} s",
        )

    def _difference(self, name: str, first: Values, last: Values, seconds: float) -> float:
        joules = last[name] - first[name]
        span = self._ranges.get(name)
        if joules < 0 and span is not None:
            joules += span
        if span is not None and seconds * _CERTAIN_WATTS > joules + span:
            raise EnergyError(
                f"the energy counter {name} may have begun anew unseen in the window",
                why=f"it holds {span:.0f} J, and the window took {seconds:.0f} s",
                next_step="measure in shorter windows",
            )
        if joules < 0:
            raise EnergyError(
                f"the energy counter {name} ran backwards",
                why=f"from {first[name]:.3f} J to {last[name]:.3f} J: its driver was loaded anew",
            )
        if joules > seconds * _MOST_WATTS:
            raise EnergyError(
                f"the energy counter {name} says what cannot be",
                why=f"{joules:.0f} J in {seconds:.2f} s would be {joules / seconds / 1e3:.1f} kW",
            )
        return joules
