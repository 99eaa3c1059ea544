"""Records with figures of our choice: runs of noise-floor, and of a benchmark with a ladder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from result_cases import host

from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.job import resolve
from narrowgauge_contract.outcome import InsideFacts, Metric, Outcome, Row, Status, Validity
from narrowgauge_contract.record import Record, compose
from narrowgauge_contract.spec import load_toml, parse_spec

ROOT = Path(__file__).parents[2]
NOISE_SPEC = load_toml(ROOT / "experiments" / "noise-floor" / "experiment.toml")
RUNGS = ["strict", "tf32", "fp16", "folded", "int8"]
BENCH_SPEC: dict[str, Any] = {
    "experiment": {
        "id": "bench", "title": "A bench", "summary": "For tests.", "headline": ["latency"],
    },
    "parameters": {
        "mode": {
            "type": "choice", "choices": [*RUNGS, "bottom", "top"], "default": "strict",
            "axis": "row", "help": "How it computes.",
        },
        "batch": {"type": "int", "default": 128, "axis": "row", "help": "Images."},
    },
    "draw": [
        {
            "name": "ladder", "kind": "ladder", "title": "What each step brings",
            "parameter": "mode", "metric": "latency", "order": RUNGS, "ends": ["bottom", "top"],
            "names": {"strict": "fp32, strict"},
        },
    ],
    "summary": {
        "parameter": "mode", "metric": "latency", "order": ["fp16", "strict"],
        "names": {"fp16": "Half", "strict": "Float32"}, "baseline": "strict",
        "heading": "Results summary ({batch} images)",
        "line": "{name}: {value:.4f} seconds ({ratio:.2f} x full precision speed)",
    },
}  # fmt: skip
#: Seconds per call of each mode, chosen so that folding brings nothing.
LATENCIES = {
    "strict": 0.080, "tf32": 0.040, "fp16": 0.020, "folded": 0.020, "int8": 0.010,
    "bottom": 0.080, "top": 0.010,
}  # fmt: skip


def _record(
    folder: RunFolder, rows: tuple[Row, ...], device: str, executor: str | None = "docker"
) -> Record:
    planned = folder.job()
    inside = InsideFacts("3.11.2", "Linux", torch="2.13.0", cpu=device, threads=2)
    outcome = Outcome(
        1, planned.run_id, Status.COMPLETE, 0, rows, inside, "b" * 64, "c" * 64, 1e9, 1e9 + 9, 9.0
    )
    facts = host(executor=executor) if executor else None
    return compose(planned, outcome, (), facts)


def _row(plan: Any, metrics: tuple[Metric, ...], facts: dict[str, Any]) -> Row:
    return Row(
        plan.index, plan.repeat, plan.seed, plan.parameters, Status.COMPLETE, Validity(True),
        facts=facts, metrics=metrics,
    )  # fmt: skip


def noise_run(
    root: Path,
    run_id: str = "20261121T090000Z-noise-floor-aaaaaa",
    spread: float = 0.01,
    device: str = "EPYC",
    executor: str | None = "docker",
    target: str = "cpu",
    repeats: int = 10,
    planted: tuple[float, ...] = (0.0,),
    noisy: str = "copy",
    workloads: tuple[str, str] = ("copy", "matmul"),
) -> RunFolder:
    """A recorded run of noise-floor with so much noise from process to process; of the two
    workloads, `noisy` has twice as much."""
    spec = parse_spec(NOISE_SPEC)
    overrides = {"workload": workloads, "planted": planted}
    profile = {"smoke": "smoke"}.get(run_id, "short")
    spec = dataclasses.replace(
        spec,
        profiles={**spec.profiles, profile: dataclasses.replace(spec.profiles[profile],
                                                               repeats=repeats)},
    )  # fmt: skip
    job = resolve(spec, overrides, profile=profile, target=target, seed=0, run_id=run_id)
    folder = Store(root).new_run(job)
    chance = np.random.default_rng(1)
    rows = []
    for plan in folder.job().rows:
        wide = spread * (2 if plan.parameters["workload"] == noisy else 1)
        centre = 1e-4 * np.exp(chance.normal(0.0, wide))
        slow = 1 + plan.parameters["planted"] / 100
        firsts = centre * np.exp(chance.normal(0.0, 0.001, 78))
        seconds = centre * slow * np.exp(chance.normal(0.0, 0.001, 78))
        metrics = (
            Metric("ratio", "1", "monotonic", tuple((seconds / firsts).tolist())),
            Metric("latency_first", "s", "monotonic", tuple(firsts.tolist())),
            Metric("latency_second", "s", "monotonic", tuple(seconds.tolist())),
        )
        rows.append(_row(plan, metrics, {"pairs": [39, 39]}))
    folder.write_record(_record(folder, tuple(rows), device, executor))
    return folder


def bench_run(
    root: Path,
    run_id: str = "20261121T100000Z-bench-bbbbbb",
    spread: float = 0.004,
    repeats: int = 10,
    modes: tuple[str, ...] = (*RUNGS, "bottom", "top"),
    batches: tuple[int, ...] = (128,),
    invalid: tuple[str, ...] = (),
    latencies: dict[str, float] | None = None,
    device: str = "EPYC",
    unit: str = "s",
) -> RunFolder:
    """A recorded run of the bench. With another unit than s the metric is a rate."""
    spec = parse_spec(BENCH_SPEC)
    short = dataclasses.replace(spec.profiles["short"], repeats=repeats)
    spec = dataclasses.replace(spec, profiles={**spec.profiles, "short": short})
    overrides = {"mode": modes, "batch": batches}
    job = resolve(spec, overrides, profile="short", target="cpu", seed=0, run_id=run_id)
    folder = Store(root).new_run(job)
    chance = np.random.default_rng(2)
    rows = []
    for plan in folder.job().rows:
        mode = plan.parameters["mode"]
        value = (latencies or LATENCIES)[mode] * np.exp(chance.normal(0.0, spread))
        value = value if unit == "s" else 1 / value
        row = _row(plan, (Metric("latency", unit, "monotonic", (float(value),)),), {})
        if mode in invalid:
            row = dataclasses.replace(row, validity=Validity(False, ("no such unit",)))
        rows.append(row)
    folder.write_record(_record(folder, tuple(rows), device))
    return folder
