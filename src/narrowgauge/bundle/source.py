"""The sources that a bundle holds: the checkout as it is now, committed or not, and git's word.

What git does not track may be anybody's: keys, drafts, earlier bundles with images that must not be
passed on. So a public bundle takes of it only what the bundled runs may have used, names the rest,
and no bundle takes archives, results, or itself.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from narrowgauge.bundle.entries import Entry, name_problem
from narrowgauge.bundle.manifest import Contents, Kind, LeftOut
from narrowgauge.checkout import Checkout, git_facts
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.hashing import tree_files

__all__ = ["SCRATCH_PREFIX", "SOURCE_FOLDER", "take_source"]

SOURCE_FOLDER = "source"
#: How the folder begins in which images are saved; a killed bundle may have left one.
SCRATCH_PREFIX = ".narrowgauge-bundle-"
_GIT_TIMEOUT_S = 60.0
#: Without git, what makes a checkout; results, environments and builds lie elsewhere.
_FOLDERS = ("docker", "docs", "experiments", "images", "scripts", "src", "tests")
_ARCHIVES = (".zip", ".ngpack", ".tgz")
_WHAT = "the source as it was when this was bundled"


def take_source(
    checkout: Checkout, kind: Kind, experiments: Collection[str], never: Collection[Path]
) -> Contents:
    """The files of the checkout as they are now, and `git.json`; with changes that are not
    committed, `git.diff`.

    All that git tracks, and of what it would track in a `full` bundle everything but archives, in a
    `public` one only what lies in `src/` and in the folders of `experiments`. Without git nothing
    tells the two apart, and all folders of a checkout count as its own. `never`: files that are
    left out, and folders of which only what git tracks is taken, such as the results.
    """
    root = checkout.root
    tracked, loose = _tracked_and_loose(root)
    own = ("",) if kind != "public" or not tracked else _own(experiments)
    entries, left_out = [], []
    for name in sorted({*tracked, *loose}):
        path = root / name
        if path.is_symlink() or not path.is_file() or path in never:
            continue  # removed but not committed, a submodule, or the bundle itself
        problem = name_problem(name)
        if name not in tracked:
            if SCRATCH_PREFIX in name or any(path.is_relative_to(each) for each in never):
                continue
            problem = problem or _loose_problem(name, own)
        if problem:
            left_out.append(LeftOut(f"the source file {name!a}", problem))
            continue
        entries.append(Entry(f"{SOURCE_FOLDER}/{name}", _WHAT, source=path))
    state, why = _git_state(checkout)
    return Contents((*entries, *state), (*left_out, *why))


def _own(experiments: Collection[str]) -> tuple[str, ...]:
    return ("src/", *(f"experiments/{name}/" for name in experiments))


def _tracked_and_loose(root: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """What git tracks, and what it would track; without git, nothing and what is there."""
    tracked = _listed(root, "--cached")
    loose = _listed(root, "--others", "--exclude-standard")
    if tracked is None or loose is None:
        return frozenset(), tuple(_walked(root))
    return frozenset(tracked), tuple(loose)


def _loose_problem(name: str, own: tuple[str, ...]) -> str:
    """Why a file that git does not track is left out; empty where it is not."""
    file = PurePosixPath(name).name.lower()
    if file.endswith(_ARCHIVES) or ".tar" in file:
        return "git does not track it, and it is an archive: nobody sees what is in it"
    if not name.startswith(own):
        return (
            "git does not track it, and no run in here can have used it; commit what belongs here"
        )
    return ""


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


def _listed(root: Path, *which: str) -> list[str] | None:
    """The files that git knows so; None where it cannot say."""
    found = _git(root, "ls-files", "-z", *which)
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
