"""In which checked facts two records differ, as far as a claim's selections do not settle them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from narrowgauge.statistics import stated
from narrowgauge_contract.agreement import agreement_facts, differing
from narrowgauge_contract.record import Record

__all__ = ["facts_of", "named_apart"]


def named_apart(
    one: Record, facts: dict[str, Any], other: Record, fixed: set[str]
) -> Iterator[str]:
    """The disagreements, parameters one by one. One that every selection fixes may differ between
    records: the rows that were selected have it equal."""
    if one is other:
        return
    theirs = agreement_facts(other)
    chosen = {
        each
        for record in (one, other)
        for name in fixed
        for each in _listed(record.parameters.get(name))
    }
    for line in differing(facts, theirs):
        if line.startswith("plan:") and _same_plans(facts["plan"], theirs["plan"], chosen):
            continue
        if not line.startswith("parameters:"):
            yield line
            continue
        for name in sorted(one.parameters.keys() | other.parameters.keys()):
            left, right = (each.parameters.get(name, "none") for each in (one, other))
            if left != right and name not in fixed:
                yield f"parameter {name}: {stated(left)} / {stated(right)}"


def _same_plans(left: dict[str, str], right: dict[str, str], chosen: set[str]) -> bool:
    """Whether placement plans, hashes by name, agree: what both records have by one name is the
    same, and what one has alone is among the values that selections choose between."""
    both = left.keys() & right.keys()
    alone = left.keys() ^ right.keys()
    return all(left[name] == right[name] for name in both) and alone <= chosen


def _listed(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def facts_of(lines: Sequence[str]) -> str:
    return ", ".join(line.partition(":")[0] for line in lines)
