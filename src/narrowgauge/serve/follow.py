"""A run that goes on: what its events say so far. One reader per run, which reads on where it was,
so that following a long run does not read it all again every second."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from narrowgauge.progress import Progress, duration
from narrowgauge.report.text import clean
from narrowgauge.serve.curves import curve_picture
from narrowgauge.serve.series import SeriesStore
from narrowgauge.store import RunFolder
from narrowgauge.units import format_value
from narrowgauge_contract.errors import NarrowgaugeError
from narrowgauge_contract.events import Event, EventKind, EventTail
from narrowgauge_contract.spec import headline_of

__all__ = ["Follower", "Followers", "LiveView"]

_LOG_FILE = "lab.log"
_MOST_LINES, _MOST_BYTES, _MOST_LETTERS = 200, 16_384, 3500
#: More curves than these do not fit a page.
_MOST_CURVES = 8
_MOST_FOLLOWERS = 8
_LOG_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ENERGY_UNITS = ("J", "W")
#: Colours of a terminal, which a page cannot show. What else acts on a terminal is made visible.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class LiveView:
    """A run at a moment. `curves`: pairs (metric with unit, SVG); `energy`: (metric, newest)."""

    part: float
    words: str
    left: str
    rows_done: int
    rows_total: int
    failed: int
    curves: tuple[tuple[str, str], ...]
    energy: tuple[tuple[str, str], ...]
    log: str
    damaged: int


class Follower:
    """Reads one run's events; `view` may be asked for any number of times."""

    def __init__(self, folder: RunFolder) -> None:
        """Raises DamagedRecordError where the run's job cannot be read."""
        self._folder = folder
        self._lock = threading.Lock()
        self._tail = EventTail(folder.events_path)
        job = folder.job()
        self._progress = Progress(job)
        self._headline = headline_of(job.spec)
        self._log: deque[str] = deque(maxlen=_MOST_LINES)
        self._series = SeriesStore()
        self._units: dict[str, str] = {}
        self._energy: dict[str, str] = {}
        self._odd = 0

    def view(self) -> LiveView:
        """Read what is new and say how the run stands. One thread at a time; others wait."""
        with self._lock:
            return self._view()

    def _view(self) -> LiveView:
        for event in self._tail.poll():
            try:
                self._add(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self._odd += 1  # events that anybody wrote: one odd one must not hide the rest
        progress = self._progress
        left = progress.eta_s(time.monotonic())
        return LiveView(
            part=progress.part,
            words=clean(progress.phase),
            left=f"about {duration(left)} left" if left is not None else "",
            rows_done=progress.rows_done,
            rows_total=progress.rows_total,
            failed=progress.failed,
            curves=tuple(self._curves()),
            energy=tuple(sorted(self._energy.items())),
            log=clean(self._words()[-_MOST_LETTERS:], lines=True),
            damaged=self._tail.damaged + self._odd,
        )

    def _add(self, event: Event) -> None:
        if event.kind is EventKind.LOG:
            self._log.append(str(event.data["text"])[:2000])
        elif event.kind is EventKind.METRIC:
            self._add_metric(event.row or 0, event.data)
        self._progress.add(event)

    def _add_metric(self, row: int, data: dict[str, Any]) -> None:
        name, unit = clean(data["name"]), clean(data.get("unit", ""))
        values = [float(value) for value in data["values"]]
        self._units[name] = unit
        if unit in _ENERGY_UNITS and values:
            self._energy[name] = format_value(values[-1], unit)
        self._series.add(name, row, values)

    def _curves(self) -> list[tuple[str, str]]:
        found = []
        for name, rows in self._series.chosen(self._headline, _MOST_CURVES).items():
            unit = self._units[name]
            label = f"{name} ({unit})" if unit not in ("", "1") else name
            found.append((label, curve_picture(name, unit, rows)))
        return found

    def _words(self) -> str:
        return _COLOURS.sub("", "\n".join([*self._log, *self._lab_log()]))

    def _lab_log(self) -> list[str]:
        """The end of what a native run printed; a container's log is with the engine.

        What ran wrote into this folder: a link there may lead to any file, and a pipe never ends.
        """
        try:
            descriptor = os.open(self._folder.path / _LOG_FILE, _LOG_FLAGS)
            with open(descriptor, "rb") as stream:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return []
                stream.seek(0, 2)
                stream.seek(max(0, stream.tell() - _MOST_BYTES))
                text = stream.read(_MOST_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return []
        return text.splitlines()[-_MOST_LINES:]


class Followers:
    """A follower per run that somebody looks at; those not looked at for longest are let go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Follower] = OrderedDict()

    def view(self, folder: RunFolder) -> LiveView | None:
        """How a run stands; None where it cannot be followed (its job is damaged)."""
        try:
            return self._follower(folder).view()
        except (NarrowgaugeError, OSError, KeyError):
            return None

    def _follower(self, folder: RunFolder) -> Follower:
        # Only finding it is done under the lock of all: a long run must not keep others waiting.
        key = str(folder.path)
        with self._lock:
            follower = self._known.pop(key, None) or Follower(folder)
            self._known[key] = follower
            while len(self._known) > _MOST_FOLLOWERS:
                self._known.popitem(last=False)
            return follower
