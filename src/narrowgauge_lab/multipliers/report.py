"""What is known of a table, as text for a terminal."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from narrowgauge_lab.multipliers.comparing import Difference, difference
from narrowgauge_lab.multipliers.statistics import (
    ErrorStatistics,
    error_blocks,
    error_statistics,
)
from narrowgauge_lab.multipliers.structure import Structure, analyse
from narrowgauge_lab.multipliers.table import CODES, Table
from narrowgauge_lab.multipliers.terms import factor_type, term_text

__all__ = [
    "analysis_text", "comparison_text", "heat_text", "list_entry", "list_line", "list_text",
    "show_text",
]  # fmt: skip

#: From no error to the largest block's.
_SHADES = " .:-=+*#%@"
#: Of a heat map: cells on a side.
_BLOCKS = 16
_COLUMNS = ("multiplier", "structure", "terms", "ER", "MED", "NMED", "MRED", "worst", "bias")
_SIDES = {True: "signed", False: "unsigned"}


def analysis_text(table: Table, structure: Structure) -> str:
    """The structure, what it says for kernels, and the proof."""
    lines = [_head(table), "", f"structure: {structure.kind}"]
    if structure.proved:
        count = len(structure.factors)
        fewest = ", and fewer are impossible" if structure.fewest else ""
        lines.append(f"products:  {count} exact 8-bit ones{fewest} (rank {structure.rank})")
        lines += _formula(structure)
        lines.append(
            f"proof:     all {structure.checked_pairs:,} pairs multiplied out in 64 bits and "
            "compared, no difference"
        )
    else:
        lines.append(f"why:       {structure.evidence.get('why', '')}")
        lines.append("           kernels look products up in the table")
    lines += _coefficients(structure)
    lines.append(f"table:     sha256 {structure.evidence['table_sha256']}")
    return "\n".join(lines) + "\n"


def show_text(table: Table, statistics: ErrorStatistics) -> str:
    """The error's statistics and its heat map."""
    return "\n".join([_head(table), "", *_statistics(statistics), "", heat_text(table)])


def comparison_text(
    tables: Tuple[Table, Table],
    statistics: Tuple[ErrorStatistics, ErrorStatistics],
    structures: Tuple[Structure, Structure],
) -> str:
    """Two multipliers side by side, how far apart they are, and their heat maps in one scale."""
    columns = [_column(*each) for each in zip(tables, statistics, structures)]
    rows = [("", tables[0].name, tables[1].name)]
    rows += [(head, one, other) for (head, one), (_, other) in zip(*columns)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join((row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2])))
        for row in rows
    ]
    lines += ["", _apart(difference(*tables)), ""]
    most = max(float(error_blocks(table).max()) for table in tables)
    # No code has five digits: two maps without their first column fit a terminal of 80.
    maps = [[line[1:] for line in _heat_rows(table, _BLOCKS, most)] for table in tables]
    lines.append("mean |error|, activation downwards, weight to the right:")
    names = tuple(f"      {table.name}" for table in tables)
    width = max(map(len, maps[0]))
    lines += [f"{one:<{width}}  {other}".rstrip() for one, other in (names, *zip(*maps))]
    return "\n".join([*lines, _legend(most)]) + "\n"


def heat_text(table: Table, blocks: int = _BLOCKS) -> str:
    """The mean |error| by operands in shades, from none to the largest."""
    most = float(error_blocks(table, blocks).max())
    step = (CODES >> (8 - table.bits)) // blocks
    head = f"mean |error|, activation downwards in steps of {step}, weight to the right:"
    return "\n".join([head, *_heat_rows(table, blocks, most), _legend(most)]) + "\n"


def list_entry(table: Table) -> Dict[str, Any]:
    """A multiplier of the list, for JSON; `terms` is None where there is no structure."""
    structure = analyse(table)
    return {
        "multiplier": table.name,
        "source": table.source,
        "structure": structure.kind,
        "terms": len(structure.factors) if structure.proved else None,
        **error_statistics(table).to_fact(),
    }


def list_line(entry: Dict[str, Any]) -> Tuple[str, ...]:
    """A `list_entry` in a row of `list_text`."""
    return (
        entry["multiplier"],
        entry["structure"],
        "–" if entry["terms"] is None else str(entry["terms"]),
        f"{entry['er']:.4f}",
        f"{entry['med']:.2f}",
        f"{entry['nmed']:.6f}",
        f"{entry['mred']:.4f}",
        str(entry["worst"]),
        f"{entry['bias']:+.2f}",
    )


