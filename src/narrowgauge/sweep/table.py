"""What came out of a sweep: a line per run, best first where the sweep says what is best."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from narrowgauge.sweep.file import SweepSpec
from narrowgauge.sweep.journal import Entry
from narrowgauge.sweep.points import Point
from narrowgauge.units import number
from narrowgauge_contract.spec import ExperimentSpec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plan_json", "plan_lines", "print_sweep", "ranked", "sweep_json"]

_MOST_LINES = 40


def ranked(entries: Sequence[Entry], sweep: SweepSpec) -> list[Entry]:
    """Those with a figure of the sweep's metric, best first; then the others as they came."""
    metric, sign = sweep.file.metric, -1.0 if sweep.file.direction == "maximize" else 1.0

    def place(entry: Entry) -> tuple[bool, float]:
        value = (entry.figures or {}).get(metric, math.nan) if entry.valid else math.nan
        return (math.isnan(value), 0.0 if math.isnan(value) else sign * value)

    return sorted(entries, key=place)


def print_sweep(
    entries: Sequence[Entry], sweep: SweepSpec, spec: ExperimentSpec, console: Console
) -> None:
    """The table for people."""
    from narrowgauge.show_tables import plain_table

    metrics = _metrics(entries, sweep, spec)
    table = plain_table(f"Sweep {sweep.file.name}", *sweep.domains, *metrics, "run", "ended")
    listed = ranked(entries, sweep)
    for entry in listed[:_MOST_LINES]:
        figures = entry.figures or {}
        values = [_cell(entry.values.get(name)) for name in sweep.domains]
        cells = [number(figures[name]) if name in figures else "–" for name in metrics]
        table.add_row(*values, *cells, entry.run_id.rpartition("-")[2], _ended(entry))
    console.print(table)
    if len(listed) > _MOST_LINES:
        console.print(f"and {len(listed) - _MOST_LINES} more: --json has them all")


def sweep_json(entries: Sequence[Entry], sweep: SweepSpec) -> str:
    """The same for scripts."""
    body = {
        "sweep": sweep.file.name,
        "experiment": sweep.file.experiment,
        "runs": [
            {
                "run_id": entry.run_id,
                "values": entry.values,
                "exit_code": entry.exit_code,
                "valid": entry.valid,
                "figures": {k: v for k, v in (entry.figures or {}).items() if math.isfinite(v)},
            }
            for entry in ranked(entries, sweep)
        ],
    }
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def plan_lines(points: Sequence[Point], sweep: SweepSpec) -> list[str]:
    """The points that would be run, the first of them by name."""
    lines = [f"{len(points)} runs of {sweep.file.experiment}, {sweep.file.method}"]
    for point in points[:_MOST_LINES]:
        words = [f"{n}={_cell(v)}" for n, v in zip(sweep.domains, point.values, strict=True)]
        lines.append(f"  {point.key}  " + " ".join(words))
    if len(points) > _MOST_LINES:
        lines.append(f"  and {len(points) - _MOST_LINES} more")
    return lines


def plan_json(points: Sequence[Point], sweep: SweepSpec) -> str:
    """The same for scripts: every point."""
    listed = [
        {"key": point.key, "values": dict(zip(sweep.domains, point.values, strict=True))}
        for point in points
    ]
    return json.dumps({"experiment": sweep.file.experiment, "points": listed}, indent=1)


def _metrics(entries: Sequence[Entry], sweep: SweepSpec, spec: ExperimentSpec) -> list[str]:
    known = {name for entry in entries for name in entry.figures or {}}
    wanted = dict.fromkeys(filter(None, (sweep.file.metric, *spec.headline)))
    return [name for name in wanted if name in known]


def _ended(entry: Entry) -> str:
    if entry.exit_code is None:
        return "open"
    return "valid" if entry.valid else f"exit {entry.exit_code}"


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
