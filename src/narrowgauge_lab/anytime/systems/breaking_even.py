"""From which share of active positions on a unit is faster dense: measured on this device.

One unit of an adaptive network, its residual added at the positions of blobs: thresholds of smooth
noise, whose edges are about as long as those of ponder maps (positions strewn singly would have all
their neighbours in the first convolution). Dense is the same unit of the plain network as fast as
torch has it: batch normalisation folded, in the memory layout that the device likes better.

Sparse counts what follows from the list of who runs: these dilated, and both convolutions. Who goes
on to run is not in it: scores and the shorter list are the same work whichever way the unit then
computes, so this is the break-even that `SparseSact` takes as `dense_from`. What thinking costs is
in a whole network's time alone. On a GPU both are replayed as CUDA graphs, where they can be:
launched one by one, half a dozen kernels take a host longer than they take the device, however few
positions there are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.sparse_positions import Grid, compiled_for
from narrowgauge_lab.anytime.systems.folded import FoldedUnit
from narrowgauge_lab.anytime.systems.sact import Unit
from narrowgauge_lab.anytime.systems.sparse_sact import Rows, Running, SparseUnit
from narrowgauge_lab.engines.graph import captured_alike
from narrowgauge_lab.measure import TimingPlan, interleave

__all__ = ["SHARES", "Case", "Point", "blobs", "break_even", "faster", "measure_shares"]

#: Shares of active positions to measure at.
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
_BLUR = 9


@dataclasses.dataclass(frozen=True)
class Case:
    """A unit of `channels` on maps size × size, in batches of `batch`."""

    channels: int
    size: int
    batch: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.channels}x{self.size}x{self.size}"


@dataclasses.dataclass(frozen=True)
class Point:
    """Seconds of one unit at a share of active positions; `near`: the share of these dilated, which
    the first convolution is for; `macs`: of sparse over dense; `way`: `cuda-graph` or `launch by
    launch: WHY`, of both."""

    share: float
    near: float
    macs: float
    sparse_s: Tuple[float, ...]
    dense_s: Tuple[float, ...]
    way: str = ""

    @property
    def ratio(self) -> float:
        """Median dense over median sparse: above 1 sparse is faster."""
        return _median(self.dense_s) / _median(self.sparse_s)

    def to_fact(self) -> Dict[str, Any]:
        """For `ctx.fact`, without the samples."""
        return {
            "share": self.share, "near": self.near, "macs": self.macs, "ratio": self.ratio,
            "sparse_s": _median(self.sparse_s), "dense_s": _median(self.dense_s), "way": self.way,
        }  # fmt: skip


def blobs(batch: int, size: int, share: float, generator: torch.Generator) -> torch.Tensor:
    """bool [batch, size, size] with `share` of all positions in each image, rounded; in patches."""
    noise = torch.randn(batch, 1, size + _BLUR - 1, size + _BLUR - 1, generator=generator)
    smooth = F.avg_pool2d(F.avg_pool2d(noise, 5, stride=1), 5, stride=1).flatten(1)
    wanted = max(1, round(share * size * size))
    order = smooth.argsort(1, descending=True)[:, :wanted]
    mask = torch.zeros(batch, size * size, dtype=torch.bool)
    return mask.scatter_(1, order, True).view(batch, size, size)


def measure_shares(
    case: Case,
    device: torch.device,
    plan: TimingPlan,
    *,
    shares: Sequence[float] = SHARES,
    pairs: int = 15,
    compiled: Optional[bool] = None,
    now: Optional[Callable[[], float]] = None,
) -> List[Point]:
    """Measure one unit sparse and dense, in turns, at each share. `compiled`: see `SparseSact`.
    `now`: a clock, such as `time.process_time` on a shared CPU; None: the measure package's own.

    Raises BadValueError for a share that is not within (0, 1], and what `interleave` raises.
    """
    if any(not 0.0 < share <= 1.0 for share in shares):
        raise BadValueError(f"{shares} are no shares of positions", next_step="0 < share <= 1")
    generator = torch.Generator().manual_seed(0)
    unit = Unit(case.channels, case.channels, 1, False).to(device).eval()
    whether = compiled_for(unit.conv1.weight) if compiled is None else compiled
    sparse = SparseUnit(unit, whether)
    x = torch.randn(case.batch, case.channels, case.size, case.size, generator=generator).to(device)
    clock = {} if now is None else {"now": now}
    points = []
    with torch.no_grad():
        masks = [blobs(case.batch, case.size, share, generator) for share in shares]
        listed = [_sparse(sparse, x, mask) for mask in masks]
        calls = [_dense(unit, x, True), _dense(unit, x, False), *(call for call, _, _ in listed)]
        (one, other, *at_shares), way = captured_alike(calls, device)
        dense = faster(one, other, device, plan, clock)
        for call, (_, grid, run) in zip(at_shares, listed):
            near = len(grid.dilated(run.positions)) / len(grid.everywhere)
            both = interleave(call, dense, device, plan, pairs, **clock)
            active = len(run.positions) / len(grid.everywhere)
            seconds = both.first.seconds, both.second.seconds
            points.append(Point(active, near, (near + active) / 2, *seconds, way))
    return points


def break_even(points: Sequence[Point]) -> float:
    """The share of active positions up to which sparse is faster: where the ratio crosses 1, by
    straight lines between points; 0 where it never is faster, 1 where always."""
    ordered = sorted(points, key=lambda point: point.share)
    if not ordered or ordered[0].ratio <= 1.0:
        return 0.0
    for one, other in zip(ordered, ordered[1:]):
        if other.ratio <= 1.0:
            part = (one.ratio - 1.0) / (one.ratio - other.ratio)
            return one.share + part * (other.share - one.share)
    return ordered[-1].share


def _sparse(
    unit: SparseUnit, x: torch.Tensor, mask: torch.Tensor
) -> Tuple[Callable[[], None], Grid, Running]:
    batch, _, height, width = x.shape
    grid = Grid(batch, height, width, x.device, unit.first.packed is not None)
    rows = Rows.of(grid, x.permute(0, 2, 3, 1))
    positions = grid.everywhere[mask.view(-1).to(x.device)]
    run = Running(positions, x.new_ones(len(positions)))

    def call() -> None:
        unit.add_at(grid, rows, grid.near_to(run.positions), run)
        # The state would grow from call to call.
        rows.state.mul_(0.5)

    return call, grid, run


def _dense(unit: Unit, x: torch.Tensor, last: bool) -> Callable[[], None]:
    layout = torch.channels_last if last else torch.contiguous_format
    folded = FoldedUnit(unit, layout)
    state = x.clone().contiguous(memory_format=layout)

    def call() -> None:
        state.add_(folded.residual(folded.ready(state)))
        state.mul_(0.5)

    return call


def faster(
    one: Callable[[], Any], other: Callable[[], Any], device: torch.device, plan: TimingPlan,
    clock: Dict[str, Any],
) -> Callable[[], Any]:  # fmt: skip
    """Which of two takes less time by the median of a few pairs; `clock`: `now` of `interleave`."""
    both = interleave(one, other, device, plan, 5, **clock)
    return one if _median(both.first.seconds) <= _median(both.second.seconds) else other


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
