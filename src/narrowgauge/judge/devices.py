"""Which device a record was measured on, and whether that is the one that a claim names."""

from __future__ import annotations

import re

from narrowgauge_contract.record import Record

__all__ = ["device_of", "matches_device", "names_device"]

#: What makes another product of a name that it follows: a GTX 1080 Ti is no GTX 1080.
_VARIANTS = r"(?:Ti|SUPER|Laptop|Max-Q|D)"


def names_device(name: str, device: str) -> bool:
    """Whether `device` is in a name as whole words, and no variant of it is meant."""
    whole = rf"(?<!\w){re.escape(device)}(?!\w)(?![\s-]*{_VARIANTS}(?!\w))"
    return re.search(whole, name, re.IGNORECASE) is not None


def device_of(record: Record) -> str:
    """The accelerator, or without one the CPU; empty where the record does not say."""
    inside = record.inside
    return (inside.accelerator or inside.cpu or "") if inside is not None else ""


def matches_device(record: Record, device: str) -> bool:
    """Whether `device` names what the rows ran on, or the board that this is part of.

    The host's GPUs count only where nothing was seen from inside, and there is one: a row that ran
    on the CPU of a host with a GPU is none of that GPU's.
    """
    names = [device_of(record)]
    if record.host is not None:
        machine = record.host.machine
        names += [machine.system, str(machine.clocks.get("board", ""))]
        if record.inside is None and len(machine.gpus) == 1:
            names.append(str(machine.gpus[0].get("name", "")))
    return any(names_device(name, device) for name in names if name)
