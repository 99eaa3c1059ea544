"""Everything the criteria look at, gathered once. Values only: no check opens a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.catalog import EXPERIMENT_FILE, experiment_names
from narrowgauge.checkout import Checkout
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.images.content import dockerfile_path, lock_path
from narrowgauge.images.render import check, render_all
from narrowgauge.store import Store, read_entry, status_word
from narrowgauge.targets import Target, load_targets
from narrowgauge_contract.claims import Claim, load_claims
from narrowgauge_contract.errors import ExperimentFileError
from narrowgauge_contract.hashing import tree_files
from narrowgauge_contract.record import Record, load_record
from narrowgauge_contract.spec import ExperimentSpec, load_spec

__all__ = ["Artifact", "Citation", "Part", "gather", "parse_citation"]

CLAIMS_FILE = "claims.toml"
_PAGES = ("README.md", "ARTIFACT.md", "CITATION.cff", "LICENSE", "docs/judging.md")
_SCRIPTS = (".py", ".sh", ".toml")
#: Where somebody else's code is kept, where it is kept apart.
_VENDOR_NAMES = ("vendor", "third_party", "third-party", "extern", "external")
#: What such a folder has that says where it came from and what was changed.
UPSTREAM_FILE = "UPSTREAM.md"


@dataclass(frozen=True)
class Citation:
    """What of CITATION.cff counts: empty where it does not say."""

    title: str = ""
    paper: str = ""
    doi: str = ""
    licence: str = ""


@dataclass(frozen=True)
class Part:
    """One experiment. `modules` maps each Python file in its folder to its text; `problem` is why
    its declaration or claims cannot be read."""

    name: str
    spec: ExperimentSpec | None
    claims: tuple[Claim, ...]
    readme: str
    modules: Mapping[str, str]
    references: tuple[Record, ...]
    problem: str = ""


@dataclass(frozen=True)
class Artifact:
    """A checkout and its results. `pages` has the text of each page, empty where it is not there;
    `scripts` everything that may hold a path; `stale` what a fresh rendering says; `runs` maps each
    run to its status word; `vendored` folders of others' code to whether they say whose."""

    citation: Citation
    pages: Mapping[str, str]
    parts: tuple[Part, ...]
    targets: Mapping[str, Target]
    locks: Mapping[str, bool]
    dockerfiles: Mapping[str, bool]
    stale: str
    scripts: Mapping[str, str]
    sources: Mapping[str, str]
    vendored: Mapping[str, bool]
    runs: Mapping[str, str]
    commands: frozenset[str]


def gather(checkout: Checkout, store: Store, commands: frozenset[str]) -> Artifact:
    """Read it all. Raises TargetsFileError where docker/targets.toml cannot be read."""
    root = checkout.root
    targets = load_targets(checkout.targets_file)
    pages = {name: _text(root / name) for name in _PAGES}
    parts = tuple(_part(checkout.experiments / n) for n in experiment_names(checkout.experiments))
    return Artifact(
        citation=parse_citation(pages["CITATION.cff"]),
        pages=pages,
        parts=parts,
        targets=targets,
        locks={name: (root / lock_path(each)).is_file() for name, each in targets.items()},
        dockerfiles={n: (root / dockerfile_path(t)).is_file() for n, t in targets.items()},
        stale=_stale(root, targets),
        scripts=dict(_texts(root, ("experiments", "scripts"), _SCRIPTS)),
        sources=dict(_texts(root, ("src", "experiments"), (".py",))),
        vendored=dict(_vendored(root)),
        runs={folder.name: status_word(read_entry(folder)) for folder in store.all()},
        commands=commands,
    )


def parse_citation(text: str) -> Citation:
    """The few keys of a CITATION.cff that are asked for. Not a YAML parser: one key on one line."""
    return Citation(
        title=_key(text, r"^title"),
        paper=_key(text.partition("preferred-citation:")[2], r"^\s+title"),
        doi=_key(text, r"^doi") or _identifier(text),
        licence=_key(text, r"^license"),
    )


def _key(text: str, key: str) -> str:
    match = re.search(rf"{key}:[ \t]*(.+?)[ \t]*$", text, re.MULTILINE)
    return match[1].strip("'\"") if match else ""


def _identifier(text: str) -> str:
    """`identifiers:` has entries with `type: doi` and a `value`, in either order."""
    block = re.search(r"^identifiers:\n((?:[ \t-].*\n?)+)", text, re.MULTILINE)
    for entry in re.split(r"^\s*- ", block[1], flags=re.MULTILINE) if block else ():
        if re.search(r"^\s*type:\s*doi\s*$", entry, re.MULTILINE):
            return _key(entry, r"^\s*value")
    return ""


def _part(folder: Path) -> Part:
    modules = {path.name: _text(path) for path in sorted(folder.glob("*.py"))}
    spec: ExperimentSpec | None = None
    claims: tuple[Claim, ...] = ()
    references: tuple[Record, ...] = ()
    problem = ""
    try:
        spec = load_spec(folder / EXPERIMENT_FILE)
        if (folder / CLAIMS_FILE).is_file():
            claims = load_claims(folder / CLAIMS_FILE, spec)
        paths = sorted((folder / "reference").glob("*/*.json.gz"))
        references = tuple(load_record(path) for path in paths)
    except NarrowgaugeError as error:
        problem = error.what
    except OSError as error:
        problem = str(ExperimentFileError(f"{folder} cannot be read", why=str(error)))
    return Part(
        folder.name, spec, claims, _text(folder / "README.md"), modules, references, problem
    )


def _stale(root: Path, targets: Mapping[str, Target]) -> str:
    try:
        check(root, render_all(root, targets))
    except NarrowgaugeError as error:
        return error.what
    return ""


def _texts(
    root: Path, folders: tuple[str, ...], suffixes: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in tree_files(root / folder):
            if path.suffix in suffixes:
                yield path.relative_to(root).as_posix(), _text(path)


def _vendored(root: Path) -> Iterator[tuple[str, bool]]:
    for folder in ("src", "experiments", "scripts"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_dir() and path.name in _VENDOR_NAMES:
                yield path.relative_to(root).as_posix(), (path / UPSTREAM_FILE).is_file()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
