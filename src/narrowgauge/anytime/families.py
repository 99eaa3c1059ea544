"""Runs that are one network trained several times: a family has a row for each seed.

Rows of one family agree in all that two records must agree in before their rows may go into one
statistic (`narrowgauge_contract.agreement.MUST_AGREE`): rows of another version of the code,
another torch or another device are another family, and its label names what differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.anytime.gather import Answered
from narrowgauge.report.text import clean
from narrowgauge.statistics import word
from narrowgauge_contract.agreement import MUST_AGREE
from narrowgauge_scores.side_file import RunLogits

__all__ = ["Family", "families_of", "split_notes"]

#: What must agree and is no row's: a row has parameters of its own where a record has the lists of
#: all rows, and what energy is measured by says nothing of answers.
FACTS = tuple(each for each in MUST_AGREE if each not in ("parameters", "energy_source"))
#: Nobody reads more of a name.
_MOST_LETTERS = 160


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
    facts = tuple(repr(each.facts.get(name)) for name in FACTS)
    return run.family, run.variant, macs, parameters, facts


def split_notes(families: Sequence[Family]) -> list[str]:
    """A line for each network whose rows are in several families because a fact differs."""
    groups: dict[tuple[object, ...], list[Family]] = {}
    for family in families:
        *network, _ = _key(family.rows[0])
        groups.setdefault(tuple(network), []).append(family)
    notes = []
    for alike in groups.values():
        names = _varying([family.rows[0].facts for family in alike], FACTS)
        if len(alike) > 1:
            labels = "; ".join(family.label for family in alike)
            notes.append(f"not averaged over seeds, since {', '.join(names)} differ: {labels}")
    return notes


def _labels(firsts: Sequence[Answered]) -> list[str]:
    """The family and its variant, with the parameters that tell those of one name apart, and the
    experiment or a number where nothing else does."""
    plain = [_plain_label(e.logits) for e in firsts]
    labels = []
    for each, label in zip(firsts, plain, strict=True):
        alike = [e for e, other in zip(firsts, plain, strict=True) if other == label]
        differing = _varying([e.row.parameters for e in alike])
        words = [f"{name}={word(each.row.parameters.get(name, 'none'))}" for name in differing]
        facts = _varying([e.facts for e in alike], FACTS)
        if "experiment" in facts:
            words.insert(0, each.experiment)
        words += [f"{n}={word(each.facts.get(n))}" for n in facts if n != "experiment"]
        labels.append(_readable(", ".join([label, *words])))
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


def _readable(label: str) -> str:
    """Parameters and facts come from a record, which may be anybody's."""
    found = clean(label)
    return found if len(found) <= _MOST_LETTERS else f"{found[: _MOST_LETTERS - 1]}…"


def _varying(listed: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> list[str]:
    """Which of these names, or of all there are, stand for several values."""
    asked = list(names) or list(dict.fromkeys(name for each in listed for name in each))
    return [name for name in asked if len({repr(each.get(name)) for each in listed}) > 1]
