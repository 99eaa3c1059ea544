"""The lab's own fatal errors."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import Optional, Tuple

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_contract.outcome import ErrorInfo

__all__ = [
    "BusyError",
    "DataCorruptError",
    "DataUnavailableError",
    "DiskFullError",
    "OutOfMemoryError",
    "describe",
    "disk_full",
    "is_disk_full",
]

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DataUnavailableError(NarrowgaugeError):
    """A data set is not where the lab was told to look."""

    exit_code = ExitCode.DATA_UNAVAILABLE


class DataCorruptError(NarrowgaugeError):
    """A data file is not what its declaration says."""

    exit_code = ExitCode.DATA_CORRUPT


class DiskFullError(NarrowgaugeError):
    """There is no room for the run's files."""

    exit_code = ExitCode.DISK_FULL


class BusyError(NarrowgaugeError):
    """Another process is writing to the same folder."""

    exit_code = ExitCode.BUSY


class OutOfMemoryError(NarrowgaugeError):
    """The row needed more memory than there was, on the host or on the accelerator."""

    exit_code = ExitCode.OUT_OF_MEMORY


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that the disk (or a quota) is full."""
    seen = error  # type: Optional[BaseException]
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def disk_full(out: Path) -> DiskFullError:
    """The error to raise where a write to `out` found no room."""
    return DiskFullError(
        f"no room left in {out}",
        why="the file system, or the user's quota on it, is full",
        next_step=(
            "free some space; the events so far are kept, and --resume goes on from the last "
            "checkpoint"
        ),
    )


def describe(error: BaseException, out: Path) -> Tuple[ErrorInfo, ExitCode]:
    """An exception of a row as data, and the exit code it stands for."""
    known = _known(error, out)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    info = ErrorInfo(
        kind=type(known).__name__ if known else type(error).__name__,
        what=known.what if known else (str(error) or type(error).__name__),
        why=known.why if known else "the experiment raised it",
        next_step=known.next_step if known else "",
        trace=trace[-8000:],
    )
    return info, known.exit_code if known else ExitCode.RUN_FAILED


def _known(error: BaseException, out: Path) -> Optional[NarrowgaugeError]:
    if isinstance(error, NarrowgaugeError):
        return error
    if is_disk_full(error):
        return disk_full(out)
    if _is_out_of_memory(error):
        return OutOfMemoryError(
            "the row ran out of memory",
            why=str(error).splitlines()[0] if str(error) else "MemoryError",
            next_step="a smaller -p batch_size needs less",
        )
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    # torch.cuda.OutOfMemoryError came with 1.13 and moved since; before, only the text tells.
    text = str(error)
    by_name = type(error).__name__ == "OutOfMemoryError"
    by_text = isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text
    )
    return by_name or by_text
