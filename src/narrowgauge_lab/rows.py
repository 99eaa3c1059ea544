"""One row in a child process: forked from a parent that imported torch and never touched CUDA."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Optional

from narrowgauge_contract.codec import encode
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.events import EventKind, EventLog
from narrowgauge_contract.job import Job, RowPlan
from narrowgauge_contract.outcome import Status
from narrowgauge_lab.errors import describe, is_disk_full

__all__ = ["run_row"]

_PR_SET_PDEATHSIG = 1


def run_row(
    job: Job,
    plan: RowPlan,
    log: EventLog,
    out: Path,
    run: Callable[[Any], None],
    *,
    device: str,
    data_root: Optional[Path],
    resume: bool,
    parent: int,
) -> int:
    """Measure one row to its end, in this process; the exit code for it.

    Everything that the row has to say is in the events when this returns, its error included.
    """
    _die_with(parent)
    started = time.monotonic()
    error_info, code = None, ExitCode.OK
    try:
        log.emit(
            EventKind.ROW_START,
            plan.index,
            repeat=plan.repeat,
            seed=plan.seed,
            parameters=plan.parameters,
        )
        _measure(job, plan, log, out, run, device, data_root, resume)
    except BaseException as error:
        # BaseException: an experiment that calls sys.exit() must not end as a success.
        error_info, code = describe(error, out)
        print(f"row {plan.index}: {error_info.kind}: {error_info.what}", file=sys.stderr)
    status = Status.COMPLETE if code is ExitCode.OK else Status.FAILED
    try:
        log.emit(
            EventKind.ROW_END,
            plan.index,
            status=status.value,
            seconds=time.monotonic() - started,
            error=encode(error_info),
        )
    except OSError as error:
        if not is_disk_full(error):
            raise
        return int(ExitCode.DISK_FULL)
    return int(code)


def _measure(
    job: Job,
    plan: RowPlan,
    log: EventLog,
    out: Path,
    run: Callable[[Any], None],
    device: str,
    data_root: Optional[Path],
    resume: bool,
) -> None:
    import numpy as np
    import torch

    from narrowgauge_lab.context import RowContext

    random.seed(plan.seed)
    np.random.seed(plan.seed % 2**32)
    torch.manual_seed(plan.seed)
    context = RowContext(
        plan,
        log,
        out,
        device=torch.device(device),
        profile=job.profile,
        data_root=data_root,
        resume=resume,
    )
    context.fact("device", device)
    run(context)
    context.finish()


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however the parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(int(ExitCode.KILLED))
