"""Intervals of figures that are means over test images, and of differences of them.

Accuracy of an exit, area under steps, accuracy at a budget: each is a mean over the images of one
number per image (`Values`), as long as costs are the shapes'. The percentile bootstrap draws images
with replacement (Efron and Tibshirani 1993, chapter 13). All families see the same draws, so that a
difference of two is paired, image by image, and what makes an image hard for both cancels.

Several seeds of a family are drawn with replacement too, each family's for itself. Of few seeds a
plain draw understates their variance by (n - 1) / n, which is put right. One seed has no variance
to be known: the interval is then of the test images alone, and whoever shows it says so.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from narrowgauge_contract.errors import BadValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["COVERAGE", "DRAWS", "Interval", "draw_means", "interval_of"]

COVERAGE = 0.95
DRAWS = 2000
#: So many draws at once: 200 times 10,000 images are 8 MB.
_CHUNK = 200


@dataclasses.dataclass(frozen=True)
class Interval:
    """`value` and the percentile interval around it."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is told from none."""
        return self.low > 0 or self.high < 0


def draw_means(values: Sequence[Array], draws: int = DRAWS, seed: int = 0) -> Array:
    """float64 [families, draws]: the figure of each family in each draw, the draws the same.

    `values`: for each family [seeds, images], a number per image; images in the same order for all.
    Raises BadValueError for families of different images.
    """
    images = {each.shape[1] for each in values}
    if len(images) != 1 or 0 in images or not all(each.shape[0] for each in values):
        raise BadValueError(
            "these families have no draws in common",
            why=f"they were tested on {sorted(images)} images, or one has no seed",
        )
    count = images.pop()
    stacked = np.concatenate([np.asarray(each, np.float64) for each in values]).T
    chance = np.random.default_rng([seed, count])
    means = np.empty((draws, stacked.shape[1]))
    for begin in range(0, draws, _CHUNK):
        size = min(_CHUNK, draws - begin)
        means[begin : begin + size] = _weights(chance, size, count) @ stacked / count
    splits = np.cumsum([each.shape[0] for each in values])[:-1]
    return np.stack([_over_seeds(part, chance) for part in np.split(means, splits, axis=1)])


def _weights(chance: np.random.Generator, draws: int, images: int) -> Array:
    """float64 [draws, images]: how often each draw takes an image."""
    drawn = chance.integers(images, size=(draws, images))
    drawn += np.arange(draws)[:, np.newaxis] * images
    counts = np.bincount(drawn.reshape(-1), minlength=draws * images)
    weights: Array = counts.reshape(draws, images).astype(np.float64)
    return weights


def _over_seeds(means: Array, chance: np.random.Generator) -> Array:
    """[draws] of means [draws, seeds], seeds drawn as well."""
    draws, seeds = means.shape
    whole: Array = means.mean(axis=1)
    if seeds > 1:
        drawn = chance.integers(seeds, size=(draws, seeds))
        picked = np.take_along_axis(means, drawn, axis=1).mean(axis=1)
        whole += (picked - whole) * math.sqrt(seeds / (seeds - 1))
    return whole


def interval_of(value: float, drawn: Array, low: float, high: float) -> Interval:
    """The percentile interval of a figure that lies between `low` and `high`, from its draws
    [draws]: what is put right for few seeds may reach beyond."""
    tail = (1.0 - COVERAGE) / 2.0
    ends = np.clip(np.quantile(drawn, [tail, 1.0 - tail]), low, high)
    return Interval(value, float(ends[0]), float(ends[1]))
