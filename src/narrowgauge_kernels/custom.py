"""A user's multiplication as a MAC policy: one C++ file, compiled at first use and kept.

    struct Multiply {
      MAC_INLINE float operator()(float a, float b) const { return a * b; }
    };

a is the activation, b the weight. The file is one on its own: it may include the standard library's
headers (CUDA's, where it is compiled for a GPU), and MAC_INLINE is defined before it starts. It is
compiled together with templates in csrc/manual_float/: those of manual_float_micro.h for the CPU,
where contraction of a*b + c is off, and those of cuda/manual_float_launch.h for CUDA.

Libraries are kept in $XDG_CACHE_HOME/narrowgauge/macs (~/.cache by default) by the content of the
file and of our headers, the compilers' versions, and what they are for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import List, Mapping, Optional, Sequence, Tuple, Union

from narrowgauge_kernels import toolchain
from narrowgauge_kernels.errors import BuildArgumentError, KernelBuildError, ToolchainMissingError
from narrowgauge_kernels.library import require
from narrowgauge_kernels.mac import CUSTOM, Mac
from narrowgauge_kernels.sources import CSRC, header_hash
from narrowgauge_kernels.toolchain import Compiler

__all__ = ["cache_directory", "compile_functor"]

#: Of what the key of the cache is made of.
_FORMAT = 1
_MOST_LINES = 30

_CXX_FLAGS = ("-std=c++14", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden")
_ISA_FLAGS = {"avx2": ("-mavx2", "-mfma"), "avx512": ("-mavx512f", "-mfma")}
_NVCC_FLAGS = ("-std=c++14", "-O3", "-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden")

_CPU_SOURCE = """#include "manual_float/manual_float_custom.h"
#include "functor.h"
NARROWGAUGE_MANUAL_CPU(Multiply)
"""
_CUDA_SOURCE = """#include "manual_float/cuda/manual_float_launch.h"
#include "functor.h"
NARROWGAUGE_MANUAL_CUDA(Multiply)
"""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Compilers and flags; nvcc is None for the CPU alone."""

    cxx: Compiler
    cxx_flags: Tuple[str, ...]
    nvcc: Optional[Compiler]
    nvcc_flags: Tuple[str, ...]


def compile_functor(
    path: Union[str, Path],
    cuda: bool = False,
    architectures: Sequence[str] = (),
    env: Optional[Mapping[str, str]] = None,
) -> Mac:
    """The policy of the `struct Multiply` in the file `path`.

    For this processor, and with `cuda` for GPUs too: of `architectures` such as "9.0", by default
    those that are visible. Raises BuildArgumentError where the file cannot be read,
    KernelBuildError with the compiler's message about it where it does not compile,
    ToolchainMissingError without a compiler, and KernelsNotBuiltError without our own kernels.
    """
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise BuildArgumentError(
            f"the functor {source} cannot be read",
            why=str(error),
            next_step="name a file with `struct Multiply { MAC_INLINE float operator()(float a, "
            "float b) const; };`",
        ) from error
    plan = _plan(cuda, architectures)
    target = cache_directory(env) / f"{_key(content, plan)}.so"
    if not target.is_file():
        _build(source, content, plan, target)
    return Mac(CUSTOM, library=str(target))


def cache_directory(env: Optional[Mapping[str, str]] = None) -> Path:
    """Where compiled functors are kept. A relative XDG_CACHE_HOME counts as none."""
    base = (os.environ if env is None else env).get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "narrowgauge" / "macs"


def _plan(cuda: bool, architectures: Sequence[str]) -> _Plan:
    require("cpu")
    import torch

    isa = torch.ops.narrowgauge.cpu_instruction_sets()[-1]
    cxx_flags = (*_CXX_FLAGS, *_ISA_FLAGS.get(isa, ()))
    cxx = toolchain.find_cxx("g++")
    if not cuda:
        return _Plan(cxx, cxx_flags, None, ())
    wanted = tuple(architectures) or toolchain.visible_architectures()
    numbers = [each.replace(".", "") for each in toolchain.parse_architectures(" ".join(wanted))]
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    nvcc = toolchain.find_nvcc(torch.version.cuda or "")
    return _Plan(cxx, cxx_flags, nvcc, (*_NVCC_FLAGS, *codes))


def _key(content: bytes, plan: _Plan) -> str:
    parts = [
        _FORMAT,
        hashlib.sha256(content).hexdigest(),
        header_hash(CSRC),
        plan.cxx.version,
        plan.cxx_flags,
        plan.nvcc.version if plan.nvcc else "",
        plan.nvcc_flags,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build(source: Path, content: bytes, plan: _Plan, target: Path) -> None:
    """Compile in a folder of its own, then put the library in place at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=str(target.parent)) as folder:
            room = Path(folder)
            # What was read is compiled, under the name that messages should have.
            (room / "functor.h").write_bytes(
                f"#line 1 {json.dumps(str(source))}\n".encode() + content
            )
            (room / "functor.cpp").write_text(_CPU_SOURCE, encoding="utf-8")
            (room / "functor_cuda.cu").write_text(_CUDA_SOURCE, encoding="utf-8")
            for command in _commands(room, plan):
                _run(command, source)
            (room / "functor.so").replace(target)
    except OSError as error:
        raise KernelBuildError(
            f"cannot keep the compiled functor {source}",
            why=str(error),
            next_step=f"make room in {target.parent}, or set XDG_CACHE_HOME to another folder",
        ) from error


def _commands(room: Path, plan: _Plan) -> List[List[str]]:
    include = [f"-I{CSRC}", f"-I{room}"]
    cpu, library = str(room / "functor.o"), str(room / "functor.so")
    compile_cpu = [plan.cxx.path, *plan.cxx_flags, *include, "-c", str(room / "functor.cpp")]
    commands = [[*compile_cpu, "-o", cpu]]
    if plan.nvcc is None:
        return [*commands, [plan.cxx.path, "-shared", "-s", cpu, "-o", library]]
    start, cuda = [plan.nvcc.path, "-ccbin", plan.cxx.path], str(room / "functor_cuda.o")
    commands.append(
        [*start, *plan.nvcc_flags, *include, "-c", str(room / "functor_cuda.cu"), "-o", cuda]
    )
    # As build.py links: a static runtime, its symbols hidden.
    hidden = ["-cudart", "static", "-Xlinker=--exclude-libs,ALL", "-Xlinker=-s"]
    return [*commands, [*start, *hidden, "-shared", cpu, cuda, "-o", library]]


def _run(command: Sequence[str], source: Path) -> None:
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
    if done.returncode != 0:
        raise KernelBuildError(
            f"the functor {source} does not compile",
            why=_about(done.stdout, str(source)),
            next_step="it needs `struct Multiply { MAC_INLINE float operator()(float a, float b) "
            "const; };` and to stand alone; on a GPU, what it calls must be device code",
        )


def _about(output: str, name: str) -> str:
    """The compiler's lines about the user's file; where there are none, its errors.

    A message starts at the left margin; what it quotes is indented.
    """
    kept, keep = [], False
    for line in output.splitlines():
        if line and not line[0].isspace():
            keep = line.startswith(name)
        if keep:
            kept.append(line)
    if not kept:
        kept = [line for line in output.splitlines() if "error" in line] or output.splitlines()
    return "\n".join(kept[:_MOST_LINES]).strip()
