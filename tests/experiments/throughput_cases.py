"""Rows of `throughput`, run in this process."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, Dict, Tuple

import torch

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import Job, parse_overrides, resolve
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_contract.spec import ExperimentSpec, load_spec
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.experiments import load_run

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NAME = "throughput"
CPU = torch.device("cpu")
#: Quick, whatever the machine: no figure of these tests is a measurement.
QUICK = (
    "model=resnet18-tiny",
    "engine=eager",
    "batch=2",
    "workers=1",
    "seconds=0.1",
    "warm_up_s=0",
)


def module(name: str) -> types.ModuleType:
    """A module of the experiment, loaded as the lab loads it."""
    load_run(EXPERIMENTS, NAME)
    return sys.modules[f"narrowgauge_experiments.throughput.{name}"]


def spec() -> ExperimentSpec:
    return load_spec(EXPERIMENTS / NAME / "experiment.toml")


def job(*words: str, profile: str = "smoke") -> Job:
    declared = spec()
    overrides = parse_overrides(declared, words)
    return resolve(declared, overrides, profile=profile, target="native", seed=0, run_id="r")


def parameters(*words: str) -> Dict[str, Any]:
    """Those of the first row that these words ask for."""
    return dict(job(*words).rows[0].parameters)


def run_row(out: Path, *words: str, device: torch.device = CPU) -> Tuple[Row, Path]:
    """The first row that the words ask for beside QUICK, and its folder, with the threads that this
    process has: torch 1.8's convolutions do not bear that their number changes. Of words for one
    parameter the last one counts. What the row raises leaves it unfinished."""
    threads = f"threads={torch.get_num_threads()}"
    chosen = {word.partition("=")[0]: word for word in (*QUICK, threads, *words)}
    plan = job(*chosen.values()).rows[0]
    with EventLog(out / EVENTS_FILE) as log:
        head = {"repeat": plan.repeat, "seed": plan.seed, "parameters": plan.parameters}
        log.emit(EventKind.ROW_START, plan.index, **head)
        ctx = RowContext(plan, log, out, device=device, profile="smoke")
        load_run(EXPERIMENTS, NAME)(ctx)
        ctx.finish()
        log.emit(EventKind.ROW_END, plan.index, status="complete", seconds=1.0, error=None)
    (row,) = Fold().add_all(read_events(out / EVENTS_FILE)).rows()
    return row, ctx.folder
