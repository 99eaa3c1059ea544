"""From what was judged to the report: the runs' cards looked up, and the view built of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from narrowgauge.judge.model import Judged
from narrowgauge.report.cards import find_cards
from narrowgauge.report.content import Report, build
from narrowgauge.report.html import html_report
from narrowgauge.store import Store
from narrowgauge_contract.record import Record

__all__ = ["assemble", "assemble_page"]


def assemble(
    judged: Judged,
    store: Store,
    experiments: Path | None,
    records: Mapping[str, Iterable[Record]] | None = None,
) -> Report:
    """The view of what was judged. Runs are looked up in the store and then among the references
    below `experiments`; those in `records`, by experiment, were read already."""
    known = {record.run_id: record for each in (records or {}).values() for record in each}
    return build(judged, find_cards(judged.run_ids, store, experiments, known))


def assemble_page(judged: Judged, store: Store, experiments: Path | None) -> str:
    """The same as one HTML page."""
    return html_report(assemble(judged, store, experiments))
