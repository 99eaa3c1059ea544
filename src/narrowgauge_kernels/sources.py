"""Which files make which library, and with which flags: the build as data.

A file's name says how it is compiled: `*_avx2.cpp`, `*_avx512*.cpp` and `*_neon.cpp` for one
instruction set on one machine, `*_cuda.cpp` and `cuda/*.cu` for the CUDA library, the rest for
every processor. A new operator's files are found by being there.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import platform
from pathlib import Path
from typing import Tuple

from narrowgauge_kernels.toolchain import TorchFacts

__all__ = [
    "CSRC",
    "FORMAT",
    "Library",
    "Tool",
    "Unit",
    "default_directory",
    "header_hash",
    "library_name",
    "source_hash",
    "units",
]

#: Of build.json. 1: source_hash, torch, machine, compilers, cuda_architectures, flags, libraries.
FORMAT = 1

CSRC = Path(__file__).parent / "csrc"

#: Files beside csrc that decide what is built.
_RECIPE = ("build.py", "sources.py")

#: suffix of the stem -> machines it is for, flags. Never -march=native: the build machine is not
#: the machine that runs it.
_INSTRUCTION_SETS = {
    "_avx2": (("x86_64", "amd64"), ("-mavx2", "-mfma")),
    "_avx512": (("x86_64", "amd64"), ("-mavx512f", "-mfma")),
    "_avx512bw": (("x86_64", "amd64"), ("-mavx512f", "-mavx512bw", "-mfma")),
    "_avx512vnni": (("x86_64", "amd64"), ("-mavx512f", "-mavx512bw", "-mavx512vnni", "-mfma")),
    "_neon": (("aarch64", "arm64"), ()),
}

#: No contraction: where a multiply and an add are one rounding, the source says fma.
_CXX_FLAGS = (
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
_NVCC_HOST_FLAGS = ("-O3", "-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden")
#: Device code has no torch header, so it stays at the standard that NVRTC 11.8 and nvcc 13 share.
_NVCC_DEVICE_FLAGS = ("-std=c++14", *_NVCC_HOST_FLAGS)


class Library(str, enum.Enum):
    """The two libraries of a build."""

    CPU = "cpu"
    CUDA = "cuda"


class Tool(str, enum.Enum):
    """What compiles a file."""

    CXX = "cxx"
    NVCC = "nvcc"


@dataclasses.dataclass(frozen=True)
class Unit:
    """One file to compile. `flags` hold no path, so that they can be recorded and compared."""

    source: Path
    library: Library
    tool: Tool
    flags: Tuple[str, ...]
    uses_torch: bool


def default_directory(torch_version: str, machine: str = "") -> Path:
    """Where a build for this torch goes, and where `load` looks, unless told otherwise."""
    return CSRC.parent / "build" / f"torch-{torch_version}-{machine or platform.machine()}"


def library_name(library: Library) -> str:
    """The file that `torch.ops.load_library` takes."""
    return f"narrowgauge_{library.value}.so"


def units(csrc: Path, facts: TorchFacts, architectures: Tuple[str, ...]) -> Tuple[Unit, ...]:
    """Every file to compile for this torch; without architectures, the CPU library's only."""
    found = []
    for source in sorted(csrc.rglob("*.cpp")):
        if source.stem.endswith("_cuda"):
            if architectures:
                flags = (*_torch_flags(facts), *_NVCC_HOST_FLAGS)
                found.append(Unit(source, Library.CUDA, Tool.NVCC, flags, uses_torch=True))
            continue
        machines, extra = _instruction_set(source.stem)
        if not machines or facts.machine in machines:
            flags = (*_torch_flags(facts), *_CXX_FLAGS, *extra)
            found.append(Unit(source, Library.CPU, Tool.CXX, flags, uses_torch=True))
    if architectures:
        flags = (*_NVCC_DEVICE_FLAGS, *(_code_flag(name) for name in architectures))
        for source in sorted(csrc.rglob("*.cu")):
            found.append(Unit(source, Library.CUDA, Tool.NVCC, flags, uses_torch=False))
    return tuple(found)


def source_hash(package: Path = CSRC.parent) -> str:
    """sha256 over the C++ and CUDA sources and the recipe, by name and content."""
    digest = hashlib.sha256()
    files = [path for path in (package / "csrc").rglob("*") if path.is_file()]
    files += [package / name for name in _RECIPE]
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def header_hash(csrc: Path) -> str:
    """sha256 over the headers: any of them may be in any file."""
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in (".h", ".cuh")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _torch_flags(facts: TorchFacts) -> Tuple[str, ...]:
    return (f"-std={facts.standard}", f"-D_GLIBCXX_USE_CXX11_ABI={int(facts.cxx11_abi)}")


def _instruction_set(stem: str) -> Tuple[Tuple[str, ...], Tuple[str, ...]]:
    for suffix, (machines, flags) in _INSTRUCTION_SETS.items():
        if stem.endswith(suffix):
            return machines, flags
    return (), ()


def _code_flag(architecture: str) -> str:
    number = architecture.replace(".", "")
    return f"-gencode=arch=compute_{number},code=sm_{number}"
