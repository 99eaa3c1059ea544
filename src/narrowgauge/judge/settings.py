"""The settings that a claim leaves open: what tells them apart, and how many were measured."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from narrowgauge_contract.claims import Claim
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.parameters import PROFILE_PARAMETER
from narrowgauge_contract.spec import PROFILES, ExperimentSpec

__all__ = ["Coverage", "Key", "coverage_of", "key_of", "label_of", "named_by", "varying_in"]

#: The values of what a claim leaves open, by name, as `repr` writes them.
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Coverage:
    """How many settings of the claim's profile there are, and how many were measured."""

    measured: int = 1
    settings: int = 1

    @property
    def whole(self) -> bool:
        return self.measured >= self.settings


def named_by(claim: Claim) -> frozenset[str]:
    """The parameters that any selection of the claim fixes."""
    return frozenset(name for each in claim.selections for name in each.where)


def key_of(row: Row, named: Collection[str]) -> Key:
    """The setting of a row: its parameters without those that the claim names."""
    return tuple(sorted((n, repr(v)) for n, v in row.parameters.items() if n not in named))


def varying_in(keys: Sequence[Key]) -> set[str]:
    """The parameters in which settings differ."""
    pairs = {pair for key in keys for pair in key}
    return {name for name, value in pairs if any((name, value) not in key for key in keys)}


def label_of(key: Key, varying: Collection[str]) -> str:
    """`batch=8`: a setting by the parameters in which it differs from others."""
    return ", ".join(f"{name}={value.strip(chr(39))}" for name, value in key if name in varying)


def coverage_of(
    claim: Claim, spec: ExperimentSpec, measured: Sequence[Key], attempted: Sequence[Key]
) -> Coverage:
    """Of the claim's profile, or of a larger one with as many settings that was measured whole.

    Along the rows' axis only, since runs that differ in anything else are not put together. A
    setting that was attempted and skipped, since it does not exist here, is not asked for.
    """
    named = named_by(claim)
    own, *larger = (_settings_of(spec, n, named) for n in PROFILES[PROFILES.index(claim.profile) :])
    enough = [own, *(each for each in larger if len(each) >= len(own))]
    found = [_covered(settings, measured, attempted) for settings in enough]
    return next((each for each in found if each.whole), found[0])


def _settings_of(spec: ExperimentSpec, profile: str, named: Collection[str]) -> list[Key]:
    values = spec.profiles[profile].values
    names = [
        name
        for name, parameter in spec.parameters.items()
        if parameter.axis == "row"
        and parameter.unit != "s"
        and name not in named
        and name != PROFILE_PARAMETER.name
        and len(values.get(name, ())) > 1
    ]
    choices = itertools.product(*(values[name] for name in names))
    return [tuple((n, repr(v)) for n, v in zip(names, each, strict=True)) for each in choices]


def _covered(settings: list[Key], measured: Sequence[Key], attempted: Sequence[Key]) -> Coverage:
    done = _among(settings, measured)
    tried = _among(settings, attempted)
    asked = [each for each in settings if each in done or each not in tried]
    return Coverage(len(done), len(asked))


def _among(settings: list[Key], keys: Sequence[Key]) -> set[Key]:
    """The settings that one of the keys is of."""
    names = [name for name, _ in settings[0]]
    return set(settings) & set(_cut(keys, names))


def _cut(keys: Sequence[Key], names: Sequence[str]) -> Iterator[Key]:
    for key in keys:
        known = dict(key)
        yield tuple((name, known.get(name, "")) for name in names)
