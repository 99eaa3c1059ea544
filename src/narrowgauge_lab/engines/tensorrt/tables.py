"""Calibration tables as TensorRT writes them, and which of their entries a layer reads.

A table is text: a line that names the version and the algorithm, then `tensor: hex` lines, where
the digits are the bits of a float32, the highest first: the step from one int8 to the next, the
largest magnitude over 127 (README of NVIDIA's sampleINT8). Zeros in front may be left out.
"""

from __future__ import annotations

import math
import struct
from typing import Dict, Iterable

from narrowgauge_contract.errors import DataCorruptError
from narrowgauge_lab.engines.tensorrt.onnx_nodes import node_inputs

__all__ = ["read_table", "scales_of_layers"]

_HEAD = "TRT-"
_DIGITS = 8


def read_table(table: bytes) -> Dict[str, float]:
    """Tensor -> scale. Raises DataCorruptError where the bytes are no such table."""
    lines = table.decode("utf-8", errors="replace").splitlines()
    if not lines or not lines[0].startswith(_HEAD):
        raise _damaged(f"its first line is not {_HEAD}… but {(lines or [''])[0]!r:.40}")
    found: Dict[str, float] = {}
    for line in filter(str.strip, lines[1:]):
        # A tensor's name may hold colons itself.
        name, colon, digits = (part.strip() for part in line.rpartition(":"))
        try:
            if not colon or not 1 <= len(digits) <= _DIGITS:
                raise ValueError(f"1 to {_DIGITS} digits are wanted")
            (scale,) = struct.unpack(">f", bytes.fromhex(digits.zfill(_DIGITS)))
        except ValueError as error:
            raise _damaged(f"the line {line!r:.80} is no entry: {error}") from error
        if not math.isfinite(scale) or scale < 0:
            raise _damaged(f"the scale of {name} is {scale}")
        found[name] = scale
    return found


def scales_of_layers(table: bytes, onnx: bytes, layers: Iterable[str]) -> Dict[str, float]:
    """Layer -> scale of its input; `onnx` is the file that the table is of. A layer whose input has
    no entry, or only 0, which is none, is left out. Raises DataCorruptError."""
    scales = read_table(table)
    inputs = node_inputs(onnx)
    found: Dict[str, float] = {}
    for layer in layers:
        weight = f"{layer}.weight" if layer else "weight"
        for reads in inputs:
            if weight in reads[1:] and scales.get(reads[0]):
                found.setdefault(layer, scales[reads[0]])
    return found


def _damaged(why: str) -> DataCorruptError:
    return DataCorruptError(
        "this is no calibration table of TensorRT's",
        why=why,
        next_step="calibrate again, without the cached table",
    )
