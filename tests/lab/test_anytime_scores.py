"""The scores of a run's answers as metrics of its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import row_of

from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.anytime import scores
from narrowgauge_lab.context import RowContext
from narrowgauge_scores.side_file import RunLogits, Split

LABELS = np.array([0, 1, 1, 0])
#: The first exit is wrong of the last two images, the second of the last.
LOGITS = np.array(
    [
        [[2, 0], [0, 2], [2, 0], [0, 2]],
        [[4, 0], [0, 4], [0, 4], [0, 4]],
    ],
    np.float32,
)


def _run(**changes: Any) -> RunLogits:
    test = Split(LOGITS, LABELS, np.arange(4))
    fields = {
        "family": "toynet", "variant": "", "data": "mnist", "seed": 0, "test": test,
        "cumulative_macs": np.array([100_000, 500_000]),
        "direct_macs": np.array([100_000, 400_000]),
    }  # fmt: skip
    fields.update(changes)
    return RunLogits(**fields)


def _recorded(out: Path, run: RunLogits, taken: Any = None) -> Row:
    plan = RowPlan(index=0, repeat=0, seed=0, parameters={})
    log = EventLog(out / EVENTS_FILE)
    log.emit(EventKind.ROW_START, 0, repeat=0, seed=0, parameters={})
    ctx = RowContext(plan, log, out, device=torch.device("cpu"), profile="smoke")
    scores.record(ctx, run, taken)
    return row_of(log, plan)


def _value(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None
    return metric.values[0]


def test_every_scalar_becomes_a_metric(tmp_path: Path) -> None:
    row = _recorded(tmp_path, _run())

    assert _value(row, "exit0_accuracy") == 50.0
    assert _value(row, "exit1_accuracy") == 75.0
    assert _value(row, "exit1_macs") == 400_000
    assert _value(row, "exit1_cumulative_macs") == 500_000
    assert 0 < _value(row, "area") < 0.75
    assert row.facts["scored_images"] == 4
    assert "LeNet" in row.facts["area_range"]


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_policy_is_recorded_whatever_holds_its_exits(tmp_path: Path, kind: Any) -> None:
    row = _recorded(tmp_path, _run(), kind([0, 0, 1, 1]))

    assert _value(row, "adaptive_accuracy") == 75.0
    assert _value(row, "mean_macs") == 300_000
    assert _value(row, "exit1_share") == 50.0


def test_made_up_data_has_no_range_and_says_so(tmp_path: Path) -> None:
    row = _recorded(tmp_path, _run(synthetic=True))

    assert row.metric("area") is None
    assert row.metric("area_own") is not None
    assert "none" in row.facts["area_range"]


def test_exits_that_there_are_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="no exits"):
        _recorded(tmp_path, _run(), torch.tensor([0, 0, 2, 1]))
