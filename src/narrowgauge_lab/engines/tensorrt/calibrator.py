"""Scales for int8 where TensorRT finds them itself: it runs the network on real images, which a
calibrator hands it batch by batch, and keeps what it found in a table that can be used again."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import torch

from narrowgauge_lab.engines.base import Profile
from narrowgauge_lab.errors import CalibrationError

__all__ = ["batches_of", "check_images", "make_calibrator"]

_BASES = {"entropy": "IInt8EntropyCalibrator2", "minmax": "IInt8MinMaxCalibrator"}


def check_images(images: Sequence[torch.Tensor], profile: Profile) -> None:
    """Raise CalibrationError where there is nothing to calibrate on."""
    if not any(each.shape[0] for each in images):
        raise CalibrationError(
            "int8 has nothing to calibrate on",
            why="there is no image",
            next_step="give a few hundred real images: Preparation(calibration=(...))",
        )
    for number, each in enumerate(images):
        if tuple(each.shape[1:]) != profile.image or each.dtype != torch.float32:
            raise CalibrationError(
                f"calibration batch {number} is {tuple(each.shape)} of {each.dtype}",
                why=f"the network takes images of {profile.image}, calibration float32",
            )
        if not bool(torch.isfinite(each).all()):
            raise CalibrationError(f"calibration batch {number} has values that are not finite")


def batches_of(images: Sequence[torch.Tensor], best: int) -> List[torch.Tensor]:
    """All images in batches of one size, which TensorRT wants: the largest up to `best` that leaves
    no image over."""
    together = torch.cat([each for each in images if each.shape[0]])
    count = int(together.shape[0])
    size = max(each for each in range(1, min(best, count) + 1) if count % each == 0)
    return list(together.split(size))


def make_calibrator(
    trt: Any,
    kind: str,
    batches: Sequence[torch.Tensor],
    device: torch.device,
    known: Optional[bytes],
    keep: Callable[[bytes], None],
) -> Any:
    """A calibrator of this `kind` (entropy, minmax). `known`: the table of an earlier calibration,
    with which no image is run. `keep` gets the new one.

    TensorRT calls it from C++, prints what it raises and goes on with the images so far: the first
    exception is in `error`, to be raised when the build is over. The class is made here because its
    base comes with the library.
    """
    base: Any = getattr(trt, _BASES[kind])

    class Images(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.error: Optional[Exception] = None
            self.given = 0
            self._at: Optional[torch.Tensor] = None  # TensorRT reads it until the next call

        def get_batch_size(self) -> int:
            return int(batches[0].shape[0])

        def get_batch(self, _names: Sequence[str]) -> Optional[List[int]]:
            if self.given == len(batches) or self.error is not None:
                return None
            try:
                self._at = batches[self.given].to(device).contiguous()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # it is read on another stream
            except Exception as error:
                self.error = error
                return None
            self.given += 1
            return [self._at.data_ptr()]

        def read_calibration_cache(self) -> Optional[bytes]:
            return known

        def write_calibration_cache(self, cache: Any) -> None:
            try:
                keep(bytes(cache))
            except Exception as error:
                self.error = error

    return Images()
