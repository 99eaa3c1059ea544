"""The memory of a network at one batch size: buffers by value, scales, and what is shared."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from narrowgauge_lab.engines.own.gpu.ahead import Turn
from narrowgauge_lab.engines.own.gpu.formats import NumberFormat
from narrowgauge_lab.engines.own.gpu.lowering import Sizes
from narrowgauge_lab.engines.own.gpu.packing import STEM_PIXEL, PackedWeight
from narrowgauge_lab.engines.own.gpu.placement import Place, Placement, place
from narrowgauge_lab.engines.own.gpu.steps import ConvStep, LinearStep, Plan, sources

__all__ = ["Lane", "Memory", "stem_of"]

#: Rows of a stem's images are multiples of this many pixels: aligned as caches are.
_ROW = 16


def stem_of(plan: Plan, sizes: Sizes) -> Optional[ConvStep]:
    """The convolution that alone reads images of fewer than 4 channels, if there is one: its window
    is walked in runs of whole pixels."""
    readers = [step for step in plan.steps if plan.source in sources(step)]
    size = sizes[plan.source]
    if len(readers) != 1 or len(size) != 3 or size[0] >= STEM_PIXEL:
        return None
    first = readers[0]
    if sum(getattr(step, "module", "") == getattr(first, "module", "") for step in plan.steps) > 1:
        return None  # its weights are packed once
    plain = isinstance(first, ConvStep) and not first.depthwise and first.prologue is None
    return first if plain and first.residual is None else None  # type: ignore[return-value, union-attr]


class Lane:
    """Memory that kernels of one stream share, since they run one after the other. It only grows,
    and what was given out before lives on with its users."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._partial = torch.zeros(0, dtype=torch.float32, device=device)
        self._tickets = torch.zeros(0, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=device)

    def parts(self, elements: int, tiles: int, dtype: torch.dtype) -> Tuple[torch.Tensor, ...]:
        """(partial sums, tickets) for a divided sum; tickets are 0 and have to be left so."""
        if self._partial.numel() < elements:
            self._partial = torch.empty(elements, dtype=torch.float32, device=self._device)
        if self._tickets.numel() < tiles:
            self._tickets = torch.zeros(tiles, dtype=torch.int32, device=self._device)
        return self._partial.view(dtype), self._tickets

    def workspace(self, size: int) -> Optional[torch.Tensor]:
        """At least `size` bytes for a library."""
        if size == 0:
            return None
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._workspace

    def nbytes(self) -> int:
        held = (self._partial, self._tickets, self._workspace)
        return sum(each.numel() * each.element_size() for each in held)


class Memory:
    """Buffers for `batch` images on `device`, one block for all that is stored in the format.

    `images` holds what came in, [N, C, H, W] as `image_dtype`; `input_place` is where it is read
    to, with `border` pixels around it.
    """

    def __init__(
        self,
        plan: Plan,
        sizes: Sizes,
        form: NumberFormat,
        batch: int,
        stem: Optional[PackedWeight],
        device: torch.device,
    ) -> None:
        self.plan, self.sizes, self.form, self.batch, self.device = plan, sizes, form, batch, device
        self.placement: Placement = place(plan, sizes, form, batch)
        # Zeroed once: a block that is read before its first use must hold no NaN.
        wide = form.width
        block = torch.zeros(self.placement.total // wide, dtype=form.dtype, device=device)
        self.buffers = {
            name: block[begin // wide : (begin + self.placement.sizes[name]) // wide]
            for name, begin in self.placement.begins.items()
        }
        self.border, self.input_place = self._input(stem)
        pixels = batch * self.input_place.height * self.input_place.width
        self.buffers[plan.source] = torch.zeros(
            pixels * self.input_place.pixel, dtype=form.dtype, device=device
        )
        self._result: Optional[torch.Tensor] = None
        self._lanes = (Lane(device), Lane(device))
        #: Of whatever is launched next in this memory.
        self.turn = Turn()

    def _input(self, stem: Optional[PackedWeight]) -> Tuple[int, Place]:
        channels, height, width = self.size(self.plan.source)
        if stem is None:
            step = max(1, 16 // self.form.width)
            pixel = -(-channels // step) * step
            return 0, Place(self.plan.source, 0, pixel, channels, height, width)
        border, run = stem.padding, stem.depth // STEM_PIXEL
        out_w = (width + 2 * border - stem.window_width) // stem.stride + 1
        # The last run may end beyond the border: its weights are zero there, but it is read.
        wide = max(width + 2 * border, (out_w - 1) * stem.stride + run)
        wide = -(-wide // _ROW) * _ROW
        return border, Place(self.plan.source, 0, STEM_PIXEL, channels, height + 2 * border, wide)

    def size(self, name: str) -> Tuple[int, int, int]:
        """(channels, height, width) of a value; of a flat one 1 × 1 pixel."""
        size = self.sizes[name]
        return (size[0], size[1], size[2]) if len(size) == 3 else (size[0], 1, 1)

    def place(self, name: str) -> Place:
        return self.input_place if name == self.plan.source else self.placement.places[name]

    def start(self, name: str) -> torch.Tensor:
        """The buffer of a value from its first element on, flat."""
        where = self.place(name)
        return self.buffers[where.buffer][where.offset :]

    def view(self, name: str) -> torch.Tensor:
        """A value as torch sees it: [N, C, H, W], or [N, C] of a flat one."""
        where = self.place(name)
        _, height, width = self.size(name)
        buffer, pixel = self.buffers[where.buffer], where.pixel
        begin = int(buffer.storage_offset()) + where.offset
        if len(self.sizes[name]) == 1:
            return buffer.as_strided((self.batch, where.channels), (pixel, 1), begin)
        if name == self.plan.source:
            begin += self.border * (where.width + 1) * pixel
        return buffer.as_strided(
            (self.batch, where.channels, height, width),
            (where.height * where.width * pixel, 1, where.width * pixel, pixel),
            begin,
        )

    def is_result(self, step: LinearStep) -> bool:
        """Whether a linear layer writes float32 to `result`, whatever the format."""
        return self.plan.is_result(step)

    def result(self) -> torch.Tensor:
        """Float32 [N, ...] for the network's result."""
        if self._result is None:
            size = (self.batch, *self.sizes[self.plan.shaped])
            self._result = torch.zeros(size, dtype=torch.float32, device=self.device)
        return self._result

    def whole(self, name: str) -> torch.Tensor:
        """The images with all that lies in a pixel, and with the border, which has no pixel more
        than its width on any side."""
        where = self.place(name)
        width = self.size(name)[2] + 2 * self.border
        return self.start(name).as_strided(
            (self.batch, where.pixel, where.height, width),
            (where.height * where.width * where.pixel, 1, where.width * where.pixel, where.pixel),
        )

    def lane(self, *, beside: bool) -> Lane:
        """What kernels on one stream share; those that run beside others have their own."""
        return self._lanes[beside]

    def nbytes(self) -> int:
        """Bytes on the device, weights not among them."""
        images = self.buffers[self.plan.source]
        own = images.numel() * images.element_size()
        return self.placement.total + own + sum(lane.nbytes() for lane in self._lanes)
