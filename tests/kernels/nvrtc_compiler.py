"""NVRTC 11.8 through ctypes: the newest compiler on PyPI that still makes code for 7.0 and 7.2.

The package `nvidia-cuda-nvrtc-cu11==11.8.89` (21 MB) is a declared test dependency; nvcc 13 refuses
those capabilities, and a whole CUDA 11 toolkit is 3 GB.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

INSTALL = "python -m pip install nvidia-cuda-nvrtc-cu11==11.8.89"


class NvrtcError(Exception):
    """NVRTC is missing or refused a program; the message has its log."""


def find_library(search_path=None):
    """The libnvrtc of the package, from this interpreter's site-packages."""
    for entry in sys.path if search_path is None else search_path:
        folder = Path(entry) / "nvidia" / "cuda_nvrtc" / "lib"
        for library in sorted(folder.glob("libnvrtc.so.*")):
            return library
    raise NvrtcError(f"NVRTC 11.8 is not installed; install it with: {INSTALL}")


@contextlib.contextmanager
def _kept_locale():
    """NVRTC gives its caller's thread the locale C, in which Python reads files as ASCII from then
    on. `locale.setlocale` does not see that: it speaks of the process's locale."""
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.restype, uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


class Nvrtc:
    """One loaded NVRTC."""

    def __init__(self, library):
        # The builtins library lies beside it, where the loader does not look by itself.
        for builtins in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self):
        """(major, minor)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def compile(self, source, capability, include):
        """Machine code (a cubin) of the file `source` for a capability such as `7.2`.

        Raises NvrtcError with the compiler's log.
        """
        program = ctypes.c_void_p()
        text = source.read_bytes()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), text, source.name.encode(), 0, None, None
            )
        )
        options = [
            f"--gpu-architecture=sm_{capability.replace('.', '')}".encode(),
            b"--std=c++14",
            f"--include-path={include}".encode(),
        ]
        try:
            array = (ctypes.c_char_p * len(options))(*options)
            with _kept_locale():
                code = self._library.nvrtcCompileProgram(program, len(options), array)
            if code != 0:
                raise NvrtcError(self._read(program, "ProgramLog").decode())
            return self._read(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program, what):
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, code):
        if code != 0:
            raise NvrtcError(self._library.nvrtcGetErrorString(code).decode())
