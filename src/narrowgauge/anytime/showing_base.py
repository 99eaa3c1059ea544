"""What families cost within a point of a plain network, as a table, in JSON and in CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from narrowgauge.anytime.showing_tables import INTERVALS, lined_table
from narrowgauge.report.text import csv_cell

if TYPE_CHECKING:
    from rich.table import Table

    from narrowgauge.anytime.bases import Base

__all__ = ["base_csv", "base_json", "base_table"]

_FIGURE = "macs_at_given_base_less_1"


def base_table(base: Base, numbers: Mapping[str, int]) -> Table:
    """A family a line, by its number: its MACs, their interval, and what share of the base's they
    are."""
    title = f"within a point of {base.label}: {100 * base.accuracy:.2f} %, {_macs(base.macs)}"
    headings = ["", "MACs", "from", "to", "of the base's", "draws that reach it"]
    table = lined_table(INTERVALS, headings, title)
    for each in base.families:
        share = f"{100 * each.macs / base.macs:.1f} %" if math.isfinite(each.macs) else "–"
        cells = [_macs(each.macs), _macs(each.low), _macs(each.high), share]
        table.add_row(str(numbers[each.label]), *cells, f"{100 * each.reached:.1f} %")
    return table


def _macs(value: float) -> str:
    return f"{value / 1e6:.4g} M" if math.isfinite(value) else "never"


def base_json(base: Base | None) -> dict[str, Any] | None:
    """What never happens is infinite, which JSON does not have: the writer makes it null."""
    return None if base is None else asdict(base)


def base_csv(base: Base | None) -> Iterator[list[object]]:
    """Lines as of `showing.scoring_csv`; a cell of what never happens is `inf`."""
    for each in base.families if base else ():
        values = [repr(each.macs), "", "", "", "", repr(each.low), repr(each.high)]
        yield [csv_cell(each.label), _FIGURE, "MAC", *values]
