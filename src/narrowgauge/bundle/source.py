"""The sources that a bundle holds: the checkout as it is now, committed or not, and git's word."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.bundle.entries import Entry, name_problem
from narrowgauge.bundle.manifest import Contents, LeftOut
from narrowgauge.checkout import Checkout, git_facts
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.hashing import tree_files

__all__ = ["SOURCE_FOLDER", "take_source"]

SOURCE_FOLDER = "source"
_GIT_TIMEOUT_S = 60.0
#: Without git, what makes a checkout; results, environments and builds lie elsewhere.
_FOLDERS = ("docker", "docs", "experiments", "images", "scripts", "src", "tests")
_WHAT = "the source as it was when this was bundled"


def take_source(checkout: Checkout) -> Contents:
    """Every file that git tracks or would track, as it is now, and `git.json`; with changes that
    are not committed, `git.diff`."""
    listed = _listed(checkout.root)
    names = _walked(checkout.root) if listed is None else listed
    entries, left_out = [], []
    for name in sorted(set(names)):
        path = checkout.root / name
        if path.is_symlink() or not path.is_file():
            continue  # removed but not committed, or a submodule
        problem = name_problem(name)
        if problem:
            left_out.append(LeftOut(f"the source file {name!a}", problem))
            continue
        entries.append(Entry(f"{SOURCE_FOLDER}/{name}", _WHAT, source=path))
    state, why = _git_state(checkout)
    return Contents((*entries, *state), (*left_out, *why))


def _git_state(checkout: Checkout) -> tuple[list[Entry], list[LeftOut]]:
    facts = git_facts(checkout.root)
    if facts is None:
        why = "this is no git checkout, or git is not here; the files themselves are"
        return [], [LeftOut("the commit of the source", why)]
    entries = [Entry("git.json", "the commit of the source", content=dumps(facts).encode())]
    changes = _git(checkout.root, "diff", "--no-ext-diff", "--no-color", "HEAD")
    if facts.dirty and changes:
        entries.append(Entry("git.diff", "what differs from that commit", content=changes))
    return entries, []


def _listed(root: Path) -> list[str] | None:
    """What git tracks or would track; None where it cannot say."""
    words = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    found = _git(root, *words)
    if found is None:
        return None
    return [name for name in found.decode("utf-8", errors="replace").split("\0") if name]


def _walked(root: Path) -> Iterator[str]:
    yield from (path.name for path in root.iterdir() if path.is_file() and path.name[0] != ".")
    for folder in _FOLDERS:
        found = tree_files(root / folder) if (root / folder).is_dir() else ()
        yield from (p.relative_to(root).as_posix() for p in found if p.suffix != ".pyc")


def _git(root: Path, *words: str) -> bytes | None:
    # The checkout itself, not a repository that it happens to lie in.
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
