"""What a claim allows, as a region of its figure, and whether a figure lies in it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from narrowgauge_contract.claims import Claim, ClaimKind, Expectation, MetricOperator

__all__ = ["Place", "Region", "allowed", "place_of", "shape_of", "words_of"]


class Place(enum.Enum):
    """Where a figure lies with all that is known of its spread."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    ACROSS = "across"


@dataclass(frozen=True)
class Region:
    """`low` to `high`, both included unless `open_` says that they are not."""

    low: float = -math.inf
    high: float = math.inf
    open_: bool = False

    def holds(self, value: float) -> bool:
        """Never holds NaN."""
        if self.open_:
            return self.low < value < self.high
        return self.low <= value <= self.high


def place_of(region: Region, low: float, high: float) -> Place:
    """Where `low` to `high` lies: wholly inside, wholly outside, or on both sides."""
    if math.isnan(low) or math.isnan(high):
        return Place.OUTSIDE
    if region.holds(low) and region.holds(high):
        return Place.INSIDE
    apart = high <= region.low or low >= region.high if region.open_ else (
        high < region.low or low > region.high
    )  # fmt: skip
    return Place.OUTSIDE if apart else Place.ACROSS


def allowed(claim: Claim, expectation: Expectation) -> Region:
    """What the claim allows where it was measured as published.

    A value or ratio: the figure within its relative tolerance. A bound: at or beyond it.
    Equivalence: as many times more as less (1 / (1 + t) to 1 + t), two one-sided tests at 5 %.
    A trend: on the same side of 1 (of 0, for a value) as the published figure.
    """
    if claim.kind is ClaimKind.TREND:
        return _trend(claim, expectation)
    figure, tolerance = expectation.figure, expectation.tolerance
    if claim.kind is ClaimKind.EQUIVALENCE and claim.operator is not MetricOperator.VALUE:
        middle, margin = (1.0 if figure is None else figure), 1.0 + (tolerance or 0.0)
        return Region(middle / margin, middle * margin, open_=True)
    if figure is not None and tolerance is not None:
        reach = abs(figure) * tolerance
        return Region(figure - reach, figure + reach)
    return _bounds(expectation)


def shape_of(claim: Claim, expectation: Expectation) -> Region | None:
    """What other hardware has to show: the direction of a ratio, of two metrics or measured as one.
    None where the claim has no shape, since a figure of one device is nothing to another."""
    shaped = (ClaimKind.TREND, ClaimKind.RATIO)
    if claim.operator is MetricOperator.VALUE and claim.kind not in shaped:
        return None
    if claim.operator is MetricOperator.GEOMEAN:
        return None
    region = allowed(claim, expectation)
    if region.low >= 1.0:
        return Region(low=1.0, open_=True)
    if region.high <= 1.0:
        return Region(high=1.0, open_=True)
    return region


def _trend(claim: Claim, expectation: Expectation) -> Region:
    if expectation.figure is None:
        return _bounds(expectation)
    middle = 1.0 if claim.operator is MetricOperator.RATIO else 0.0
    if expectation.figure > middle:
        return Region(low=middle, open_=True)
    return Region(high=middle, open_=True)


def _bounds(expectation: Expectation) -> Region:
    return Region(
        -math.inf if expectation.minimum is None else expectation.minimum,
        math.inf if expectation.maximum is None else expectation.maximum,
    )


def words_of(region: Region) -> str:
    """`at least 2`, `below 1`, `0.98 to 1.02`."""
    if math.isinf(region.low) and math.isinf(region.high):
        return "any figure"
    if math.isinf(region.high):
        return f"{'more than' if region.open_ else 'at least'} {region.low:.4g}"
    if math.isinf(region.low):
        return f"{'less than' if region.open_ else 'at most'} {region.high:.4g}"
    return f"{region.low:.4g} to {region.high:.4g}"
