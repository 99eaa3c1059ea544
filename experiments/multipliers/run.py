"""One row of `multipliers`: a table's errors and its structure, also beside another's, or a list of
those built in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.multipliers import (
    NAMES,
    Structure,
    Table,
    analyse,
    difference,
    error_blocks,
    error_difference,
    error_statistics,
    find_table,
    is_file,
    named,
)
from narrowgauge_lab.multipliers.report import (
    analysis_text,
    comparison_text,
    list_entry,
    list_line,
    list_text,
    show_text,
)

_FOLDER = Path(__file__).parent
_ALL = "all"
#: No other multiplier beside the row's.
_NONE = "none"
_SIGNED: Dict[str, Optional[bool]] = {"auto": None, "true": True, "false": False}
#: Of the heat map: operands of a side that are one cell.
_BLOCKS = 16


def run(ctx: RowContext) -> None:
    """Look at the row's table, and at another beside it. Raises what `find_table` raises."""
    text, against = ctx.parameters["table"], ctx.parameters["against"]
    signed = _SIGNED[ctx.parameters["signed"]]
    if text == _ALL:
        _list(ctx, against)
        return
    # Of two, signs are said of the file; a built-in one has them in its name.
    table = _found(text, None if is_file(against) and not is_file(text) else signed)
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
    _write(
        ctx,
        "errors.json",
        _json(_heat(table, error_blocks(table, _BLOCKS), f"mean |error| of {table.name}")),
    )
    if ctx.parameters["keep_table"]:
        np.save(str(ctx.side_file("table.npy")), table.values)
    if against != _NONE:
        other = _found(against, signed if is_file(against) else None)
        _beside(ctx, table, other)


def _beside(ctx: RowContext, table: Table, other: Table) -> None:
    """Both tables' errors, and where the other is nearer to exact products."""
    statistics = (error_statistics(table), error_statistics(other))
    structures = (analyse(table), analyse(other))
    apart = difference(table, other)
    ctx.fact(
        "against",
        {
            "multiplier": _about(other),
            "statistics": statistics[1].to_fact(),
            "structure": _brief(structures[1]),
            "difference": None if apart is None else apart.to_fact(),
        },
    )
    if apart is not None:
        ctx.metric("differing", apart.share, unit="1", source="all pairs")
    _write(ctx, "comparison.txt", comparison_text((table, other), statistics, structures))
    cells = error_difference(table, other, _BLOCKS)
    if cells is not None:
        label = f"mean |error| of {other.name} less that of {table.name}"
        _write(ctx, "difference.json", _json(_heat(table, cells, label)))


def _list(ctx: RowContext, against: str) -> None:
    if against != _NONE:
        raise BadValueError(
            f"a list has nothing to stand beside {against}", next_step="name one table instead"
        )
    entries = []
    for number, name in enumerate(NAMES):
        entries.append(list_entry(named(name)))
        ctx.progress(number + 1, len(NAMES), "multipliers")
    ctx.fact("listed", len(entries))
    _write(ctx, "list.txt", list_text([list_line(entry) for entry in entries]))
    _write(ctx, "list.json", _json(entries))


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


def _heat(table: Table, cells: np.ndarray, label: str) -> Dict[str, Any]:
    """Cells and where they begin, as drawings of kind `heat` take them."""
    step = (256 >> (8 - table.bits)) // _BLOCKS
    starts: List[List[str]] = [
        [str(i * step - (128 if signed else 0)) for i in range(_BLOCKS)]
        for signed in (table.a_signed, table.b_signed)
    ]
    return {
        "rows": starts[0], "columns": starts[1], "values": cells.tolist(), "label": label,
    }  # fmt: skip


def _json(document: Any) -> str:
    return json.dumps(document, sort_keys=True) + "\n"


def _write(ctx: RowContext, name: str, text: str) -> None:
    ctx.side_file(name).write_text(text, encoding="utf-8")
