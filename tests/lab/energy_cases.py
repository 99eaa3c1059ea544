"""A clock that nobody waits for, devices that draw known power on it, trees of made-up boards."""

from __future__ import annotations

import bisect
import csv
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.energy.source import Clock

RAILS = Path(__file__).parents[1] / "data" / "jetson-rails.csv"
CPU = torch.device("cpu")


class FakeClock:
    """Time that passes where it is slept, and what is due in it on the way."""

    def __init__(self, at: float = 100.0) -> None:
        self.at = at
        self.tickers: List[FakeTicker] = []

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.at, self.pass_time)

    def pass_time(self, seconds: float) -> None:
        until = self.at + seconds
        while True:
            due = min(
                (t for t in self.tickers if t.due <= until), key=lambda t: t.due, default=None
            )
            if due is None:
                break
            self.at = max(self.at, due.due)
            due.fire()
        self.at = max(self.at, until)


class FakeTicker:
    """What a sampling thread does, by a FakeClock. `late_s`: how much later a turn may come."""

    def __init__(self, clock: FakeClock, late: Optional[Callable[[], float]] = None) -> None:
        self._clock = clock
        self._late = late or (lambda: 0.0)
        self.due = float("inf")
        self._interval = 0.0
        self._action: Callable[[], bool] = lambda: False

    def start(self, interval_s: float, action: Callable[[], bool]) -> None:
        self._interval, self._action, self.due = interval_s, action, self._clock.at
        self._clock.tickers.append(self)

    def stop(self) -> None:
        if self in self._clock.tickers:
            self._clock.tickers.remove(self)

    def fire(self) -> None:
        self.due += self._interval + self._late()
        if not self._action():
            self.stop()


class Device:
    """Draws `idle` W, and more while a call runs; knows what it really drew."""

    def __init__(self, clock: FakeClock, idle: float = 50.0, load: float = 250.0) -> None:
        self.clock = clock
        self.idle = idle
        self.load = load
        self.calls = 0
        self._times = [clock.at]
        self._joules = [0.0]
        self._watts = [idle]

    def call(self, seconds: float = 0.05) -> None:
        self.calls += 1
        self.draw(self.load)
        self.clock.pass_time(seconds)
        self.draw(self.idle)

    def draw(self, watts: float) -> None:
        """From now on."""
        self._joules.append(self.joules(self.clock.at))
        self._times.append(self.clock.at)
        self._watts.append(watts)

    def watts(self) -> float:
        return self._watts[-1]

    def joules(self, at: float) -> float:
        """From its beginning until then."""
        index = bisect.bisect_right(self._times, at) - 1
        return self._joules[index] + self._watts[index] * (at - self._times[index])

    def counter(self, period: float = 0.1, quantum: float = 1e-3) -> float:
        """What a counter says that steps once a period, in J."""
        stepped = self.clock.at // period * period
        return self.joules(max(stepped, self._times[0])) // quantum * quantum


class Line(NamedTuple):
    """One channel of a monitor, as the table has it."""

    driver: str
    monitor: str
    channel: int
    label: str
    millivolts: int
    milliamperes: int


def boards() -> Dict[Tuple[str, str], List[Line]]:
    """(board, layout) → its channels."""
    found: Dict[Tuple[str, str], List[Line]] = {}
    with open(str(RAILS), newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            numbers = (int(row[name]) for name in ("channel", "millivolts", "milliamperes"))
            channel, millivolts, milliamperes = numbers
            line = Line(
                row["driver"], row["monitor"], channel, row["label"], millivolts, milliamperes
            )
            found.setdefault((row["board"], row["layout"]), []).append(line)
    return found


def write_board(root: Path, board: str, layout: str) -> Path:
    """The tree that the board's kernel would show, below `root`."""
    for number, line in enumerate(boards()[board, layout]):
        monitor = root / "sys/bus/i2c/drivers" / line.driver / line.monitor
        write_channel(monitor, layout, line, number)
    return root


def write_channel(monitor: Path, layout: str, line: Line, number: int = 0) -> None:
    milliwatts = line.millivolts * line.milliamperes // 1000
    if layout == "iio":
        zero = line.channel - 1
        files = {
            f"iio:device{number // 3}/rail_name_{zero}": line.label,
            f"iio:device{number // 3}/in_power{zero}_input": milliwatts,
            f"iio:device{number // 3}/in_voltage{zero}_input": line.millivolts,
            f"iio:device{number // 3}/in_current{zero}_input": line.milliamperes,
        }
    else:
        folder = f"hwmon/hwmon{number // 3 + 2}"
        files = {
            f"{folder}/in{line.channel}_label": line.label,
            f"{folder}/in{line.channel}_input": line.millivolts,
            f"{folder}/curr{line.channel}_input": line.milliamperes,
            f"{folder}/in{line.channel}_enable": 1,
            f"{folder}/shunt{line.channel}_resistor": 5000,
            # What the kernel shows beside the rails, and what is none.
            f"{folder}/in{line.channel + 3}_input": 1,
            f"{folder}/in7_label": "sum of shunt voltages",
            f"{folder}/in7_input": 4,
            f"{folder}/curr4_input": 999,
        }
    write_files(monitor, {name: f"{value}\n" for name, value in files.items()})


def write_files(root: Path, files: Dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


class Case:
    """A row that energy is measured in, and what it has recorded so far."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._plan = RowPlan(0, 0, 7, {})
        self._log = EventLog(folder / EVENTS_FILE)
        self._log.emit(EventKind.ROW_START, 0, repeat=0, seed=7, parameters={})
        self.ctx = RowContext(self._plan, self._log, folder, device=CPU, profile="smoke")

    def row(self) -> Row:
        from toys import row_of

        return row_of(self._log, self._plan)

    @property
    def facts(self) -> Dict[str, Any]:
        return dict(self.row().facts)

    @property
    def reasons(self) -> Tuple[str, ...]:
        """Why the row is INVALID; empty where it is not."""
        return tuple(r for r in self.row().validity.reasons if "did not" not in r)

    def values(self, name: str) -> Tuple[float, ...]:
        metric = self.row().metric(name)
        assert metric is not None, f"no metric {name}"
        return metric.values

    def source(self, name: str) -> str:
        metric = self.row().metric(name)
        assert metric is not None
        return metric.source

    def close(self) -> None:
        self._log.close()
