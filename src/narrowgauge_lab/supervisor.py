"""The parent of the rows: forks one process per row, and says how each ended where it could not.

It imports torch so that the rows need not, and never runs a torch operation: a thread pool or a
CUDA context made here would be broken in every row.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import IO, Iterator, List, Optional, Set, Tuple

from narrowgauge_contract.codec import encode, write_json_atomic
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, SkippedError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, EventTail
from narrowgauge_contract.job import Job, RowPlan
from narrowgauge_contract.outcome import (
    OUTCOME_FILE,
    ErrorInfo,
    Fold,
    InsideFacts,
    Outcome,
    Status,
    encode_error,
    fold_outcome,
    why_nothing_measured,
)
from narrowgauge_lab.console import complain, row_ended
from narrowgauge_lab.endings import why_silent
from narrowgauge_lab.errors import ResumeRefusedError
from narrowgauge_lab.folder import last_words, mend_events
from narrowgauge_lab.forking import fork
from narrowgauge_lab.nodes import Company, Meeting
from narrowgauge_lab.oom import oom_kills
from narrowgauge_lab.rows import Setting, live_as_row
from narrowgauge_lab.stopping import StopRequest

__all__ = ["Supervisor"]

#: These decide how the run ends whatever the other rows did.
_DECISIVE = (ExitCode.DISK_FULL, ExitCode.OUT_OF_MEMORY)


class Supervisor:
    """Runs the rows of one job. The folder must be held (`folder.hold`) while this lives.

    The rows are folded from the events file as they end, so the outcome says what the record says.
    """

    def __init__(
        self, job: Job, log: EventLog, setting: Setting, stop: StopRequest, crash: IO[bytes]
    ) -> None:
        """`crash`: an empty file for the last lines of rows that native code kills."""
        self._job = job
        self._log = log
        self._setting = setting
        self._stop = stop
        self._crash = crash
        self._fold = Fold()
        self._tail = EventTail(setting.out / EVENTS_FILE)
        self._codes: List[int] = []
        self._ended: Set[int] = set()
        self._catch_up()

    def begin(self, inside: InsideFacts, source_hash: str, experiment_hash: str) -> None:
        """Write the start of the run.

        Raises ResumeRefusedError, having changed nothing, where rows of this run were measured in
        other circumstances: one record has one set of them.
        """
        fold = self._fold
        if fold.rows():
            before = {"the lab's source": fold.source_hash, "the experiment": fold.experiment_hash}
            now = {"the lab's source": source_hash, "the experiment": experiment_hash}
            before.update(encode(fold.inside) or {})
            now.update(encode(inside))
            differing = [name for name in now if now[name] != before.get(name)]
            if differing:
                raise ResumeRefusedError(
                    "the run cannot go on here: it was begun in other circumstances",
                    why="\n".join(f"{n}: {before.get(n)}, now {now[n]}" for n in differing),
                    next_step="resume where it was begun, or start anew with another --out",
                )
        # A fold of the events, which stay; beside new ones it would tell of the old ones only.
        outcome = self._setting.out / OUTCOME_FILE
        if outcome.exists():
            outcome.unlink()
        self._log.emit(
            EventKind.RUN_START,
            inside=inside,
            source_hash=source_hash,
            experiment_hash=experiment_hash,
        )

    def run_rows(self, device: str, company: Optional[Company] = None) -> None:
        """Every row that is not complete, one after another, until one finds the disk full."""
        self._setting = dataclasses.replace(self._setting, device=device)
        for plan, meeting in self._to_run(company):
            if self._stop.asked or int(ExitCode.DISK_FULL) in self._codes:
                break
            self._setting = dataclasses.replace(self._setting, meeting=meeting)
            self._codes.append(self._run_row(plan))

    def _to_run(self, company: Optional[Company]) -> Iterator[Tuple[RowPlan, Optional[Meeting]]]:
        """The rows that are not complete, as they come; on a node that follows, those that the one
        that leads says."""
        if company is not None and not company.nodes.leads:
            yield from company.follow(self._job)
            return
        complete = self._fold.complete() if self._setting.resume else ()
        for plan in self._job.rows:
            if plan.index not in complete and not self._stop.asked:
                yield plan, company.lead(plan) if company is not None else None

    def end(self, error: Optional[ErrorInfo] = None, code: ExitCode = ExitCode.OK) -> Outcome:
        """Write outcome.json. `error` and `code`: why the rows could not even begin."""
        self._catch_up()
        status = Status.FAILED
        if error is None:
            status, code = self._verdict()
            error = self._why_failed() if status is Status.FAILED else None
        out = self._setting.out
        data = {"status": status.value, "exit_code": int(code)}
        last_words(out, lambda: self._log.emit(EventKind.RUN_END, **data))
        self._catch_up()
        outcome = fold_outcome(self._job, self._fold, status, int(code), error)
        last_words(out, lambda: write_json_atomic(out / OUTCOME_FILE, outcome))
        return outcome

    def _why_failed(self) -> Optional[ErrorInfo]:
        """What failed, before what was merely skipped; where all were, that."""
        rows = sorted(self._fold.rows(), key=lambda row: row.status is Status.SKIPPED)
        lacking = why_nothing_measured(rows)
        if lacking:
            return ErrorInfo(SkippedError.__name__, "nothing could be measured here", lacking)
        return next((row.error for row in rows if row.error is not None), None)

    def _run_row(self, plan: RowPlan) -> int:
        """One row in a child; its exit code."""
        started = time.monotonic()
        kills = oom_kills()
        self._ended.discard(plan.index)
        self._log.emit(
            EventKind.ROW_START,
            plan.index,
            repeat=plan.repeat,
            seed=plan.seed,
            parameters=plan.parameters,
        )
        status = self._wait_for_child(plan)
        self._catch_up()
        if os.WIFEXITED(status) and plan.index in self._ended:
            return os.WEXITSTATUS(status)
        return self._end_row(plan, status, time.monotonic() - started, kills)

    def _wait_for_child(self, plan: RowPlan) -> int:
        parent = os.getpid()
        self._crash.seek(0)
        self._crash.truncate()
        with self._stop.blocked():
            child = fork()
            if child == 0:
                live_as_row(self._job, plan, self._log, self._setting, parent, self._crash)
            self._stop.child_began(child)
        _, status = os.waitpid(child, 0)
        self._stop.child_ended()
        return status

    def _end_row(self, plan: RowPlan, status: int, seconds: float, kills: Optional[int]) -> int:
        """Say for a row how it ended, since its process could not; the row's exit code."""
        mend_events(self._setting.out)
        if self._stop.asked:
            code, how, error = ExitCode.INTERRUPTED, Status.INTERRUPTED, None
        else:
            known = why_silent(status, kills, oom_kills(), self._setting.out)
            code, how = known.exit_code, Status.FAILED
            self._crash.seek(0)
            trace = self._crash.read().decode("utf-8", "replace")
            error = ErrorInfo(type(known).__name__, known.what, known.why, known.next_step, trace)
            complain(f"{row_ended(plan.index, error.what, error)}\n{trace}".rstrip())
        data = {"status": how.value, "seconds": seconds, "error": encode_error(error)}
        emit = self._log.emit
        last_words(self._setting.out, lambda: emit(EventKind.ROW_END, plan.index, **data))
        self._catch_up()
        return int(code)

    def _catch_up(self) -> None:
        for event in self._tail.poll():
            if event.row is not None and event.kind is EventKind.ROW_END:
                self._ended.add(event.row)
            try:
                self._fold.add(event)
            except (NarrowgaugeError, KeyError, TypeError, ValueError):
                # One odd event of an experiment must not cost all the others.
                continue

    def _verdict(self) -> Tuple[Status, ExitCode]:
        """How the run ended: the decisive failures first, then whether anything is usable."""
        rows = {row.index: row for row in self._fold.rows()}
        mine = [rows.get(plan.index) for plan in self._job.rows]
        complete = [row for row in mine if row is not None and row.status is Status.COMPLETE]
        skipped = [row for row in mine if row is not None and row.status is Status.SKIPPED]
        if self._stop.asked and len(complete) + len(skipped) < len(mine):
            return Status.INTERRUPTED, ExitCode.INTERRUPTED
        bad = [code for code in self._codes if code != ExitCode.OK]
        for decisive in _DECISIVE:
            if decisive in bad:
                return Status.FAILED, decisive
        if bad:
            # One reason shared by every row is the run's reason (no data, not applicable, …).
            shared = not complete and len(set(bad)) == 1 and bad[0] in set(ExitCode)
            return Status.FAILED, ExitCode(bad[0]) if shared else ExitCode.RUN_FAILED
        if skipped and not complete:
            return Status.FAILED, ExitCode.NOT_APPLICABLE
        if complete and not any(row.validity.valid for row in complete):
            return Status.COMPLETE, ExitCode.NO_VALID_ROW
        return Status.COMPLETE, ExitCode.OK
