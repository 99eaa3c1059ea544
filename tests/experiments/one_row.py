"""Rows of an experiment run in this process, for the tests of experiments."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import Job, parse_overrides, resolve
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_contract.spec import ExperimentSpec, load_spec
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.experiments import load_run

__all__ = ["CPU", "EXPERIMENTS", "Rows"]

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Of the experiment `name`. `quick`: words that make a row quick, which others come after; no
    figure of a test is a measurement."""

    name: str
    quick: Tuple[str, ...] = ()

    def module(self, name: str) -> types.ModuleType:
        """A module of the experiment, loaded as the lab loads it."""
        load_run(EXPERIMENTS, self.name)
        package = self.name.replace("-", "_")
        return sys.modules[f"narrowgauge_experiments.{package}.{name}"]

    def spec(self) -> ExperimentSpec:
        return load_spec(EXPERIMENTS / self.name / "experiment.toml")

    def job(self, *words: str, profile: str = "smoke") -> Job:
        declared = self.spec()
        overrides = parse_overrides(declared, words)
        return resolve(declared, overrides, profile=profile, target="native", seed=0, run_id="r")

    def parameters(self, *words: str) -> Dict[str, Any]:
        """Those of the first row that these words ask for."""
        return dict(self.job(*words).rows[0].parameters)

    def run(
        self, out: Path, *words: str, device: torch.device = CPU, data: Optional[Path] = None
    ) -> Row:
        """The first row that the words ask for beside the quick ones; of words for one parameter
        the last one counts. What the row raises leaves it unfinished."""
        chosen = {word.partition("=")[0]: word for word in (*self.quick, *words)}
        job = self.job(*chosen.values())
        plan = job.rows[0]
        out.mkdir(exist_ok=True)
        try:
            with EventLog(out / EVENTS_FILE) as log:
                head = {"repeat": plan.repeat, "seed": plan.seed, "parameters": plan.parameters}
                log.emit(EventKind.ROW_START, plan.index, **head)
                ctx = RowContext(
                    plan, log, out, device=device, profile="smoke", data_root=data, plans=job.plan
                )
                load_run(EXPERIMENTS, self.name)(ctx)
                ctx.finish()
                log.emit(EventKind.ROW_END, plan.index, status="complete", seconds=1.0, error=None)
        finally:
            (row,) = Fold().add_all(read_events(out / EVENTS_FILE)).rows()
        return row
