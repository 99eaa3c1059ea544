"""What the build is for and with: one Python's torch, and the compilers on the PATH."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
from typing import Optional, Sequence, Tuple

from narrowgauge_kernels.errors import (
    BuildArgumentError,
    DiskFullError,
    KernelBuildError,
    ToolchainMissingError,
)

__all__ = [
    "Compiler",
    "TorchFacts",
    "find_cxx",
    "find_nvcc",
    "parse_architectures",
    "query_torch",
    "visible_architectures",
]

#: Runs in the other interpreter. The language standard is the one torch gives its own extensions,
#: read from the text of cpp_extension: importing that module needs setuptools and probes for CUDA.
_QUERY = r"""
import glob, json, os, platform, re, torch
root = os.path.dirname(torch.__file__)
with open(os.path.join(root, "utils", "cpp_extension.py"), encoding="utf-8") as source:
    standards = re.findall(r"-std=c\+\+(\d+)", source.read())
omp = glob.glob(os.path.join(root, "lib", "libgomp*.so*"))
omp += glob.glob(os.path.join(os.path.dirname(root), "torch.libs", "libgomp*.so*"))
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI),
    "include": os.path.join(root, "include"),
    "library": os.path.join(root, "lib"),
    "standard": "c++" + max(standards, key=int),
    "openmp": omp[0] if omp else None,
    "machine": platform.machine(),
}))
"""

_ARCHITECTURE = re.compile(r"^(\d+)\.(\d)([af]?)$")


@dataclasses.dataclass(frozen=True)
class TorchFacts:
    """What one interpreter's torch asks of code that links it.

    `openmp` is the OpenMP runtime that torch brings; linking that one, and not the system's, keeps
    a second thread pool out of the process and `torch.set_num_threads` in charge.
    """

    version: str
    cuda: Optional[str]
    cxx11_abi: bool
    include: str
    library: str
    standard: str
    openmp: Optional[str]
    machine: str


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler's path and what it says of itself."""

    path: str
    version: str


def query_torch(python: str) -> TorchFacts:
    """Ask an interpreter about its torch, in a process of its own.

    Raises ToolchainMissingError when the interpreter or its torch cannot be had.
    """
    try:
        answer = subprocess.run([python, "-c", _QUERY], capture_output=True, text=True)
    except OSError as error:
        raise ToolchainMissingError(
            f"no interpreter '{python}'",
            why=str(error),
            next_step="give the Python whose torch the kernels are for: --torch PYTHON",
        ) from error
    if answer.returncode != 0:
        raise ToolchainMissingError(
            f"'{python}' cannot import torch",
            why=tail(answer.stderr, 3),
            next_step=f"{python} -m pip install torch, or name another interpreter with --torch",
        )
    return TorchFacts(**json.loads(answer.stdout.strip().splitlines()[-1]))


def find_cxx(name: str) -> Compiler:
    """The C++ compiler `name`. Raises ToolchainMissingError with the line that installs it."""
    path = shutil.which(name)
    if path is None:
        raise ToolchainMissingError(
            f"no C++ compiler '{name}' on the PATH",
            next_step="apt-get install g++, or name another one with --compiler",
        )
    return Compiler(path, _first_line([path, "--version"]))


def find_nvcc(cuda: str) -> Compiler:
    """The CUDA compiler, for a torch built with CUDA `cuda`. Raises ToolchainMissingError."""
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        raise ToolchainMissingError(
            "no CUDA compiler 'nvcc' on the PATH or in /usr/local/cuda/bin",
            next_step=f"apt-get install cuda-toolkit-{cuda.replace('.', '-')} (from NVIDIA's "
            "repository for this system), or build for the CPU only: --cuda none",
        )
    release = re.search(r"release [\d.]+, (V[\d.]+)", _output([path, "--version"]))
    return Compiler(path, f"nvcc {release.group(1)}" if release else "nvcc of unknown version")


def parse_architectures(text: str) -> Tuple[str, ...]:
    """Turn `7.5 8.0 9.0a` into capabilities in order, each once. Raises BuildArgumentError."""
    words = text.split()
    for word in words:
        if _ARCHITECTURE.match(word) is None:
            raise BuildArgumentError(
                f"'{word}' is not a compute capability",
                next_step="--cuda takes 'none', 'auto', or capabilities such as \"7.5 8.0 9.0a\"",
            )
    if not words:
        raise BuildArgumentError("--cuda is empty", next_step="say --cuda none for the CPU only")
    return tuple(sorted(set(words), key=_architecture_order))


def _architecture_order(word: str) -> Tuple[int, int, str]:
    major, minor, suffix = _ARCHITECTURE.match(word).groups()
    return int(major), int(minor), suffix


def visible_architectures() -> Tuple[str, ...]:
    """The capabilities of this host's GPUs, as nvidia-smi tells them."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        why = f"nvidia-smi does not run: {error}"
    else:
        if answer.returncode == 0 and answer.stdout.strip():
            return parse_architectures(answer.stdout)
        why = tail(answer.stdout, 3)
    raise ToolchainMissingError(
        "--cuda auto found no GPU here",
        why=why,
        next_step='name the capabilities (--cuda "8.6"), or build for the CPU only (--cuda none)',
    )


def run(command: Sequence[str], what: str) -> str:
    """Run a compiler; its output, or KernelBuildError (DiskFullError) with the end of it."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise ToolchainMissingError(f"{command[0]} does not run", why=str(error)) from error
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stdout:
        # Compilers keep their intermediate files in TMPDIR, so it need not be the build directory.
        raise DiskFullError(
            f"no room on the disk for {what}",
            why=tail(done.stdout, 3),
            next_step="free 50 MB there and in TMPDIR (or /tmp), or build elsewhere with --out DIR",
        )
    if done.returncode != 0:
        raise KernelBuildError(
            f"{what} failed with exit code {done.returncode}",
            why=tail(done.stdout, 30) + "\ncommand: " + " ".join(command),
            next_step="if it does not know a compute capability, leave that one out or use another "
            "CUDA toolkit; if it does not know the C++ standard, use a newer compiler (--compiler)",
        )
    return done.stdout


def tail(text: str, lines: int) -> str:
    """The last lines of a tool's output."""
    return "\n".join(text.strip().splitlines()[-lines:])


def _output(command: Sequence[str]) -> str:
    return run(command, command[0])


def _first_line(command: Sequence[str]) -> str:
    return _output(command).splitlines()[0]
