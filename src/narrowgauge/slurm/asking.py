"""What a user asks of Slurm, as `NAME=VALUE` words or the table of a sweep file. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from narrowgauge.errors import BadValueError, UnknownNameError, UsageError

__all__ = ["CONTAINERS", "SlurmAsk", "add_words", "parse_ask", "parse_minutes"]

#: How the lab may run on a node; `auto` is the first that the site has.
CONTAINERS = ("auto", "apptainer", "enroot", "none")

_CLOCK = re.compile(r"^(?:(\d+)-)?(\d+):(\d{1,2})(?::(\d{1,2}))?$")
_YES, _NO = ("yes", "true", "1", ""), ("no", "false", "0")


@dataclass(frozen=True)
class SlurmAsk:
    """One request, in Slurm's own words where it has them.

    `time`: minutes that a run may take, each time it is started; `grace`: seconds before that end
    (or a preemption) in which a run saves itself, to be queued again, at most `requeues` times.
    `patience`: minutes that a run may wait in a full partition before it is given up; 0: any time.
    `parallel`: jobs of one array that may run at once. `exclusive`: whole nodes; figures taken
    beside other people's jobs are indicative only. `image`: an archive of `images save`, or what
    was made of one (.sif, .sqsh); without one the lab runs natively.
    """

    partition: str = ""
    time: int = 60
    nodes: int = 1
    gres: str = ""
    cpus: int = 0
    mem: str = ""
    exclusive: bool = True
    account: str = ""
    qos: str = ""
    constraint: str = ""
    patience: int = 0
    parallel: int = 256
    requeues: int = 3
    grace: int = 90
    container: str = "auto"
    image: str = ""


def parse_ask(words: Sequence[str] | Mapping[str, Any]) -> SlurmAsk:
    """From `--slurm NAME=VALUE` words, or a table of a file.

    Raises UnknownNameError with the nearest name, UsageError for a name given twice, BadValueError.
    """
    pairs = (
        [(name, str(value).lower() if isinstance(value, bool) else str(value))
         for name, value in words.items()]
        if isinstance(words, Mapping)
        else [(word.partition("=")[0].strip(), word.partition("=")[2].strip()) for word in words]
    )  # fmt: skip
    known = [each.name for each in fields(SlurmAsk)]
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name not in known:
            raise UnknownNameError("Slurm setting", name, known)
        if name in values:
            raise UsageError(f"the Slurm setting '{name}' is given twice")
        values[name] = _PARSERS.get(name, _text)(name, text)
    return SlurmAsk(**values)


def add_words(ask: SlurmAsk, words: Sequence[str]) -> SlurmAsk:
    """What a command line says over what a file said."""
    said = parse_ask(words)
    named = {word.partition("=")[0].strip() for word in words}
    return replace(ask, **{name: getattr(said, name) for name in named})


def parse_minutes(text: str) -> int | None:
    """Minutes, rounded up, of `90`, `1:30:00` (h:m:s), `30:00` (m:s) or `2-12:00` (days-h:m), as
    sbatch reads them; None for anything else, and for nothing at all."""
    if text.isdigit():
        return int(text) or None
    match = _CLOCK.match(text)
    if match is None:
        return None
    days, first, second, third = match.groups()
    if days is not None:
        seconds = int(days) * 86400 + int(first) * 3600 + int(second) * 60 + int(third or 0)
    elif third is not None:
        seconds = int(first) * 3600 + int(second) * 60 + int(third)
    else:
        seconds = int(first) * 60 + int(second)
    return -(-seconds // 60) or None


def _text(name: str, text: str) -> str:
    if not text or any(ord(each) < 32 for each in text):
        raise BadValueError(f"the Slurm setting '{name}' has no value", next_step=f"{name}=VALUE")
    return text


def _minutes(name: str, text: str) -> int:
    minutes = parse_minutes(text)
    if minutes is None:
        raise BadValueError(
            f"'{name}={text}' is no time limit",
            next_step="minutes, h:mm:ss or days-hh:mm, such as time=90 or time=1:30:00",
        )
    return minutes


def _count(least: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise BadValueError(f"'{name}={text}' is not a number of at least {least}")
        return int(text)

    return parse


def _truth(name: str, text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise BadValueError(f"'{name}={text}' is neither yes nor no")
    return text.lower() in _YES


def _container(name: str, text: str) -> str:
    if text not in CONTAINERS:
        raise UnknownNameError(f"value of '{name}'", text, CONTAINERS)
    return text


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "time": _minutes,
    "nodes": _count(1),
    "cpus": _count(1),
    "parallel": _count(1),
    "patience": _count(0),
    "requeues": _count(0),
    "grace": _count(1),
    "exclusive": _truth,
    "container": _container,
}
