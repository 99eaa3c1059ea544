"""`narrowgauge` as users start it: a process, a project, a results folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge_contract.record import Record, load_record

ROOT = Path(__file__).parents[2]
ALIAS = "narrowgauge/cpu:local"
LABEL_RUN = "io.narrowgauge.run"
#: Seconds after which a command is taken to hang.
WITHIN = 300.0


@dataclass(frozen=True)
class Built:
    """An image and what building it said."""

    name: str
    log: str


@dataclass(frozen=True)
class Program:
    """`narrowgauge`, on a project, with a results folder of its own."""

    project: Path
    results: Path
    env: Mapping[str, str]

    def words(self, *words: str) -> list[str]:
        # Data lie in a folder of their own and belong to no checkout.
        where = [] if words[0] == "data" else ["--project", str(self.project)]
        return [sys.executable, "-m", "narrowgauge", *words, *where]

    def run_words(self, experiment: str, *words: str) -> list[str]:
        fixed = ("--on", "cpu", "--executor", "docker", "--profile", "smoke", "--wait")
        return [*self.words("run", experiment, *fixed, *words), "--results", str(self.results)]

    def call(
        self, *words: str, expect: int = 0, within: float = WITHIN
    ) -> subprocess.CompletedProcess[str]:
        """Any command to its end; fails, with what it said, where it exits otherwise."""
        return _finished(self.start(self.words(*words)), expect, within)

    def run(
        self, experiment: str, *words: str, expect: int = 0
    ) -> subprocess.CompletedProcess[str]:
        return _finished(self.start(self.run_words(experiment, *words)), expect)

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        # A suite started in the background has SIGINT ignored, and children inherit that.
        return subprocess.Popen(
            words,
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_interrupts,
        )

    def folder(self) -> Path:
        """The folder of the one run there is."""
        found = [path.parent for path in self.results.glob("*/*/job.json")]
        assert len(found) == 1, found
        return found[0]

    def record(self) -> Record:
        return load_record(self.folder() / "record.json")


@dataclass(frozen=True)
class Compose:
    """`docker compose` on a folder with compose.yaml, experiments and results, and no .env yet."""

    folder: Path
    name: str
    env: Mapping[str, str]

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def set(self, **settings: object) -> None:
        """Write .env: uid, gid, data, target."""
        lines = [f"NARROWGAUGE_{name.upper()}={value}\n" for name, value in settings.items()]
        (self.folder / ".env").write_text("".join(lines), encoding="utf-8")

    def call(
        self, *words: str, expect: int = 0, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Any command of compose, with more in its environment; fails where it exits otherwise."""
        where = ["--project-directory", str(self.folder), "--project-name", self.name]
        process = subprocess.Popen(
            ["docker", "compose", "--ansi", "never", *where, *words],
            cwd=self.folder,
            env={**self.env, **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return _finished(process, expect)

    def run(self, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        """`docker compose run`, without fetching data before."""
        return self.call("run", "--rm", "--no-deps", *words, expect=expect)

    def run_folder(self) -> Path:
        """The folder of the one run there is."""
        found = [path.parent for path in self.results.glob("*/*/job.json")]
        assert len(found) == 1, found
        return found[0]

    def record(self) -> Record:
        return load_record(self.run_folder() / "record.json")


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _finished(
    process: subprocess.Popen[str], expect: int, within: float = WITHIN
) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == expect, f"exit {process.returncode}, not {expect}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    """The condition's first true value; fails after a while, saying what never came."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come within {seconds:g} s")


def facts_in(record: Record) -> dict[str, Any]:
    """The facts of a record's one row."""
    (row,) = record.rows
    return dict(row.facts)
