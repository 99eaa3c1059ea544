"""What the tests of results share: records with every state of a row, in real folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import Job, resolve
from narrowgauge_contract.outcome import (
    InsideFacts,
    Metric,
    Outcome,
    Row,
    SideFile,
    Status,
    Validity,
)
from narrowgauge_contract.record import (
    GitFacts,
    HostFacts,
    ImageFacts,
    MachineFacts,
    Record,
    compose,
)
from narrowgauge_contract.spec import parse_spec

PRECISIONS = ("fp32", "bf16")
SPEC: dict[str, Any] = {
    "experiment": {
        "id": "toy", "title": "A toy", "summary": "For tests.",
        "headline": ["accuracy", "images_per_second"],
    },
    "parameters": {
        "precision": {
            "type": "choice", "choices": ["fp32", "bf16", "fp16"], "default": "fp32",
            "axis": "row", "help": "What it computes in.",
        },
        "epochs": {"type": "int", "default": 3, "axis": "run", "help": "Passes."},
    },
    "profiles": {"short": {"repeats": 3}},
    "draw": [
        {"name": "loss", "kind": "curve", "title": "Loss", "metrics": ["loss", "accuracy"]},
        {"name": "speed", "kind": "bar", "title": "Speed", "metrics": ["images_per_second"]},
        {
            "name": "confusion", "kind": "confusion", "title": "Confusion",
            "side_file": "confusion.json",
        },
    ],
}  # fmt: skip


def job(run_id: str = "20261121T100000Z-toy-aaaaaa", **values: Any) -> Job:
    """A job of the toy; `precision` and `epochs` as keywords."""
    overrides = {"precision": PRECISIONS, "epochs": (3,)}
    overrides.update({name: tuple(listed) for name, listed in values.items()})
    return resolve(
        parse_spec(SPEC), overrides, profile="short", target="cpu", seed=0, run_id=run_id
    )


def _row(plan: Any, out: Path, scale: float) -> Row:
    accuracy = {"fp32": 99.0, "bf16": 98.0, "fp16": 97.0}[plan.parameters["precision"]]
    epochs = plan.parameters["epochs"]
    losses = tuple(1.0 / (e + 1) for e in range(epochs))
    rising = tuple(accuracy + 0.1 * plan.repeat - epochs + 1 + e for e in range(epochs))
    side = out / f"row-{plan.index}" / "confusion.json"
    side.parent.mkdir(parents=True)
    side.write_text(json.dumps({"labels": ["cat", "dog"], "counts": [[9, plan.repeat], [2, 8]]}))
    return Row(
        index=plan.index,
        repeat=plan.repeat,
        seed=plan.seed,
        parameters=plan.parameters,
        status=Status.COMPLETE,
        validity=Validity(True),
        metrics=(
            Metric("loss", "nat", "monotonic", losses, "epoch"),
            Metric(
                "accuracy", "%", "count",
                rising, "epoch",
            ),
            Metric(
                "images_per_second", "images/s", "monotonic",
                (100.0, *(scale * (8000.0 + 100 * plan.repeat + e) for e in range(1, epochs))),
                "epoch",
            ),
        ),
        side_files=(
            SideFile(f"row-{plan.index}/confusion.json", sha256_file(side), side.stat().st_size),
        ),
        seconds=61.5,
    )  # fmt: skip


def host(**changes: Any) -> HostFacts:
    facts = HostFacts(
        executor="docker",
        machine=MachineFacts("6.1.0", "x86_64", "Debian 12", "EPYC", 2, 16 << 30, "20.10.24"),
        exit_code=0,
        status=Status.COMPLETE,
        image=ImageFacts("narrowgauge/cpu:local", "sha256:" + "d" * 64, "python", None, "tag"),
        git=GitFacts("0123456789abcdef" * 2, False),
    )
    return dataclasses.replace(facts, **changes)


def record_of(
    folder: RunFolder, *, facts: HostFacts | None = None, scale: float = 1.0, device: str = "EPYC"
) -> Record:
    """The record that a good run of the folder's job would have; writes its side files, and the
    outcome that it is composed from."""
    planned = folder.job()
    rows = tuple(_row(plan, folder.out, scale) for plan in planned.rows)
    inside = InsideFacts("3.11.2", "Linux", torch="2.13.0", cpu=device, threads=2)
    outcome = Outcome(
        1, planned.run_id, Status.COMPLETE, 0, rows, inside, "b" * 64, "c" * 64, 1e9, 1e9 + 190,
        190.0,
    )  # fmt: skip
    write_json_atomic(folder.outcome_path, outcome)
    return compose(planned, outcome, (), facts or host())


def with_row(record: Record, index: int, **changes: Any) -> Record:
    """The record with one row changed."""
    rows = [dataclasses.replace(r, **changes) if r.index == index else r for r in record.rows]
    return dataclasses.replace(record, rows=tuple(rows))


def outcome_of(record: Record) -> Outcome:
    """The outcome that a record was composed from."""
    return Outcome(
        1, record.run_id, record.status, record.exit_code, record.rows, record.inside,
        record.hashes.source, record.hashes.experiment, record.started_utc, record.ended_utc,
        record.seconds, record.error,
    )  # fmt: skip


def recorded(root: Path, run_id: str = "20261121T100000Z-toy-aaaaaa", **values: Any) -> RunFolder:
    """A good run of the toy, recorded below `root`."""
    folder = Store(root).new_run(job(run_id, **values))
    folder.write_record(record_of(folder))
    return folder
