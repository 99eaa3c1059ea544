"""The lab's own fatal errors, and what any other exception means for a run."""

from __future__ import annotations

import errno
import re
import traceback
from pathlib import Path
from typing import Iterator, Optional, Tuple

from narrowgauge_contract.errors import (
    DataCorruptError,
    DataUnavailableError,
    DiskFullError,
    ExitCode,
    NarrowgaugeError,
    UsageError,
)
from narrowgauge_contract.outcome import ErrorInfo

__all__ = [
    "BusyError",
    "CalibrationError",
    "ClockError",
    "DataCorruptError",
    "DataUnavailableError",
    "DeviceLostError",
    "DiskFullError",
    "HeldTooLongError",
    "OutOfMemoryError",
    "ResultsUnwritableError",
    "ResumeRefusedError",
    "RowCrashedError",
    "TorchMissingError",
    "bytes_asked",
    "describe",
    "device_lost",
    "disk_full",
    "is_disk_full",
    "known_error",
]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
#: How torch says it before it had a class for it, on the CPU, and inside its libraries.
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
#: What an allocation asked for: torch on CUDA and on the CPU, of every version, and numpy.
_ASKED = re.compile(r"(?:[Tt]ried to|Unable to) allocate (\d+(?:\.\d+)?) ([KMGTPE]i?B|bytes)")
_BYTES = {unit: 1 << (10 * power) for power, unit in enumerate("bKMGTPE")}
#: What CUDA and NVML say of a device that is gone or broken. A program's own faults (`unspecified
#: launch failure`, `an illegal memory access`, a failed assertion) are not among them.
_DEVICE_LOST = re.compile(
    r"uncorrectable (?:ECC|NVLink) error"
    r"|CUDA-capable device(?:s|\(s\))? (?:is|are|is/are) busy or unavailable"
    r"|no CUDA-capable device is detected"
    r"|CUDA error: unknown error"
    r"|\bXid\b"
    r"|(?:GPU|[Dd]evice)(?: \S+)? (?:is|was) lost"
    r"|fallen off the bus"
    r"|GPU requires re(?:set|start)"
)
_TRACE_CHARACTERS = 8000


class ResultsUnwritableError(NarrowgaugeError):
    """The output folder cannot be written."""

    exit_code = ExitCode.RESULTS_UNWRITABLE


class BusyError(NarrowgaugeError):
    """Another process is writing to the same folder."""

    exit_code = ExitCode.BUSY


class TorchMissingError(NarrowgaugeError):
    """This Python has no torch, or a broken one."""

    exit_code = ExitCode.TOOLCHAIN_MISSING


class ResumeRefusedError(UsageError):
    """A run was begun in other circumstances (source, torch, device), so it cannot go on here."""


class OutOfMemoryError(NarrowgaugeError):
    """The row needed more memory than there was, on the host or on the accelerator."""

    exit_code = ExitCode.OUT_OF_MEMORY


class CalibrationError(DataUnavailableError):
    """Calibration had no data, or data that gives no range: nothing, NaN, infinities."""


class RowCrashedError(NarrowgaugeError):
    """The process of a row ended without saying how its row went."""

    exit_code = ExitCode.RUN_FAILED


class ClockError(NarrowgaugeError):
    """A clock stepped, stood still, or claims more time than passed."""

    exit_code = ExitCode.RUN_FAILED


class DeviceLostError(NarrowgaugeError):
    """The accelerator is gone or broken; no program can be at fault."""

    exit_code = ExitCode.RUN_FAILED


