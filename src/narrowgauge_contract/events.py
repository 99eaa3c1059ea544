"""What happens inside a run, one JSON line per event, appended and never rewritten.

The lab's parent and the child that measures a row both append to one file. Each line is one
`write` to a descriptor opened with O_APPEND, so lines from two processes never interleave.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Type, Union

from narrowgauge_contract.codec import decode, encode
from narrowgauge_contract.errors import NarrowgaugeError

__all__ = ["EVENTS_FILE", "Event", "EventKind", "EventLog", "EventTail", "read_events"]

EVENTS_FILE = "events.jsonl"


class EventKind(str, enum.Enum):
    """The closed list. What each carries in `data`:

    run-start     inside: InsideFacts; source, experiment: hashes
    row-start     repeat, seed, parameters
    progress      done, total, unit; `phase` where a row has several
    metric        name, unit, source, values, index, conditions (appended to the row's metric)
    fact          name, value (a property of the row, such as the precision that really ran)
    invalid       reason (the row's numbers must not be used)
    side-file     path, sha256, bytes
    log           text
    row-end       status: complete | failed | interrupted; seconds; error
    run-end       status, exit_code
    """

    RUN_START = "run-start"
    ROW_START = "row-start"
    PROGRESS = "progress"
    METRIC = "metric"
    FACT = "fact"
    INVALID = "invalid"
    SIDE_FILE = "side-file"
    LOG = "log"
    ROW_END = "row-end"
    RUN_END = "run-end"


@dataclasses.dataclass(frozen=True)
class Event:
    """`utc` is seconds since the epoch, `t` a monotonic clock in seconds (same boot, same host)."""

    kind: EventKind
    t: float
    utc: float
    row: Optional[int] = None
    data: Dict[str, Any] = dataclasses.field(default_factory=dict)


class EventLog:
    """Appends events to a file. A context manager; `fork`-safe, since each line is one write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def emit(self, kind: EventKind, row: Optional[int] = None, **data: Any) -> Event:
        """Write one event; OSError (disk full) is the caller's to name."""
        event = Event(kind, time.monotonic(), time.time(), row, data)
        line = json.dumps(encode(event), separators=(",", ":"), allow_nan=False) + "\n"
        payload = line.encode("utf-8")
        written = os.write(self._descriptor, payload)
        if written != len(payload):
            # A short write on a regular file means that the disk is full: ask again for the error.
            os.write(self._descriptor, payload[written:])
        return event


def parse_event(line: Union[str, bytes], where: str) -> Event:
    """One line to an Event; DamagedRecordError or ValueError where it is not one."""
    data = json.loads(line)
    return decode(Event, data, where)


class EventTail:
    """Reads the events of a file that is still growing, holding only the unfinished last line.

    `damaged` counts whole lines that were no event; they are skipped, since one bad line must not
    cost the run that surrounds it.
    """

    _CHUNK = 1 << 20

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0
        self._rest = b""

    def poll(self) -> Iterator[Event]:
        """The events that arrived since the last poll, in order."""
        try:
            stream = open(self.path, "rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(self._offset)
            while True:
                chunk = stream.read(self._CHUNK)
                if not chunk:
                    return
                self._offset += len(chunk)
                yield from self._split(chunk)

    @property
    def unfinished(self) -> bool:
        """Whether the file ends in the middle of a line: its writer was killed, or still writes."""
        return bool(self._rest)

    def _split(self, chunk: bytes) -> Iterator[Event]:
        lines: List[bytes] = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            try:
                yield parse_event(line, str(self.path))
            except (ValueError, NarrowgaugeError):
                self.damaged += 1


def read_events(path: Path) -> Iterator[Event]:
    """All whole events of a finished file; nothing where there is no file."""
    yield from EventTail(path).poll()
