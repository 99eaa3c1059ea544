"""Rows of `throughput`, run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.outcome import Row

NAME = "throughput"
#: Quick, whatever the machine: no figure of these tests is a measurement.
QUICK = (
    "model=resnet18-tiny",
    "engine=eager",
    "batch=2",
    "workers=1",
    "seconds=0.1",
    "warm_up_s=0",
)
_ROWS = Rows(NAME, QUICK)
module, spec, job, parameters = _ROWS.module, _ROWS.spec, _ROWS.job, _ROWS.parameters

__all__ = [
    "CPU", "EXPERIMENTS", "NAME", "QUICK", "job", "module", "parameters", "run_row", "spec",
]  # fmt: skip


def run_row(out: Path, *words: str, device: torch.device = CPU) -> Tuple[Row, Path]:
    """A row and its folder, with the threads that this process has: torch 1.8's convolutions do not
    bear that their number changes."""
    row = _ROWS.run(out, f"threads={torch.get_num_threads()}", *words, device=device)
    return row, out / f"row-{row.index}"
