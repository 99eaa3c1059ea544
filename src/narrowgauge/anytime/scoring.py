"""Families on one scale: their figures over seeds, intervals over test images, and pairs.

Everything is computed from the answers on reading; nothing of it is stored in a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowgauge.anytime.bases import Base, against
from narrowgauge.anytime.families import Family, families_of, split_notes
from narrowgauge.anytime.gather import Gathered, data_words
from narrowgauge_scores.answers import correct_of
from narrowgauge_scores.areas import CostRange
from narrowgauge_scores.fronts import best_static_gain, hypervolume, pareto_front
from narrowgauge_scores.points import Point, budgeted_points, exit_costs, mean_points
from narrowgauge_scores.resampling import Interval, draw_means, interval_of
from narrowgauge_scores.scalars import (
    Scalar,
    area_values,
    chance_of,
    median_latency,
    range_of,
    scalars_of,
)
from narrowgauge_scores.side_file import RunLogits

__all__ = ["Curve", "FamilyScore", "Mean", "Pair", "Scoring", "score"]

Floats = NDArray[np.float64]
_LATENCY = "latency"


@dataclass(frozen=True)
class Mean:
    """A figure over the seeds of a family that have it: their mean, least and greatest. `seeds`
    have it, of the family's `of`; a mean of some is not one of all."""

    mean: float
    least: float
    greatest: float
    seeds: int
    unit: str
    of: int


@dataclass(frozen=True)
class Curve:
    """A family's exits against one cost: means over its seeds, accuracy from 0 to 1 with its
    interval, and the step area on the range that all families share."""

    costs: tuple[float, ...]
    accuracies: tuple[Interval, ...]
    area: Interval


@dataclass(frozen=True)
class FamilyScore:
    """`latency` is None where it was not measured on the device that the scoring is of.
    `budgeted`: the operating points B of each seed; `points`: A and B, means over the seeds.
    `static_gain`: the most that any of `points` has over the best single-exit network or plain
    network that costs no more, each a mean over its seeds; None without one."""

    family: Family
    figures: dict[str, Mean]
    macs: Curve
    latency: Curve | None
    budgeted: tuple[tuple[Point, ...], ...]
    points: tuple[Point, ...]
    static_gain: float | None

    @property
    def label(self) -> str:
        return self.family.label


@dataclass(frozen=True)
class Pair:
    """How much larger the area of `one` over a cost is than that of `other`, test image by test
    image."""

    one: str
    other: str
    over: str
    difference: Interval

    @property
    def told_apart(self) -> bool | None:
        """Whether more test images would tell them apart too. None over latency: times are taken
        as they were measured, and two rows of one network differ by more than their images do."""
        return None if self.over == _LATENCY else self.difference.excludes_zero


@dataclass(frozen=True)
class Scoring:
    """All families. `front`: label of the family and point, for what none beats, cheapest first;
    this and `hypervolume` are of means over seeds, and the best over operating points. `base`: what
    they cost within a point of one of them, where one was asked for."""

    data: str
    images: int
    classes: int
    synthetic: bool
    range: CostRange
    families: tuple[FamilyScore, ...]
    pairs: tuple[Pair, ...]
    front: tuple[tuple[str, Point], ...]
    hypervolume: float
    device: str
    latency_range: CostRange | None
    notes: tuple[str, ...]
    base: Base | None = None


def score(gathered: Gathered, base: str = "") -> Scoring:
    """Score what was gathered; see the module's text. `base` names the family of one exit that the
    others are to keep up with (`bases.against`, whose errors it raises); empty: none."""
    families, dropped = families_of(gathered.answered)
    held = against(families, base) if base else None
    run = families[0].runs[0]
    within = range_of(run) or _spanning([exit_costs(r) for f in families for r in f.runs])
    device, timed, latency_notes = _timed(families)
    spans = [median_latency(r.latency) for f in timed for r in f.runs if r.latency is not None]
    latency_range = _spanning(spans) if spans else None
    curves, pairs = _curves(families, within, exit_costs, "MACs")
    timings: dict[str, Curve] = {}
    if latency_range is not None:
        timings, more = _curves(timed, latency_range, _seconds, _LATENCY)
        pairs += more
    scores = tuple(
        _family_score(family, families, curves[family.label], timings.get(family.label), within)
        for family in families
    )
    points = [(each.label, point) for each in scores for point in each.points]
    front = pareto_front([p.macs for _, p in points], [p.accuracy for _, p in points])
    return Scoring(
        data=data_words(run),
        images=run.test.images,
        classes=run.test.classes,
        synthetic=run.synthetic,
        range=within,
        families=scores,
        pairs=tuple(pairs),
        front=tuple(points[index] for index in front),
        hypervolume=hypervolume(
            [p.macs for _, p in points], [p.accuracy for _, p in points],
            within.low, within.high, floor=chance_of(run),
        ),
        device=device,
        latency_range=latency_range,
        notes=(*gathered.left_out, *dropped, *latency_notes, *_notes(families)),
        base=held,
    )  # fmt: skip


