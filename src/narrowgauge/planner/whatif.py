"""Another machine: what its bus, its memory, its processors and its launches would be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowgauge_contract.errors import BadValueError, UnknownNameError

__all__ = ["CHANGES", "HERE", "Machine", "Speed", "changes_of", "machine_of"]

#: What would help most: each change is tried alone.
CHANGES = ("bus=2x", "coherent=yes", "accelerator=2x", "cpu=2x", "latency=0us")
_NAMES = ("bus", "coherent", "accelerator", "cpu", "latency")
_FACTOR = re.compile(r"([0-9.]+(?:e[-+]?[0-9]+)?)x")
_RATE = re.compile(r"([0-9.]+(?:e[-+]?[0-9]+)?)([KMGT]?)B/s")
_TIME = re.compile(r"([0-9.]+(?:e[-+]?[0-9]+)?)(ns|us|ms|s)")
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Speed:
    """So many times as fast, or `per_second` bytes each way where that is given."""

    factor: float = 1.0
    per_second: float | None = None


@dataclass(frozen=True)
class Machine:
    """What is different. `coherent`: both sides read one memory in place, and nothing is copied or
    converted. `latency`: seconds from the host's asking the accelerator for something until it
    begins; where given, the fixed part of a copy is no more than it, and whatever else a launch
    costs shrinks in the proportion in which a launch does.
    """

    bus: Speed = Speed()
    coherent: bool = False
    accelerator: float = 1.0
    cpu: float = 1.0
    latency: float | None = None


#: The machine that was measured.
HERE = Machine()


def changes_of(text: str) -> tuple[str, ...]:
    """The changes that `--what-if` lists, checked. Raises BadValueError, UnknownNameError."""
    words = tuple(filter(None, (word.strip() for word in text.split(","))))
    names = [word.partition("=")[0] for word in words]
    machine_of(words)
    double = [name for name in names if names.count(name) > 1]
    if double:
        raise BadValueError(f"--what-if names '{double[0]}' twice")
    return words


def machine_of(changes: Sequence[str]) -> Machine:
    """The machine with all these changes. Raises BadValueError, UnknownNameError."""
    found = HERE
    for change in changes:
        name, equals, value = change.partition("=")
        if name not in _NAMES:
            raise UnknownNameError("change", name, _NAMES, where="in --what-if")
        if not equals:
            raise _bad(change, "it has no value")
        found = _changed(found, name, value, change)
    return found


def _changed(machine: Machine, name: str, value: str, change: str) -> Machine:
    if name == "coherent":
        if value not in ("yes", "no"):
            raise _bad(change, "coherent is yes or no")
        return replace(machine, coherent=value == "yes")
    if name == "latency":
        time = _TIME.fullmatch(value)
        if time is None:
            raise _bad(change, "a time is like 2us")
        return replace(machine, latency=_number(time.group(1), change) * _UNITS[time.group(2)])
    factor, rate = _FACTOR.fullmatch(value), _RATE.fullmatch(value)
    if factor is not None:
        times = _positive(factor.group(1), change)
        if name == "bus":
            return replace(machine, bus=Speed(times))
        if name == "cpu":
            return replace(machine, cpu=times)
        return replace(machine, accelerator=times)
    if name == "bus" and rate is not None:
        return replace(
            machine,
            bus=Speed(per_second=_positive(rate.group(1), change) * _PREFIX[rate.group(2)]),
        )
    raise _bad(change, "a factor is like 4x" + (", a rate like 64GB/s" if name == "bus" else ""))


def _positive(text: str, change: str) -> float:
    number = _number(text, change)
    if number <= 0:
        raise _bad(change, "it should be above 0")
    return number


def _number(text: str, change: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _bad(change, f"{text} is no number") from None


def _bad(change: str, why: str) -> BadValueError:
    return BadValueError(
        f"--what-if '{change}' says nothing",
        why=why,
        next_step="as in --what-if bus=64GB/s,coherent=yes,accelerator=4x,cpu=2x,latency=2us",
    )
