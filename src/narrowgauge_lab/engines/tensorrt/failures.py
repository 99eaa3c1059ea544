"""What TensorRT says while it works, and the errors that we make of it. It reports through its
logger and returns nothing; an exception says no more than that it failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, List, Type

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_lab.engines.errors import EngineBuildError
from narrowgauge_lab.errors import OutOfMemoryError, bytes_asked, known_error

__all__ = ["EngineRunError", "failure", "make_logger"]

_KEPT = 200
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|insufficient memory", re.IGNORECASE)


class EngineRunError(NarrowgaugeError):
    """A built engine failed while it was loaded, refitted or run."""

    exit_code = ExitCode.RUN_FAILED


def make_logger(trt: Any) -> Any:
    """An ILogger that keeps warnings and errors in `said`, the latest 200 of each.

    The class is made here because its base comes with the library.
    """
    severities = trt.ILogger.Severity
    kept = {
        severities.INTERNAL_ERROR: "errors", severities.ERROR: "errors",
        severities.WARNING: "warnings",
    }  # fmt: skip

    class Said(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: List[str] = []
            self.warnings: List[str] = []

        def log(self, severity: Any, msg: str) -> None:
            name = kept.get(severity)
            if name is not None:
                said = getattr(self, name)
                said.append(str(msg))
                del said[:-_KEPT]

        def take(self) -> str:
            """What was said since the last time, errors where there are any; then it is gone."""
            lines = self.errors or self.warnings
            self.errors, self.warnings = [], []
            return "\n".join(dict.fromkeys(lines))

    return Said()


def failure(
    what: str,
    said: str,
    next_step: str = "",
    kind: Type[NarrowgaugeError] = EngineBuildError,
) -> NarrowgaugeError:
    """The error to raise where TensorRT gave nothing: memory that ran out and a lost device are
    what they are everywhere, the rest is `kind`."""
    if _OUT_OF_MEMORY.search(said):
        asked = bytes_asked(said)
        return OutOfMemoryError(
            what + (f": it asked for {asked} bytes" if asked else ": memory ran out"),
            why=said,
            next_step="use less: a smaller batch, a smaller model, or a smaller workspace_mb",
        )
    known = known_error(RuntimeError(said), Path())
    return known or kind(what, why=said or "TensorRT gave no reason", next_step=next_step)
