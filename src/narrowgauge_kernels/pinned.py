"""CPU tensors in page-locked memory: what a GPU copies at full rate, and its kernels reach.

`install` makes torch's allocator of CPU memory one that gives blocks of a pool, for the life of
the process. Blocks are of size classes (powers of two, and halfway between), asked of the CUDA
driver as they are needed, up to a limit, and kept for the next tensor of their class. Beyond the
limit, or where the driver gives no more, tensors lie in ordinary memory; `statistics` counts those.
Tensors of less than 4 KiB always do.

torch does not know that a copy with `non_blocking=True` still reads a tensor of the pool when the
last reference to it goes: `keep` it. Our own operators keep theirs.

A forked child has no pool: it allocates as if nothing had been installed.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Dict, Optional

import torch

from narrowgauge_kernels.errors import KernelsError
from narrowgauge_kernels.library import require

__all__ = ["PinnedStatistics", "install", "is_installed", "keep", "statistics"]

#: The process that `install` succeeded in. The allocator stays in torch, so this is no argument.
_installed: Dict[str, Optional[int]] = {"process": None}


@dataclasses.dataclass(frozen=True)
class PinnedStatistics:
    """Since `install`, in bytes. The first four are of whole blocks, and exact.

    held                  page-locked by the pool; it never shrinks
    used                  of it, in tensors, or read or written by a stream still
    peak                  the most that was used at any time
    limit                 of what may be held
    pageable_bytes        asked for, all told, and given in ordinary memory for want of blocks
    pageable_allocations  how often
    """

    held: int
    used: int
    peak: int
    limit: int
    pageable_bytes: int
    pageable_allocations: int


def install(limit_bytes: int, device: Optional[int] = None) -> None:
    """Give page-locked memory to the CPU tensors of this process from now on, up to a limit.

    The memory is asked for on one CUDA device (None: the current one), and every device reaches it.
    A second call changes the limit, and asks a driver again that had refused.

    Raises KernelsNotBuiltError where the kernels are built for the CPU only, and RuntimeError where
    there is no CUDA device, or where the driver gives no page-locked memory at all.
    """
    require("cuda")
    torch.cuda.init()
    index = torch.cuda.current_device() if device is None else device
    torch.ops.narrowgauge.pinned_install(limit_bytes, index)
    _installed["process"] = os.getpid()


def is_installed() -> bool:
    """Whether CPU tensors of this process are page-locked; not so in a child that it forked."""
    return _installed["process"] == os.getpid()


def statistics() -> PinnedStatistics:
    """What the pool holds, and what it could not give. Raises KernelsError where there is none."""
    if not is_installed():
        raise KernelsError(
            "no page-locked memory is installed in this process",
            next_step="call narrowgauge_kernels.pinned.install in it first",
        )
    return PinnedStatistics(*torch.ops.narrowgauge.pinned_statistics())


def keep(tensor: torch.Tensor, stream: Optional[torch.cuda.Stream] = None) -> bool:
    """Keep the memory of a CPU tensor until what is queued on the stream (None: the current one) is
    done, even if nobody holds the tensor; for good where the stream is being captured.

    Whether it is the pool's: any other tensor is left alone.
    """
    if not is_installed():
        return False
    chosen = torch.cuda.current_stream() if stream is None else stream
    index = chosen.device.index
    return bool(torch.ops.narrowgauge.pinned_keep(tensor, index, chosen.cuda_stream))
