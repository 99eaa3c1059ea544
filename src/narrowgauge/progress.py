"""Live progress from a run's events: how far, how long still, the latest figures.

`Progress` is the pure part. `LineReporter` writes plain lines for logs and pipes, `LiveReporter`
one moving line for terminals; rich is imported when the first is drawn, after the run has started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from narrowgauge.units import format_value
from narrowgauge_contract.events import Event, EventKind
from narrowgauge_contract.job import Job
from narrowgauge_contract.spec import headline_of

__all__ = ["LineReporter", "LiveReporter", "Progress", "Reporter", "SilentReporter", "duration"]

_LINE_EVERY_S = 5.0
#: From when on an estimate is said: whichever comes first.
_ETA_AFTER_S = 5.0
_ETA_AFTER_PART = 0.02
#: A row that takes longer than those before is not done for that.
_NEARLY = 0.99
#: How many figures fit on the line beside the bar.
_FIGURES = 3


class Progress:
    """What the events so far say. `now` is the clock the events use (monotonic, same host).

    A row may have several stretches of work, such as a training and then a table of cuts, each of
    which counts from nothing, and of which nobody knows how long it takes beside the others. How
    far the row is never goes back for that: in the first row it stands still and no time is said,
    and later rows are measured by how long those before took.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows_total = len(job.rows)
        self.rows_done = 0
        self.failed = 0
        self.skipped = 0
        self.row: int | None = None
        self.phase = ""
        self.figures: dict[str, str] = {}
        #: Of the row, the most so far, and as the newest event has it.
        self._row_part = self._counted = 0.0
        self._row_goes_on = False
        self._row_began = self._newest = 0.0
        #: In this row, and the most that one before had.
        self._stretches = self._most_stretches = 1
        self._row_seconds: list[float] = []
        self._row_parameters: dict[str, Any] = {}

    def add(self, event: Event) -> None:
        self._newest = event.t
        if event.kind is EventKind.ROW_START:
            self.row = event.row
            self._row_part = self._counted = 0.0
            self._row_goes_on = True
            self._row_began = event.t
            self._stretches = 1
            # What the row before reached would be read as this one's.
            self.phase, self.figures = "", {}
            self._row_parameters = event.data.get("parameters", {})
        elif event.kind is EventKind.PROGRESS:
            done, total = event.data.get("done", 0), event.data.get("total", 0)
            part = min(1.0, done / total) if total else 0.0
            self._stretches += part < self._counted
            self._counted, self._row_part = part, max(part, self._row_part)
            words = (
                event.data.get("phase", ""),
                f"{_count(done)}/{_count(total)}",
                event.data.get("unit", ""),
            )
            self.phase = " ".join(filter(None, words))
        elif event.kind is EventKind.METRIC and event.data.get("values"):
            value = event.data["values"][-1]
            # Events have words for what JSON has no number for: NaN, Infinity.
            known = isinstance(value, (int, float))
            shown = format_value(value, event.data.get("unit", "")) if known else str(value)
            self.figures.pop(event.data["name"], None)  # the newest stand last
            self.figures[event.data["name"]] = shown
        elif event.kind is EventKind.ROW_END:
            self.rows_done += 1
            status = event.data.get("status")
            self.skipped += status == "skipped"
            self.failed += status not in ("complete", "skipped")
            self._row_part = 0.0
            self._row_goes_on = False
            # One that was skipped, or failed early, says nothing of how long others take.
            self._row_seconds += [event.t - self._row_began] if status == "complete" else []
            self._most_stretches = max(self._most_stretches, self._stretches)

    @property
    def part(self) -> float:
        """How much of the whole run is done, 0 to 1."""
        if not self.rows_total:
            return 0.0
        return min(1.0, (self.rows_done + self._part_of_row()) / self.rows_total)

    def _part_of_row(self) -> float:
        """How much of the row that goes on is done; of one that may begin anew, by its time."""
        mean = sum(self._row_seconds) / len(self._row_seconds) if self._row_seconds else 0.0
        if not self._row_goes_on or self._most_stretches == 1 or mean <= 0.0:
            return self._row_part
        return min(_NEARLY, (self._newest - self._row_began) / mean)

    def eta_s(self, now: float) -> float | None:
        """Seconds left, if it goes on as it went; None before there is anything to go by.

        Rows that failed or were skipped are done, and say nothing of how long others take.
        """
        part = self._part_of_row()
        whole = len(self._row_seconds) + part
        if whole <= 0.0 or (self._stretches > 1 and not self._row_seconds):
            return None
        spent = sum(self._row_seconds) + (now - self._row_began if self._row_goes_on else 0.0)
        # The first steps warm up: an hour, said for a run of minutes, is worse than nothing.
        if spent < _ETA_AFTER_S and self.part < _ETA_AFTER_PART:
            return None
        return max(0.0, spent * (self.rows_total - self.rows_done - part) / whole)

    def line(self, now: float) -> str:
        """One line that says it all."""
        eta = self.eta_s(now)
        # Between two rows the line is still of the one that ended, and so are its figures.
        number = min(max(self.rows_done + self._row_goes_on, 1), self.rows_total)
        words = [f"row {number}/{self.rows_total}"]
        varied = [n for n, v in self.job.parameters.items() if isinstance(v, list)]
        known = self._row_parameters
        words += [f"{name}={known[name]}" for name in varied if name in known]
        words += [self.phase] if self.phase else []
        words += [f"{n} {v}" for n, v in self._shown()]
        words += [f"{self.failed} failed"] if self.failed else []
        words += [f"{self.skipped} skipped"] if self.skipped else []
        words += [f"{self.part:4.0%}"]
        if eta is not None:
            words += [f"about {duration(eta)} left"]
        elif self._stretches == 1:
            words += ["starting"]
        return " · ".join(words)

    def _shown(self) -> list[tuple[str, str]]:
        headline = [name for name in headline_of(self.job.spec) if name in self.figures]
        rest = [name for name in reversed(self.figures) if name not in headline]
        return [(name, self.figures[name]) for name in (headline + rest)[:_FIGURES]]


