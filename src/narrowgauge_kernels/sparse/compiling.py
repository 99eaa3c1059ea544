"""Machine code of generated sources, kept by content in $XDG_CACHE_HOME/narrowgauge/sparse.

NVRTC where there is one that knows the capability (it takes half the time), else nvcc. The key is
of the source, the capability and the compiler; a source that does not compile is kept beside, and
the error says where.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Callable, Mapping, Optional

from narrowgauge_kernels import toolchain
from narrowgauge_kernels.errors import DiskFullError, KernelBuildError, ToolchainMissingError
from narrowgauge_kernels.sparse.nvrtc import Nvrtc, find_nvrtcs

__all__ = ["Compiler", "cache_directory", "compile_source", "find_compiler", "write_atomic"]

_FORMAT = 1
_NVCC_FLAGS = ("-std=c++14", "-O3", "-cubin")


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What it is, for the key, and source, name, capability -> cubin."""

    identity: str
    compile: Callable[[str, str, str], bytes]


def cache_directory(env: Optional[Mapping[str, str]] = None) -> Path:
    """Where machine code and tuned tiles are kept. A relative XDG_CACHE_HOME counts as none."""
    base = (os.environ if env is None else env).get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "narrowgauge" / "sparse"


@functools.lru_cache(maxsize=None)
def find_compiler(arch: str) -> Compiler:
    """One that makes code for the capability. Raises ToolchainMissingError."""
    libraries = find_nvrtcs()
    tried = []
    for library in libraries:
        try:
            nvrtc = Nvrtc(library)
            version = ".".join(str(part) for part in nvrtc.version())
            known = nvrtc.knows(arch)
        except KernelBuildError as error:  # one of another machine, or without its builtins
            tried.append(f"{error.what} ({library}): {error.why}")
            continue
        if known:
            return Compiler(f"NVRTC {version}", nvrtc.compile)
        tried.append(f"NVRTC {version} ({library}) makes no machine code for {arch}")
    if not libraries:
        tried.append("no libnvrtc beside torch, in the nvidia packages or in /usr/local/cuda")
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        raise ToolchainMissingError(
            f"no compiler of CUDA for compute capability {arch}",
            why="\n".join([*tried, "no nvcc on the PATH or in /usr/local/cuda/bin"]),
            next_step="pip install nvidia-cuda-nvrtc-cu12, or a CUDA toolkit",
        )
    version = toolchain.find_nvcc("").version
    return Compiler(version, functools.partial(_nvcc, path))


def compile_source(
    source: str,
    arch: str,
    env: Optional[Mapping[str, str]] = None,
    compiler: Optional[Compiler] = None,
) -> Path:
    """The file with machine code of the source for a capability; compiled once.

    Raises KernelBuildError, with the path of the source that did not compile, DiskFullError, and
    ToolchainMissingError.
    """
    chosen = compiler or find_compiler(arch)
    parts = json.dumps([_FORMAT, source, arch, chosen.identity])
    key = hashlib.sha256(parts.encode()).hexdigest()[:32]
    folder = cache_directory(env)
    target = folder / f"{key}.cubin"
    if target.is_file():
        return target
    kept = folder / "failed" / f"{key}.cu"
    try:
        code = chosen.compile(source, kept.name, arch)
    except KernelBuildError as error:
        write_atomic(kept, source.encode())
        raise KernelBuildError(
            f"a generated kernel does not compile for {arch}",
            why=f"{chosen.identity}: {error.why}",
            next_step=f"the source is kept: {kept}",
        ) from error
    write_atomic(target, code)
    return target


def write_atomic(path: Path, content: bytes) -> None:
    """At once, so that no reader sees a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=str(path.parent), delete=False) as file:
            file.write(content)
        os.replace(file.name, str(path))
    except OSError as error:
        raise DiskFullError(
            f"{path} cannot be written",
            why=str(error),
            next_step=f"make room in {path.parent}, or set XDG_CACHE_HOME to another folder",
        ) from error


def _nvcc(path: str, source: str, name: str, arch: str) -> bytes:
    number = arch.replace(".", "")
    with tempfile.TemporaryDirectory() as folder:
        written, target = Path(folder) / name, Path(folder) / "code.cubin"
        written.write_text(source, encoding="utf-8")
        code = f"-gencode=arch=compute_{number},code=sm_{number}"
        done = subprocess.run(
            [path, *_NVCC_FLAGS, code, "-o", str(target), str(written)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
        if done.returncode != 0:
            raise KernelBuildError(f"nvcc refused {name}", why=toolchain.tail(done.stdout, 30))
        return target.read_bytes()