def _spanning(costs: Sequence[Floats]) -> CostRange:
    low, high = min(float(each.min()) for each in costs), max(float(each.max()) for each in costs)
    if low == high:
        low, high = low / math.sqrt(2), high * math.sqrt(2)
    return CostRange(low, high, "the cheapest first exit to the dearest last of these runs")


def _timed(families: Sequence[Family]) -> tuple[str, tuple[Family, ...], tuple[str, ...]]:
    """The one device that latencies are of, and the families that have them for every seed."""
    timed = tuple(f for f in families if all(run.latency is not None for run in f.runs))
    devices = sorted({run.device or "an unnamed device" for f in timed for run in f.runs})
    if len(devices) > 1:
        listed = ", ".join(devices)
        return "", (), (f"latencies go on no common axis: they are of {listed}",)
    if not devices:
        return "", (), ("no run measured latencies",)
    missing = [f.label for f in families if f not in timed]
    notes = (f"without latencies: {', '.join(missing)}",) if missing else ()
    return devices[0], timed, notes


def _seconds(run: RunLogits) -> Floats:
    assert run.latency is not None
    found: Floats = median_latency(run.latency)
    return found


def _curves(
    families: Sequence[Family],
    within: CostRange,
    costs: Callable[[RunLogits], Floats],
    over: str,
) -> tuple[dict[str, Curve], list[Pair]]:
    """Each family's curve over a cost, and the differences of areas of every two of them."""
    areas = [np.stack([area_values(r, costs(r), within) for r in f.runs]) for f in families]
    exits = [np.stack([correct_of(r.test)[k] for r in f.runs]) for f in families
             for k in range(f.runs[0].exits)]  # fmt: skip
    drawn = draw_means([*areas, *exits])
    heights = iter(
        interval_of(float(values.mean()), draws, 0.0, 1.0)
        for values, draws in zip(exits, drawn[len(areas) :], strict=True)
    )
    curves = {
        family.label: Curve(
            costs=tuple(np.mean([costs(run) for run in family.runs], axis=0).tolist()),
            accuracies=tuple(itertools.islice(heights, family.runs[0].exits)),
            area=interval_of(float(areas[place].mean()), drawn[place], 0.0, 1.0),
        )
        for place, family in enumerate(families)
    }
    pairs = [
        Pair(
            families[i].label,
            families[j].label,
            over,
            interval_of(float(areas[i].mean() - areas[j].mean()), drawn[i] - drawn[j], -1.0, 1.0),
        )
        for i, j in itertools.combinations(range(len(families)), 2)
    ]
    return curves, pairs


def _family_score(
    family: Family,
    families: Sequence[Family],
    macs: Curve,
    latency: Curve | None,
    within: CostRange,
) -> FamilyScore:
    points = mean_points(family.runs)
    return FamilyScore(
        family=family,
        figures=_means([scalars_of(run, within=within) for run in family.runs]),
        macs=macs,
        latency=latency,
        budgeted=tuple(budgeted_points(run) for run in family.runs),
        points=points,
        static_gain=_static_gain(family, families, points),
    )


def _means(seeds: Sequence[Sequence[Scalar]]) -> dict[str, Mean]:
    """Figures that are one number; of several of one name the median stands for a latency, and
    operating points stay with their seeds."""
    found: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for scalars in seeds:
        for each in scalars:
            if each.index and not each.name.endswith("_latency"):
                continue
            found.setdefault(each.name, []).append(float(np.median(each.values)))
            units[each.name] = each.unit
    return {
        name: Mean(
            float(np.mean(values)), min(values), max(values), len(values), units[name], len(seeds)
        )
        for name, values in found.items()
    }


def _static_gain(
    family: Family, families: Sequence[Family], points: Sequence[Point]
) -> float | None:
    """C: what stands against it are networks of one exit, and the plain networks that runs name."""
    static: list[tuple[float, float]] = []
    for other in families:
        if other is not family and other.runs[0].exits == 1:
            static += [(point.macs, point.accuracy) for point in mean_points(other.runs)]
        bases = [
            (float(run.base_macs), run.base_accuracy / 100.0)
            for run in other.runs
            if run.base_macs is not None and run.base_accuracy is not None
        ]
        if bases:
            cost, height = np.mean(bases, axis=0).tolist()
            static.append((cost, height))
    if not static:
        return None
    costs, heights = [cost for cost, _ in static], [height for _, height in static]
    gains = [best_static_gain(p.macs, p.accuracy, costs, heights) for p in points]
    known = [gain for gain in gains if gain is not None]
    return max(known) if known else None


def _notes(families: Sequence[Family]) -> list[str]:
    alone = [f.label for f in families if len(f.rows) == 1]
    notes = split_notes(families)
    if alone:
        listed = ", ".join(alone)
        notes.append(f"one seed only, so intervals are of the test images alone: {listed}")
    if any(run.test.macs is not None for f in families for run in f.runs):
        notes.append("costs that depend on the image are means; intervals take them as fixed")
    return notes
