"""Sparse inference without asking the device anything: lists of fixed capacity.

`SparseSact` learns on the host how long each list of positions is, which is a synchronisation of a
GPU, and cannot be captured in a CUDA graph. Here each unit has room for so many positions, found on
calibration images with a margin. All shapes are known, so nothing waits and a pass may be captured.
Where an image needs more room than there is, a flag on the device says so: reading it is the one
wait of a pass, and the answer is then computed by `SparseSact`.

The compiled loops take the length of a list from the device, and make the lists. By torch's
operators one is filled by a running sum and a scatter, and slots that stay empty point at some
position, where what they add is zero.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_kernels import position_conv
from narrowgauge_lab.anytime.sparse_positions import Grid, Listed, convolve_at, set_at
from narrowgauge_lab.anytime.systems.act import EPSILON
from narrowgauge_lab.anytime.systems.sact import SLOPE, AdaptiveResNet, dilated
from narrowgauge_lab.anytime.systems.sparse_sact import (
    Grids,
    Rows,
    Running,
    SparseHead,
    SparseSact,
    SparseUnit,
    everywhere,
)

__all__ = ["FixedSact", "Room", "compact"]


@dataclasses.dataclass(frozen=True)
class Room:
    """Shares of all positions that a unit has room for: itself, and for these dilated."""

    own: float
    near: float


@dataclasses.dataclass
class _Slots:
    """Who computes the coming unit, in slots: `used` bool; the others hold any position and 0."""

    positions: torch.Tensor
    left: torch.Tensor
    used: torch.Tensor


def compact(
    flags: torch.Tensor, values: Sequence[torch.Tensor], fills: Sequence[float], capacity: int
) -> Tuple[List[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Values [m] where flags bool [m] are set, in order, in `capacity` slots each, the rest filled;
    which slots are used, bool; and whether there were too few of them, bool, a scalar."""
    order = flags.cumsum(0)
    target = torch.where(flags & (order <= capacity), order - 1, torch.full_like(order, capacity))
    found = []
    for value, fill in zip(values, fills):
        slots = torch.full((capacity + 1,), fill, dtype=value.dtype, device=value.device)
        found.append(slots.scatter_(0, target, value)[:capacity])
    count = flags.sum()
    used = torch.arange(capacity, device=flags.device) < count
    return found, used, count > capacity


