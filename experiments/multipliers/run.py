"""One row of `multipliers`: a table's errors and its structure, or a list of those built in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.multipliers import (
    NAMES,
    Structure,
    Table,
    analyse,
    error_blocks,
    error_statistics,
    find_table,
    is_file,
    named,
)
from narrowgauge_lab.multipliers.report import analysis_text, list_line, list_text, show_text

_FOLDER = Path(__file__).parent
_ALL = "all"
_SIGNED: Dict[str, Optional[bool]] = {"auto": None, "true": True, "false": False}
#: Of the heat map: operands of a side that are one cell.
_BLOCKS = 16


def run(ctx: RowContext) -> None:
    """Look at the row's table. Raises what `find_table` raises."""
    text = ctx.parameters["table"]
    if text == _ALL:
        _list(ctx)
        return
    table = _found(text, _SIGNED[ctx.parameters["signed"]])
    statistics, structure = error_statistics(table), analyse(table)
    ctx.fact("multiplier", _about(table))
    ctx.fact("statistics", statistics.to_fact())
    ctx.fact("structure", _brief(structure))
    for name in ("er", "med", "nmed", "mred", "worst", "bias"):
        ctx.metric(name, float(getattr(statistics, name)), unit="1", source="all pairs")
    if structure.proved:
        ctx.metric("terms", len(structure.factors), unit="1", source="proof")
    _write(ctx, "analysis.txt", analysis_text(table, structure))
    _write(ctx, "show.txt", show_text(table, statistics))
    _write(ctx, "structure.json", _json(structure.to_fact()))
    _write(ctx, "errors.json", _json(_heat(table)))


def _list(ctx: RowContext) -> None:
    lines = []
    for number, name in enumerate(NAMES):
        lines.append(list_line(named(name)))
        ctx.progress(number + 1, len(NAMES), "multipliers")
    ctx.fact("listed", len(lines))
    _write(ctx, "list.txt", list_text(lines))


def _found(text: str, signed: Optional[bool]) -> Table:
    beside = _FOLDER / text
    if is_file(text) and beside.parent.is_dir() and not Path(text).is_absolute():
        return find_table(str(beside), signed)
    if signed is not None and not is_file(text):
        raise BadValueError(
            f"'{text}' is built in, and says itself whether it is signed",
            next_step=f"{text}-signed, or {text} with signed=auto",
        )
    return find_table(text, signed)


def _about(table: Table) -> Dict[str, Any]:
    return {
        "name": table.name,
        "source": table.source,
        "bits": table.bits,
        "a_signed": table.a_signed,
        "b_signed": table.b_signed,
        "fits_int16": table.fits_int16(),
        "sha256": table.sha256(),
    }


def _brief(structure: Structure) -> Dict[str, Any]:
    """Without lists of 256, which are in structure.json."""
    fact = structure.to_fact()
    if not structure.terms:
        fact["terms"] = [each.coefficient for each in structure.factors]
    return fact


def _heat(table: Table) -> Dict[str, Any]:
    """Cells and where they begin, as drawings of kind `heat` take them."""
    step = (256 >> (8 - table.bits)) // _BLOCKS
    starts: List[List[str]] = [
        [str(i * step - (128 if signed else 0)) for i in range(_BLOCKS)]
        for signed in (table.a_signed, table.b_signed)
    ]
    return {
        "rows": starts[0],
        "columns": starts[1],
        "values": error_blocks(table, _BLOCKS).tolist(),
        "label": "mean |error|",
    }


def _json(document: Any) -> str:
    return json.dumps(document, sort_keys=True) + "\n"


def _write(ctx: RowContext, name: str, text: str) -> None:
    ctx.side_file(name).write_text(text, encoding="utf-8")
