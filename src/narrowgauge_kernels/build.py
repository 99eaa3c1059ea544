"""Build the kernels for one torch, by calling the compilers directly.

    python -m narrowgauge_kernels.build [--torch PYTHON] [--cuda "7.5 9.0a"|none|auto] [--out DIR]

makes narrowgauge_cpu.so, narrowgauge_cuda.so when asked, and build.json. The libraries know no
Python.h: one build serves every Python with that torch. Needs no GPU, no setuptools and no ninja.
What is unchanged, by content, is not compiled again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from narrowgauge_kernels import toolchain
from narrowgauge_kernels.errors import DiskFullError, KernelBuildError, KernelsError
from narrowgauge_kernels.sources import (
    CSRC,
    FORMAT,
    Library,
    Tool,
    Unit,
    default_directory,
    header_hash,
    library_name,
    source_hash,
    units,
)
from narrowgauge_kernels.toolchain import Compiler, TorchFacts

__all__ = ["Request", "build", "main"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to build: `cuda` is `none`, `auto` or capabilities, `out` None the default directory,
    `jobs` 0 one per core. `objects`: where compiled files are kept for other builds too, of any
    torch; None: beside the libraries, and only those that are used."""

    python: str = sys.executable
    cuda: str = "none"
    out: Optional[Path] = None
    compiler: str = "g++"
    jobs: int = 0
    objects: Optional[Path] = None


@dataclasses.dataclass(frozen=True)
class _Toolset:
    """The compilers of one build; nvcc is None for the CPU only."""

    facts: TorchFacts
    cxx: Compiler
    nvcc: Optional[Compiler]
    architectures: Tuple[str, ...]


def build(request: Request, say: Callable[[str], None] = print) -> Path:
    """Compile and link what changed; the directory of the libraries.

    Raises BuildArgumentError, ToolchainMissingError, KernelBuildError, DiskFullError.
    """
    tools = _toolset(request)
    directory = request.out or default_directory(tools.facts.version, tools.facts.machine)
    started = time.monotonic()
    try:
        with _locked(directory):
            changed = _build_locked(directory, tools, request, say)
    except OSError as error:
        raise _disk_error(error, directory) from error
    verdict = f"built in {time.monotonic() - started:.1f} s" if changed else "up to date"
    say(f"kernels for torch {tools.facts.version} {verdict}: {directory}")
    return directory


def _toolset(request: Request) -> _Toolset:
    if request.cuda == "none":
        architectures: Tuple[str, ...] = ()
    elif request.cuda == "auto":
        architectures = toolchain.visible_architectures()
    else:
        architectures = toolchain.parse_architectures(request.cuda)
    cxx = toolchain.find_cxx(request.compiler)
    facts = toolchain.query_torch(request.python)
    nvcc = None
    if architectures:
        if not (Path(facts.library) / "libc10_cuda.so").is_file():
            raise KernelBuildError(
                f"torch {facts.version} of {request.python} is built without CUDA",
                next_step="install a CUDA build of torch, or build for the CPU only: --cuda none",
            )
        nvcc = toolchain.find_nvcc(facts.cuda or "")
    return _Toolset(facts, cxx, nvcc, architectures)


def _build_locked(
    directory: Path, tools: _Toolset, request: Request, say: Callable[[str], None]
) -> bool:
    plan = units(CSRC, tools.facts, tools.architectures)
    kept = request.objects or directory / "objects"
    objects, changed = _compile(kept, plan, tools, request.jobs or os.cpu_count() or 1, say)
    record = _record(plan, objects, tools)
    record_path = directory / "build.json"
    wanted = {unit.library for unit in plan}
    there = {library for library in Library if (directory / library_name(library)).is_file()}
    if _read(record_path) == record and wanted <= there:
        return changed
    # Without build.json a directory is not built: a crash below never leaves libraries that
    # their own description contradicts.
    with contextlib.suppress(FileNotFoundError):
        record_path.unlink()
    for library in there - wanted:
        (directory / library_name(library)).unlink()
    for library in sorted(wanted):
        say(f"link {library_name(library)}")
        made = [objects[unit] for unit in plan if unit.library is library]
        _link(directory / library_name(library), library, made, tools)
    _write_atomic(record_path, json.dumps(record, indent=2, sort_keys=True) + "\n")
    if request.objects is None:
        _prune(kept, objects.values())
    return True


def _compile(
    directory: Path,
    plan: Sequence[Unit],
    tools: _Toolset,
    jobs: int,
    say: Callable[[str], None],
) -> Tuple[Dict[Unit, Path], bool]:
    directory.mkdir(parents=True, exist_ok=True)
    headers = header_hash(CSRC)
    objects = {
        unit: directory / f"{unit.source.stem}.{_key(unit, headers, tools)}.o" for unit in plan
    }
    missing = [unit for unit in plan if not objects[unit].is_file()]

    def compile_one(unit: Unit) -> None:
        started = time.monotonic()
        temporary = objects[unit].with_suffix(f".{os.getpid()}.tmp.o")
        warnings = toolchain.run(
            _compile_command(unit, temporary, tools), f"compiling {unit.source.name}"
        )
        temporary.replace(objects[unit])
        say(f"compile {unit.source.name} ({time.monotonic() - started:.1f} s)")
        if warnings.strip():
            say(warnings.strip())

    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        # Files that include torch take longest; started first, they do not end alone.
        order = sorted(missing, key=lambda unit: not unit.uses_torch)
        for outcome in [pool.submit(compile_one, unit) for unit in order]:
            outcome.result()
    return objects, bool(missing)


