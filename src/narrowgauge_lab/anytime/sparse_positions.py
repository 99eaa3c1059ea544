"""Convolutions at some positions of a map only: gather, multiply, scatter.

Maps lie as rows [cells, C], one row per position, in images that carry a border of zeros: so the
3×3 neighbourhood of a position is its row and eight others at fixed distances, and no position is a
special case. A convolution at n positions is then im2col of these alone (one `index_select`), one
matrix product, and one scatter; what it costs follows n. `narrowgauge_kernels` does all three in
one loop without the matrix of im2col, where it is built for the device.

Positions are lists of rows. torch's operators need their length on the host: on a GPU each new list
is a synchronisation (`nonzero`). The compiled ones also take lists with room to spare, whose length
is on the device (`count`), and make them; so does `narrowgauge_lab.anytime.systems.fixed_sact`.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch
import torch.nn.functional as F

from narrowgauge_kernels import position_conv
from narrowgauge_kernels.library import has_kernels

__all__ = [
    "Grid", "Listed", "Matrix", "add_at", "compiled_for", "convolve_at", "matrix_of", "set_at",
]  # fmt: skip

#: im2col in pieces that stay in a processor's cache; on a GPU in one.
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A 3×3 convolution as a product: `weight` [9 · C, F], taps first; `bias` [F]. `window`: the
    same for a convolution of whole maps, [F, C, 3, 3]. `packed`: for the compiled loops of
    `narrowgauge_kernels`, where they do it; None: torch's operators do."""

    weight: torch.Tensor
    bias: torch.Tensor
    window: torch.Tensor
    packed: Optional[torch.Tensor] = None


def compiled_for(weight: torch.Tensor) -> bool:
    """Whether the compiled loops can do it: float32, on a device that they are built for."""
    device = weight.device.type
    fits = device in ("cpu", "cuda") and weight.dtype == torch.float32
    return fits and has_kernels(device)


@dataclasses.dataclass(frozen=True)
class Listed:
    """Positions int64 [n], of which the first `count`, int64 [1] on their device, are meant; None:
    all are."""

    positions: torch.Tensor
    count: Optional[torch.Tensor] = None

    def exact(self) -> torch.Tensor:
        """Those that are meant alone; waits for the device where their number is there."""
        return self.positions if self.count is None else self.positions[: int(self.count)]


def matrix_of(
    weight: torch.Tensor,
    scale: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    compiled: bool,
) -> Matrix:
    """Of weights [F, C, 3, 3], each filter times `scale` [F] (batch normalisation after it)."""
    window = weight.detach().clone() if scale is None else weight.detach() * scale.view(-1, 1, 1, 1)
    filters = window.shape[0]
    turned = window.permute(2, 3, 1, 0).reshape(-1, filters).contiguous()
    zeros = torch.zeros(filters, dtype=window.dtype, device=window.device)
    last = window.contiguous(memory_format=torch.channels_last)
    packed = position_conv.packed(turned.view(9, -1, filters)) if compiled else None
    return Matrix(turned, zeros if bias is None else bias.detach().clone(), last, packed)


