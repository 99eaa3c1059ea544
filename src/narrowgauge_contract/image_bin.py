"""The `.bin` format of images of the sparse-convolution artefact (cuSNN, PACT 2022).

float32, little-endian, [images, 224, 224, 3]: one image's bytes after another's, pixels in rows, a
pixel's colours side by side. There is no header: neither the order of colours nor what was done to
the values can be told from a file, so whoever reads one has to be told.

What the artefact's own files hold was found by looking at them: colours blue first, values from 0
to 255, the picture scaled so that its longer side fits, and zeros below it or to its right.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Tuple

from narrowgauge_contract.errors import DataCorruptError

__all__ = [
    "CHANNELS",
    "IMAGE_BYTES",
    "ORDERS",
    "PREPROCESSING",
    "SIDE",
    "Preprocessing",
    "count_of",
]

SIDE, CHANNELS = 224, 3
#: 602,112.
IMAGE_BYTES = 4 * SIDE * SIDE * CHANNELS
ORDERS = ("rgb", "bgr")


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """A value of the file is (value from 0 to 255 - mean) / std; both red, green, blue."""

    mean: Tuple[float, float, float]
    std: Tuple[float, float, float]


#: By name. `raw`: as in the artefact. `unit`: from 0 to 1. `torchvision`: as its trained networks
#: want them, and Keras' DenseNets. `caffe`: as Keras' ResNets (v1) and VGGs want them.
PREPROCESSING: Dict[str, Preprocessing] = {
    "raw": Preprocessing((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "unit": Preprocessing((0.0, 0.0, 0.0), (255.0, 255.0, 255.0)),
    "torchvision": Preprocessing((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "caffe": Preprocessing((123.68, 116.779, 103.939), (1.0, 1.0, 1.0)),
}


def count_of(length: int, where: str) -> int:
    """How many images `length` bytes are. Raises DataCorruptError where they are no whole number of
    images, or none."""
    if length < 1 or length % IMAGE_BYTES:
        images = length / IMAGE_BYTES
        raise DataCorruptError(
            f"{where} holds no whole images",
            why=f"it has {length} bytes, which is {images:.3g} images of {IMAGE_BYTES} bytes "
            f"(float32, {SIDE}×{SIDE}×{CHANNELS})",
            next_step="make it with `narrowgauge image-bin pack`, or copy it again",
        )
    return length // IMAGE_BYTES
