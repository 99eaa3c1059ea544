"""A network made ready by an engine to be called over and over by one of several workers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import LayerFact, Preparation, Runner
from narrowgauge_lab.engines.cache import EngineCache
from narrowgauge_lab.engines.registry import prepare
from narrowgauge_lab.measure.probe import Observation
from narrowgauge_lab.networks.subject import Right, count_right
from narrowgauge_lab.networks.trained import Labelled

__all__ = ["Report", "Serving", "kept_engines", "make_ready"]


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a worker is to run; picklable, since it may be a process.

    `example` is on the CPU, of the precision's dtype, one batch. `labelled`: real images on which
    right answers are counted. `threads` of a CPU; 0 leaves them. `cache`: a folder, or "".
    """

    engine: str
    model: nn.Module
    example: torch.Tensor
    precision: str
    device: str
    calibration: Tuple[torch.Tensor, ...] = ()
    options: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    threads: int = 0
    cache: str = ""
    labelled: Optional[Labelled] = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a Serving: logits (on the CPU) of the example, right answers to the labelled
    images, and what the runner tells."""

    logits: torch.Tensor
    right: Optional[Right]
    build_seconds: float
    from_cache: bool
    cache_note: str
    threads: int
    layers: Tuple[LayerFact, ...]
    observations: Optional[Tuple[Observation, ...]]
    choice: Dict[str, Any]


def make_ready(serving: Serving) -> Tuple[Callable[[], Any], Callable[[], Report]]:
    """What to call for each batch, which ends when its results are there; and the report of it.

    On CUDA everything is on the current stream, now and in the calls.
    """
    device = torch.device(serving.device)
    if serving.threads:
        torch.set_num_threads(serving.threads)
    example = serving.example.to(device)
    runner = prepare(
        serving.engine,
        serving.model,
        example,
        Preparation(
            serving.precision,
            device,
            calibration=serving.calibration,
            cache=EngineCache(Path(serving.cache)) if serving.cache else None,
            options=serving.options,
        ),
    )
    labelled = serving.labelled
    report = Report(
        logits=runner(example).cpu().clone(),
        right=None if labelled is None else count_right(runner, labelled, example),
        build_seconds=runner.build_seconds,
        from_cache=runner.from_cache,
        cache_note=runner.cache_note,
        threads=torch.get_num_threads(),
        layers=runner.layers(),
        observations=runner.observations(),
        choice=_choice(runner),
    )

    def call() -> None:
        runner(example)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    return call, lambda: report


def kept_engines(environment: Mapping[str, str] = os.environ) -> Path:
    """Where engines are kept between rows and runs; in a container that is its cache volume."""
    base = environment.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "narrowgauge" / "engines"


def _choice(runner: Runner) -> Dict[str, Any]:
    """What the runner chose from by measuring, where it says so."""
    choice = getattr(runner, "choice", None)
    return dict(choice.to_dict()) if hasattr(choice, "to_dict") else {}
