"""What a bundle is made of: entries with names that are safe on every system, and their hashes."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import BundleDamaged, UsageError
from narrowgauge_contract.hashing import sha256_file

__all__ = [
    "BUNDLE_FILE",
    "BUNDLE_FORMAT",
    "CRATE_FILE",
    "README_FILE",
    "STATEMENT_FILE",
    "SUMS_FILE",
    "VERDICTS_FILE",
    "Entry",
    "Hashed",
    "hashed",
    "name_problem",
    "parse_sums",
    "sums_text",
]

#: 1: first.
BUNDLE_FORMAT = 1
BUNDLE_FILE = "bundle.json"
CRATE_FILE = "ro-crate-metadata.json"
README_FILE = "README.md"
STATEMENT_FILE = "statement.intoto.json"
#: As `sha256sum` writes and checks it. It lists every file but itself.
SUMS_FILE = "SHA256SUMS"
VERDICTS_FILE = "verdicts.json"

_LONGEST_NAME = 400
_LONGEST_PART = 200
#: Windows has no file of these names, with whatever suffix.
_DEVICES = re.compile(r"(?i)^(con|prn|aux|nul|com\d|lpt\d)(\.|$)")
_FORBIDDEN = re.compile(r'[\\:*?"<>|\x00-\x1f\x7f]')
_SUM = re.compile(r"^([0-9a-f]{64})  (.+)$")


@dataclass(frozen=True)
class Entry:
    """A file of a bundle: `content`, or what lies at `source`. `what` is a phrase for it."""

    name: str
    what: str
    source: Path | None = None
    content: bytes = b""


@dataclass(frozen=True)
class Hashed:
    """An entry with its size in bytes and its sha256."""

    entry: Entry
    bytes: int
    sha256: str


def name_problem(name: str) -> str:
    """Why `name` may not be in a bundle; empty where it may.

    A name is relative, below the folder it is unpacked to, and means the same on every system.
    """
    if not name or len(name) > _LONGEST_NAME:
        return "it is empty or too long"
    if name.startswith("/") or name.endswith("/"):
        return "it is absolute or a folder"
    if _FORBIDDEN.search(name):
        return "it has a backslash, a colon, a control character or a wildcard"
    if unicodedata.normalize("NFC", name) != name or not name.isprintable():
        return "it has characters that do not show or that systems write in two ways"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "it leads out of its folder"
        if len(part) > _LONGEST_PART or part[-1] in " ." or _DEVICES.match(part):
            return f"'{part[:40]}' is no file name on every system"
    return ""


def hashed(entries: Iterable[Entry]) -> tuple[Hashed, ...]:
    """Every entry with its hash, sorted by name.

    Raises UsageError for a name that is not safe, or one that two entries have.
    """
    found: dict[str, Hashed] = {}
    for entry in sorted(entries, key=lambda each: each.name):
        problem = name_problem(entry.name)
        if problem:
            raise UsageError(f"'{entry.name!a}' cannot be put into a bundle", why=problem)
        key = entry.name.casefold()
        if key in found:
            raise UsageError(
                f"two files of a bundle would be called {entry.name}",
                why=f"{found[key].entry.name} is there, and not every system tells the two apart",
            )
        found[key] = _hash(entry)
    return tuple(found.values())


def sums_text(files: Iterable[Hashed]) -> str:
    """What `sha256sum -c` reads."""
    return "".join(f"{each.sha256}  {each.entry.name}\n" for each in files)


def parse_sums(text: str) -> Mapping[str, str]:
    """The sha256 of each name. Raises BundleDamaged."""
    return dict(_sum_lines(text))


def _sum_lines(text: str) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    # Not splitlines(): that also breaks at characters that a name may hold.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _SUM.match(line)
        if match is None:
            raise BundleDamaged(f"line {number} of {SUMS_FILE} is not a sha256 and a name")
        problem = name_problem(match[2])
        if problem or match[2] in seen:
            raise BundleDamaged(
                f"line {number} of {SUMS_FILE} names {match[2]!a}",
                why=problem or "it is there twice",
            )
        seen.add(match[2])
        yield match[2], match[1]


def _hash(entry: Entry) -> Hashed:
    if entry.source is None:
        return Hashed(entry, len(entry.content), hashlib.sha256(entry.content).hexdigest())
    return Hashed(entry, entry.source.stat().st_size, sha256_file(entry.source))
