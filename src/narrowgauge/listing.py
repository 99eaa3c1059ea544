"""What `narrowgauge list` shows, and what `run --json` says of finished runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.fitting import refusal
from narrowgauge.machine import Host
from narrowgauge.selection import working_targets
from narrowgauge.store import RunFolder
from narrowgauge.targets import Target
from narrowgauge_contract.parameters import PROFILE_PARAMETER
from narrowgauge_contract.placement import BUILTIN, NO_PLAN
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import ExperimentSpec, Profile

__all__ = ["finished_json", "listing_json", "print_listing"]


def listing_json(specs: Sequence[ExperimentSpec], targets: Mapping[str, Target]) -> str:
    """Experiments with parameters, profiles and the targets that can run them; targets."""
    body = {
        "experiments": [_experiment(spec, targets) for spec in specs],
        "targets": [
            {"name": t.name, "title": t.title, "unresolved": list(t.unresolved)}
            for t in targets.values()
        ],
    }
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def print_listing(
    specs: Sequence[ExperimentSpec], targets: Mapping[str, Target], host: Host
) -> None:
    """Two tables for people."""
    from rich import box
    from rich.table import Column, Table

    from narrowgauge.screen import Screen

    console = Screen(highlight=False)
    # A name is there to be typed, so it is never cut.
    columns = (Column("experiment", no_wrap=True), "what", "smoke", "short", "paper", "targets")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for spec in specs:
        costs = [_cost(spec.profiles[name]) for name in ("smoke", "short", "paper")]
        working = working_targets(spec, targets)
        where = "all" if set(working) == set(targets) else ", ".join(working)
        table.add_row(spec.id, spec.title, *costs, where)
    console.print(table)
    choices = "|".join(PROFILE_PARAMETER.choices)
    console.print(f"\nevery experiment takes -p {PROFILE_PARAMETER.name}={choices}")
    plans = _plans(specs)
    if plans:
        console.print(plans)
    console.print()
    table = Table("target", "what", "here", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for target in targets.values():
        table.add_row(target.name, target.title, _here(target, host))
    console.print(table)


def finished_json(finished: Sequence[tuple[RunFolder, Record]]) -> str:
    """One object per run: where it lies and how it ended."""
    body = [
        {
            "run_id": record.run_id,
            "folder": str(folder.path),
            "status": record.status.value,
            "exit_code": record.exit_code,
            "rows": len(record.rows),
            "valid_rows": len(record.valid_rows()),
        }
        for folder, record in finished
    ]
    return json.dumps({"runs": body}, indent=2, sort_keys=True) + "\n"


def _experiment(spec: ExperimentSpec, targets: Mapping[str, Target]) -> dict[str, Any]:
    return {
        "id": spec.id,
        "title": spec.title,
        "summary": spec.summary,
        "data_sets": list(spec.data_sets),
        "parameters": {
            name: {
                "type": p.type,
                "default": p.default,
                "axis": p.axis,
                "help": p.help,
                "choices": list(p.choices),
                "aliases": list(p.aliases),
            }
            for name, p in (*spec.parameters.items(), (PROFILE_PARAMETER.name, PROFILE_PARAMETER))
        },
        "profiles": {
            name: {"repeats": p.repeats, "minutes": p.minutes, "disk_gb": p.disk_gb, "note": p.note}
            for name, p in spec.profiles.items()
        },
        "targets": working_targets(spec, targets),
    }


def _plans(specs: Sequence[ExperimentSpec]) -> str:
    """Which experiments take a placement plan, and what there is; empty where none does."""
    takers = [
        f"{spec.id} -p {name}=PLAN"
        for spec in specs
        for name, parameter in spec.parameters.items()
        if parameter.type == "plan"
    ]
    if not takers:
        return ""
    known = ", ".join((*BUILTIN, NO_PLAN))
    return f"{', '.join(takers)}: a TOML file, or {known} (narrowgauge placement list)"


def _cost(profile: Profile) -> str:
    minutes = f"{profile.minutes:g} min" if profile.minutes is not None else "?"
    times = f"{profile.repeats}×" if profile.repeats != 1 else ""
    return " ".join(filter(None, [minutes, times]))


def _here(target: Target, host: Host) -> str:
    found = refusal(target, host)
    if found is not None:
        return f"no: {found.reason}"
    return "yes"
