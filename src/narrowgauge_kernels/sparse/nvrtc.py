"""NVIDIA's run-time compiler by ctypes: from torch's own libraries, a package or a toolkit."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.util
import sys
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence, Tuple

from narrowgauge_kernels.errors import KernelBuildError

__all__ = ["Nvrtc", "find_nvrtcs"]

_OPTIONS = ("--std=c++14", "--fmad=true")


def find_nvrtcs(search_path: Optional[Sequence[str]] = None) -> Tuple[Path, ...]:
    """Each libnvrtc here: torch's own, of the nvidia packages, of a toolkit."""
    folders = []
    for entry in sys.path if search_path is None else search_path:
        folders += sorted((Path(entry) / "nvidia").glob("*/lib"))
    if search_path is None:
        torch = importlib.util.find_spec("torch")
        if torch is not None and torch.origin is not None:
            folders.insert(0, Path(torch.origin).parent / "lib")
        folders.append(Path("/usr/local/cuda/lib64"))
    # Not the builtins, nor the variant that another loader is to prefer.
    found = [
        library
        for folder in folders
        for library in sorted(folder.glob("libnvrtc[.-]*so*"))
        if "builtins" not in library.name and ".alt." not in library.name
    ]
    installed = ctypes.util.find_library("nvrtc") if search_path is None else None
    return (*found, *([Path(installed)] if installed else []))


class Nvrtc:
    """One loaded NVRTC. Raises KernelBuildError where the file does not load."""

    def __init__(self, library: Path) -> None:
        self.path = library
        try:
            # The builtins lie beside it, where the loader does not look by itself.
            for builtins in sorted(library.parent.glob("libnvrtc-builtins*so*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise KernelBuildError(f"{library} does not load", why=str(error)) from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> Tuple[int, int]:
        """(major, minor)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def knows(self, arch: str) -> bool:
        """Whether it makes machine code for a capability such as `9.0`; before CUDA 11.2 there is
        none that says so, and torch 1.8 has some that make none."""
        if not hasattr(self._library, "nvrtcGetSupportedArchs"):
            return False
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        known = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(known))
        return int(arch.rstrip("af").replace(".", "")) in list(known)

    def compile(self, source: str, name: str, arch: str) -> bytes:
        """Machine code (a cubin) of the source. Raises KernelBuildError with the compiler's log."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), 0, None, None
            )
        )
        architecture = f"--gpu-architecture=sm_{arch.replace('.', '')}"
        options = [word.encode() for word in (architecture, *_OPTIONS)]
        try:
            array = (ctypes.c_char_p * len(options))(*options)
            with _kept_locale():
                code = self._library.nvrtcCompileProgram(program, len(options), array)
            if code != 0:
                log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise KernelBuildError(f"NVRTC refused {name}", why=log.strip())
            return self._read(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: Any, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, code: int) -> None:
        if code != 0:
            raise KernelBuildError(
                "NVRTC failed", why=self._library.nvrtcGetErrorString(code).decode()
            )


@contextlib.contextmanager
def _kept_locale() -> Iterator[None]:
    """NVRTC gives its caller's thread the locale C, in which Python reads files as ASCII."""
    uselocale = getattr(ctypes.CDLL(None), "uselocale", None)
    if uselocale is None:
        yield
        return
    uselocale.restype, uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)
