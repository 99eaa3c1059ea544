"""What every source of energy is: rails by their raw names, a total that says what it is, windows.

A window is begun and ended by whoever measures. Its energy comes by rail, with how long it really
took, how much of that was observed, and how finely.
"""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError

__all__ = [
    "REAL_CLOCK",
    "Clock",
    "Energy",
    "EnergyError",
    "EnergyMissingError",
    "NullSource",
    "Rail",
    "Sampling",
    "Source",
    "Total",
]


class EnergyError(NarrowgaugeError):
    """A source of energy failed, or said what cannot be, while it was measured with."""

    exit_code = ExitCode.RUN_FAILED

    def in_words(self) -> str:
        """What, why and what to do on one line, as a row's reason."""
        words = f"{self.what} ({self.why})" if self.why else self.what
        return f"{words}; {self.next_step}" if self.next_step else words


class EnergyMissingError(EnergyError):
    """Energy was asked for, and there is nothing here that says it. A row without it is INVALID."""

    exit_code = ExitCode.NOT_APPLICABLE


@dataclass(frozen=True)
class Clock:
    """Seconds of a monotonic clock, and a way to wait; tests give their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL_CLOCK = Clock()


@dataclass(frozen=True)
class Rail:
    """One thing whose power is known. `name` is what the board, driver or kernel calls it.

    `parts`: what it feeds, as far as anyone has said; several where the rail is shared, and then no
    part's own share is known. `said_by`: where that is from. `place`: where it is read.
    """

    name: str
    parts: Tuple[str, ...] = ()
    said_by: str = ""
    place: str = ""

    def to_fact(self) -> Dict[str, Any]:
        return {"parts": list(self.parts), "said_by": self.said_by, "place": self.place}


@dataclass(frozen=True)
class Total:
    """How the whole is had: `rule` is "rail" (one that feeds all), "sum" (of these), or "none".

    `why` says what makes it so, and for "none" why no sum of the rails is a total.
    """

    rule: str
    rails: Tuple[str, ...] = ()
    why: str = ""

    def of(self, values: Mapping[str, float]) -> Optional[float]:
        """The total of values by rail; None where there is none. Never the sum of a part."""
        return sum(values[name] for name in self.rails) if self.rails else None

    def to_fact(self) -> Dict[str, Any]:
        return {"rule": self.rule, "rails": list(self.rails), "why": self.why}


@dataclass(frozen=True)
class Sampling:
    """How a power that is only read, not counted, was read. `times` are the clock's seconds, and
    `watts` of each rail has a value for each. `busy_s`: what the reading itself took."""

    interval_s: float
    times: Tuple[float, ...]
    watts: Dict[str, Tuple[float, ...]]
    busy_s: float

    @property
    def rate_hz(self) -> float:
        span = self.times[-1] - self.times[0]
        return (len(self.times) - 1) / span if span > 0 else 0.0

    def to_fact(self) -> Dict[str, Any]:
        span = self.times[-1] - self.times[0]
        return {
            "interval_s": self.interval_s,
            "rate_hz": self.rate_hz,
            "samples": len(self.times),
            "seconds_per_reading": self.busy_s / len(self.times),
            "busy_share": self.busy_s / span if span > 0 else 0.0,
        }


@dataclass(frozen=True)
class Energy:
    """What a window drew, in J by rail, over `seconds` from its beginning.

    `tail_s` of those lie after the window was told to end: a counter is only read when it steps.
    `coverage`: the share of the window that was observed; `resolution_j`: what of the total cannot
    be told apart.
    """

    joules: Dict[str, float]
    seconds: float
    tail_s: float
    coverage: float
    resolution_j: float
    sampling: Optional[Sampling] = field(default=None, repr=False)


class Source(abc.ABC):
    """Something that says energy. `name` goes into records: figures of two kinds of source are not
    comparable. `period_s` is how often it has something new to say."""

    name: str = ""
    rails: Tuple[Rail, ...] = ()
    total: Total = Total("none")
    period_s: float = 0.0
    #: What a reader of the figures must know, where there is something.
    caveat: str = ""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin a window, at a step of the source where it has steps. Raises EnergyError."""

    @abc.abstractmethod
    def end(self) -> Energy:
        """End it; whoever measures has synchronised the device before. Raises EnergyError."""

    def abandon(self) -> None:
        """Give up a window that was begun; nothing where none was."""
        return

    def close(self) -> None:
        """Let go of what was opened; a second call does nothing."""
        return

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: Any) -> None:
        self.abandon()
        self.close()

    def label(self, rails: Tuple[str, ...]) -> str:
        """What a metric's `source` says: the source's name and, of several rails, which."""
        return self.name if len(self.rails) == 1 else f"{self.name}:{'+'.join(rails)}"


class NullSource(Source):
    """Energy was not asked for."""

    name = "none"

    def begin(self) -> None:
        raise EnergyError("no energy is measured with the source 'none'")

    def end(self) -> Energy:
        raise EnergyError("no energy is measured with the source 'none'")
