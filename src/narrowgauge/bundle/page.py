"""The verdicts of a bundle as a page. Made of the bundle's own records and verdicts alone, so that
whoever verifies it makes the same page."""

from __future__ import annotations

from collections.abc import Iterable

from narrowgauge.judge.model import Judged
from narrowgauge.report.cards import card_of
from narrowgauge.report.content import build
from narrowgauge.report.html import html_report
from narrowgauge_contract.record import Record

__all__ = ["REPORT_FILE", "report_page"]

REPORT_FILE = "report.html"


def report_page(judged: Judged, records: Iterable[Record]) -> bytes:
    """The report of `judged` as `narrowgauge report` writes it, with a card of each run."""
    known = {record.run_id: record for record in records}
    cards = (
        (run, card_of(known[run]) if run in known else "its record is not here")
        for run in judged.run_ids
    )
    return html_report(build(judged, cards)).encode("utf-8")
