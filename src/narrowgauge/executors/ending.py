"""From an exit status to how a run ended: one table for every executor. Pure."""

from __future__ import annotations

from narrowgauge.executors.base import Ending
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.outcome import ErrorInfo, Status

__all__ = ["ending_from", "vanished"]

_SIGKILL = 9
_AGAIN = "run it again for what is missing"
_PERHAPS = "; a host that runs out of memory does so too, and `dmesg` there would say so"

#: What the lab's own exit codes mean where it left no outcome to say more.
_SAID = {
    ExitCode.USAGE: "the lab did not accept its job",
    ExitCode.NOT_APPLICABLE: "the experiment cannot run in this environment",
    ExitCode.TOOLCHAIN_MISSING: "something the lab needs is missing in its environment",
    ExitCode.DATA_UNAVAILABLE: "the lab did not find its data",
    ExitCode.DATA_CORRUPT: "a data file does not have the declared content",
    ExitCode.DISK_FULL: "no room left while the run wrote its results",
    ExitCode.RUN_FAILED: "at least one row failed",
    ExitCode.NO_VALID_ROW: "no row is valid",
}


def ending_from(status: int, *, out_of_memory: bool, log_tail: str, what: str) -> Ending:
    """Judge an exit `status` (0 to 255; 128 + n for signal n). `what`: container or process."""
    if status == 0:
        return Ending(int(ExitCode.OK), Status.COMPLETE, log_tail)
    if status == ExitCode.OUT_OF_MEMORY or (out_of_memory and status == 128 + _SIGKILL):
        return _ended(
            ExitCode.OUT_OF_MEMORY,
            Status.UNFINISHED if status > 128 else Status.FAILED,
            log_tail,
            f"the {what} ran out of memory",
            f"exit status {status}"
            + (", killed by the kernel's OOM killer" if out_of_memory else ""),
            "use less: a smaller batch or fewer rows at once; or give the host more memory",
        )
    if status == ExitCode.INTERRUPTED:
        return _ended(
            ExitCode.INTERRUPTED, Status.INTERRUPTED, log_tail, "the run was interrupted", "", ""
        )
    if status > 128:
        return _ended(
            ExitCode.KILLED,
            Status.UNFINISHED,
            log_tail,
            f"the {what} was killed by signal {status - 128}",
            "not by this launcher" + (_PERHAPS if status == 128 + _SIGKILL else ""),
            _AGAIN,
        )
    if status in _SAID:
        code = ExitCode(status)
        return _ended(code, Status.FAILED, log_tail, _SAID[code], f"exit status {status}", "")
    return _ended(
        ExitCode.RUN_FAILED,
        Status.FAILED,
        log_tail,
        "the lab stopped before it measured anything to the end",
        f"exit status {status}; its last words:\n{_last_lines(log_tail)}",
        "",
    )


def vanished(what: str, why: str, log_tail: str = "") -> Ending:
    """The ending of a run whose container or process is gone without a word."""
    return _ended(ExitCode.KILLED, Status.UNFINISHED, log_tail, f"the {what} is gone", why, _AGAIN)


def _ended(
    code: ExitCode, status: Status, log_tail: str, what: str, why: str, next_step: str
) -> Ending:
    error = ErrorInfo(code.name.lower().replace("_", "-"), what, why, next_step)
    return Ending(int(code), status, log_tail, error)


def _last_lines(log_tail: str) -> str:
    return "\n".join(log_tail.strip().splitlines()[-5:]) or "(none)"