def list_text(lines: Sequence[Tuple[str, ...]]) -> str:
    """A table of these lines."""
    rows = [_COLUMNS, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    shown = []
    for row in rows:
        words = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        words += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        shown.append("  ".join(words).rstrip())
    return "\n".join(shown) + "\n"


def _heat_rows(table: Table, blocks: int, most: float) -> List[str]:
    """A line for each block of activations, then the axis of the weights."""
    step = (CODES >> (8 - table.bits)) // blocks
    start = tuple(-CODES // 2 if signed else 0 for signed in (table.a_signed, table.b_signed))
    lines = []
    for i, row in enumerate(error_blocks(table, blocks)):
        cells = "".join(2 * _shade(float(error), most) for error in row)
        lines.append(f"{start[0] + i * step:>5} |{cells}|")
    lines.append(f"       {start[1]:<{2 * blocks - 4}}{start[1] + (blocks - 1) * step:>4}")
    return lines


def _legend(most: float) -> str:
    return f"shades: '{_SHADES}' from 0 to {most:.6g}"


def _column(table: Table, found: ErrorStatistics, structure: Structure) -> List[Tuple[str, str]]:
    """What `comparison_text` says of one of the two."""
    return [
        ("operands", _operands(table)),
        ("structure", structure.kind),
        ("exact products", str(len(structure.factors)) if structure.proved else "–"),
        ("ER", f"{found.er:.6f}"),
        ("MED", f"{found.med:.6g}"),
        ("NMED", f"{found.nmed:.6g}"),
        ("MRED", f"{found.mred:.6g}"),
        ("worst", str(found.worst)),
        ("bias", f"{found.bias:+.6g}"),
        ("operands commute", "yes" if found.symmetric else "no"),
    ]


def _apart(found: Optional[Difference]) -> str:
    if found is None:
        return "their operands are not the same codes, so there are no pairs to compare"
    if not found.pairs:
        return "their products are the same, at all pairs"
    return (
        f"their products differ at {found.pairs:,} pairs ({found.share:.6f}):\n"
        f"mean |difference| {found.mean:.6g}, largest {found.largest}"
    )


def _operands(table: Table) -> str:
    sides = {_SIDES[table.a_signed], _SIDES[table.b_signed]}
    words = sides.pop() if len(sides) == 1 else (
        f"activation {_SIDES[table.a_signed]}, weight {_SIDES[table.b_signed]}"
    )  # fmt: skip
    return f"{words} {table.bits}×{table.bits}"


def _head(table: Table) -> str:
    low, high = int(table.values.min()), int(table.values.max())
    beyond = "" if table.fits_int16() else ", beyond int16"
    return (
        f"{table.name}: {_operands(table)}; {table.source}\nproducts from {low} to {high}{beyond}"
    )


def _formula(structure: Structure) -> List[str]:
    if structure.terms:
        texts = [term_text(term) for term in structure.terms]
        return [f"           {'a·b =' if not i else '    +'} {t}" for i, t in enumerate(texts)]
    return [
        f"           {'a·b =' if not i else '    +'} {each.coefficient}·f{i}(a)·g{i}(b), "
        f"f{i} {_range(each.a_values)}, g{i} {_range(each.b_values)}"
        for i, each in enumerate(structure.factors)
    ]


def _range(values: Sequence[int]) -> str:
    return f"{factor_type(values)} from {min(values)} to {max(values)}"


def _coefficients(structure: Structure) -> List[str]:
    """Of a bilinear one: what a_i·b_j counts, activation's bits downwards from the lowest."""
    found: Optional[List[List[int]]] = structure.evidence.get("bit_coefficients")
    if found is None:
        return []
    width = max(len(str(value)) for row in found for value in row)
    lines = ["bits:      what a_i·b_j counts, i downwards and j to the right, from 0"]
    return lines + ["           " + " ".join(str(v).rjust(width) for v in row) for row in found]


def _statistics(found: ErrorStatistics) -> List[str]:
    return [
        f"ER    {found.er:.6f}  of pairs are wrong ({found.exact_pairs:,} exact)",
        f"MED   {found.med:.6g}  mean |error|",
        f"NMED  {found.nmed:.6g}  over the largest |a·b|",
        f"MRED  {found.mred:.6g}  mean |error| / |a·b|",
        f"worst {found.worst}  largest |error|",
        f"bias  {found.bias:+.6g}  mean error",
        "operands commute" if found.symmetric else "operands do not commute",
    ]


def _shade(error: float, most: float) -> str:
    """The lightest but one for whatever is not exact."""
    if not error:
        return _SHADES[0]
    return _SHADES[max(1, min(int(error / most * len(_SHADES)), len(_SHADES) - 1))]
