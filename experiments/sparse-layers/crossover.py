"""From how many zeros on skipping them is faster: a grid of made-up maps, and its picture."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from typing import Any, Dict, List, Sequence, Tuple

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.networks.layer_shapes import LayerShape
from narrowgauge_lab.sparsity import PATTERNS

from .correctness import check
from .maps import Library, layer_of
from .ours import ours_of
from .peers import peers_of, problem_of
from .times import DENSE, measure_layer

__all__ = ["FILE", "Point", "crossing", "numbers_in", "sweep"]

#: What is drawn: log2 of dense over sparse, so 0 is the crossover.
FILE = "crossover.json"


@dataclasses.dataclass(frozen=True)
class Point:
    """One place of the grid. `gain`: how many times as fast as the faster dense way sparse is;
    above 1 skipping zeros is worth it."""

    shape: str
    batch: int
    zeros: float
    sparse_s: float
    dense_s: float

    @property
    def gain(self) -> float:
        return self.dense_s / self.sparse_s


def sweep(ctx: RowContext, shapes: Sequence[LayerShape], library: Library) -> None:
    """Measure every shape at every batch and share of zeros that the row asks for, and record
    `crossover_zeros` (per batch; 1 where dense is always faster) and the grid. What is wrong makes
    the row INVALID. Raises BadValueError for a grid that is none, or real maps."""
    parameters = ctx.parameters
    if parameters["maps"] not in PATTERNS:
        raise BadValueError(
            f"a sweep cannot be over maps={parameters['maps']}", next_step=", ".join(PATTERNS)
        )
    shares = [each / 100 for each in numbers_in(parameters["sweep_zeros"], 0, 100)]
    batches = [int(each) for each in numbers_in(parameters["sweep_batches"], 1, 4096, whole=True)]
    points: List[Point] = []
    for batch in batches:
        for share in shares:
            for shape in dict.fromkeys(shapes):
                point = _point(ctx, shape, batch, share, library)
                points += [point] if point is not None else []
            ctx.progress(len(points), len(batches) * len(shares) * len(set(shapes)), "points")
    if not points:
        return
    _record(ctx, points, batches, shares)


def numbers_in(text: str, least: float, most: float, whole: bool = False) -> List[float]:
    """Those of a text with spaces between them, ascending. Raises BadValueError, also for 1.5 where
    they are to be `whole`."""
    try:
        numbers = sorted({float(word) for word in text.split()})
    except ValueError as error:
        raise BadValueError(f"'{text}' is no list of numbers", why=str(error)) from error
    # Not `any(outside)`: NaN is within nothing.
    if not numbers or not all(least <= each <= most for each in numbers):
        raise BadValueError(f"'{text}' is no list of numbers from {least:g} to {most:g}")
    if whole and any(each != int(each) for each in numbers):
        raise BadValueError(f"'{text}' is no list of numbers that are whole")
    return numbers


def _point(ctx: RowContext, shape: LayerShape, batch: int, share: float, library: Library) -> Any:
    """None where something computed the layer wrongly."""
    parameters = ctx.parameters
    layer = layer_of(shape, batch, parameters["maps"], library=library, seed=ctx.seed, zeros=share)
    precision = parameters["precision"]
    ours = ours_of(layer, ctx.device, precision, parameters["granularity"], parameters["tune_s"])
    problem = problem_of(layer, ctx.device, precision)
    found = peers_of(
        problem, DENSE, parameters["plans"], parameters["plan_s"], parameters["tune_s"]
    )
    checked = check(ctx, layer, precision, ours, found.peers)
    if not checked.right:
        return None
    times = measure_layer(ctx, layer, ours, checked.peers)
    dense = min(times.median(name) for name in times.beside)
    return Point(shape.name, batch, share, times.median(), dense)


def crossing(gains: Sequence[Tuple[float, float]]) -> float:
    """Of (share of zeros, gain), ascending: the share from which on every gain is above 1, log-
    linear between two. 1 where the last one is not, 0 where all are."""
    if gains[-1][1] < 1.0:
        return 1.0
    for (low, below), (high, above) in reversed(list(zip(gains, gains[1:]))):
        if below < 1.0:
            part = -math.log(below) / (math.log(above) - math.log(below))
            return low + part * (high - low)
    return 0.0


def _record(
    ctx: RowContext, points: Sequence[Point], batches: Sequence[int], shares: Sequence[float]
) -> None:
    """Gains of several shapes are their geometric mean."""
    grid: Dict[Tuple[int, float], float] = {}
    for batch in batches:
        for share in shares:
            here = [p.gain for p in points if (p.batch, p.zeros) == (batch, share)]
            if here:
                grid[batch, share] = statistics.mean(math.log2(gain) for gain in here)
    whole = [batch for batch in batches if all((batch, share) in grid for share in shares)]
    found = [crossing([(share, 2 ** grid[batch, share]) for share in shares]) for batch in whole]
    source = "monotonic" if ctx.device.type == "cpu" else "cuda-event"
    ctx.metric("crossover_zeros", found, unit="1", source=source, index="batch")
    ctx.fact("crossover_batches", whole)
    ctx.fact("points", [{**dataclasses.asdict(p), "gain": p.gain} for p in points])
    if whole:
        picture = {
            "rows": [f"batch {batch}" for batch in whole],
            "columns": [f"{share:.0%}" for share in shares],
            "values": [[grid[batch, share] for share in shares] for batch in whole],
            "label": "log2(dense / sparse)",
        }
        ctx.side_file(FILE).write_text(json.dumps(picture), encoding="utf-8")
