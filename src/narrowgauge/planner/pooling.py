"""The costs of several processes made one: the same step takes another time in each.

Where memory lies and what the host does besides differ from process to process, and not within one:
steps of ResNet-20 took 27 to 34 ms in six processes of one host, and hardly moved in each. A plan
that is predicted from one of them is off by as much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Any

from narrowgauge_contract.placement_costs import Costs

__all__ = ["pooled"]

_SAMPLED = ("products", "native", "placed", "copies", "conversions", "segments", "fixed", "steps")
_SAMPLES = ("seconds", "host_seconds")


def pooled(several: Sequence[Costs]) -> Costs:
    """One or more costs of the same step on one machine as one, whose samples are the medians of
    each process: so a fast process, which has more samples, counts for no more than a slow one.

    What only some of them have is pooled of these; layers and all else are those of the first.
    """
    first, *others = several
    if not others:
        return first
    entries: dict[str, Any] = {name: _entries(several, name) for name in _SAMPLED}
    return dataclasses.replace(first, **entries)


def _entries(several: Sequence[Costs], name: str) -> tuple[Any, ...]:
    """By what they are of, in the order in which they first come."""
    found: dict[Hashable, list[Any]] = {}
    for costs in several:
        for entry in getattr(costs, name):
            found.setdefault(_identity(entry), []).append(entry)
    return tuple(_one(entries) for entries in found.values())


def _identity(entry: Any) -> Hashable:
    fields = (field.name for field in dataclasses.fields(entry))
    return tuple(getattr(entry, name) for name in fields if name not in _SAMPLES)


def _one(entries: Sequence[Any]) -> Any:
    return dataclasses.replace(
        entries[0],
        **{
            name: tuple(median(getattr(entry, name)) for entry in entries)
            for name in _SAMPLES
            if hasattr(entries[0], name)
        },
    )
