"""The answers that runs kept, found through their records, and whether they go on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.errors import UsageError
from narrowgauge.index.untouched import check_untouched
from narrowgauge.side_files import side_file
from narrowgauge.store import RunFolder
from narrowgauge_contract.agreement import agreement_facts
from narrowgauge_contract.outcome import Row
from narrowgauge_scores.side_file import LOGITS_FILE, RunLogits, Split, read_logits

if TYPE_CHECKING:
    from narrowgauge_contract.record import Record

__all__ = ["Answered", "Gathered", "answers_of", "gather"]

_MOST_NAMED = 4


@dataclass(frozen=True)
class Answered:
    """A row that kept its answers; its test images in the order of their numbers. `facts`: what its
    record says by the names in `MUST_AGREE`."""

    run_id: str
    experiment: str
    row: Row
    logits: RunLogits
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.run_id} row {self.row.index}"


@dataclass(frozen=True)
class Gathered:
    """What is scored, all of one test, and a line for each row that is not."""

    answered: tuple[Answered, ...]
    left_out: tuple[str, ...]


def gather(folders: Sequence[RunFolder]) -> Gathered:
    """The answers of all valid rows of these runs; a run that is named twice counts once.

    Raises UsageError where no row has any, and where they are of different data sets or test
    images: those go on no common axis. DamagedRecordError where a record or side file is damaged,
    or a record was edited.
    """
    answered: list[Answered] = []
    left_out: list[str] = []
    for folder in {folder.path.resolve(): folder for folder in folders}.values():
        record = folder.record()
        check_untouched(folder, record)
        for row in record.rows:
            found, why = answers_of(record, row, folder)
            if found is not None:
                answered.append(found)
            else:
                left_out.append(f"{record.run_id} row {row.index}: {why}")
    if not answered:
        raise UsageError(
            "no row of these runs has answers to score",
            why="\n".join(left_out[:_MOST_NAMED]) or "no run has a row",
            next_step=f"runs of networks with several exits keep {LOGITS_FILE}; give one of those",
        )
    _require_one_test(answered)
    return Gathered(tuple(answered), tuple(left_out))


def answers_of(record: Record, row: Row, folder: RunFolder) -> tuple[Answered | None, str]:
    """A row's answers, or None and why it has none to score. Raises DamagedRecordError."""
    if not row.validity.valid:
        return None, "not valid: " + "; ".join(row.validity.reasons)
    path = side_file(row, LOGITS_FILE, folder)
    if path is None:
        return None, f"it kept no {LOGITS_FILE}"
    run = read_logits(path)
    run = replace(run, test=_sorted(run.test), device=_device(record, run.device))
    return Answered(record.run_id, record.experiment, row, run, agreement_facts(record)), ""


def _device(record: Record, said: str) -> str:
    """The device by its whole name: "cpu" is another on every host, and with other threads."""
    inside = record.inside
    if said not in ("", "cpu") or inside is None or inside.cpu is None:
        return said
    return f"{inside.cpu}, {inside.threads} threads" if inside.threads else inside.cpu


def _sorted(split: Split) -> Split:
    """Images by their number, so that those of two runs stand in one order."""
    order = np.argsort(split.samples)
    if (np.diff(order) == 1).all():
        return split
    macs = None if split.macs is None else split.macs[:, order]
    base = None if split.base_correct is None else split.base_correct[order]
    return Split(split.logits[:, order], split.labels[order], split.samples[order], macs, base)


def _require_one_test(answered: Sequence[Answered]) -> None:
    first = answered[0]
    apart = {each.name: why for each in answered[1:] if (why := _difference(first, each))}
    if not apart:
        return
    lines = [f"{first.name}: {_test_words(first.logits)}"]
    lines += [f"{name}: {why}" for name, why in list(apart.items())[:_MOST_NAMED]]
    if len(apart) > _MOST_NAMED:
        lines.append(f"and {len(apart) - _MOST_NAMED} more")
    raise UsageError(
        "these runs are not of one test, so they go on no common axis",
        why="\n".join(lines),
        next_step="score those of one data set and one test subset together, the others apart",
    )


def _difference(one: Answered, other: Answered) -> str:
    """What keeps two rows apart, as the other is; empty where nothing does."""
    left, right = one.logits, other.logits
    if (left.data, left.synthetic) != (right.data, right.synthetic):
        return _test_words(right)
    if left.test.classes != right.test.classes:
        return f"{right.test.classes} classes of {right.data}"
    if not np.array_equal(left.test.samples, right.test.samples):
        shared = len(np.intersect1d(left.test.samples, right.test.samples))
        return f"{_test_words(right)}, of which {shared:,} are the same"
    if not np.array_equal(left.test.labels, right.test.labels):
        return f"other labels of the same images of {right.data}"
    return ""


def _test_words(run: RunLogits) -> str:
    return f"{run.test.images:,} test images of {data_words(run)}"


def data_words(run: RunLogits) -> str:
    """The data set as people are told of it."""
    return f"{run.data} (made up)" if run.synthetic else run.data
