"""The first try: which claims a laptop can answer in minutes, and the report at its end."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.checkout import Checkout
from narrowgauge.judge.gather import Claimed, all_claims
from narrowgauge.judge.model import Judged
from narrowgauge.reproduce.planning import Here, can_be_run
from narrowgauge.store import Store
from narrowgauge_contract.codec import write_atomic

__all__ = ["kick_claims", "write_report"]

#: A claim that costs more on its own hardware is no first try.
_MOST_MINUTES = 3.0
REPORT_FILE = "report.html"


def kick_claims(experiments: Path, here: Here) -> tuple[Claimed, ...]:
    """Short claims of any hardware, of experiments that need neither a data set nor a GPU."""
    return tuple(
        each
        for each in all_claims(experiments)
        if each.claim.minutes <= _MOST_MINUTES
        and not each.claim.device
        and not each.spec.requires_accelerator
        and not each.spec.data_sets
        and each.spec.data_parameter is None
        and can_be_run(each, here)
    )


def write_report(judged: Judged, checkout: Checkout, results: Path) -> Path:
    """The report of what was judged, beside the results."""
    from narrowgauge.report.assembled import assemble_page

    path = results / REPORT_FILE
    page = assemble_page(judged, Store(results), checkout.experiments)
    write_atomic(path, page.encode("utf-8"))
    return path
