"""Rows of `tensor-cores`, run in this process or as the lab runs them, each in its own."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, List, Tuple

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.events import EVENTS_FILE, EventKind, read_events

NAME = "tensor-cores"
#: Quick, whatever the machine: no figure of these tests is a measurement.
QUICK = ("workload=resnet50-tiny", "batch=2", "images=4", "limit_s=0.05")
_ROWS = Rows(NAME)
module, spec, job = _ROWS.module, _ROWS.spec, _ROWS.job
parameters, run_row = _ROWS.parameters, _ROWS.run


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