class Grid:
    """Where the positions of `batch` images of height × width are among rows.

    `inside`: bool [cells], false on the borders; `everywhere`: int64, all positions. `compiled`:
    lists are made by `narrowgauge_kernels`.
    """

    def __init__(
        self, batch: int, height: int, width: int, device: torch.device, compiled: bool = False
    ) -> None:
        self.batch, self.height, self.width = batch, height, width
        self.compiled = compiled
        self.stride = width + 2
        self.image = (height + 2) * self.stride
        self.cells = batch * self.image
        steps = (-1, 0, 1)
        self.taps = [down * self.stride + across for down in steps for across in steps]
        self._taps = torch.tensor([self.taps], device=device)
        inside = torch.zeros(batch, height + 2, self.stride, dtype=torch.bool, device=device)
        inside[:, 1:-1, 1:-1] = True
        self.inside = inside.view(-1)
        self.everywhere = self.every(1)

    def every(self, stride: int) -> torch.Tensor:
        """Positions of each `stride`-th row and column, from the first on."""
        images = torch.arange(self.batch, device=self.inside.device) * self.image
        down = torch.arange(1, self.height + 1, stride, device=self.inside.device) * self.stride
        across = torch.arange(1, self.width + 1, stride, device=self.inside.device)
        return (images.view(-1, 1, 1) + down.view(-1, 1) + across).view(-1)

    def rows(self, channels: int, like: torch.Tensor) -> torch.Tensor:
        """Rows of zeros, [cells, channels]."""
        return like.new_zeros(self.cells, channels)

    def images(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows without their borders as a view [B, h, w, C]."""
        whole = rows.view(self.batch, self.height + 2, self.stride, rows.shape[1])
        return whole[:, 1:-1, 1:-1]

    def near(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the neighbourhoods of positions [n], taps in order: [n · 9]."""
        return (positions.view(-1, 1) + self._taps).view(-1)

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """bool [cells], true at positions."""
        found = torch.zeros(self.cells, dtype=torch.bool, device=positions.device)
        return found.index_fill_(0, positions, True)

    def dilated(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions and their neighbours, in order."""
        if self.compiled:
            return position_conv.positions_near(positions, self.taps, self.inside)
        return self.spread(self.mask(positions)).nonzero().view(-1)

    def near_to(self, positions: torch.Tensor) -> Listed:
        """What `dilated` gives, for the compiled loops without waiting for a GPU."""
        if not (self.compiled and positions.is_cuda):
            return Listed(self.dilated(positions))
        room = len(self.everywhere)
        return Listed(*position_conv.near_list(positions, self.taps, self.inside, room))

    def spread(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask bool [cells], false on the borders, dilated by 3×3; false on the borders."""
        across = self._widened(mask, 1)
        return self._widened(across, self.stride).logical_and_(self.inside)

    @staticmethod
    def _widened(mask: torch.Tensor, step: int) -> torch.Tensor:
        wider = mask.clone()
        wider[step:] |= mask[:-step]
        wider[:-step] |= mask[step:]
        return wider

    def image_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Which image each position is of, int64 [n]."""
        return torch.div(positions, self.image, rounding_mode="floor")

    def per_image(self, positions: torch.Tensor) -> torch.Tensor:
        """How many of the positions each image has, float64 [B]."""
        counts = torch.bincount(self.image_of(positions), minlength=self.batch)
        return counts.double()


def convolve_at(
    grid: Grid, rows: torch.Tensor, positions: torch.Tensor, matrix: Matrix, slope: float = 1.0,
    count: Optional[torch.Tensor] = None,
) -> torch.Tensor:  # fmt: skip
    """A 3×3 convolution of rows [cells, C] (borders zero) at n positions only, and a leaky ReLU:
    [n, F]. `slope` 1: without. `count`: see `Listed`; by the compiled loops only, and what is past
    it is anything."""
    if matrix.packed is not None:
        return position_conv.run_packed(
            rows, positions, matrix.packed, matrix.bias, grid.taps, slope, count
        )
    assert count is None, "torch's operators take lists of known length"
    listed, channels = positions.shape[0], rows.shape[1]
    result = rows.new_empty(listed, matrix.weight.shape[1])
    piece = max(1, listed)
    if rows.device.type == "cpu":
        piece = max(1, _CHUNK_BYTES // (9 * channels * rows.element_size()))
    for start in range(0, listed, piece):
        some = positions[start : start + piece]
        columns = rows.index_select(0, grid.near(some)).view(len(some), 9 * channels)
        torch.addmm(matrix.bias, columns, matrix.weight, out=result[start : start + piece])
    return result if slope == 1.0 else F.leaky_relu_(result, slope)


def set_at(
    grid: Grid, rows: torch.Tensor, positions: torch.Tensor, matrix: Matrix, slope: float,
    out: torch.Tensor, count: Optional[torch.Tensor] = None,
) -> None:  # fmt: skip
    """Put what `convolve_at` gives into the rows `out` [cells, F] at positions."""
    if matrix.packed is not None:
        position_conv.set_at(
            rows, positions, matrix.packed, matrix.bias, grid.taps, slope, out, count
        )
        return
    out.index_copy_(0, positions, convolve_at(grid, rows, positions, matrix, slope, count))


def add_at(
    grid: Grid, rows: torch.Tensor, positions: torch.Tensor, matrix: Matrix, share: torch.Tensor,
    state: torch.Tensor, total: torch.Tensor, count: Optional[torch.Tensor] = None,
) -> None:  # fmt: skip
    """Add what `convolve_at` gives to the rows `state` [cells, F] at positions, and times `share`
    [n] to the rows `total`."""
    if matrix.packed is not None:
        position_conv.add_at(
            rows, positions, matrix.packed, matrix.bias, grid.taps, share, state, total, count
        )
        return
    result = convolve_at(grid, rows, positions, matrix, count=count)
    state.index_add_(0, positions, result)
    total.index_add_(0, positions, result.mul_(share.view(-1, 1)))
