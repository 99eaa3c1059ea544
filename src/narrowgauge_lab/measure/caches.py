"""How large a device's last caches are, and what empties them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError

__all__ = ["cpu_cache_bytes", "cpu_flush_bytes", "flush_buffer", "flusher", "gpu_cache_bytes"]

#: Buffer over cache: one full cache may stay in part, where replacement is not strictly by age.
_TIMES = 2
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE of cuda.h; torch tells it only since 2.3.
_L2_CACHE_SIZE = 38
_SYSFS = Path("/sys/devices/system/cpu")
#: The level of what a core has to itself where a last level is shared.
_PRIVATE = 2


def cpu_cache_bytes(sysfs: Path = _SYSFS) -> int:
    """All last-level caches of the CPUs together; a server's has several.

    Raises NotApplicableError where sysfs tells of none.
    """
    caches = _cpu_caches(sysfs)
    last = max(level for level, _ in caches)
    return sum(size for (level, _), size in caches.items() if level == last)


def cpu_flush_bytes(sysfs: Path = _SYSFS) -> int:
    """What has to be written to empty the CPU's caches: the last level twice, and below it each
    core's own L2 once, which may hold what the last level does not. Raises NotApplicableError."""
    caches = _cpu_caches(sysfs)
    below = any(level > _PRIVATE for level, _ in caches)
    own = sum(size for (level, _), size in caches.items() if below and level == _PRIVATE)
    return _TIMES * cpu_cache_bytes(sysfs) + own


def _cpu_caches(sysfs: Path) -> Dict[Tuple[int, str], int]:
    """Bytes by level and by the CPUs that share the cache, so that each is there once."""
    caches: Dict[Tuple[int, str], int] = {}
    for index in sysfs.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, cpus, size = (_read(index / name) for name in ("level", "shared_cpu_list", "size"))
        found = re.match(r"(\d+)([KMG]?)", size)
        if found and level.isdigit() and _read(index / "type") != "Instruction":
            caches[(int(level), cpus)] = int(found.group(1)) * _UNITS[found.group(2)]
    if not any(caches.values()):
        raise NotApplicableError(
            "cold caches cannot be measured here",
            why=f"{sysfs} does not tell how large the last-level caches are",
            next_step="measure with hot caches",
        )
    return caches


def _read(path: Path) -> str:
    """A word of sysfs; empty where this kernel has no such file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


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
    """uint8 (CUDA) or int64 (CPU), larger than the caches of `device` by enough to empty them."""
    if device.type == "cuda":
        return torch.zeros(_TIMES * gpu_cache_bytes(device), dtype=torch.uint8, device=device)
    return torch.zeros(cpu_flush_bytes() // 8, dtype=torch.int64)


def flusher(buffer: torch.Tensor) -> Callable[[], Any]:
    """What empties the caches of the buffer's device; on CUDA it is queued, not awaited.

    On a CPU the buffer is read as well as written: stores alone may go past the cache.
    """
    if buffer.device.type == "cuda":
        return buffer.zero_
    return lambda: buffer.add_(1)
