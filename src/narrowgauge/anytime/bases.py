"""What families cost where they are as good as one plain network, less a point of accuracy.

The plain network is a family of one exit, or what a family's runs name as theirs and know the right
answers of, as BranchyNet's do of their trunk. Both accuracies are of the same images, so their
difference is paired, image by image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowgauge.anytime.families import Family
from narrowgauge.errors import UsageError
from narrowgauge_scores.answers import correct_of
from narrowgauge_scores.areas import cost_reaching
from narrowgauge_scores.points import exit_costs
from narrowgauge_scores.resampling import COVERAGE, DRAWS, draw_means

__all__ = ["LESS", "AtBase", "Base", "against"]

Floats = NDArray[np.float64]

#: A point of accuracy.
LESS = 0.01
#: A rounding must not lose the exit that is exactly a point below.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class AtBase:
    """The least MACs of an exit of the family `label` that is within a point of the base, by mean
    accuracies over its seeds. Infinity: no exit is. `low` to `high`: in 95 % of the draws;
    `reached`: the share of draws in which an exit is."""

    label: str
    macs: float
    low: float
    high: float
    reached: float


@dataclass(frozen=True)
class Base:
    """The plain network: means over its seeds, `accuracy` from 0 to 1; and all other families."""

    label: str
    macs: float
    accuracy: float
    families: tuple[AtBase, ...]


@dataclass(frozen=True)
class _Plain:
    """A candidate: `correct` [seeds, images]; `family`, where it is one of its own."""

    label: str
    macs: float
    correct: Floats
    family: Family | None = None


def against(families: Sequence[Family], asked: str) -> Base:
    """All families against the plain network that `asked` names: its label, or a part of it that no
    other one has. Raises UsageError where that is none or several."""
    base = _named([*map(_alone, families), *map(_trained_first, families)], asked)
    others = [family for family in families if family is not base.family]
    exits = [_correct(family, k) for family in others for k in range(family.runs[0].exits)]
    values = [base.correct, *exits]
    drawn = draw_means(values)
    wanted = drawn[0] - LESS - _ROUNDING
    mean = float(base.correct.mean())
    found, place = [], 1
    for family in others:
        count = family.runs[0].exits
        costs = np.mean([exit_costs(run) for run in family.runs], axis=0)
        heights = [float(each.mean()) for each in values[place : place + count]]
        least = cost_reaching(costs, heights, mean - LESS - _ROUNDING)
        spent = _least(costs, drawn[place : place + count] >= wanted)
        found.append(_at_base(family.label, math.inf if least is None else least, spent))
        place += count
    return Base(base.label, base.macs, mean, tuple(found))


def _alone(family: Family) -> _Plain | None:
    """A family of one exit."""
    if family.runs[0].exits > 1:
        return None
    macs = float(np.mean([exit_costs(run)[0] for run in family.runs]))
    return _Plain(family.label, macs, _correct(family, 0), family)


def _trained_first(family: Family) -> _Plain | None:
    """The plain network that every run of a family names and knows the right answers of."""
    runs = family.runs
    known = [run.test.base_correct for run in runs if run.test.base_correct is not None]
    macs = [run.base_macs for run in runs if run.base_macs is not None]
    if not len(known) == len(macs) == len(runs):
        return None
    return _Plain(f"plain network of {family.label}", float(np.mean(macs)), np.stack(known) * 1.0)


def _named(candidates: Sequence[_Plain | None], asked: str) -> _Plain:
    plain = [each for each in candidates if each is not None]
    found = [each for each in plain if each.label == asked]
    found = found or [each for each in plain if asked in each.label]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(each.label for each in (found or plain))
    raise UsageError(
        f"--base '{asked}' names {len(found) or 'none'} of the plain networks",
        why=f"they are: {listed}" if listed else "all of these runs' families have several exits",
        next_step="give the label of one, or a part that it alone has"
        if listed
        else "add the run of a plain network, such as of sact with kind=plain",
    )


def _correct(family: Family, exit: int) -> Floats:
    found: Floats = np.stack([correct_of(run.test)[exit] for run in family.runs]).astype(float)
    return found


def _least(costs: Floats, enough: NDArray[np.bool_]) -> Floats:
    """float64 [draws]: the least of the costs [exits] that is enough in a draw, [exits, draws]."""
    spent: Floats = np.where(enough, costs[:, np.newaxis], np.inf).min(axis=0)
    return spent


def _at_base(label: str, macs: float, spent: Floats) -> AtBase:
    """The ends are costs that draws have: between an exit's and never there is nothing."""
    tail = (1.0 - COVERAGE) / 2.0
    ordered = np.sort(spent)
    low = ordered[math.floor(tail * (DRAWS - 1))]
    high = ordered[math.ceil((1.0 - tail) * (DRAWS - 1))]
    reached = float(np.isfinite(spent).mean())
    return AtBase(label, macs, float(low), float(high), reached)
