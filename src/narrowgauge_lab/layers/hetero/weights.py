"""Weights on the device: sent when they changed, many in one copy where they share one tensor.

A parameter has changed when it is another tensor, lies elsewhere, or its version counter rose. A
parameter that is a *part* of a larger tensor, as `FlatOptimizer` makes them, has a counter of its
own: writes to the whole do not raise it (assigning `.data` keeps the parameter's counter and leaves
the whole's behind). So the whole has to be shown to `watch`, whose counter then tells, and goes up
in one copy. A part of something that nobody showed is sent at every call: late is wrong, twice is
only slow. Writes through `.data` raise no counter at all: `forget` is for them.
"""

from __future__ import annotations

from typing import Any, List, Optional

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.ledger import ALL_LAYERS, Ledger

__all__ = ["Slot", "Weights"]


class _Copied:
    """What is kept of one tensor: its copy on the device, and page-locked memory to send it from
    where it has none of its own."""

    def __init__(self) -> None:
        self.far: Optional[torch.Tensor] = None
        self.staged: Optional[torch.Tensor] = None


class Slot(_Copied):
    """One parameter's place. `whole` is the watched tensor that it is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor: Optional[torch.Tensor] = None
        self.address = self.version = self.generation = -1
        self.whole: Optional[_Whole] = None
        #: The parameter on the device, a part of what is copied there or the copy itself.
        self.view: Optional[torch.Tensor] = None
        #: What `view` is a part of, and the address of the parameter that it is the copy of.
        self.part_of: Optional[torch.Tensor] = None
        self.part_for = -1


class _Whole(_Copied):
    """A watched tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = values
        self.version = self.generation = -1
        self.begin = values.data_ptr()
        self.end = self.begin + values.numel() * values.element_size()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether all of a parameter lies in it, in one piece."""
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        same = tensor.is_contiguous() and tensor.dtype == self.values.dtype
        return same and self.begin <= begin and end <= self.end


class Weights:
    """All parameters that one bus sends. Copies are queued on the current stream."""

    def __init__(
        self,
        device: torch.device,
        host: HostMemory,
        ledger: Ledger,
        *,
        each_call: bool,
        waits: bool,
    ) -> None:
        """`each_call`: send whether it changed or not; `waits`: copies are not to overlap."""
        self._device, self._host, self._ledger = device, host, ledger
        self._each_call, self._waits = each_call, waits
        self._wholes: List[_Whole] = []
        self._generation = 0

    def watch(self, values: torch.Tensor) -> None:
        """A flat tensor that parameters are views of, and that is written as a whole. It replaces
        those watched before that it overlaps."""
        new = _Whole(values.detach())
        apart = [old for old in self._wholes if old.end <= new.begin or new.end <= old.begin]
        self._wholes = [*apart, new]
        self.forget()

    def forget(self) -> None:
        """Send everything anew at its next use."""
        self._generation += 1

    def on_device(
        self, slot: Slot, tensor: torch.Tensor, layer: str, pass_: str, stream: Any
    ) -> torch.Tensor:
        """The parameter as it is now, on the device, once the current stream gets there."""
        whole, view = slot.whole, slot.view
        if (
            view is not None
            and slot.tensor is tensor
            and slot.address == tensor.data_ptr()
            and slot.version == tensor._version
            and slot.generation == self._generation
            and (whole is None or whole.version == whole.values._version)
            and not self._each_call
        ):
            return view
        slot.tensor, slot.address, slot.version = tensor, tensor.data_ptr(), tensor._version
        slot.generation = self._generation
        slot.whole = None if self._each_call else self._around(tensor)
        if slot.whole is None:
            slot.part_of = None
            slot.view = self._send(slot, tensor.detach(), layer, pass_, stream)
            if torch_compat.storage_bytes(tensor) != tensor.numel() * tensor.element_size():
                slot.generation = -1
        else:
            slot.view = self._part(slot, slot.whole, tensor, pass_, stream)
        return slot.view

    def _around(self, tensor: torch.Tensor) -> Optional[_Whole]:
        return next((whole for whole in self._wholes if whole.has(tensor)), None)

    def _part(
        self, slot: Slot, whole: _Whole, tensor: torch.Tensor, pass_: str, stream: Any
    ) -> torch.Tensor:
        version = whole.values._version
        if whole.far is None or (whole.version, whole.generation) != (version, self._generation):
            self._send(whole, whole.values, ALL_LAYERS, pass_, stream)
            whole.version, whole.generation = version, self._generation
        far, view = whole.far, slot.view
        assert far is not None
        if (
            view is not None
            and slot.part_of is far
            and slot.part_for == slot.address
            and view.shape == tensor.shape
        ):
            return view
        slot.part_of, slot.part_for = far, slot.address
        first = (slot.address - whole.begin) // tensor.element_size()
        return far.view(-1)[first : first + tensor.numel()].view(tensor.shape)

    def _send(
        self, copied: _Copied, near: torch.Tensor, layer: str, pass_: str, stream: Any
    ) -> torch.Tensor:
        if copied.far is None or copied.far.shape != near.shape or copied.far.dtype != near.dtype:
            copied.far = torch.empty(near.shape, dtype=near.dtype, device=self._device)
            copied.staged = None
        size = near.numel() * near.element_size()
        with self._ledger.stage(layer, pass_, "refit", stream=stream, to_device=size):
            near = near.contiguous()
            if self._host.locks and not self._host.locked(near):
                if copied.staged is None:
                    copied.staged = self._host.fresh(near.shape, near.dtype)
                near = copied.staged.copy_(near)
            copied.far.copy_(near, non_blocking=not self._waits)
        return copied.far
