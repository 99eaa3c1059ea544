"""What an experiment may say through its context, and what it may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Iterator, List, Tuple

import numpy as np
import pytest
import torch
from toys import row_of

from narrowgauge_contract.errors import ExperimentFileError, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_lab.context import RowContext

Said = Tuple[RowContext, EventLog, RowPlan]


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Said]:
    """A context, its log, and its row's plan; the row is started."""
    plan = RowPlan(3, 1, 8, {"x": 1})
    with EventLog(tmp_path / EVENTS_FILE) as log:
        log.emit(EventKind.ROW_START, 3, repeat=1, seed=8, parameters=plan.parameters)
        context = RowContext(
            plan, log, tmp_path, device=torch.device("cpu"), profile="smoke", data_sets=("mnist",)
        )
        yield context, log, plan


def test_the_row_is_known(said: Said) -> None:
    ctx, _, _ = said
    assert (ctx.parameters, ctx.seed, ctx.repeat) == ({"x": 1}, 8, 1)
    assert (ctx.device, ctx.profile) == (torch.device("cpu"), "smoke")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (2, (2.0,)),
        (2.5, (2.5,)),
        ([1, 2], (1.0, 2.0)),
        ([], ()),
        (range(3), (0.0, 1.0, 2.0)),
        (np.float32(0.5), (0.5,)),
        (np.arange(2), (0.0, 1.0)),
        (torch.tensor(3), (3.0,)),
        (torch.tensor([1.5, 2.5]), (1.5, 2.5)),
        ([torch.tensor(1.0), np.int64(2)], (1.0, 2.0)),
    ],
)
def test_samples_come_as_they_are(said: Said, given: object, kept: Tuple[float, ...]) -> None:
    ctx, log, plan = said
    ctx.metric("m", given, unit="1", source="computed")  # type: ignore[arg-type]

    assert row_of(log, plan).metrics[0].values == kept


def test_samples_accumulate_and_keep_their_conditions(said: Said) -> None:
    ctx, log, plan = said
    for value in (1.0, 2.0):
        ctx.metric("m", value, unit="s", source="monotonic", conditions={"cache": "cold"})
    (metric,) = row_of(log, plan).metrics

    assert metric.values == (1.0, 2.0)
    assert metric.conditions == {"cache": "cold"}
    with pytest.raises(UsageError, match="changes its unit or source"):
        ctx.metric("m", 3.0, unit="ms", source="monotonic")
    with pytest.raises(ValueError, match="could not convert"):
        ctx.metric("n", ["fast"], unit="s", source="monotonic")  # type: ignore[list-item]
    assert row_of(log, plan).metrics == (metric,), "what was refused is not in the record"


def test_only_declared_data_may_be_read(said: Said, tmp_path: Path) -> None:
    ctx, _, _ = said
    with pytest.raises(ExperimentFileError, match="does not declare"):
        ctx.data("cifar10")
    with pytest.raises(UsageError, match="no shape of its own"):
        ctx.data("synthetic")


def test_made_up_data_is_a_fact_and_never_unasked(said: Said, tmp_path: Path) -> None:
    ctx, log, plan = said
    data = ctx.synthetic(channels=1, size=4, classes=2, train=4, test=2)
    assert data.train_images.shape == (4, 1, 4, 4)
    assert row_of(log, plan).facts == {"synthetic": True}

    strict = RowContext(plan, log, tmp_path, device=ctx.device, profile="smoke", synthetic=False)
    with pytest.raises(UsageError, match="nobody asked for"):
        strict.synthetic(channels=1, size=4, classes=2, train=4, test=2)


def test_side_files_stay_inside_and_are_recorded(said: Said, tmp_path: Path) -> None:
    ctx, log, plan = said
    for name in ("../escape", "/etc/escape", "."):
        with pytest.raises(UsageError, match="is not inside"):
            ctx.side_file(name)
    with pytest.raises(UsageError, match="is not inside"):
        ctx.add_side_file(Path("/etc/hostname"))
    ctx.side_file("table.json").write_text(json.dumps([1]))
    ctx.side_file("table.json")
    shared = tmp_path / "shared.bin"
    shared.write_bytes(b"12")
    ctx.add_side_file(shared)
    ctx.finish()

    assert {(f.path, f.bytes) for f in row_of(log, plan).side_files} == {
        ("row-3/table.json", 3), ("shared.bin", 2),
    }  # fmt: skip


def test_a_side_file_that_was_never_written_is_an_error_of_a_complete_row(said: Said) -> None:
    ctx, _, _ = said
    ctx.side_file("never.txt")
    ctx.finish(complete=False)
    ctx.side_file("never.txt")
    with pytest.raises(UsageError, match=r"never written: never\.txt"):
        ctx.finish()


def test_a_stage_may_keep_from_the_row_that_its_numbers_are_invalid(said: Said) -> None:
    ctx, log, plan = said
    told: List[str] = []
    ctx.for_stage("member0", told.append).invalid("diverged")
    ctx.for_stage("trunk").invalid("diverged too")

    assert told == ["diverged"]
    reasons = row_of(log, plan).validity.reasons
    assert "diverged too" in reasons
    assert "diverged" not in reasons
