"""The host's end of every copy: memory that the device reads and writes by itself, or does not.

Page-locked memory comes from torch's own pool of it. Where the kernels' allocator is installed,
every larger CPU tensor is page-locked as it is made, and nothing is copied aside. Where the driver
gives no more, the memory is ordinary: copies wait and are slower, and `notes` says so.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch

from narrowgauge_kernels import pinned

__all__ = ["HostMemory", "channels_last", "dense", "elements", "like"]

#: Addresses that are remembered to be page-locked: far more than a training step has tensors.
_REMEMBERED = 1 << 16
#: How torch and CUDA say that there is no more page-locked memory, or none at all.
_REFUSALS = ("out of memory", "pin memory", "pinned", "cudaHost", "CUDA error")


class HostMemory:
    """Host tensors of one bus. `locks`: whether its copies want page-locked memory.

    `allocate` is called like `torch.empty`, `is_locked` tells of a tensor; tests put their own.
    """

    def __init__(
        self,
        locks: bool,
        allocate: Optional[Callable[..., torch.Tensor]] = None,
        is_locked: Optional[Callable[[torch.Tensor], bool]] = None,
    ) -> None:
        self.locks = locks
        self._empty = allocate or torch.empty
        self._is_locked = is_locked or torch.Tensor.is_pinned
        #: From this size in bytes on, page-locked memory was refused.
        self._refused_from: Optional[int] = None
        self._notes: Dict[str, int] = {}
        self._locked: Set[int] = set()
        self._staging: Dict[Tuple[str, torch.dtype], torch.Tensor] = {}

    def fresh(
        self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool = False
    ) -> torch.Tensor:
        """Memory for whoever gets the result, page-locked where it can be."""
        form = torch.channels_last if channels_last else torch.contiguous_format
        return self._made(tuple(shape), dtype, form)

    def staging(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory of the bus's own, [count], the same at each call: whoever writes it again
        has waited for what reads it."""
        key = (name, dtype)
        kept = self._staging.get(key)
        if kept is None or kept.numel() < count:
            kept = self._staging[key] = self._made((count,), dtype)
        return kept[:count]

    def locked(self, tensor: torch.Tensor) -> bool:
        """Whether the device may copy from here while the host goes on."""
        if not _locks_by_itself():
            return self._is_locked(tensor)
        # The allocator's memory stays page-locked for good, and asking the driver takes 3 us.
        address = tensor.data_ptr()
        if address in self._locked:
            return True
        found = self._is_locked(tensor)
        if found:
            if len(self._locked) >= _REMEMBERED:
                self._locked.clear()
            self._locked.add(address)
        return found

    def page_locking(self) -> str:
        """Who page-locks: nobody, torch's pool of such memory, or the kernels' allocator."""
        if not self.locks:
            return "none"
        return "all CPU tensors" if _locks_by_itself() else "torch's pool"

    def notes(self) -> List[str]:
        """What went otherwise than asked, for the record; empty where nothing did."""
        found = [f"{text} ({count} times)" for text, count in self._notes.items()]
        if self.locks and _locks_by_itself():
            seen = _statistics()
            if seen.pageable_allocations:
                found.append(
                    f"the allocator gave pageable memory {seen.pageable_allocations} times, "
                    f"{seen.pageable_bytes} bytes in all: beyond its limit of {seen.limit}, or the "
                    "driver gave no more"
                )
        return found

    def note(self, text: str) -> None:
        self._notes[text] = self._notes.get(text, 0) + 1

    def _made(
        self,
        shape: Tuple[int, ...],
        dtype: torch.dtype,
        form: torch.memory_format = torch.contiguous_format,
    ) -> torch.Tensor:
        if not self.locks or _locks_by_itself():
            return self._empty(shape, dtype=dtype, memory_format=form)
        size = elements(shape) * torch.empty(0, dtype=dtype).element_size()
        if self._refused_from is None or size < self._refused_from:
            try:
                return self._empty(shape, dtype=dtype, memory_format=form, pin_memory=True)
            except RuntimeError as error:
                if not any(word in str(error) for word in _REFUSALS):
                    raise
                self._refused_from = size
                reason = str(error).partition("\n")[0]
                self.note(f"no page-locked memory from {size} bytes on: {reason}")
        self.note("pageable memory used in place of page-locked")
        return self._empty(shape, dtype=dtype, memory_format=form)


def _locks_by_itself() -> bool:
    """Whether the kernels' allocator page-locks all CPU tensors."""
    return bool(pinned.is_installed())


def _statistics() -> Any:
    return pinned.statistics()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its batch outermost and no gaps: contiguous, or channels_last."""
    if tensor.is_contiguous() or channels_last(tensor):
        return tensor
    return tensor.contiguous()


def channels_last(tensor: torch.Tensor) -> bool:
    """Whether it is [B, C, H, W] with C innermost and not also contiguous."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def like(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`flat` with the shape and strides of a dense tensor of as many elements."""
    return flat.as_strided(tensor.shape, tensor.stride())


def elements(shape: Sequence[int]) -> int:
    """Of a tensor with that shape."""
    total = 1
    for size in shape:
        total *= size
    return total
