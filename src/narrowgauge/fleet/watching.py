"""One run on a board, as its connection brings it: events first, then how it ended and its files.

Everything is written as it arrives, so a connection that was cut is taken up where it ended. Files
wait in `arriving/` beside `out/` until their sums are right.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from narrowgauge.errors import NarrowgaugeError, disk_full
from narrowgauge.executors.base import Ending
from narrowgauge.executors.ending import ending_from, vanished
from narrowgauge.fleet.errors import BoardUnfit, LinkCut
from narrowgauge.fleet.leases import taken_error
from narrowgauge.fleet.link import Channel
from narrowgauge.fleet.protocol import EVENT, Answer
from narrowgauge_contract.events import EVENTS_FILE
from narrowgauge_contract.hashing import sha256_file

__all__ = ["ARRIVING", "Arrival", "Watching", "offsets", "parse_sums"]

ARRIVING = "arriving"

_ESCAPED = re.compile(r"\\([\\nr])")
_MEANS = {"\\": "\\", "n": "\n", "r": "\r"}


@dataclass
class Arrival:
    """What has come so far of a run, in the run's folder here. `wrong`: files whose sum is not the
    board's; they are asked for again. `behind`: events between what is here and what came last are
    missing, and are asked for too. `left_out`: what the board could not bring."""

    folder: Path
    started: bool = False
    cold: bool | None = None
    notes: list[str] = field(default_factory=list)
    code: str = ""
    out_of_memory: bool = False
    log: str = ""
    wrong: tuple[str, ...] = ()
    behind: bool = False
    left_out: tuple[str, ...] = ()
    complete: bool = False

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def events(self) -> Path:
        return self.out / EVENTS_FILE

    @property
    def arriving(self) -> Path:
        return self.folder / ARRIVING

    def ending(self) -> Ending:
        """How the run ended. Only once `code` is known."""
        if self.code == "gone":
            return vanished(
                "container", "it was removed from the board before it was collected", self.log
            )
        found = ending_from(
            int(self.code), out_of_memory=self.out_of_memory, log_tail=self.log, what="container"
        )
        # A symbolic link, a file that cannot be read, or one whose name holds a line's end.
        said = tuple(f"not brought from the board: {name}" for name in self.left_out)
        return replace(found, exceptions=said)

    def bytes_here(self) -> int:
        """How much has arrived of events and files."""
        paths = [self.events, *self.arriving.rglob("*")]
        return sum(path.stat().st_size for path in paths if path.is_file())


def offsets(arrival: Arrival) -> tuple[int, str]:
    """From where on events and files are still wanted: what board.sh's `watch` is told."""
    if EVENTS_FILE in arrival.wrong and arrival.events.exists():
        os.truncate(arrival.events, 0)
    have = arrival.events.stat().st_size if arrival.events.exists() else 0
    lines = []
    for path in sorted(arrival.arriving.rglob("*")) if arrival.arriving.exists() else ():
        name = path.relative_to(arrival.arriving).as_posix()
        if path.is_file() and name in arrival.wrong:
            path.unlink()
        elif path.is_file():
            lines.append(f"{path.stat().st_size} {name}")
    return have, "\n".join(lines)


def parse_sums(text: str) -> dict[str, str]:
    """The sum of each file, as sha256sum prints them: a line that begins with a backslash has a
    name in which backslash, line feed and carriage return are written with one. Raises ValueError.
    """
    found = {}
    for line in text.split("\n"):
        if not line:
            continue
        digest, separator, name = line.removeprefix("\\").partition("  ")
        if not separator:
            raise ValueError(f"not a line of sha256sum: {line[:80]!r}")
        if line.startswith("\\"):
            name = _ESCAPED.sub(lambda match: _MEANS[match[1]], name)
        found[name.removeprefix("./")] = digest
    return found