class HeldTooLongError(NarrowgaugeError):
    """Work that was to be queued behind a held stream waits for that stream itself."""

    exit_code = ExitCode.RUN_FAILED


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that the disk (or a quota) is full."""
    return any(isinstance(e, OSError) and e.errno in _FULL for e in _chain(error))


def disk_full(out: Path) -> DiskFullError:
    """The error to raise where a write to `out` found no room."""
    return DiskFullError(
        f"no room left in {out}",
        why="the file system, or the user's quota on it, is full",
        next_step="free some space there, then give the same command with --resume: complete rows "
        "are kept, and a row goes on from its last checkpoint",
    )


def device_lost(why: str) -> DeviceLostError:
    """The error to raise where the accelerator does not answer any more; `why` in its own words."""
    return DeviceLostError(
        "the device was lost while the row ran",
        why=why,
        next_step="look for Xid lines in the kernel's log (dmesg) and at nvidia-smi; a device "
        "that is gone comes back with a reset or a restart. Then give the same command with "
        "--resume",
    )


def bytes_asked(message: str) -> Optional[int]:
    """How much memory an allocator's complaint says it was asked for; None where it does not."""
    found = _ASKED.search(message)
    return round(float(found.group(1)) * _BYTES[found.group(2)[0]]) if found else None


def known_error(error: BaseException, out: Path) -> Optional[NarrowgaugeError]:
    """The fatal error that an exception stands for; None for one that says nothing to us.

    `out` is where the run writes, for the message.
    """
    if isinstance(error, NarrowgaugeError):
        return error
    if is_disk_full(error):
        return disk_full(out)
    if any(_is_out_of_memory(e) for e in _chain(error)):
        return _out_of_memory(error)
    lost = next(filter(_is_device_lost, _chain(error)), None)
    if lost is not None:
        return device_lost(_first_line(lost))
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return ResultsUnwritableError(
            f"cannot write {error.filename or out}",
            why=error.strerror or str(error),
            next_step="give an --out folder that this user may write",
        )
    return _foreign(error)


def describe(
    error: BaseException, out: Path, *, otherwise: ExitCode = ExitCode.RUN_FAILED
) -> Tuple[ErrorInfo, ExitCode]:
    """An exception as data, and the exit code it stands for (`otherwise` where nobody knows it)."""
    known = known_error(error, out)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if known is None:
        kind, what = type(error).__name__, str(error) or type(error).__name__
        return ErrorInfo(kind, what, trace=trace[-_TRACE_CHARACTERS:]), otherwise
    # A foreign error keeps its own class name: it is what its documentation calls it.
    kind = type(error if type(known) is NarrowgaugeError else known).__name__
    info = ErrorInfo(kind, known.what, known.why, known.next_step, trace[-_TRACE_CHARACTERS:])
    return info, known.exit_code


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it."""
    seen = set()
    current: Optional[BaseException] = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    # The class came with torch 1.13 and has moved since; before, only the text tells.
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in _OUT_OF_MEMORY_TEXTS
    )


def _is_device_lost(error: BaseException) -> bool:
    """Whether a library of NVIDIA's, through torch, pynvml or our own NvmlError, says so; not any
    text that does."""
    by_nvml = type(error).__name__.lower().startswith("nvmlerror")
    by_nvidia = by_nvml or isinstance(error, RuntimeError)
    return by_nvidia and _DEVICE_LOST.search(str(error)) is not None


def _out_of_memory(error: BaseException) -> OutOfMemoryError:
    """With the bytes that were asked for, where the error tells them."""
    asked = next(filter(None, (_ASKED.search(str(e)) for e in _chain(error))), None)
    what = "the row ran out of memory"
    if asked:
        amount, unit = asked.groups()
        what += f": it asked for {bytes_asked(asked.group())} bytes"
        if unit != "bytes":
            what += f" ({amount} {unit})"
    return OutOfMemoryError(
        what,
        why=_first_line(error),
        next_step="use less: a smaller batch or a smaller model; or give it more",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _foreign(error: BaseException) -> Optional[NarrowgaugeError]:
    """An error of the kernels package, which has our shape and cannot have our class."""
    code = getattr(error, "exit_code", None)
    if not all(isinstance(getattr(error, name, None), str) for name in ("what", "why")):
        return None
    if code not in {int(known) for known in ExitCode}:
        return None
    twin = NarrowgaugeError(
        str(getattr(error, "what", "")),
        why=str(getattr(error, "why", "")),
        next_step=str(getattr(error, "next_step", "")),
    )
    twin.exit_code = ExitCode(code)
    return twin
