"""The answers of board.sh, read from a connection that may end anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from narrowgauge.fleet.errors import LinkCut

__all__ = ["EVENT", "Answer", "Answers"]

#: An answer that is a line of the run's own: an event.
EVENT = "event"

_MARK = b"@ng "
#: Answers that are followed by bytes; their first word says how many.
_WITH_BYTES = ("file", "left-out", "log", "part", "sums")
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Answer:
    """One line. `size` bytes follow it, which must be read before the next answer."""

    word: str
    text: str
    size: int = 0

    def fields(self, count: int) -> list[str]:
        """The text as `count` fields, the last of which may hold spaces; empty ones at its end."""
        found = self.text.split(" ", count - 1)
        return found + [""] * (count - len(found))


class Answers:
    """Iterates over answers until `done`. Raises LinkCut where the stream ends before."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        #: Whether anything has come: only over a connection can it.
        self.heard = False

    def __iter__(self) -> Iterator[Answer]:
        while True:
            answer = self.next()
            if answer.word == "done":
                return
            yield answer

    def next(self) -> Answer:
        line = self._stream.readline()
        self.heard = self.heard or bool(line)
        if not line.endswith(b"\n"):
            # What was cut off is not an event and not an answer.
            raise LinkCut("the connection ended in the middle")
        if not line.startswith(_MARK):
            return Answer(EVENT, line.decode("utf-8", errors="surrogateescape"))
        text = line[len(_MARK) : -1].decode("utf-8", errors="surrogateescape")
        word, _, rest = text.partition(" ")
        if word not in _WITH_BYTES:
            return Answer(word, rest)
        size, _, rest = rest.partition(" ")
        if not size.isdigit():
            raise LinkCut(f"the connection brought something else than an answer: {text[:80]!r}")
        return Answer(word, rest, int(size))

    def chunks(self, size: int) -> Iterator[bytes]:
        """The bytes that follow an answer. Raises LinkCut."""
        while size:
            chunk = self._stream.read(min(size, _CHUNK))
            if not chunk:
                raise LinkCut("the connection ended in the middle")
            size -= len(chunk)
            yield chunk

    def body(self, answer: Answer) -> bytes:
        """Those bytes, where they are few."""
        return b"".join(self.chunks(answer.size))
