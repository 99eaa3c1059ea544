"""Runs that are one network trained several times: a family has a row for each seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.anytime.gather import Answered
from narrowgauge.statistics import word
from narrowgauge_scores.side_file import RunLogits

__all__ = ["Family", "families_of"]


@dataclass(frozen=True)
class Family:
    """`rows` differ in their seed only, which they stand in the order of."""

    label: str
    rows: tuple[Answered, ...]

    @property
    def runs(self) -> tuple[RunLogits, ...]:
        return tuple(each.logits for each in self.rows)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)


def families_of(answered: Sequence[Answered]) -> tuple[tuple[Family, ...], tuple[str, ...]]:
    """Families in the order in which they first occur, and a line for each row that is not counted:
    of two rows of one seed the later one given."""
    groups: dict[tuple[object, ...], dict[int, Answered]] = {}
    dropped: list[str] = []
    for each in answered:
        group = groups.setdefault(_key(each), {})
        if each.logits.seed in group:
            before = group[each.logits.seed]
            dropped.append(f"{before.name}: {each.name} is the same with seed {each.logits.seed}")
        group[each.logits.seed] = each
    sorted_groups = [tuple(group[seed] for seed in sorted(group)) for group in groups.values()]
    labels = _labels([rows[0] for rows in sorted_groups])
    found = tuple(Family(*pair) for pair in zip(labels, sorted_groups, strict=True))
    return found, tuple(dropped)


def _key(each: Answered) -> tuple[object, ...]:
    run = each.logits
    macs = tuple(run.cumulative_macs.tolist()), tuple(run.direct_macs.tolist())
    parameters = tuple(sorted((name, repr(value)) for name, value in each.row.parameters.items()))
    return each.experiment, run.family, run.variant, macs, parameters


def _labels(firsts: Sequence[Answered]) -> list[str]:
    """The family and its variant, with the parameters that tell those of one name apart, and the
    experiment or a number where nothing else does."""
    plain = [_plain_label(e.logits) for e in firsts]
    labels = []
    for each, label in zip(firsts, plain, strict=True):
        alike = [e for e, other in zip(firsts, plain, strict=True) if other == label]
        differing = _varying(e.row.parameters for e in alike)
        words = [f"{name}={word(each.row.parameters.get(name, 'none'))}" for name in differing]
        if len({e.experiment for e in alike}) > 1:
            words.insert(0, each.experiment)
        labels.append(", ".join([label, *words]))
    count, seen = Counter(labels), Counter[str]()
    for place, label in enumerate(labels):
        if count[label] > 1:
            seen[label] += 1
            labels[place] = f"{label} ({seen[label]})"
    return labels


def _plain_label(run: RunLogits) -> str:
    if run.variant.startswith(run.family):
        return run.variant
    return f"{run.family} {run.variant}".rstrip()


def _varying(parameters: Iterable[Mapping[str, Any]]) -> list[str]:
    listed = list(parameters)
    names = dict.fromkeys(name for each in listed for name in each)
    return [name for name in names if len({repr(each.get(name)) for each in listed}) > 1]
