"""Training, validation and test images of an anytime network: what is trained on, what thresholds
are fitted on, and what is reported. No image is in two of them."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Tuple

import numpy as np
import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.augment import Augmentation, Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData

__all__ = ["SPLIT_SEED", "Splits", "make_splits", "splits_of"]

#: One split for all systems, rows and repeats: their curves are of the same images.
SPLIT_SEED = 9

_PLAIN = Augmentation()


@dataclasses.dataclass(frozen=True)
class Splits:
    """Feeds on the device; `…_samples`: int64 [N], which images of the set's training or test part
    they are, in the feeds' order. `data`: the set's name."""

    training: Feed
    validation: Feed
    test: Feed
    training_samples: np.ndarray
    validation_samples: np.ndarray
    test_samples: np.ndarray
    classes: Tuple[str, ...]
    data: str
    seed: int
    test_whole: bool

    def record(self, ctx: RowContext) -> None:
        """Facts: how many images each part has, by which seed, and the hash of the validation's."""
        held = np.ascontiguousarray(self.validation_samples, dtype="<i8").tobytes()
        split = {
            "training": len(self.training),
            "validation": len(self.validation),
            "test": len(self.test),
            "test_whole": self.test_whole,
            "seed": self.seed,
            "validation_sha256": hashlib.sha256(held).hexdigest(),
        }
        ctx.fact("split", split)


def make_splits(
    data: FlatData,
    device: torch.device,
    *,
    validation: int = 5000,
    train_limit: int = 0,
    test_limit: int = 0,
    augmentation: Augmentation = _PLAIN,
    channels_last: bool = False,
    seed: int = SPLIT_SEED,
) -> Splits:
    """Hold `validation` images of the training part out, drawn by `seed`; train on the first
    `train_limit` of the others (0: all), augmented; test on the first `test_limit` images of the
    test part (0: all). All are normalised by the declared mean and deviation of the training part.

    Raises BadValueError where nothing is left to train on, or to validate or test with.
    """
    whole = len(data.train_images)
    if not 1 <= validation < whole:
        raise BadValueError(
            f"{validation} images for validation",
            why=f"the training part of {data.declaration.name} has {whole}, which both share",
            next_step=f"-p validation=N with N from 1 to {whole - 1}",
        )
    order = np.random.RandomState(seed).permutation(whole)
    held, rest = np.sort(order[:validation]), np.sort(order[validation:])
    rest = rest[: train_limit or len(rest)]
    tested = np.arange(len(data.test_images))[: test_limit or len(data.test_images)]
    if not len(tested):
        raise BadValueError(f"{data.declaration.name} has no test images")
    mean, std = data.declaration.mean, data.declaration.std

    def feed(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray, how: Augmentation) -> Feed:
        return Feed(images[chosen], labels[chosen], mean, std, device, how, channels_last)

    return Splits(
        training=feed(data.train_images, data.train_labels, rest, augmentation),
        validation=feed(data.train_images, data.train_labels, held, _PLAIN),
        test=feed(data.test_images, data.test_labels, tested, _PLAIN),
        training_samples=rest,
        validation_samples=held,
        test_samples=tested,
        classes=tuple(data.declaration.classes),
        data=data.declaration.name,
        seed=seed,
        test_whole=len(tested) == len(data.test_images),
    )


def splits_of(
    ctx: RowContext,
    data: FlatData,
    augmentation: Augmentation = _PLAIN,
    channels_last: bool = False,
) -> Splits:
    """`make_splits` on the row's device, by the parameters `validation`, `train_limit` and
    `test_limit`. Raises what that raises."""
    parameters = ctx.parameters
    return make_splits(
        data,
        ctx.device,
        validation=parameters["validation"],
        train_limit=parameters["train_limit"],
        test_limit=parameters["test_limit"],
        augmentation=augmentation,
        channels_last=channels_last,
    )
