"""What a sparse layer computes, by what, and from which fraction of zeros on it skips them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Dict, Optional, Tuple

import torch

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab import tf32_flags

__all__ = ["BACKENDS", "Crossover", "Key", "Point", "Settings", "key_of"]

#: (device type, dtype, shape, layout) of a map, and what else the host computes it by: what a
#: crossover holds for.
Key = Tuple[str, str, Tuple[int, ...], str, str]

#: `auto` takes `sparse` or `dense` by the layer's crossover; without one, `sparse` where the device
#: and the dtype have a kernel. `switched` (CUDA): the device counts the zeros and runs one of two
#: generated kernels by a crossover of its own. `reference` is dense in float64, rounded once.
BACKENDS = ("auto", "sparse", "switched", "dense", "reference")


@dataclasses.dataclass(frozen=True)
class Settings:
    """`relu_input` and `relu_output`: which ReLUs are part of the layer. Raises UnknownNameError
    for a backend that is not there."""

    relu_input: bool = True
    relu_output: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UnknownNameError("backend", self.backend, BACKENDS, where="of a sparse layer")


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured level: seconds per call, in turns, on a map with this fraction of zeros."""

    zeros: float
    sparse_s: Tuple[float, ...]
    dense_s: Tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Crossover:
    """Where skipping zeros becomes faster than computing them, for one shape on one device.

    Of `switched`, `sparse` and `dense` are the two generated kernels that it has. `zeros`: the
    fraction of zeros from which on `sparse` is faster; 0 where it always is and infinity where it
    never is; measured on random maps, `points` in ascending order, with every sample. `own_zeros`:
    the fraction in the layer's own map at calibration; `own_point`: how long that took (on a CPU,
    of the first layer with this problem). `shape`, `device`, `dtype` of the map.
    """

    zeros: float
    own_zeros: float
    shape: Tuple[int, ...]
    device: str
    dtype: str
    points: Tuple[Point, ...]
    own_point: Optional[Point] = None

    def says(self, zeros: Optional[float] = None) -> str:
        """`sparse` or `dense` for a map with this fraction of zeros; without one, for its own."""
        return "sparse" if (self.own_zeros if zeros is None else zeros) >= self.zeros else "dense"

    def says_by_own(self) -> Optional[str]:
        """`sparse` or `dense` as the layer's own map was faster; None where that was not measured.

        A network's zeros come in whole channels and patches, and are skipped faster than the random
        ones of `points`."""
        own = self.own_point
        if own is None:
            return None
        is_faster = statistics.median(own.sparse_s) <= statistics.median(own.dense_s)
        return "sparse" if is_faster else "dense"

    @property
    def needs_count(self) -> bool:
        """Whether the choice depends on the zeros of the map at all."""
        return 0.0 < self.zeros <= 1.0

    def to_fact(self) -> Dict[str, Any]:
        """For a record: without the samples; None for the crossover that is nowhere."""
        return {
            "crossover": self.zeros if math.isfinite(self.zeros) else None,
            "own_zeros": self.own_zeros,
            "shape": list(self.shape),
            "device": self.device,
            "dtype": self.dtype,
        }


def key_of(x: torch.Tensor) -> Key:
    """What a crossover measured on x holds for, in this process as it is set now: TF32 may be
    allowed for convolutions on CUDA or not, and a CPU has a number of threads."""
    by, device = "", x.device.type
    if device == "cpu":
        by = f"{torch.get_num_threads()} threads"
    elif x.dtype == torch.float32 and tf32_flags.tf32_allowed()["conv"]:
        by = "tf32"
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return device, str(x.dtype), tuple(x.shape), "nhwc" if last else "nchw", by
