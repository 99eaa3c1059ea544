"""Tiny experiments for the tests of the lab, written into a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, Optional, Tuple

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import Job, RowPlan, parse_overrides, resolve
from narrowgauge_contract.outcome import Fold, InsideFacts, Outcome, Row
from narrowgauge_lab import session
from narrowgauge_lab.experiments import find_spec

SOURCE = Path(__file__).parents[2] / "src"
INSIDE = InsideFacts(python="3", platform="test", torch="1.8.0")
METRIC = 'ctx.metric("y", ctx.parameters["x"] * 2, unit="1", source="computed")\n'

_TOML = """
[experiment]
id = "{id}"
title = "toy"
summary = "toy"
{extra}
[parameters.x]
type = "int"
axis = "row"
default = 1
min = 0
help = "a number"

[parameters.gear]
type = "choice"
choices = ["low", "high"]
axis = "run"
default = "low"
help = "which gear"

[profiles.smoke]
repeats = 1
[profiles.short]
repeats = 2
"""


def write_toy(folder: Path, body: str, name: str = "toy", extra: str = "") -> Path:
    """Make `folder/<name>/` with a run.py whose `run(ctx)` has `body`; gives `folder`."""
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "experiment.toml").write_text(_TOML.format(id=name, extra=extra))
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    (home / "run.py").write_text(f"import math, os, signal, sys, time\n\n\ndef run(ctx):\n{lines}")
    return folder


def toy_job(experiments: Path, *words: str, profile: str = "smoke") -> Job:
    spec = find_spec(experiments, "toy")
    return resolve(
        spec,
        parse_overrides(spec, words),
        profile=profile,
        target="native",
        seed=7,
        run_id="20260101T000000Z-toy-000000",
    )


def request(
    tmp_path: Path,
    *words: str,
    profile: str = "smoke",
    resume: bool = False,
    shard: Optional[Tuple[int, int]] = None,
    data: Optional[Path] = None,
    name: str = "toy",
) -> session.Request:
    """A run of the toy in `tmp_path/experiments` into `tmp_path/out`."""
    return session.Request(
        out=tmp_path / "out",
        start=tmp_path,
        env={},
        experiment=name,
        parameters=words,
        profile=profile,
        seed=7,
        experiments=tmp_path / "experiments",
        resume=resume,
        shard=shard,
        data=data,
    )


def run_toy(
    tmp_path: Path, body: str, *words: str, profile: str = "smoke", resume: bool = False
) -> Tuple[Outcome, Path]:
    """Run a toy in children of this process; its outcome and its output folder.

    The body must run no torch operation that uses threads: other tests have used them in this
    process, and a forked child waits for them for ever. That is why the lab's own parent runs none.
    """
    write_toy(tmp_path / "experiments", body)
    wanted = request(tmp_path, *words, profile=profile, resume=resume)
    return session.run(wanted), wanted.out


def environment() -> Dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


def start_lab(*words: str) -> subprocess.Popen[str]:
    """The lab as a process of its own, as users and containers start it."""
    return subprocess.Popen(
        [sys.executable, "-m", "narrowgauge_lab", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )


def wait_for(out: Path, kind: EventKind, count: int = 1) -> None:
    """Until so many events of that kind are in the run's file."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if sum(event.kind is kind for event in read_events(out / EVENTS_FILE)) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {kind.value} event within 300 s")


def fold(out: Path) -> Fold:
    return Fold().add_all(read_events(out / EVENTS_FILE))


def row_of(log: EventLog, plan: RowPlan) -> Row:
    """What the events so far make of the one row that was started in `log`."""
    (row,) = Fold().add_all(read_events(log.path)).rows()
    assert row.index == plan.index
    return row
