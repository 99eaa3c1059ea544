"""Recorded energy, as a source: for tests of what measures, and to look at a recording again.

A recording is a table of text. Its first line names the columns: `t_s`, and a rail each with its
unit, `VDD_IN_W` (power at that time) or `package-0_J` (a counter). All rails have one unit.

It is played from the first window on, and must last for as long as is measured: with an EnergyPlan
its idle window, its first call and warm-up, and its windows, which come out some 5 % longer than
asked for (count 10 %), and again for each that has to be repeated: 19 s as a rule for the plan as
it stands. No window is shorter than 5 s and 50 of the recording's intervals. What ends too early is
an EnergyError, no guess.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab.measure.energy.boards import describe_rail, total_of
from narrowgauge_lab.measure.energy.sampled import integrate, observed, usual_gap
from narrowgauge_lab.measure.energy.source import (
    Clock,
    Energy,
    EnergyError,
    EnergyMissingError,
    Rail,
    Sampling,
    Source,
    Total,
)

__all__ = ["Recording", "ReplaySource", "load_recording", "write_recording"]

_TIME = "t_s"


@dataclass(frozen=True)
class Recording:
    """`times` rise. `unit` is "W" or "J"; `values` of each rail has one for each time."""

    times: Tuple[float, ...]
    unit: str
    values: Dict[str, Tuple[float, ...]]

    @property
    def interval_s(self) -> float:
        """The usual distance of two times: the median."""
        return usual_gap(self.times)

    def joules(self, rail: str, begin: float, end: float) -> float:
        """Between two times of the recording. Raises EnergyError for a counter that runs back."""
        values = self.values[rail]
        if self.unit == "W":
            return integrate(self.times, values, begin, end)
        if any(after < before for before, after in zip(values, values[1:])):
            raise EnergyError(f"the recorded energy counter {rail} runs backwards")
        return _at(self.times, values, end) - _at(self.times, values, begin)


def load_recording(path: Path) -> Recording:
    """Raises EnergyMissingError where there is no such file, UsageError where it is not a
    recording."""
    try:
        with open(str(path), newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EnergyMissingError(f"no recorded energy in {path}", why=str(error)) from error
    header = rows[0] if rows else []
    units = {name[-1] for name in header[1:] if name[-2:] in ("_W", "_J")}
    named = all(name[-2:] in ("_W", "_J") and len(name) > 2 for name in header[1:])
    if header[:1] != [_TIME] or not named or len(units) != 1 or len(set(header)) != len(header):
        raise _bad(path, f"its first line must be {_TIME},RAIL_W,… or {_TIME},RAIL_J,…")
    table: List[List[float]] = []
    for number, row in enumerate(rows[1:], start=2):
        try:
            numbers = [float(word) for word in row]
        except ValueError:
            raise _bad(path, f"line {number} has something that is not a number") from None
        if len(numbers) != len(header) or not all(map(math.isfinite, numbers)):
            raise _bad(path, f"line {number} must have {len(header)} finite numbers")
        table.append(numbers)
    times = tuple(row[0] for row in table)
    if len(times) < 2 or any(after <= before for before, after in zip(times, times[1:])):
        raise _bad(path, "its times must rise, and be two at least")
    rails = {
        name[:-2]: tuple(row[column] for row in table)
        for column, name in enumerate(header)
        if column
    }
    return Recording(times, units.pop(), rails)


def write_recording(path: Path, sampling: Sampling) -> None:
    """What a window's readings were, so that `replay:FILE` gives the same energy again."""
    with open(str(path), "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([_TIME, *(f"{name}_W" for name in sampling.watts)])
        began = sampling.times[0]
        for index, at in enumerate(sampling.times):
            row = [f"{at - began:.6f}", *(f"{w[index]:.6f}" for w in sampling.watts.values())]
            writer.writerow(row)


class ReplaySource(Source):
    """A recording played from where the first window begins, in the clock's own time."""

    def __init__(self, recording: Recording, clock: Clock, total: Optional[Total] = None) -> None:
        """`total`: what is told of it; else what the board with such rails has, and a single rail
        is its own total."""
        names = tuple(recording.values)
        self.name = "replay"
        self.rails = tuple(_rail(name, names) for name in names)
        self.total = total or _total(names)
        self.period_s = recording.interval_s
        self.caveat = "played from a recording: no figure of this run"
        self._recording = recording
        self._clock = clock
        self._played: Optional[float] = None
        self._began: Optional[float] = None

    def begin(self) -> None:
        if self._played is None:
            self._played = self._clock.now()
        self._began = self._reached(self._played)

    def end(self) -> Energy:
        if self._began is None or self._played is None:
            raise EnergyError("an energy window is ended that was not begun")
        (began, self._began), ended = (self._began, None), self._reached(self._played)
        recording = self._recording
        if ended > recording.times[-1]:
            raise EnergyError(
                f"the recording is from {recording.times[0]:g} to {recording.times[-1]:g} s,"
                f" and the window from {began:.2f} to {ended:.2f} s",
                next_step="play a recording that lasts for all that is measured",
            )
        joules = {name: recording.joules(name, began, ended) for name in recording.values}
        return Energy(
            joules,
            seconds=ended - began,
            tail_s=0.0,
            coverage=observed(
                recording.times, began, ended, self.period_s, "play a recording without holes"
            ),
            resolution_j=0.0,
        )

    def abandon(self) -> None:
        self._began = None

    def _reached(self, played: float) -> float:
        return self._recording.times[0] + self._clock.now() - played


def _rail(name: str, names: Sequence[str]) -> Rail:
    return describe_rail(name, names, "recording")


def _total(names: Tuple[str, ...]) -> Total:
    if len(names) == 1:
        return Total("rail", names, "the only rail of the recording")
    return total_of(names)


def _at(times: Sequence[float], values: Sequence[float], when: float) -> float:
    """Linear between two times; the caller has seen that `when` is not outside."""
    for index in range(1, len(times)):
        if when <= times[index]:
            share = (when - times[index - 1]) / (times[index] - times[index - 1])
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


def _bad(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not a recording of energy", why=why)