def _compile_command(unit: Unit, target: Path, tools: _Toolset) -> List[str]:
    if unit.tool is Tool.NVCC:
        start = [tools.nvcc.path, "-ccbin", tools.cxx.path]
    else:
        start = [tools.cxx.path]
    include = ["-I", str(CSRC)]
    include += ["-isystem", tools.facts.include] if unit.uses_torch else []
    return [*start, *unit.flags, *include, "-c", str(unit.source), "-o", str(target)]


def _link(target: Path, library: Library, objects: Sequence[Path], tools: _Toolset) -> None:
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    command = [*_link_start(library, tools), "-shared", "-o", str(temporary)]
    command += [*map(str, objects), "-L", tools.facts.library, *_link_end(library, tools)]
    toolchain.run(command, f"linking {target.name}")
    temporary.replace(target)


def _link_start(library: Library, tools: _Toolset) -> List[str]:
    if library is Library.CUDA:
        # nvcc knows where its own static runtime is; a static one needs no libcudart of torch's
        # version, and hidden symbols keep it apart from torch's.
        hidden = ["-Xlinker=--exclude-libs,ALL", "-Xlinker=-z,defs", "-Xlinker=-s"]
        return [tools.nvcc.path, "-ccbin", tools.cxx.path, "-cudart", "static", *hidden]
    return [tools.cxx.path, "-Wl,-z,defs", "-s"]


def _link_end(library: Library, tools: _Toolset) -> List[str]:
    if library is Library.CUDA:
        return ["-lc10_cuda", "-ltorch_cpu", "-lc10"]
    # dlopen is a library of its own before glibc 2.34, as in Ubuntu 20.04.
    return ["-ltorch_cpu", "-lc10", tools.facts.openmp or "-fopenmp", "-ldl"]


def _key(unit: Unit, headers: str, tools: _Toolset) -> str:
    compilers = [tools.cxx.version, tools.nvcc.version if tools.nvcc else ""]
    torch = [tools.facts.version, str(tools.facts.cuda)] if unit.uses_torch else []
    source = unit.source.read_text(encoding="utf-8")
    # Compilers for another processor say the same of their version.
    parts = [tools.facts.machine, source, headers, *unit.flags, *compilers, *torch]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _record(plan: Sequence[Unit], objects: Dict[Unit, Path], tools: _Toolset) -> Dict[str, object]:
    libraries: Dict[str, List[str]] = {}
    for unit in plan:
        libraries.setdefault(unit.library.value, []).append(objects[unit].name)
    return {
        "format": FORMAT,
        "source_hash": source_hash(),
        "torch": {
            "version": tools.facts.version,
            "cuda": tools.facts.cuda,
            "cxx11_abi": tools.facts.cxx11_abi,
        },
        "machine": tools.facts.machine,
        "compilers": {
            "cxx": tools.cxx.version,
            "nvcc": tools.nvcc.version if tools.nvcc else None,
        },
        "cuda_architectures": list(tools.architectures),
        "flags": {unit.source.relative_to(CSRC).as_posix(): list(unit.flags) for unit in plan},
        "libraries": libraries,
    }


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _write_atomic(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _prune(directory: Path, keep: Iterable[Path]) -> None:
    for stale in set(directory.iterdir()) - set(keep):
        stale.unlink()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two builds of one directory take turns; the second finds the work done."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _disk_error(error: OSError, directory: Path) -> KernelsError:
    if error.errno == errno.ENOSPC:
        return DiskFullError(
            f"the disk of {directory} is full",
            why=str(error),
            next_step="free 50 MB there, or build elsewhere with --out DIR",
        )
    return KernelBuildError(
        f"cannot write the kernels to {directory}",
        why=str(error),
        next_step="build elsewhere with --out DIR, and say so to `load` by NARROWGAUGE_KERNELS=DIR",
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m narrowgauge_kernels.build",
        description="Build the kernels for one torch. Needs g++, and nvcc for CUDA; no GPU.",
    )
    parser.add_argument(
        "--torch",
        metavar="PYTHON",
        default=sys.executable,
        help="the Python whose torch the kernels are for (default: this one)",
    )
    parser.add_argument(
        "--cuda",
        metavar="CAPABILITIES",
        default="none",
        help='"7.5 8.0 9.0a", none (default), or auto: those of the GPUs of this host',
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: beside the sources")
    parser.add_argument("--compiler", metavar="CXX", default="g++", help="default: g++")
    parser.add_argument("--jobs", metavar="N", type=int, default=0, help="default: one per core")
    parser.add_argument(
        "--objects",
        metavar="DIR",
        type=Path,
        help="keep compiled files here, shared with other builds (default: beside the libraries)",
    )
    chosen = parser.parse_args(arguments)
    request = Request(
        chosen.torch, chosen.cuda, chosen.out, chosen.compiler, chosen.jobs, chosen.objects
    )
    try:
        build(request)
    except KernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
