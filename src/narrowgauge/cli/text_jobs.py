"""Commands that are a Job with text output: one row of an experiment, and a side file of it.

What needs torch is the lab's, so such a command is recorded like any run, in a container or
natively.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.cli.options import note, results_root

if TYPE_CHECKING:
    from narrowgauge.launch import World
    from narrowgauge.store import RunFolder
    from narrowgauge_contract.record import Record

__all__ = ["How", "run_row", "side_of", "text_of"]


@dataclass(frozen=True)
class How:
    """The options of a run that every such command has."""

    on: str | None
    executor: str
    results: Path | None
    lab_python: Path | None


def run_row(
    world: World, how: How, experiment: str, words: tuple[str, ...]
) -> tuple[RunFolder, Record]:
    """One row of the experiment, with parameters as `-p` takes them. Raises the error of a run that
    did not go well."""
    from narrowgauge.launch import prepare, run_all
    from narrowgauge.plan import JobRequest
    from narrowgauge.progress import SilentReporter
    from narrowgauge.recording import problem_of
    from narrowgauge.store import Store

    request = JobRequest(experiment, "smoke", words, 0)
    store = Store(results_root(how.results, world.checkout))
    launch = prepare(
        world, request, store.root, on=how.on, executor=how.executor, lab_python=how.lab_python
    )
    [(folder, record)] = run_all(
        world, launch, store=store, data=Path(), wait=True, reporter=SilentReporter(sys.stderr)
    )
    problem = problem_of(record, folder)
    if problem is not None:
        raise problem
    note(f"recorded: {folder.path}")
    return folder, record


def side_of(folder: RunFolder, record: Record, name: str) -> Path:
    """A side file of the row, as it was recorded. Raises DamagedRecordError where it is not."""
    from narrowgauge.side_files import side_file
    from narrowgauge_contract.errors import DamagedRecordError

    path = side_file(record.rows[0], name, folder)
    if path is None:
        raise DamagedRecordError(f"the run {record.run_id} left no {name}")
    return path


def text_of(folder: RunFolder, record: Record, name: str) -> str:
    """The same as text. Raises what `side_of` raises."""
    return side_of(folder, record, name).read_text(encoding="utf-8")
