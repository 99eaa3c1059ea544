"""The checkout that a command works on: where its parts lie, and its commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import NoCheckout
from narrowgauge.targets import TARGETS_FILE
from narrowgauge_contract.record import GitFacts

__all__ = ["Checkout", "find_checkout", "git_facts"]

_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Checkout:
    """A source tree of Narrowgauge; every path in it is absolute."""

    root: Path

    @property
    def targets_file(self) -> Path:
        return self.root / TARGETS_FILE

    @property
    def experiments(self) -> Path:
        return self.root / "experiments"

    @property
    def source(self) -> Path:
        """What `PYTHONPATH` gets for the lab."""
        return self.root / "src"

    @property
    def results(self) -> Path:
        """Where records go unless `--results` says otherwise."""
        return self.root / "results"

    @property
    def lab_environment(self) -> Path:
        """The native executor's virtual environment."""
        return self.root / ".venv-lab"


def find_checkout(start: Path, project: Path | None = None) -> Checkout:
    """The checkout at `project`; without one, around `start`; without one, this package's own.

    Raises NoCheckout.
    """
    if project is not None:
        if not _is_checkout(project):
            raise NoCheckout(
                f"--project {project} is not a checkout of Narrowgauge",
                why=f"it has no {TARGETS_FILE} beside experiments/",
            )
        return Checkout(project.resolve())
    start = start.resolve()
    own = Path(__file__).resolve().parents[2]
    for folder in (start, *start.parents, own):
        if _is_checkout(folder):
            return Checkout(folder)
    raise NoCheckout(
        f"no checkout of Narrowgauge at or above {start}",
        why=f"no folder there has {TARGETS_FILE} beside experiments/",
        next_step="cd into the checkout, or name it: --project DIR",
    )


def git_facts(root: Path) -> GitFacts | None:
    """The commit of `root` and whether tracked files differ from it; None where git cannot say."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if changes is None else GitFacts(commit.strip(), bool(changes.strip()))


def _git(root: Path, *words: str) -> str | None:
    command = ["git", "-C", str(root), "--no-optional-locks", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _is_checkout(folder: Path) -> bool:
    return (folder / TARGETS_FILE).is_file() and (folder / "experiments").is_dir()
