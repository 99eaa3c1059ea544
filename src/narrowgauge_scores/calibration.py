"""Whether an exit knows when it is right: what deciding to leave by confidence rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["BINS", "auroc", "expected_calibration_error"]

BINS = 15


def expected_calibration_error(confidence: Array, correct: Array, bins: int = BINS) -> float:
    """How far confidence and accuracy are apart, on average over the images [images]: 0 to 1.

    Guo and others, On Calibration of Modern Neural Networks, ICML 2017: `bins` of equal width over
    [0, 1], each closed above, weighted by how many images fall in.
    """
    places = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(places, weights=confidence - correct, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def auroc(score: Array, correct: Array) -> Optional[float]:
    """The chance that a right answer has a higher score than a wrong one, ties counting half.

    `score` and bool `correct` are [images]. By ranks (Mann and Whitney). None where all answers
    are right, or none is: there is then nothing to tell apart.
    """
    right = int(correct.sum())
    wrong = len(correct) - right
    if not right or not wrong:
        return None
    _, places, counts = np.unique(score, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2.0)[places.reshape(-1)]
    return float((ranks[correct.astype(bool)].sum() - right * (right + 1) / 2.0) / (right * wrong))
