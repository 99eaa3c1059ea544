"""The parent of the rows: starts one child per row, says how each ended, writes the outcome.

It imports torch so that its children need not, and never runs a torch operation: a thread pool or a
CUDA context made here would be broken in every child.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Iterator, List, Optional

from narrowgauge_contract.codec import encode, write_json_atomic
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import Job, RowPlan
from narrowgauge_contract.outcome import (
    OUTCOME_FILE,
    ErrorInfo,
    Fold,
    InsideFacts,
    Outcome,
    Status,
    fold_outcome,
)
from narrowgauge_lab.errors import BusyError, disk_full, is_disk_full
from narrowgauge_lab.rows import run_row

__all__ = ["Setting", "supervise"]

#: How long a row may take to die of SIGTERM before it is killed.
_GRACE_S = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OOM_COUNTERS = (
    (Path("/sys/fs/cgroup/memory.events"), "oom_kill"),
    (Path("/sys/fs/cgroup/memory/memory.oom_control"), "oom_kill"),
)


@dataclass(frozen=True)
class Setting:
    """Where a run happens: its output folder, data, device, and what the inside looks like."""

    out: Path
    data_root: Optional[Path]
    device: str
    inside: InsideFacts
    source_hash: str
    experiment_hash: str
    resume: bool = False


def supervise(job: Job, run: Callable[[Any], None], setting: Setting) -> Outcome:
    """Run every row of a job, write outcome.json, and give it back.

    Raises BusyError where another process uses the folder, DiskFullError where even the outcome
    found no room; the events written until then stay.
    """
    with _exclusive(setting.out):
        try:
            return _Supervisor(job, run, setting).run()
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(setting.out) from error
            raise


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    """Hold the folder: two processes appending to the same events would make one false run."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"another run is writing to {out}",
                why="its lock is held by a living process",
                next_step="wait for it to end, or give another --out",
            ) from None
        yield


class _Supervisor:
    def __init__(self, job: Job, run: Callable[[Any], None], setting: Setting) -> None:
        self.job = job
        self.run_function = run
        self.setting = setting
        self.stopping = False
        self.child = 0
        self.codes: List[int] = []
        self.first_error: Optional[ErrorInfo] = None

    def run(self) -> Outcome:
        done = self._complete_rows() if self.setting.resume else ()
        with EventLog(self.setting.out / EVENTS_FILE) as log, self._signals():
            log.emit(
                EventKind.RUN_START,
                inside=self.setting.inside,
                source_hash=self.setting.source_hash,
                experiment_hash=self.setting.experiment_hash,
            )
            for plan in self.job.rows:
                if plan.index in done:
                    continue
                if self.stopping:
                    break
                self._run_row(plan, log)
                if self.codes and self.codes[-1] == ExitCode.DISK_FULL:
                    break
            return self._finish(log)

    def _complete_rows(self) -> "tuple[int, ...]":
        return Fold().add_all(read_events(self.setting.out / EVENTS_FILE)).complete()

    def _run_row(self, plan: RowPlan, log: EventLog) -> None:
        killed_before = _oom_kills()
        started = time.monotonic()
        # Blocked while forking: a stop that arrives in between must find the child's number.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.child = os.fork()
        if self.child == 0:
            self._be_row(plan, log, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _, status = os.waitpid(self.child, 0)
        self.child = 0
        signal.alarm(0)
        if os.WIFEXITED(status):
            self.codes.append(os.WEXITSTATUS(status))
            return
        number = os.WTERMSIG(status)
        code, ended, error = self._judge_signal(number, killed_before)
        self.codes.append(int(code))
        log.emit(
            EventKind.ROW_END,
            plan.index,
            status=ended.value,
            seconds=time.monotonic() - started,
            error=encode(error),
        )
        if error is not None:
            print(f"row {plan.index}: {error.what}", file=sys.stderr)

    def _be_row(self, plan: RowPlan, log: EventLog, parent: int) -> None:
        """The child's whole life; never returns."""
        code = int(ExitCode.INTERNAL)
        try:
            # A terminal's Ctrl-C reaches children too; the parent decides and sends SIGTERM.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            code = run_row(
                self.job,
                plan,
                log,
                self.setting.out,
                self.run_function,
                device=self.setting.device,
                data_root=self.setting.data_root,
                resume=self.setting.resume,
                parent=parent,
            )
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: the parent's exit handlers are not the child's.
            os._exit(code)

    def _judge_signal(
        self, number: int, killed_before: Optional[int]
    ) -> "tuple[ExitCode, Status, Optional[ErrorInfo]]":
        if self.stopping:
            return ExitCode.INTERRUPTED, Status.INTERRUPTED, None
        name = signal.Signals(number).name
        if number == signal.SIGKILL:
            kills = _oom_kills()
            counted = None not in (kills, killed_before) and kills > killed_before  # type: ignore[operator]
            why = (
                "the kernel's out-of-memory killer ended it"
                if counted
                else "SIGKILL came from outside: usually the out-of-memory killer"
            )
            error = ErrorInfo(
                kind="OutOfMemoryError",
                what="the row was killed",
                why=why,
                next_step="a smaller -p batch_size needs less memory; free some memory on the host",
            )
            return ExitCode.OUT_OF_MEMORY, Status.FAILED, error
        error = ErrorInfo(
            kind="RowCrashed",
            what=f"the row crashed with {name}",
            why="native code (torch or a kernel) crashed; Python could not say where",
            next_step="run it again with PYTHONFAULTHANDLER=1 to see the Python line",
        )
        return ExitCode.RUN_FAILED, Status.FAILED, error

    def _finish(self, log: EventLog) -> Outcome:
        fold = Fold().add_all(read_events(self.setting.out / EVENTS_FILE))
        status, code = self._verdict(fold)
        log.emit(EventKind.RUN_END, status=status.value, exit_code=int(code))
        failed = [row.error for row in fold.rows() if row.error is not None]
        outcome = fold_outcome(self.job, fold, status, int(code), failed[0] if failed else None)
        write_json_atomic(self.setting.out / OUTCOME_FILE, outcome)
        return outcome

    def _verdict(self, fold: Fold) -> "tuple[Status, ExitCode]":
        if self.stopping:
            return Status.INTERRUPTED, ExitCode.INTERRUPTED
        bad = [code for code in self.codes if code != ExitCode.OK]
        if bad:
            known = bad[0] in {int(code) for code in ExitCode}
            return Status.FAILED, ExitCode(bad[0]) if known else ExitCode.RUN_FAILED
        rows = fold.rows()
        if rows and not any(row.validity.valid for row in rows):
            return Status.COMPLETE, ExitCode.NO_VALID_ROW
        return Status.COMPLETE, ExitCode.OK

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGALRM)}
        for number in _SIGNALS:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGALRM, self._kill)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: Optional[FrameType]) -> None:
        self.stopping = True
        if self.child:
            os.kill(self.child, signal.SIGTERM)
            signal.alarm(_GRACE_S)

    def _kill(self, number: int, frame: Optional[FrameType]) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)


def _oom_kills() -> Optional[int]:
    """How many processes of this control group the kernel killed for memory; None: cannot tell."""
    for path, key in _OOM_COUNTERS:
        try:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
        except (OSError, ValueError):
            continue
    return None
