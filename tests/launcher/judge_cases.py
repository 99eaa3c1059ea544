"""What the tests of judging share: a small experiment, claims on it, and records by figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from result_cases import host

from narrowgauge_contract.claims import Claim, parse_claims
from narrowgauge_contract.outcome import (
    ErrorInfo,
    InsideFacts,
    Metric,
    Row,
    Status,
    Validity,
)
from narrowgauge_contract.record import Hashes, HostFacts, Record
from narrowgauge_contract.spec import ExperimentSpec, parse_spec

SPEC: dict[str, Any] = {
    "experiment": {"id": "race", "title": "A race", "summary": "For tests.", "headline": ["time"]},
    "parameters": {
        "engine": {
            "type": "choice", "choices": ["eager", "graph", "own"], "default": "eager",
            "axis": "row", "help": "What runs it.",
        },
        "batch": {"type": "int", "default": 1, "axis": "row", "help": "Images at once."},
        "epochs": {"type": "int", "default": 4, "axis": "run", "help": "Passes."},
        "lr": {
            "type": "float", "default": 0.1, "axis": "run", "recipe": True, "help": "Step size.",
        },
        "limit": {
            "type": "float", "default": 2.0, "axis": "run", "unit": "s", "help": "How long.",
        },
    },
    "profiles": {"paper": {"epochs": 9}},
}  # fmt: skip
FAST = (1.00, 1.01, 0.99, 1.00, 1.02, 0.98)
SLOW = (2.00, 2.03, 1.97, 2.00, 2.01, 1.99)


def race() -> ExperimentSpec:
    return parse_spec(SPEC)


def claim(**changes: Any) -> Claim:
    """A claim on the race: by default that `eager` takes twice as long as `own`, within 10 %."""
    body: dict[str, Any] = {
        "id": "twice", "text": "Twice as fast.", "paper": "Table 1", "kind": "ratio",
        "metric": {"operator": "ratio", "of": ["time{engine=eager}", "time{engine=own}"]},
        "expected": {"any": {"figure": 2.0, "tolerance": 0.1}},
        "minimum_repeats": 3, "profile": "short", "minutes": 1, "disk_gb": 0.1,
    }  # fmt: skip
    body.update(changes)
    return parse_claims({"claim": [body]}, race())[0]


def value_claim(figure: float = 1.0, tolerance: float = 0.1, **changes: Any) -> Claim:
    """That `own` takes so long."""
    changes.setdefault("kind", "value")
    changes.setdefault("metric", {"operator": "value", "of": ["time{engine=own}"]})
    changes.setdefault("expected", {"any": {"figure": figure, "tolerance": tolerance}})
    return claim(**changes)


def bound_claim(**expected: float) -> Claim:
    metric = {"operator": "value", "of": ["time{engine=own}"]}
    return claim(kind="bound", metric=metric, expected={"any": expected})


def row(index: int, repeat: int, values: Sequence[float], **parameters: Any) -> Row:
    chosen = {"engine": "own", "batch": 1, "epochs": 4, "lr": 0.1, "limit": 2.0, **parameters}
    metric = Metric("time", "s", "monotonic", tuple(values))
    return Row(index, repeat, repeat, chosen, Status.COMPLETE, Validity(True), {}, (metric,))


def record(
    figures: Mapping[str, Sequence[float]],
    run_id: str = "20261121T100000Z-race-aaaaaa",
    *,
    device: str = "EPYC",
    target: str = "cpu",
    facts: HostFacts | None = None,
    **parameters: Any,
) -> Record:
    """A run with one row per engine and repeat, one sample each; `facts` None is a good host's."""
    rows = []
    for repeat in range(max(map(len, figures.values()))):
        for engine, values in figures.items():
            if repeat < len(values):
                rows.append(row(len(rows), repeat, (values[repeat],), engine=engine, **parameters))
    chosen = {"engine": list(figures), "batch": 1, "epochs": 4, "lr": 0.1, "limit": 2.0}
    chosen.update(parameters)
    return Record(
        format=1, run_id=run_id, experiment="race", profile="short", target=target, seed=0,
        parameters=chosen, synthetic=False, data_sets=(), status=Status.COMPLETE, exit_code=0,
        hashes=Hashes(None, "b" * 64, "c" * 64), rows=tuple(rows), host=facts or host(),
        inside=InsideFacts("3.11.2", "Linux", torch="2.13.0", cpu=device),
        started_utc=1e9, ended_utc=1e9 + 1, seconds=1.0, spec=SPEC,
    )  # fmt: skip


def both(eager: Sequence[float] = SLOW, own: Sequence[float] = FAST, **changes: Any) -> Record:
    return record({"eager": eager, "own": own}, **changes)


def changed_row(before: Record, index: int, **changes: Any) -> Record:
    rows = [dataclasses.replace(r, **changes) if r.index == index else r for r in before.rows]
    return dataclasses.replace(before, rows=tuple(rows))


def changed_sample(before: Record, index: int, value: float) -> Record:
    """The record with one stored sample changed."""
    (metric,) = next(r for r in before.rows if r.index == index).metrics
    return changed_row(before, index, metrics=(dataclasses.replace(metric, values=(value,)),))


def invalid(before: Record, *indices: int) -> Record:
    for index in indices:
        before = changed_row(before, index, validity=Validity(False, ("it throttled",)))
    return before


def skipped(before: Record) -> Record:
    """Every row skipped for what the host lacks."""
    error = ErrorInfo("NotApplicableError", "TensorRT is not here", "no module named tensorrt")
    for each in before.rows:
        before = changed_row(
            before, each.index, status=Status.SKIPPED, validity=Validity(False), error=error,
            metrics=(),
        )  # fmt: skip
    return before
