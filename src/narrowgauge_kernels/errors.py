"""The errors of building and loading kernels.

The kernels import torch and nothing of Narrowgauge, so that an image can build them from this
package alone; the shape (what, why, next step) and the exit codes are those of the contract, and a
test holds them equal.
"""

from __future__ import annotations

__all__ = [
    "BuildArgumentError",
    "DiskFullError",
    "GraphRefusedError",
    "KernelBuildError",
    "KernelsError",
    "KernelsNotBuiltError",
    "ToolchainMissingError",
]


class KernelsError(Exception):
    """What happened, why, and what to do next."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append("why:  " + self.why.replace("\n", "\n      "))
        if self.next_step:
            lines.append("next: " + self.next_step.replace("\n", "\n      "))
        return "\n".join(lines)


class BuildArgumentError(KernelsError):
    """An argument of the build is malformed."""

    exit_code = 2


class ToolchainMissingError(KernelsError):
    """A compiler, or a Python with torch, is not there."""

    exit_code = 14


class KernelBuildError(KernelsError):
    """A compiler or the linker failed, or the result could not be written."""

    exit_code = 13


class DiskFullError(KernelBuildError):
    """The disk that holds the build directory is full."""

    exit_code = 22


class KernelsNotBuiltError(KernelsError):
    """The libraries are missing, are of another torch, or are older than their sources."""

    exit_code = 13


class GraphRefusedError(KernelsError):
    """torch does not give out the CUDA graph that it captured."""

    exit_code = 3