class Watching:
    """Reads one connection in a thread of its own. `failure` is why it ended, if not in order."""

    def __init__(self, channel: Channel, arrival: Arrival, board: str) -> None:
        self._channel = channel
        self._arrival = arrival
        self._board = board
        self._sums: dict[str, Any] = {}
        self._stream: Any = None
        self._told = threading.Event()
        self._beaten = time.monotonic()
        self.failure: NarrowgaugeError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def followed(self) -> bool:
        """Whether its connection was used for another command before."""
        return self._channel.followed

    def until_started(self) -> None:
        """Wait until the board says that the run goes on. Raises what keeps it from that."""
        self._told.wait()
        if self.failure is not None:
            raise self.failure

    def alive(self, wait_s: float) -> bool:
        self._thread.join(wait_s)
        return self._thread.is_alive()

    def beat(self, every_s: float) -> None:
        """Let the board know that somebody still watches."""
        if time.monotonic() - self._beaten < every_s:
            return
        self._beaten = time.monotonic()
        try:
            self._channel.send(b"beat\n")
        except LinkCut:
            pass  # the thread that reads finds out

    def remove(self) -> None:
        """Everything has arrived: the board may forget the run."""
        self._channel.send(b"remove\n")
        self._channel.finish()

    def close(self) -> None:
        self._channel.close()

    def _run(self) -> None:
        try:
            for answer in self._channel.read():
                if self._take(answer):
                    return
        except LinkCut as error:
            self.failure = self._channel.failure(error)
        except NarrowgaugeError as error:
            self.failure = error
        except OSError as error:
            self.failure = disk_full(self._arrival.folder, f"the results of a run: {error}")
        except Exception as error:
            # Whoever waits for this thread must hear of it; asking again would bring the same.
            self.failure = BoardUnfit(
                f"the board {self._board} sent what cannot be understood",
                why=f"{type(error).__name__}: {error}",
                next_step=f"narrowgauge hosts doctor {self._board}",
            )
        finally:
            if self._stream is not None:
                self._stream.close()
            self._told.set()

    def _take(self, answer: Answer) -> bool:
        """Take one answer in; whether it was the last."""
        arrival = self._arrival
        word, text = answer.word, answer.text
        if word == EVENT:
            self._event(text)
        elif word == "cache":
            arrival.cold = text == "cold"
        elif word == "left":
            arrival.notes.append(text)
        elif word in ("busy", "measuring"):
            raise taken_error(self._board, word, text)
        elif word == "nothing":
            arrival.code = "gone"
            raise LinkCut(f"nothing of this run is on the board {self._board}")
        elif word == "started":
            arrival.started = True
            self._told.set()
        elif word == "ended":
            code, out_of_memory, _ = answer.fields(3)
            arrival.code, arrival.out_of_memory = code, out_of_memory == "true"
        elif word == "log":
            body = self._channel.answers.body(answer)
            arrival.log = body.decode("utf-8", errors="replace")
        elif word == "part":
            self._part(answer)
        elif word == "sums":
            self._check(self._channel.answers.body(answer).decode("utf-8", "surrogateescape"))
        elif word == "left-out":
            names = self._channel.answers.body(answer).decode("utf-8", errors="replace")
            arrival.left_out = tuple(names.split("\n"))
        return word == "bye"

    def _event(self, line: str) -> None:
        if not line.strip() or not self._arrival.started:
            return
        if self._stream is None:
            self._stream = open(self._arrival.events, "ab", buffering=0)
        self._stream.write(line.encode("utf-8", errors="surrogateescape"))

    def _part(self, answer: Answer) -> None:
        """The rest of one file, from the offset that the answer says."""
        offset, name = answer.fields(2)
        path = self._place(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        have = path.stat().st_size if path.exists() else 0
        start = int(offset)
        digest = hashlib.sha256() if start == 0 else None
        if have < start:
            self._arrival.behind = True
            for _ in self._channel.answers.chunks(answer.size):
                pass  # what is between is not here, and is asked for with this again
            return
        with open(path, "r+b" if path.exists() else "wb") as stream:
            stream.seek(start)
            for chunk in self._channel.answers.chunks(answer.size):
                stream.write(chunk)
                if digest is not None:
                    digest.update(chunk)
            stream.truncate()
        if digest is not None:
            self._sums[name] = digest.hexdigest()

    def _place(self, name: str) -> Path:
        """Where a file of the run goes here. A name that leads out of the folder is refused."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise BoardUnfit(
                f"the board {self._board} named a file outside of its run", why=repr(name)
            )
        return self._arrival.events if name == EVENTS_FILE else self._arrival.arriving / pure

    def _check(self, sums: str) -> None:
        """Hold what has come against the board's sums; only a whole run moves to its place."""
        arrival = self._arrival
        wanted = parse_sums(sums)
        wrong = []
        for name, digest in wanted.items():
            path = self._place(name)
            found = self._sums.get(name) or (sha256_file(path) if path.is_file() else "")
            if found != digest and not (arrival.behind and name == EVENTS_FILE):
                wrong.append(name)
        arrival.wrong = tuple(wrong)
        if wrong or arrival.behind:
            return
        for name in wanted:
            if name != EVENTS_FILE:
                place = arrival.out / name
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(arrival.arriving / name, place)
        shutil.rmtree(arrival.arriving, ignore_errors=True)
        arrival.complete = True
