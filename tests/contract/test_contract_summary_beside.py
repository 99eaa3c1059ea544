"""[[summary.beside]]: a table's lines that stand as they are, below rows that they belong to."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
from contract_cases import document

from narrowgauge_contract.errors import ExperimentFileError
from narrowgauge_contract.outcome import Metric, Row, Status, Validity
from narrowgauge_contract.spec import parse_spec
from narrowgauge_contract.summary import Summary, summary_blocks, summary_lines

_TABLE: Dict[str, Any] = {
    "parameter": "precision",
    "metric": "seconds",
    "order": ["fp16", "fp32"],
    "table": "| width | precision | s |",
    "line": "| {width} | {name} | {value:.1f} |",
    "beside": [{"where": {"width": 16}, "line": "| 16 | published | {as it is} |"}],
}


def _summary(**changes: Any) -> Summary:
    closing = parse_spec({**document(), "summary": {**_TABLE, **changes}}).closing
    assert closing is not None
    return closing


def _row(precision: str, width: int, rate: float = 0.1) -> Row:
    return Row(
        index=0, repeat=0, seed=0, parameters={"precision": precision, "width": width, "lr": rate},
        status=Status.COMPLETE, validity=Validity(True),
        metrics=(Metric("seconds", "s", "monotonic", (2.0,)),),
    )  # fmt: skip


def test_it_stands_once_below_the_last_rows_with_its_values() -> None:
    rows = [_row("fp16", 16), _row("fp32", 16), _row("fp16", 32), _row("fp16", 16, 0.2)]

    assert summary_lines(_summary(), rows) == (
        "| width | precision | s |",
        "| 16 | fp16 | 2.0 |",
        "| 16 | fp32 | 2.0 |",
        "| 32 | fp16 | 2.0 |",
        "| 16 | fp16 | 2.0 |",
        "| 16 | published | {as it is} |",
    )
    line = summary_blocks(_summary(), rows)[-1].lines[-1]
    assert (line.ratio, line.repeats) == (None, 0), "it is no figure of this run"


def test_without_rows_of_its_values_it_is_left_out() -> None:
    lines: List[str] = list(summary_lines(_summary(), [_row("fp16", 32)]))
    assert lines == ["| width | precision | s |", "| 32 | fp16 | 2.0 |"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beside": {"line": "x"}}, "list of tables"),
        ({"beside": [{"where": {"width": 16}}]}, "line"),
        ({"beside": [{"where": {"height": 16}, "line": "x"}]}, "height"),
        ({"beside": [{"where": {"precision": "fp16"}, "line": "x"}]}, "differ in 'precision'"),
        ({"beside": [{"line": "x", "text": "y"}]}, "text"),
        ({"table": "", "heading": "x"}, "goes with 'table'"),
    ],
)
def test_what_is_declared_wrongly_is_refused(changes: Dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentFileError, match=says):
        _summary(**changes)
