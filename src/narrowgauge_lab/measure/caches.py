"""How large a device's last cache is, and what empties it."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from narrowgauge_contract.errors import NotApplicableError

__all__ = ["cpu_cache_bytes", "flush_buffer", "flusher", "gpu_cache_bytes"]

#: Buffer over cache: one full cache may stay in part, where replacement is not strictly by age.
_TIMES = 2
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE of cuda.h; torch tells it only since 2.3.
_L2_CACHE_SIZE = 38
_SYSCONF = ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")


def cpu_cache_bytes(sysfs: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The CPU's last-level cache. Raises NotApplicableError where neither sysfs nor libc knows."""
    sizes = []
    for path in sysfs.glob("index*/size"):
        found = re.match(r"(\d+)([KMG]?)", path.read_text(encoding="ascii"))
        if found:
            sizes.append(int(found.group(1)) * _UNITS[found.group(2)])
    sizes += [os.sysconf(name) for name in _SYSCONF if name in os.sysconf_names]
    if max(sizes, default=0) <= 0:
        raise NotApplicableError(
            "cold caches cannot be measured here",
            why=f"neither {sysfs} nor the C library knows how large the last-level cache is",
            next_step="measure with hot caches",
        )
    return max(sizes)


def gpu_cache_bytes(device: torch.device, driver: Optional[Any] = None) -> int:
    """The L2 of a CUDA device, asked of the driver, which knows it on every torch and board."""
    library = ctypes.CDLL("libcuda.so.1") if driver is None else driver
    index = torch.cuda.current_device() if device.index is None else device.index
    handle, size = ctypes.c_int(), ctypes.c_int()
    for status in (
        library.cuInit(0),
        library.cuDeviceGet(ctypes.byref(handle), index),
        library.cuDeviceGetAttribute(ctypes.byref(size), _L2_CACHE_SIZE, handle),
    ):
        if status != 0:
            raise RuntimeError(f"CUDA error: the driver answers {status} when asked for its L2")
    return size.value


def flush_buffer(device: torch.device) -> torch.Tensor:
    """uint8 (CUDA) or int64 (CPU), twice as large as the last cache of `device`."""
    if device.type == "cuda":
        return torch.zeros(_TIMES * gpu_cache_bytes(device), dtype=torch.uint8, device=device)
    return torch.zeros(_TIMES * cpu_cache_bytes() // 8, dtype=torch.int64)


def flusher(buffer: torch.Tensor) -> Callable[[], Any]:
    """What empties the caches of the buffer's device; on CUDA it is queued, not awaited.

    On a CPU the buffer is read as well as written: stores alone may go past the cache.
    """
    if buffer.device.type == "cuda":
        return buffer.zero_
    return lambda: buffer.add_(1)
