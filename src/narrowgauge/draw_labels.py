"""What pictures call metrics, units and themselves."""

from __future__ import annotations

import re

from narrowgauge_contract.record import Record

__all__ = ["axis_of", "file_word", "index_of", "unit_of"]


def unit_of(record: Record, metric: str) -> str:
    found = next((m for row in record.valid_rows() if (m := row.metric(metric))), None)
    return found.unit if found else ""


def index_of(record: Record, metric: str) -> str:
    found = next((m for row in record.valid_rows() if (m := row.metric(metric))), None)
    return (found.index if found else "") or "sample"


def axis_of(metric: str, unit: str) -> str:
    words = metric.replace("_", " ")
    return f"{words} ({unit})" if unit and unit != "1" else words


def file_word(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label.replace("=", "-")).strip("-")
