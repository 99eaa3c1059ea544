"""Rows of `tensor-cores`, run in this process or as the lab runs them, each in its own."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest
import torch

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import Job, parse_overrides, resolve
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_contract.spec import ExperimentSpec, load_spec
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.experiments import load_run

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NAME = "tensor-cores"
CPU = torch.device("cpu")
#: Quick, whatever the machine: no figure of these tests is a measurement.
QUICK = ("workload=resnet50-tiny", "batch=2", "images=4", "limit_s=0.05")


def module(name: str) -> types.ModuleType:
    """A module of the experiment, loaded as the lab loads it."""
    load_run(EXPERIMENTS, NAME)
    return sys.modules[f"narrowgauge_experiments.tensor_cores.{name}"]


def spec() -> ExperimentSpec:
    return load_spec(EXPERIMENTS / NAME / "experiment.toml")


def job(*words: str, profile: str = "smoke") -> Job:
    declared = spec()
    overrides = parse_overrides(declared, words)
    return resolve(declared, overrides, profile=profile, target="native", seed=0, run_id="r")


def parameters(*words: str) -> Dict[str, Any]:
    """Those of the first row that these words ask for."""
    return dict(job(*words).rows[0].parameters)


def run_row(out: Path, *words: str, device: torch.device = CPU) -> Row:
    """The first row that the words ask for, here. Of words for one parameter the last one counts.
    What the row raises leaves it unfinished."""
    plan = job(*{word.partition("=")[0]: word for word in words}.values()).rows[0]
    try:
        with EventLog(out / EVENTS_FILE) as log:
            head = {"repeat": plan.repeat, "seed": plan.seed, "parameters": plan.parameters}
            log.emit(EventKind.ROW_START, plan.index, **head)
            ctx = RowContext(plan, log, out, device=device, profile="smoke")
            load_run(EXPERIMENTS, NAME)(ctx)
            ctx.finish()
            log.emit(EventKind.ROW_END, plan.index, status="complete", seconds=1.0, error=None)
    finally:
        (row,) = Fold().add_all(read_events(out / EVENTS_FILE)).rows()
    return row


@pytest.fixture
def functions() -> Iterator[None]:
    """Puts the functions that apex's mechanism replaces back after a test."""
    functional = torch.nn.functional
    kept = {name: getattr(functional, name) for name in ("conv2d", "linear")}
    yield
    for name, function in kept.items():
        setattr(functional, name, function)


def logged(out: Path) -> List[str]:
    """The lines that rows logged."""
    return [
        event.data["text"]
        for event in read_events(out / EVENTS_FILE)
        if event.kind is EventKind.LOG
    ]


def half() -> torch.dtype:
    """What this torch convolves in on a CPU beside float32: float16, or before that float64."""
    try:
        torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3).half(), torch.ones(1, 1, 3, 3).half())
    except RuntimeError:
        return torch.float64
    return torch.float16


__all__: Tuple[str, ...] = (
    "CPU", "EXPERIMENTS", "NAME", "QUICK", "functions", "half", "job", "logged", "module",
    "parameters", "run_row", "spec",
)  # fmt: skip
