"""The report for scripts: CSV with a line per claim, and JSON with everything."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from narrowgauge.judge.model import Estimate, Judged
from narrowgauge.report.content import ClaimView, Report
from narrowgauge.report.text import csv_cell
from narrowgauge_contract.codec import dumps, encode

__all__ = ["REPORT_FORMAT", "csv_report", "json_report"]

#: 1: first.
REPORT_FORMAT = 1
COLUMNS = (
    "verdict", "experiment", "claim", "text", "source", "kind", "reason", "figure", "low", "high",
    "unit", "processes", "paper_figure", "paper_tolerance", "paper_minimum", "paper_maximum",
    "expected_for", "here", "target", "device", "device_matches", "least_detectable", "two_modes",
    "runs", "replay", "what_would_change_it", "command",
)  # fmt: skip


def csv_report(report: Report) -> str:
    """A header and a line per claim; no cell begins a spreadsheet's formula."""
    stream = io.StringIO()
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(COLUMNS)
    for each in report.claims:
        table.writerow(_cells(each, report.replay))
    return stream.getvalue()


def _cells(view: ClaimView, replay: bool) -> list[str]:
    judgement = view.judgement
    estimate, expected = judgement.estimate, judgement.expectation
    found = judgement.sensitivity
    texts = (view.verdict.value, view.experiment, view.id, view.text, view.source, view.kind)
    bounds = (
        (expected.figure, expected.tolerance, expected.minimum, expected.maximum)
        if expected is not None
        else (None,) * 4
    )
    return [
        *map(csv_cell, (*texts, view.reason)),
        *_figures(estimate),
        csv_cell(estimate.unit if estimate else ""),
        str(view.repeats or ""),
        *map(_number, bounds),
        csv_cell(judgement.expected_for),
        csv_cell(view.here),
        csv_cell(view.target),
        csv_cell(view.device),
        str(judgement.device_matches).lower() if view.device else "",
        _number(found.least if found else None),
        csv_cell(view.bimodal),
        csv_cell(" ".join(run.run_id for run in view.runs)),
        str(replay).lower(),
        csv_cell(view.flip),
        csv_cell(view.command),
    ]


def _figures(estimate: Estimate | None) -> list[str]:
    values = (estimate.figure, estimate.low, estimate.high) if estimate else (None,) * 3
    return [_number(value) for value in values]


def _number(value: float | None) -> str:
    """A number that reads back as it was; empty where there is none."""
    return "" if value is None or not math.isfinite(value) else repr(value)


def json_report(report: Report, judged: Judged) -> str:
    """Everything: the judgements as they are, and what is known of their runs. In ASCII, so that
    what acts on a terminal is an escape."""
    body: dict[str, Any] = {
        "format": REPORT_FORMAT,
        "replay": report.replay,
        "counts": {verdict.value: count for verdict, count in report.counts},
        "judged": encode(judged),
        "runs": [encode(card) for _, card in report.runs],
        "missing_runs": [{"run_id": run, "why": why} for run, why in report.missing],
    }
    return dumps(body)
