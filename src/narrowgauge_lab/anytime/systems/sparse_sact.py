"""A trained network of spatially adaptive depth, run at the positions that need it.

Gives what `AdaptiveResNet` gives in eval mode, to float tolerance: batch normalisation is folded,
sums run in other orders, and a position whose halting score lies within rounding of the threshold
may halt a unit sooner or later. From the second unit of a block on, work is for a list of positions
that only gets shorter; the block ends when it is empty.

The output of a block, Σ p_l x_l, is accumulated as x_1 + Σ_{l>1} (1 − Σ_{j<l} h_j) r_l with r_l
what unit l adds to the state: the same sum, without another look at states.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.sparse_positions import (
    Grid,
    Listed,
    Matrix,
    add_at,
    compiled_for,
    convolve_at,
    matrix_of,
    set_at,
)
from narrowgauge_lab.anytime.systems.act import EPSILON
from narrowgauge_lab.anytime.systems.sact import SLOPE, AdaptiveResNet, Head, Thought, Unit

__all__ = [
    "Grids", "Rows", "Running", "SparseHead", "SparseSact", "SparseUnit", "affine", "everywhere",
]  # fmt: skip

_MOST_GRIDS = 16


def affine(norm: nn.Module) -> Tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift [C] that a batch normalisation is in eval mode."""
    scale = norm.weight.detach() * torch.rsqrt(norm.running_var + norm.eps)
    return scale, norm.bias.detach() - norm.running_mean * scale


@dataclasses.dataclass
class Running:
    """Who computes the coming unit: `positions` [n], and how much each has `left` to halt by."""

    positions: torch.Tensor
    left: torch.Tensor

    def halt(self, scores: torch.Tensor) -> Running:
        """Who goes on after these scores [n]."""
        after = self.left - scores
        goes_on = (after > EPSILON).nonzero().view(-1)
        return Running(self.positions.index_select(0, goes_on), after.index_select(0, goes_on))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows [cells, C] of a block, all with borders of zeros: its state, its output so far, and
    two to work in."""

    state: torch.Tensor
    output: torch.Tensor
    ready: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def of(cls, grid: Grid, maps: torch.Tensor) -> Rows:
        """Of the state after a block's first unit, [B, h, w, C]."""
        state, ready, hidden = (grid.rows(maps.shape[3], maps) for _ in range(3))
        grid.images(state).copy_(maps)
        return cls(state, state.clone(), ready, hidden)


class Grids:
    """The grids of the maps that came by, made once for each shape. `forgets`: when there are many;
    not where a CUDA graph may read them at their addresses."""

    def __init__(self, compiled: bool, forgets: bool = True) -> None:
        self._compiled, self._forgets = compiled, forgets
        self._made: Dict[Tuple[int, int, int], Grid] = {}

    def of(self, maps: torch.Tensor) -> Grid:
        """That of maps [B, h, w, C]."""
        batch, height, width = maps.shape[:3]
        key = (batch, height, width)
        if key not in self._made:
            if self._forgets and len(self._made) >= _MOST_GRIDS:
                self._made.clear()
            self._made[key] = Grid(batch, height, width, maps.device, self._compiled)
        return self._made[key]


