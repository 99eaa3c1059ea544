"""What `reproduce` kept of each time it ran: its plan with its seed, its steps, its verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from narrowgauge.bundle.entries import Entry, name_problem
from narrowgauge.bundle.manifest import Contents, LeftOut
from narrowgauge.judge.gather import load_judged
from narrowgauge.reproduce.journal import FOLDER as REPRODUCE_FOLDER
from narrowgauge.reproduce.occasions import occasions_in
from narrowgauge_contract.errors import NarrowgaugeError

__all__ = ["OCCASIONS_FOLDER", "take_occasions"]

OCCASIONS_FOLDER = "occasions"
_STEPS = ("plan.json", "journal.jsonl")


def take_occasions(results: Path, run_ids: frozenset[str]) -> Contents:
    """The occasions that rest on any of these runs; what cannot be read is left out by name."""
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    for path in reversed(occasions_in(results)):
        problem = name_problem(path.name)
        if problem:
            left_out.append(LeftOut(f"the occasion {path.name!a}", problem))
            continue
        try:
            judged = load_judged(path)
        except NarrowgaugeError as error:
            left_out.append(LeftOut(f"the occasion {path.name!a}", error.what))
            continue
        if run_ids & set(judged.run_ids):
            entries += _of(results, path)
    return Contents(tuple(entries), tuple(left_out))


def _of(results: Path, judged: Path) -> Iterator[Entry]:
    name = judged.stem
    yield Entry(
        f"{OCCASIONS_FOLDER}/{name}/judged.json", f"what was judged at {name}", source=judged
    )
    for file in _STEPS:
        path = results / REPRODUCE_FOLDER / name / file
        if path.is_file() and not path.is_symlink():
            yield Entry(
                f"{OCCASIONS_FOLDER}/{name}/{file}", f"how it was run at {name}", source=path
            )
