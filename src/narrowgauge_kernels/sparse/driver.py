"""The CUDA driver by ctypes: modules of machine code, and launches on a stream.

The contexts are the devices' primary ones, which torch uses too. A thread in which torch has done
nothing yet has none; `make_current` gives it one, and the other calls expect it.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple, Union

from narrowgauge_kernels.sparse.errors import DeviceError

__all__ = ["CudaDriver", "Function", "Pointer"]

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WITHOUT_OPT_IN = 49152
#: What the system keeps of a block's shared memory, on 8.0 and later.
_RESERVED = 1024


@dataclasses.dataclass(frozen=True)
class Pointer:
    """An address on the device, or 0."""

    address: int


Argument = Union[Pointer, int]


@dataclasses.dataclass(frozen=True)
class Function:
    """A kernel of a loaded module."""

    name: str
    handle: Any


class CudaDriver:
    """libcuda. Raises DeviceError where there is none, or where it refuses what it is asked."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(
                "the CUDA driver is not here",
                why=str(error),
                next_step="a host with an NVIDIA GPU and driver",
            ) from error
        self._functions: Dict[Tuple[str, str, int], Function] = {}
        self._modules: Dict[Tuple[str, int], ctypes.c_void_p] = {}
        self._contexts: Dict[int, ctypes.c_void_p] = {}

    def make_current(self, device: int) -> None:
        """Give this thread the device's primary context, where it has none."""
        current = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", ctypes.byref(current))
        if current.value:
            return
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._check("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        self._check("cuCtxSetCurrent", self._contexts[device])

    def function(self, code: Path, name: str, shared_bytes: int, device: int) -> Function:
        """A kernel of a file of machine code, loaded once for each device, which is current."""
        key = (f"{code}:{shared_bytes}", name, device)
        if key not in self._functions:
            module = self._module(code, device)
            handle = ctypes.c_void_p()
            self._check("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
            if shared_bytes + _RESERVED > _WITHOUT_OPT_IN:
                self._check(
                    "cuFuncSetAttribute", handle, ctypes.c_int(_MAX_DYNAMIC_SHARED),
                    ctypes.c_int(shared_bytes),
                )  # fmt: skip
            self._functions[key] = Function(name, handle)
        return self._functions[key]

    def launch(
        self,
        function: Function,
        grid: Tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Put a launch on the stream; nothing is waited for."""
        values = [
            ctypes.c_void_p(each.address) if isinstance(each, Pointer) else ctypes.c_uint(each)
            for each in arguments
        ]
        places = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        sizes = [ctypes.c_uint(each) for each in (*grid, 1, threads, 1, 1, shared_bytes)]
        self._check(
            "cuLaunchKernel", function.handle, *sizes, ctypes.c_void_p(stream), places, None
        )

    def _module(self, code: Path, device: int) -> ctypes.c_void_p:
        key = (str(code), device)
        if key not in self._modules:
            module = ctypes.c_void_p()
            self._check("cuModuleLoadData", ctypes.byref(module), code.read_bytes())
            self._modules[key] = module
        return self._modules[key]

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DeviceError(f"{name} failed with {code}", why=reason)