class SparseUnit:
    """A unit's residual r at some positions, its weights taken over at construction."""

    def __init__(self, unit: Unit, compiled: bool) -> None:
        self.scale, self.shift = affine(unit.bn1)
        scale, shift = affine(unit.bn2)
        self.first = matrix_of(unit.conv1.weight, scale, shift, compiled)
        self.second = matrix_of(unit.conv2.weight, None, unit.conv2.bias, compiled)
        self.macs = unit.macs_at()
        self.source = unit

    def ready(self, maps: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """The activation before the first convolution, of maps [B, h, w, C]."""
        result = torch.addcmul(self.shift, maps, self.scale, out=out)
        return F.leaky_relu_(result, SLOPE)

    def add_at(
        self, grid: Grid, rows: Rows, near: Listed, run: Running,
        count: Optional[torch.Tensor] = None,
    ) -> None:  # fmt: skip
        """Add r to the state of who runs, and its share to their output; `near`: these dilated;
        `count`: how many run, where that is known on the device alone."""
        self.ready(grid.images(rows.state), out=grid.images(rows.ready))
        set_at(grid, rows.ready, near.positions, self.first, SLOPE, rows.hidden, near.count)
        add_at(
            grid, rows.hidden, run.positions, self.second, run.left, rows.state, rows.output, count
        )

    def add_from_everywhere(self, grid: Grid, rows: Rows, run: Running, grids: Grids) -> None:
        """The same by torch's convolution of the whole maps, of which most is thrown away."""
        grid.images(rows.ready).copy_(self._convolved(self.ready(grid.images(rows.state)), grids))
        r = rows.ready.index_select(0, run.positions)
        rows.state.index_add_(0, run.positions, r)
        rows.output.index_add_(0, run.positions, r.mul_(run.left.view(-1, 1)))

    def begin(self, maps: torch.Tensor, grids: Grids) -> torch.Tensor:
        """The state after the first unit of a block, [B, h', w', C']."""
        ready = self.ready(maps)
        given = (ready if self.source.early else maps).permute(0, 3, 1, 2)
        shortcut = self.source.shortcut(given).permute(0, 2, 3, 1)
        return shortcut + self._convolved(ready, grids)

    def _convolved(self, ready: torch.Tensor, grids: Grids) -> torch.Tensor:
        """r [B, h', w', C'] of the activation of whole maps."""
        hidden = everywhere(ready, self.first, self.source.stride, SLOPE, grids)
        return everywhere(hidden, self.second, 1, 1.0, grids)


def everywhere(
    maps: torch.Tensor, matrix: Matrix, stride: int, slope: float, grids: Grids
) -> torch.Tensor:
    """A 3×3 convolution of whole maps [B, h, w, C], and a leaky ReLU (`slope` 1: without):
    [B, h', w', F]. On a CPU by the compiled loops, where the matrix is for them: in batches of one
    torch's own take longer."""
    batch, height, width, channels = maps.shape
    size = (batch, -(-height // stride), -(-width // stride), len(matrix.window))
    if not batch:  # torch 1.8 convolves nothing in this memory layout
        return maps.new_empty(size)
    if matrix.packed is None or maps.is_cuda:
        given = maps.permute(0, 3, 1, 2)
        result = F.conv2d(given, matrix.window, matrix.bias, stride=stride, padding=1)
        result = result.permute(0, 2, 3, 1)
        return result if slope == 1.0 else F.leaky_relu_(result, slope)
    grid = grids.of(maps)
    rows = grid.rows(channels, maps)
    grid.images(rows).copy_(maps)
    return convolve_at(grid, rows, grid.every(stride), matrix, slope).view(size)


class SparseHead:
    """Halting scores at some positions."""

    def __init__(self, head: Head, compiled: bool) -> None:
        assert head.near_norm is not None
        assert head.near_conv is not None
        self.near_scale, self.near_shift = affine(head.near_norm)
        self.all_scale, self.all_shift = affine(head.all_norm)
        self.near = matrix_of(head.near_conv.weight, None, head.near_conv.bias, compiled)
        self.all = head.all_conv.weight.detach().flatten().clone()

    def at(
        self, grid: Grid, rows: Rows, positions: torch.Tensor, count: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Scores [n] of the state; past `count` anything."""
        x = rows.state
        torch.addcmul(self.near_shift, grid.images(x), self.near_scale, out=grid.images(rows.ready))
        F.leaky_relu_(rows.ready, SLOPE)  # the borders are zero and stay it
        score = convolve_at(grid, rows.ready, positions, self.near, count=count).view(-1)
        mean = x.view(grid.batch, grid.image, x.shape[1]).sum(1).div_(grid.height * grid.width)
        mean = F.leaky_relu_(torch.addcmul(self.all_shift, mean, self.all_scale), SLOPE)
        whole = mean.mv(self.all)
        score += whole if grid.batch == 1 else whole.index_select(0, grid.image_of(positions))
        return score.sigmoid_()


@dataclasses.dataclass
class _Trace:
    """What one block of a pass leaves beside its output."""

    grid: Grid
    left: torch.Tensor
    steps: torch.Tensor
    macs: torch.Tensor
    ran: List[torch.Tensor] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, grid: Grid, like: torch.Tensor) -> _Trace:
        none = torch.zeros(grid.batch, dtype=torch.float64, device=like.device)
        return cls(grid, grid.rows(1, like), grid.rows(1, like), none)


class SparseSact:
    """`AdaptiveResNet` of kind `sact` for inference, as it is now: later changes of its weights do
    not matter. `dense_from`: the share of active positions from which a unit computes everywhere
    and takes what it needs, because that is faster, one for all blocks or one for each; above 1:
    never (see `breaking_even`).
    `compiled`: by the loops of `narrowgauge_kernels` or by torch's operators; None: by the loops
    where they are built. `by` says which.

    Raises BadValueError for a network of another kind, and for shares of other blocks.
    """

    def __init__(
        self,
        net: AdaptiveResNet,
        dense_from: Union[float, Sequence[float]] = 2.0,
        compiled: Optional[bool] = None,
    ) -> None:
        if net.kind != "sact":
            raise BadValueError(
                f"a network of kind '{net.kind}' has no positions to leave out",
                next_step="give one of kind sact",
            )
        alike = isinstance(dense_from, (int, float))
        self.dense_from = [dense_from] * len(net.blocks) if alike else list(dense_from)
        if len(self.dense_from) != len(net.blocks):
            raise BadValueError(
                f"{len(self.dense_from)} shares to be dense from, for {len(net.blocks)} blocks",
                next_step="give one for each block, or one for all",
            )
        self._net = net
        whether = compiled_for(net.conv.weight) if compiled is None else compiled
        self.by = "narrowgauge_kernels" if whether else "torch"
        self.stem = matrix_of(net.conv.weight, None, net.conv.bias, whether)
        self._grids = Grids(whether)
        self.blocks = [
            (
                [SparseUnit(unit, whether) for unit in block.units],
                [SparseHead(head, whether) for head in block.heads],
            )
            for block in net.blocks
        ]
        self._norm = affine(net.norm)
        self._linear = (net.linear.weight.detach().clone(), net.linear.bias.detach().clone())

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]."""
        return self._run(images, None)

    def think(self, images: torch.Tensor) -> Thought:
        """As `AdaptiveResNet.think`. `macs` are those needed, also where `dense_from` had more
        done."""
        traces: List[_Trace] = []
        logits = self._run(images, traces)
        return _thought(self._net, logits, traces, images.shape[2] * images.shape[3])

    def _run(self, images: torch.Tensor, traces: Optional[List[_Trace]]) -> torch.Tensor:
        with torch.no_grad():
            maps = everywhere(images.permute(0, 2, 3, 1), self.stem, 1, 1.0, self._grids)
            for (units, heads), share in zip(self.blocks, self.dense_from):
                maps = self._run_block(units, heads, maps, traces, share)
            return self.classify(maps)

    def classify(self, maps: torch.Tensor) -> torch.Tensor:
        """Logits of the last block's output [B, h, w, C]."""
        scale, shift = self._norm
        features = torch.addcmul(shift, maps.mean((1, 2)), scale)
        return F.linear(F.leaky_relu_(features, SLOPE), *self._linear)

    def _run_block(
        self,
        units: List[SparseUnit],
        heads: List[SparseHead],
        maps: torch.Tensor,
        traces: Optional[List[_Trace]],
        dense_from: float,
    ) -> torch.Tensor:
        began = units[0].begin(maps, self._grids)
        grid = self._grids.of(began)
        rows = Rows.of(grid, began)
        trace = None if traces is None else _Trace.of(grid, began)
        if traces is not None and trace is not None:
            traces.append(trace)
        run = Running(grid.everywhere, began.new_ones(len(grid.everywhere)))
        _note(trace, units[0], Listed(run.positions), run)
        for unit, head in zip(units[1:], heads):
            run = run.halt(head.at(grid, rows, run.positions))
            if not len(run.positions):
                break
            near = grid.near_to(run.positions)
            if len(run.positions) < dense_from * len(grid.everywhere):
                unit.add_at(grid, rows, near, run)
            else:
                unit.add_from_everywhere(grid, rows, run, self._grids)
            _note(trace, unit, near, run)
        return grid.images(rows.output)


def _note(trace: Optional[_Trace], unit: SparseUnit, near: Listed, run: Running) -> None:
    if trace is None:
        return
    trace.steps[run.positions] += 1.0
    trace.left[run.positions] = run.left.view(-1, 1)
    ran, first = trace.grid.per_image(run.positions), trace.grid.per_image(near.exact())
    trace.ran.append(ran)
    trace.macs += first * unit.macs[0] + ran * unit.macs[1]


def _thought(
    net: AdaptiveResNet, logits: torch.Tensor, traces: List[_Trace], pixels: int
) -> Thought:
    """What a pass took; `pixels` of each image."""
    fixed = net.conv.weight.numel() * pixels + net.linear.weight.numel()
    macs = torch.full((len(logits),), float(fixed), dtype=torch.float64, device=logits.device)
    shares, ponder, steps = [], [], []
    for block, trace in zip(net.blocks, traces):
        grid = trace.grid
        for number in range(len(block.units)):
            ran = trace.ran[number] if number < len(trace.ran) else torch.zeros_like(macs)
            shares.append((ran / (grid.height * grid.width)).float())
            if number < len(block.heads):
                macs += block.heads[number].macs(ran)
        macs += trace.macs
        steps.append(grid.images(trace.steps).permute(0, 3, 1, 2))
        ponder.append(steps[-1] + grid.images(trace.left).permute(0, 3, 1, 2))
    return Thought(logits, tuple(ponder), tuple(steps), torch.stack(shares, 1), macs)
