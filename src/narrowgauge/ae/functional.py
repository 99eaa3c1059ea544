"""Badges Functional and Reusable: documented, complete, and exercised without its authors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from narrowgauge.ae.artifact import UPSTREAM_FILE, Artifact, Part
from narrowgauge.ae.findings import Criterion, Finding, listed, met, missing, partly
from narrowgauge_contract.datasets import DATA_SETS
from narrowgauge_contract.job import SYNTHETIC
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import ExperimentSpec, Profile

__all__ = ["CRITERIA", "SECTIONS"]

#: What ARTIFACT.md must have a heading for, by words of which one is in it.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "what is where": ("what is where", "components", "layout"),
    "hardware and software": ("hardware", "environment", "requirements"),
    "kick the tires": ("kick",),
    "claims": ("claims", "verdicts"),
    "warnings": ("warnings", "what to expect"),
}
_KICK = ("kick", "reproduce")
_MOST_DRIFT = 2.0
#: A basic check is minutes.
_SMOKE_MINUTES = 10.0
_PROPRIETARY = ("nvcr.io/",)
_OWN_PATHS = re.compile(
    r"(?<![\w.~$}])/(?:home|Users|root|mnt|scratch)/[A-Za-z]"
    r"|[A-Z]:\\\\?[A-Za-z]"
    r"|(?<![\w.])(?!127\.|0\.0\.0\.0|255\.)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b(?!\.)"
)


def _documented(of: Artifact) -> Finding:
    page = of.pages["ARTIFACT.md"]
    remedy = "write ARTIFACT.md with headings for " + ", ".join(SECTIONS)
    if not page:
        return missing("there is no ARTIFACT.md", remedy)
    headings = [line.lower() for line in page.splitlines() if line.startswith("#")]
    absent = [
        name
        for name, words in SECTIONS.items()
        if not any(word in heading for word in words for heading in headings)
    ]
    unnamed = [part.name for part in of.parts if part.claims and f"`{part.name}`" not in page]
    undocumented = [part.name for part in of.parts if not part.readme]
    problems = [f"no heading for {listed(absent)}"] if absent else []
    problems += [f"ARTIFACT.md does not name {listed(unnamed)}"] if unnamed else []
    problems += [f"no README.md for {listed(undocumented)}"] if undocumented else []
    if problems:
        return partly("; ".join(problems), remedy + "; name each experiment with its paper's part")
    return met(f"ARTIFACT.md names {len(of.parts)} experiments and has all {len(SECTIONS)} parts")


def _dependencies(of: Artifact) -> Finding:
    bare = [name for name in of.targets if not (of.locks[name] and of.dockerfiles[name])]
    if bare:
        return missing(
            f"no lock or no Dockerfile for {listed(bare)}", "narrowgauge images lock; images render"
        )
    if of.stale:
        return missing(of.stale, "narrowgauge images render, and commit what it writes")
    open_pins = [f"{n} ({', '.join(t.unresolved)})" for n, t in of.targets.items() if t.unresolved]
    found = f"{len(of.targets)} Dockerfiles are what their template gives, each with a lock"
    if open_pins:
        remedy = "narrowgauge images lock, on a machine that reaches the registries"
        return partly(f"{found}; not pinned by digest or hash: {listed(open_pins)}", remedy)
    return met(f"{found}, each base pinned by digest")


def _kick(of: Artifact) -> Finding:
    absent = [name for name in _KICK if name not in of.commands]
    if absent:
        return missing(f"there is no command {listed(absent)}", "update Narrowgauge")
    page = of.pages["README.md"] + of.pages["ARTIFACT.md"]
    if "narrowgauge kick" not in page:
        return partly("no page says `narrowgauge kick`", "say it in README.md or ARTIFACT.md")
    return met("`narrowgauge kick` needs no GPU, times itself, and says where it went over budget")


def _resources(of: Artifact) -> Finding:
    silent = [
        f"{part.name} {profile.name}"
        for part in of.parts
        if part.spec is not None
        for profile in _declared(part)
        if profile.minutes is None or profile.disk_gb is None
    ]
    if silent:
        return missing(
            f"no minutes or no disk_gb: {listed(silent)}", "give both in experiment.toml"
        )
    ratios = [each for part in of.parts for each in _ratios(part)]
    drifted = [f"{name} {ratio:.1f} times" for name, ratio in ratios if ratio > _MOST_DRIFT]
    if drifted:
        return partly(
            f"took more than {_MOST_DRIFT:g} times what is said: {listed(drifted)}",
            "bring `minutes` up to what was measured",
        )
    return met(
        f"each profile says its minutes and disk; {len(ratios)} reference runs were compared with"
        f" their profiles and took at most {_MOST_DRIFT:g} times as long"
    )


def _declared(part: Part) -> Iterator[Profile]:
    """The profiles that experiment.toml writes out; the others are only defaults."""
    if part.spec is not None:
        written = part.spec.source.get("profiles", {})
        yield from (p for name, p in part.spec.profiles.items() if name in written)


def _ratios(part: Part) -> Iterator[tuple[str, float]]:
    """Each reference run that is of a profile as it is now: how often its minutes it took."""
    profiles = {profile.name: profile for profile in _declared(part)}
    for record in part.references:
        profile = profiles.get(record.profile)
        if profile is None or not profile.minutes or not record.seconds:
            continue
        if part.spec is not None and _is_unchanged(part.spec, profile, record):
            yield f"{part.name} {record.profile}", record.seconds / 60 / profile.minutes


def _is_unchanged(spec: ExperimentSpec, profile: Profile, record: Record) -> bool:
    """Whether the record's parameters are the profile's: those that it sets, and of the rest the
    defaults, as a run of more has more rows."""
    for name, parameter in spec.parameters.items():
        found = record.parameters.get(name, parameter.default)
        given = tuple(found) if isinstance(found, (list, tuple)) else (found,)
        if given != tuple(profile.values.get(name, (parameter.default,))):
            return False
    return True


def _own_paths(of: Artifact) -> Finding:
    found = [
        f"{name}:{number}"
        for name, text in sorted(of.scripts.items())
        for number, line in enumerate(text.splitlines(), start=1)
        if _OWN_PATHS.search(line)
    ]
    if found:
        return partly(
            f"paths or addresses of one machine: {listed(found)}",
            "take them as parameters, or relative to the checkout",
        )
    return met(f"none in {len(of.scripts)} files of experiments and scripts")


def _relevant(of: Artifact) -> Finding:
    orphans = [name for part in of.parts for name in _orphans(part)]
    nameless = [name for name, said in of.vendored.items() if not said]
    problems = [f"no run reaches {listed(orphans)}"] if orphans else []
    problems += [f"others' code without {UPSTREAM_FILE}: {listed(nameless)}"] if nameless else []
    if problems:
        return partly(
            "; ".join(problems),
            f"remove what nothing uses; say in {UPSTREAM_FILE} whose code it is, at which commit,"
            " and what was changed",
        )
    vendored = (
        f"others' code, with its origin: {listed(list(of.vendored))}"
        if of.vendored
        else "nothing is vendored"
    )
    return met(f"every module of every experiment is reached from its run.py; {vendored}")


def _orphans(part: Part) -> list[str]:
    """Python files of the experiment that neither run.py nor what it imports imports."""
    reached, open_ = set(), ["run.py"]
    while open_:
        name = open_.pop()
        if name in part.modules and name not in reached:
            reached.add(name)
            open_ += _siblings(part.modules[name])
    return [f"{part.name}/{name}" for name in part.modules if name not in reached]


def _siblings(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [f"{name.partition('.')[0]}.py" for name in names]
    return found


def _each_kind(of: Artifact) -> Finding:
    without = [
        part.name
        for part in of.parts
        if part.spec is not None and "smoke" not in {profile.name for profile in _declared(part)}
    ]
    if without:
        return missing(f"no profile smoke: {listed(without)}", "add [profiles.smoke]: seconds")
    slow = [
        f"{part.name} ({profile.minutes:g} min)"
        for part in of.parts
        for profile in _declared(part)
        if profile.name == "smoke" and (profile.minutes or 0) > _SMOKE_MINUTES
    ]
    if slow:
        return partly(f"a smoke test of more than {_SMOKE_MINUTES:g} min: {listed(slow)}", "less")
    return met(f"all {len(of.parts)} experiments have a profile smoke")


def _proprietary(of: Artifact) -> Finding:
    unverified = [
        name
        for name, each in DATA_SETS.items()
        if not each.sources or not each.licence or any(not flat.sha256 for flat in each.files)
    ]
    if unverified:
        return missing(
            f"data sets without source, licence or sha256: {listed(unverified)}", "declare them"
        )
    kept = [n for n, t in of.targets.items() if t.base.reference.startswith(_PROPRIETARY)]
    if len(kept) == len(of.targets):
        return missing("every target needs a base that not everybody may have", "add a free one")
    bound = [
        part.name
        for part in of.parts
        if part.spec is not None and (part.spec.requires_accelerator or not _has_free_data(part))
    ]
    found = (
        f"bases with NVIDIA's licence: {listed(kept)}; without: "
        f"{listed([name for name in of.targets if name not in kept])}; {len(DATA_SETS)} data sets"
        " with source, licence and sha256"
    )
    if bound:
        return partly(f"{found}; only with a GPU: {listed(bound)}", "a row that runs on a CPU too")
    return met(f"{found}; every experiment runs without a GPU")


def _has_free_data(part: Part) -> bool:
    """Whether its data are none, declared sets, or can be made up."""
    if part.spec is None:
        return True
    made_up = part.spec.parameters.get(part.spec.data_parameter or "")
    known = all(name in DATA_SETS for name in part.spec.data_sets)
    return known or (made_up is not None and SYNTHETIC in made_up.choices)


CRITERIA = (
    Criterion(
        "F1", "Functional", "a map from parts to the paper, the environment, what may surprise",
        "sysartifacts: README with component to paper, the authors' exact environment, and unusual"
        " warnings to expect.", _documented,
    ),
    Criterion(
        "F2", "Functional", "a precise list of dependencies, and the script that builds them",
        "sysartifacts packaging guide: OS-level dependencies in a container with the script that"
        " builds it. Held against a fresh rendering of the templates.", _dependencies,
    ),
    Criterion(
        "F3", "Functional", "a basic check within 30 minutes",
        "FAST and others: a minimal working example, 'e.g., within 30 minutes'.", _kick,
    ),
    Criterion(
        "F4", "Functional", "what each experiment costs, as measured",
        "EuroSys: human-minutes and compute-hours; '5 minutes, 10 GB disk'. Reference runs that"
        " took more than twice what is said are named.", _resources,
    ),
    Criterion(
        "F5", "Functional", "no paths or hosts of one machine",
        "Evaluators run it elsewhere. Home folders, drive letters and addresses are looked for in"
        " experiments and scripts.", _own_paths,
    ),
    Criterion(
        "F6", "Reusable", "only code that belongs to the paper, others' code told apart",
        "cTuning: what nothing reaches, and copied code without its origin, cost every reader.",
        _relevant,
    ),
    Criterion(
        "F7", "Reusable", "an example for each kind of experiment",
        "sysartifacts: example input and configuration for each kind.", _each_kind,
    ),
    Criterion(
        "F8", "Functional", "proprietary pieces: how to get them, and what goes without",
        "cTuning: software and data that cannot be given need a way to get them and a stand-in.",
        _proprietary,
    ),
)  # fmt: skip
