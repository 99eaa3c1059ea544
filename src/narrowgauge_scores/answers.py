"""What the exits of a network said: predictions, confidences, and what each answer cost.

All of one split, exits first: arrays [exits, images].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from narrowgauge_scores.side_file import Split

    Array = NDArray[Any]

__all__ = ["accuracies", "confidences", "correct_of", "costs_of", "entropies", "probabilities"]


def probabilities(logits: Array) -> Array:
    """The softmax of logits [..., classes], in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=-1, keepdims=True)
    return shifted


def entropies(logits: Array) -> Array:
    """The entropy in nats of the softmax of logits [..., classes]: 0 where it is sure."""
    chances = probabilities(logits)
    logs = np.log(chances, out=np.zeros_like(chances), where=chances > 0)
    found: Array = -(chances * logs).sum(axis=-1)
    return np.maximum(found, 0.0)


def confidences(logits: Array) -> Array:
    """The largest probability of the softmax of logits [..., classes]."""
    found: Array = probabilities(logits).max(axis=-1)
    return found


def correct_of(split: Split) -> Array:
    """bool [exits, images]: whether an exit names the true class; of equal logits the first."""
    right: Array = split.logits.argmax(axis=-1) == split.labels[np.newaxis]
    return right


def accuracies(split: Split) -> Array:
    """float64 [exits]: the share of images that each exit gets right."""
    found: Array = correct_of(split).mean(axis=1)
    return found


def costs_of(split: Split, cumulative: Array) -> Array:
    """float64 [exits, images]: MACs up to each exit, those of the image where they depend on it."""
    if split.macs is not None:
        return split.macs
    shape = (split.exits, split.images)
    return np.broadcast_to(cumulative.astype(np.float64)[:, np.newaxis], shape)
