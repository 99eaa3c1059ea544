"""One row in a process of its own: forked from a parent that imported torch and nothing more."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Callable, Dict, Optional

import torch

from narrowgauge_contract.errors import ExitCode, SkippedError
from narrowgauge_contract.events import EventKind, EventLog
from narrowgauge_contract.job import Job, RowPlan
from narrowgauge_contract.outcome import ErrorInfo, Status, encode_error
from narrowgauge_lab import profiling, turns
from narrowgauge_lab.console import complain, flush, row_ended
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import bytes_asked, describe
from narrowgauge_lab.folder import last_words
from narrowgauge_lab.forking import die_with
from narrowgauge_lab.nodes import Meeting
from narrowgauge_lab.seeding import seed_everything

__all__ = ["RowFunction", "Setting", "live_as_row"]

RowFunction = Callable[[Any], None]


@dataclass(frozen=True)
class Setting:
    """Where rows happen. `load` gives the experiment's function; it is called in the row's process,
    since code of an experiment in the parent could touch a device there."""

    out: Path
    data_root: Optional[Path]
    load: Callable[[], RowFunction]
    device: str = "cpu"
    resume: bool = False
    meeting: Optional[Meeting] = None


class _Stopped(BaseException):
    """SIGTERM, as an exception, so that what the row has until then is recorded."""


def live_as_row(
    job: Job, plan: RowPlan, log: EventLog, setting: Setting, parent: int, crash: IO[bytes]
) -> None:
    """Measure one row and end this process with the row's exit code. Never returns.

    What the row has to say is in the events by then, its error included. If native code kills the
    process, the Python lines that led there go to `crash`, for the parent to read.
    """
    code = int(ExitCode.INTERNAL)
    try:
        # A terminal's Ctrl-C reaches every process of the group; the parent decides, by SIGTERM.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _stop)
        die_with(parent)
        _be_the_one_to_kill()
        faulthandler.enable(crash)
        code = _run_row(job, plan, log, setting)
    except BaseException:
        complain(traceback.format_exc())
    finally:
        flush()
        # Not sys.exit: the parent's exit handlers and open blocks are not this process's.
        os._exit(code)


def _run_row(job: Job, plan: RowPlan, log: EventLog, setting: Setting) -> int:
    started = time.monotonic()
    status, code = Status.COMPLETE, ExitCode.OK
    error_info: Optional[ErrorInfo] = None
    context: Optional[RowContext] = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        context = _measure(job, plan, log, setting)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Stopped:
        status, code = Status.INTERRUPTED, ExitCode.INTERRUPTED
    except SkippedError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status, error_info = Status.SKIPPED, describe(error, setting.out)[0]
        complain(row_ended(plan.index, f"skipped: {error_info.what}", error_info))
    except BaseException as error:
        # BaseException: an experiment that calls sys.exit() must not end as a success.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status = Status.FAILED
        error_info, code = describe(error, setting.out)
        complain(row_ended(plan.index, f"{error_info.kind}: {error_info.what}", error_info))
    end = {
        "status": status.value,
        "seconds": time.monotonic() - started,
        "error": encode_error(error_info),
    }
    try:
        last_words(setting.out, lambda: log.emit(EventKind.ROW_END, plan.index, **end))
    except OSError as error:
        complain(f"row {plan.index}: its end could not be recorded: {error}")
        return int(describe(error, setting.out)[1])
    if context is not None and status is Status.COMPLETE:
        context.checkpoints.clear()  # only now: until its end is recorded, the row may be resumed
    return int(code)


def _measure(job: Job, plan: RowPlan, log: EventLog, setting: Setting) -> RowContext:
    seed_everything(plan.seed)
    run = setting.load()
    context = RowContext(
        plan,
        log,
        setting.out,
        device=torch.device(setting.device),
        profile=job.profile,
        data_root=setting.data_root,
        data_sets=job.data_sets,
        synthetic=job.synthetic,
        resume=setting.resume,
        plans=job.plan,
        meeting=setting.meeting,
    )
    complete = False
    try:
        turns.begin(context.device)
        profiling.watch(context, run)
        complete = True
    except (RuntimeError, MemoryError) as error:
        asked = bytes_asked(str(error))
        if asked is not None:
            context.fact("bytes_asked", asked)
        raise
    finally:
        # However it ends: these are what ran, after the experiment has set what it sets.
        for name, value in {**_settings(setting.device), **turns.facts()}.items():
            context.fact(name, value)
        context.finish(complete=complete)
    return context


def _settings(device: str) -> Dict[str, Any]:
    """What may change a result from run to run, as it stands when the row ends."""
    settings: Dict[str, Any] = {
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.startswith("cuda"):
        settings["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        settings["cudnn_deterministic"] = torch.backends.cudnn.deterministic
    return settings


def _stop(_number: int, _frame: Optional[FrameType]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what follows is the clearing up
    raise _Stopped


def _be_the_one_to_kill() -> None:
    """Where memory runs out, the kernel should take the row, not the parent that tells of it."""
    try:
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    except OSError:
        return  # a sandbox without it; the row is by far the larger process anyway
