"""The settings that claims need, each once: claims that share settings share a run. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.judge.gather import Claimed
from narrowgauge.statistics import word
from narrowgauge_contract.parameters import Scalar
from narrowgauge_contract.spec import ExperimentSpec

__all__ = ["Need", "needs_of"]

#: Needs are not joined into a run that would take longer: a kill would cost all of it.
_MOST_MINUTES = 30.0


@dataclass(frozen=True)
class Need:
    """One run: an experiment, a profile, and the values of the parameters that claims name.

    `minutes` and `disk_gb` are what the claims say that checking them costs.
    """

    experiment: str
    profile: str
    values: Mapping[str, frozenset[Scalar]]
    claims: tuple[str, ...]
    minutes: float
    disk_gb: float

    def words(self, spec: ExperimentSpec) -> tuple[str, ...]:
        """`name=value[,value]` for what the profile does not say already."""
        profile = spec.profiles[self.profile].values
        said = []
        for name, chosen in sorted(self.values.items()):
            usual = profile.get(name, (spec.parameters[name].default,))
            if chosen != frozenset(usual):
                ordered = [each for each in usual if each in chosen]
                ordered += sorted(chosen - set(usual), key=word)
                said.append(f"{name}={','.join(map(word, ordered))}")
        return tuple(said)


def needs_of(claims: Sequence[Claimed]) -> tuple[Need, ...]:
    """The runs that claims need, as few as give every claim its settings and no run much more.

    A claim's selections go into one run where they differ along the rows' axis, so that they are
    measured next to each other. Runs that differ in one such parameter are joined, while the joined
    one stays short.
    """
    needs: list[Need] = []
    groups: dict[tuple[str, str], list[Claimed]] = {}
    for each in claims:
        groups.setdefault((each.spec.id, each.claim.profile), []).append(each)
    for group in groups.values():
        named = {n for each in group for s in each.claim.selections for n in s.where}
        own = [need for each in group for need in _needs_of_claim(each, named)]
        needs += _joined(own, group[0].spec)
    return tuple(needs)


def _needs_of_claim(each: Claimed, named: Iterable[str]) -> list[Need]:
    spec, claim = each.spec, each.claim
    usual = spec.profiles[claim.profile].values
    wheres = [selection.where for selection in claim.selections]
    full: list[dict[str, frozenset[Scalar]]] = [
        {
            name: frozenset(
                (where[name],)
                if name in where
                else usual.get(name, (spec.parameters[name].default,))
            )
            for name in named
        }
        for where in wheres
    ]
    united = {name: frozenset().union(*(each[name] for each in full)) for name in named}
    if any(len(v) > 1 and not _listable(spec, name) for name, v in united.items()):
        wanted = list(itertools.chain.from_iterable(_singles(spec, values) for values in full))
    else:
        wanted = [united]
    unique = list({tuple(sorted((n, tuple(sorted(v, key=repr))) for n, v in w.items())): w
                   for w in wanted}.values())  # fmt: skip
    parts = len(unique)
    minutes, disk_gb = claim.minutes / parts, claim.disk_gb / parts
    found = [
        Need(spec.id, claim.profile, chosen, (each.name,), minutes, disk_gb) for chosen in unique
    ]
    return [need if need.words(spec) else _whole(need, spec) for need in found]


def _whole(need: Need, spec: ExperimentSpec) -> Need:
    """A need of a whole profile costs what the profile says, where that is more."""
    profile = spec.profiles[need.profile]
    return dataclasses.replace(
        need,
        minutes=max(need.minutes, profile.minutes or 0.0),
        disk_gb=max(need.disk_gb, profile.disk_gb or 0.0),
    )


def _listable(spec: ExperimentSpec, name: str) -> bool:
    """Whether several values of a parameter make rows of one run."""
    parameter = spec.parameters[name]
    return parameter.axis == "row" and not parameter.commas


def _singles(
    spec: ExperimentSpec, values: Mapping[str, frozenset[Scalar]]
) -> list[dict[str, frozenset[Scalar]]]:
    """One set of values per combination of what cannot be a list within one run."""
    apart = [n for n, v in values.items() if len(v) > 1 and not _listable(spec, n)]
    choices = itertools.product(*(sorted(values[name], key=repr) for name in apart))
    return [
        {**values, **{n: frozenset((v,)) for n, v in zip(apart, choice, strict=True)}}
        for choice in choices
    ]


def _joined(needs: Sequence[Need], spec: ExperimentSpec) -> list[Need]:
    """Join until nothing can be joined; the order of the first claims is kept."""
    left = list(needs)
    again = True
    while again:
        again = False
        kept: list[Need] = []
        for need in left:
            place = next((i for i, other in enumerate(kept) if _fits(other, need, spec)), None)
            if place is None:
                kept.append(need)
            else:
                kept[place] = _join(kept[place], need)
                again = True
        left = kept
    return left


def _covers(one: Need, other: Need) -> bool:
    return all(one.values[name] >= chosen for name, chosen in other.values.items())


def _fits(one: Need, other: Need, spec: ExperimentSpec) -> bool:
    if _covers(one, other) or _covers(other, one):
        return True
    differing = [name for name in one.values if one.values[name] != other.values[name]]
    short = one.minutes + other.minutes <= _MOST_MINUTES
    return short and len(differing) == 1 and _listable(spec, differing[0])


def _join(one: Need, other: Need) -> Need:
    within = _covers(one, other) or _covers(other, one)
    together = max if within else float.__add__
    return dataclasses.replace(
        one,
        values={name: one.values[name] | other.values[name] for name in one.values},
        claims=tuple(dict.fromkeys((*one.claims, *other.claims))),
        minutes=together(float(one.minutes), float(other.minutes)),
        disk_gb=together(float(one.disk_gb), float(other.disk_gb)),
    )
