"""Intervals of a median by order statistics: which two of n sorted samples hold it.

Nothing is assumed of the samples but that they are independent. The lab stops a measurement by this
arithmetic and the launcher reports by it, so both mean the same interval.
"""

from __future__ import annotations

import functools
import math
from typing import Optional, Sequence, Tuple

__all__ = ["fewer_heads", "median_bounds", "median_coverage", "median_rank"]

#: Up to here binomial coefficients are exact integers; above, logarithms of them do (to 1e-9).
_EXACT = 1000


@functools.lru_cache(maxsize=4096)
def median_rank(n: int, coverage: float = 0.95) -> int:
    """The largest k for which the k-th smallest and k-th largest of n hold the median.

    That is with a probability of at least `coverage`. 0 where even smallest and largest do not:
    with fewer than six samples at 95 %.
    """
    tail = (1.0 - coverage) / 2.0
    # Where a normal distribution has that tail is near; a few exact steps go the rest of the way.
    k = max(0, int(n / 2.0 - math.sqrt(n)))
    below = fewer_heads(n, k)
    while k > 0 and below > tail:
        k -= 1
        below -= _heads(n, k)
    while k < n // 2:
        more = below + _heads(n, k)
        if more > tail:
            break
        k, below = k + 1, more
    return k


def median_bounds(values: Sequence[float]) -> Optional[Tuple[float, float]]:
    """Those two of the values, as many from each end, that hold the median at 95 %. None of fewer
    than six."""
    rank = median_rank(len(values))
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


def median_coverage(n: int, rank: int) -> float:
    """The probability that the rank-th smallest and rank-th largest of n hold the median."""
    return 1.0 - 2.0 * fewer_heads(n, rank)


def fewer_heads(n: int, k: int) -> float:
    """P(fewer than k heads in n fair tosses)."""
    if k <= 0:
        return 0.0
    if 2 * k > n + 1:
        # As many tails as heads: summed from the side where the terms fall.
        return 1.0 - fewer_heads(n, n - k + 1)
    term = _heads(n, k - 1)
    total = 0.0
    for heads in range(k - 1, -1, -1):
        total += term
        # C(n, heads - 1) = C(n, heads) · heads / (n - heads + 1)
        term *= heads / (n - heads + 1)
        if term <= total * 1e-18:
            break
    return total


def _heads(n: int, k: int) -> float:
    """P(k heads in n fair tosses)."""
    if n <= _EXACT:
        return math.comb(n, k) / (1 << n)
    logarithm = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(logarithm - n * math.log(2.0))