def _count(number: float) -> str:
    """A count without an exponent, however large."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 10 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Reporter(Protocol):
    """Tells a user what happens. Notes are whole sentences; events may come by the million."""

    def note(self, text: str) -> None: ...

    def begin(self, job: Job) -> None: ...

    def event(self, event: Event) -> None: ...

    def tick(self) -> None: ...

    def end(self) -> None: ...


class SilentReporter:
    """For --json: notes only, to the error stream, so that standard output holds one document."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def begin(self, job: Job) -> None: ...

    def event(self, event: Event) -> None: ...

    def tick(self) -> None: ...

    def end(self) -> None: ...


class LineReporter:
    """Plain lines, at most one every few seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress: Progress | None = None
        self._last = 0.0
        self._shown = ""

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def begin(self, job: Job) -> None:
        self._progress = Progress(job)
        self._last = self._clock()
        self._shown = ""

    def event(self, event: Event) -> None:
        assert self._progress is not None
        self._progress.add(event)

    def tick(self) -> None:
        now = self._clock()
        if self._progress is None or now - self._last < _LINE_EVERY_S:
            return
        self._last = now
        line = self._progress.line(now)
        if line != self._shown:
            self._shown = line
            self.note(line)

    def end(self) -> None:
        self._progress = None


class LiveReporter:
    """One line with a bar that moves, on a terminal."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress: Progress | None = None
        self._bar: Any = None
        self._task: Any = None

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self, job: Job) -> None:
        self._progress = Progress(job)

    def event(self, event: Event) -> None:
        assert self._progress is not None
        self._progress.add(event)

    def tick(self) -> None:
        if self._progress is None:
            return
        if self._bar is None:
            self._open()
        line = self._progress.line(self._clock())
        self._bar.update(self._task, completed=self._progress.part, line=line)

    def end(self) -> None:
        if self._bar is not None:
            self.tick()
            self._bar.stop()
        self._bar = self._progress = None

    def _open(self) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        from narrowgauge.screen import Screen

        self._bar = Bar(
            TimeElapsedColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[line]}", markup=False),
            console=Screen(file=self._stream),
            refresh_per_second=5,
        )
        self._task = self._bar.add_task("run", total=1.0, line="starting")
        self._bar.start()