class FixedSact:
    """A network of kind `sact`, as it is now, with room as `calibration` images [B, 3, H, W] need
    it times `margin`. `compiled`, and `by`: see `SparseSact`. Raises BadValueError for another kind
    or a margin that is not above 0.

    A call gives logits [B, classes] and whether the room was too small somewhere, bool on the
    device: then these logits are wrong. `answer` gives right ones always, and waits.
    """

    def __init__(
        self,
        net: AdaptiveResNet,
        calibration: torch.Tensor,
        margin: float = 1.25,
        compiled: Optional[bool] = None,
    ) -> None:
        if not margin > 0:
            raise BadValueError(f"a margin of {margin} leaves no room")
        self._exact = SparseSact(net, compiled=compiled)
        self.by = self._exact.by
        self._compiled = self.by != "torch"
        self._net = net
        self.rooms = self._calibrate(calibration, margin)
        self._grids = Grids(self._compiled, forgets=False)
        self._cells: Dict[int, torch.Tensor] = {}

    def answer(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]; one wait for the device, and a second pass where room was short."""
        logits, short = self(images)
        return self._exact(images) if bool(short) else logits

    def __call__(self, images: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            short = torch.zeros((), dtype=torch.bool, device=images.device)
            if not len(images):  # spare slots need some position to point at
                return self._exact(images), short
            maps = everywhere(images.permute(0, 2, 3, 1), self._exact.stem, 1, 1.0, self._grids)
            run_block = self._run_counted if self._compiled else self._run_slots
            for number, (units, heads) in enumerate(self._exact.blocks):
                maps, too_few = run_block(units, heads, maps, self.rooms[number])
                short = short | too_few
            return self._exact.classify(maps), short

    def _run_counted(
        self,
        units: List[SparseUnit],
        heads: List[SparseHead],
        maps: torch.Tensor,
        rooms: List[Room],
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """By the compiled loops: lists with room to spare, and how long they are on the device."""
        began = units[0].begin(maps, self._grids)
        grid = self._grids.of(began)
        rows, most = Rows.of(grid, began), len(grid.everywhere)
        run = Running(grid.everywhere, began.new_ones(most))
        short = torch.zeros((), dtype=torch.bool, device=maps.device)
        count: Optional[torch.Tensor] = None
        for unit, head, room in zip(units[1:], heads, rooms):
            after = run.left - head.at(grid, rows, run.positions, count)
            own, around = _capacity(room.own, most), _capacity(room.near, most)
            kept, count = position_conv.flagged(after > EPSILON, own, count)
            run = Running(run.positions.index_select(0, kept), after.index_select(0, kept))
            near = Listed(
                *position_conv.near_list(run.positions, grid.taps, grid.inside, around, count)
            )
            assert near.count is not None
            short = short | (count > own).view(()) | (near.count > around).view(())
            unit.add_at(grid, rows, near, run, count)
        return grid.images(rows.output), short

    def _run_slots(
        self,
        units: List[SparseUnit],
        heads: List[SparseHead],
        maps: torch.Tensor,
        rooms: List[Room],
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        began = units[0].begin(maps, self._grids)
        grid = self._grids.of(began)
        rows = Rows.of(grid, began)
        positions, spare = grid.everywhere, int(grid.stride + 1)
        short = torch.zeros((), dtype=torch.bool, device=maps.device)
        slots = _Slots(positions, began.new_ones(len(positions)), torch.ones_like(positions).bool())
        for unit, head, room in zip(units[1:], heads, rooms):
            after = slots.left - head.at(grid, rows, slots.positions)
            goes_on = slots.used & (after > EPSILON)
            own = _capacity(room.own, len(positions))
            (where, left), used, few = compact(goes_on, (slots.positions, after), (spare, 0.0), own)
            slots, short = _Slots(where, left, used), short | few
            marked = torch.zeros(grid.cells, device=maps.device)
            marked.index_add_(0, slots.positions, used.float())
            near = grid.spread(marked > 0)
            capacity = _capacity(room.near, len(positions))
            (around,), _, few = compact(near, (self._all(grid),), (spare,), capacity)
            short = short | few
            unit.ready(grid.images(rows.state), out=grid.images(rows.ready))
            set_at(grid, rows.ready, around, unit.first, SLOPE, rows.hidden)
            r = convolve_at(grid, rows.hidden, slots.positions, unit.second)
            r.mul_(used.view(-1, 1))
            rows.state.index_add_(0, slots.positions, r)
            rows.output.index_add_(0, slots.positions, r.mul_(slots.left.view(-1, 1)))
        return grid.images(rows.output), short

    def _all(self, grid: Grid) -> torch.Tensor:
        if grid.cells not in self._cells:
            self._cells[grid.cells] = torch.arange(grid.cells, device=grid.inside.device)
        return self._cells[grid.cells]

    def _calibrate(self, images: torch.Tensor, margin: float) -> List[List[Room]]:
        """By the masked dense network: shares over the whole batch."""
        with torch.no_grad():
            steps = self._net.think(images).steps
        rooms: List[List[Room]] = []
        for block, found in zip(self._net.blocks, steps):
            line = []
            for number in range(1, len(block.units)):
                mask = (found > number).float()
                shares = (float(mask.mean()) * margin, float(dilated(mask).mean()) * margin)
                line.append(Room(min(1.0, shares[0]), min(1.0, shares[1])))
            rooms.append(line)
        return rooms


def _capacity(share: float, positions: int) -> int:
    return max(1, min(positions, math.ceil(share * positions)))
