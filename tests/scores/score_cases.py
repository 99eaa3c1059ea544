"""What the tests of the scores share: a small run's answers, good by construction."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np

from narrowgauge_scores.side_file import RunLogits, Split


def split(images: int = 40, exits: int = 3, classes: int = 4, seed: int = 0) -> Split:
    """Answers that get better from exit to exit."""
    chance = np.random.default_rng(seed)
    labels = chance.integers(classes, size=images)
    signal = np.eye(classes)[labels]
    noise = chance.normal(size=(images, classes))
    logits = np.stack([noise + (1.0 + k) * signal for k in range(exits)]).astype(np.float32)
    return Split(logits, labels.astype(np.int64), np.arange(images, dtype=np.int64))


def of_right(right: Any, classes: int = 2) -> Split:
    """Answers that are right where `right` [exits, images] says so, all of class 0."""
    flags = np.asarray(right, bool)
    logits = np.zeros((*flags.shape, classes), np.float32)
    logits[..., 0] = np.where(flags, 1.0, 0.0)
    logits[..., 1] = np.where(flags, 0.0, 1.0)
    images = flags.shape[1]
    return Split(logits, np.zeros(images, np.int64), np.arange(images, dtype=np.int64))


def run(**changes: Any) -> RunLogits:
    """A run of three exits on CIFAR-10's costs."""
    fields: Dict[str, Any] = {
        "family": "toynet",
        "variant": "small, width 1/4",
        "data": "cifar10",
        "seed": 3,
        "test": split(),
        "val": split(seed=1),
        "cumulative_macs": np.array([2_000_000, 9_000_000, 30_000_000]),
        "direct_macs": np.array([2_000_000, 8_000_000, 28_000_000]),
    }
    fields.update(changes)
    return RunLogits(**fields)
