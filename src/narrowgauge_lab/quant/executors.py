"""What runs a quantised network, by name, and which widths each of them has.

| name        | runs                                                       | bits              |
|-------------|------------------------------------------------------------|-------------------|
| fake        | float arithmetic on rounded values                         | 2 to 8            |
| torch       | torch's integer operators, x86 or qnnpack, layer by layer  | 2 to 8, in bytes  |
| onnxruntime | the network as an ONNX file with Q/DQ nodes, on the CPU    | 2 to 8, in bytes  |
| tensorrt    | an engine of int8 layers, on a GPU, calibrated by itself   | 8                 |

Integers of fewer than 8 bits use part of a byte's values, so they are no faster than 8 bits there.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Callable, Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import (
    BadValueError,
    NotApplicableError,
    SkippedError,
    UnknownNameError,
)
from narrowgauge_kernels import library
from narrowgauge_lab.quant.cpu import exact_activation_bits
from narrowgauge_lab.quant.layers import LayerScales, fake_quantized
from narrowgauge_lab.quant.ort import OrtModel, onnxruntime_library
from narrowgauge_lab.quant.qdq import export_float, export_qdq, onnx_library
from narrowgauge_lab.quant.x86 import choose_engine, to_int8

__all__ = [
    "EXECUTORS",
    "Executed",
    "activation_bits",
    "by_tensorrt",
    "execute",
    "float_twin",
    "require_executor",
]

#: Executor -> its least and most bits.
EXECUTORS: Dict[str, Tuple[int, int]] = {
    "fake": (2, 8),
    "torch": (2, 8),
    "onnxruntime": (2, 8),
    "tensorrt": (8, 8),
}
_ON_CPU = ("torch", "onnxruntime")
Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Executed:
    """`forward`: images [B, C, H, W] to what the network gives. `how`: what runs, in words.
    `file_bytes`: of the file that was made for it; None where there is none."""

    forward: Forward
    how: str
    file_bytes: Optional[int] = None


def require_executor(name: str, bits: int, device: torch.device) -> None:
    """Before anything is trained. Raises UnknownNameError, BadValueError for a width that the
    executor has not, SkippedError where this host or device lacks it, KernelsNotBuiltError where
    rounding has no kernel for the device yet."""
    if name not in EXECUTORS:
        raise UnknownNameError("executor", name, EXECUTORS)
    least, most = EXECUTORS[name]
    if not least <= bits <= most:
        others = [
            f"{each} has {low} to {high}" if low < high else f"{each} has {low}"
            for each, (low, high) in EXECUTORS.items()
        ]
        able = [each for each, (low, high) in EXECUTORS.items() if low <= bits <= high]
        raise BadValueError(
            f"{name} has no integers of {bits} bits" if able else f"no executor has {bits} bits",
            why="; ".join(others),
            next_step=f"-p executor={able[0]}" if able else "give 2 to 8 bits",
        )
    if name == "fake":
        library.require(device.type)
    lacking = _lacking(name, device)
    if lacking:
        raise SkippedError(f"{name} does not run here", why=lacking)


def _lacking(name: str, device: torch.device) -> str:
    if name in _ON_CPU and device.type != "cpu":
        return f"it runs int8 on a CPU, and this row is on {device.type}"
    try:
        if name == "torch":
            choose_engine()
        elif name == "onnxruntime":
            onnx_library()
            onnxruntime_library()
    except NotApplicableError as error:
        return str(error).replace("\n", "; ")
    if name != "tensorrt":
        return ""
    # Here: the engines take their scales from this package.
    from narrowgauge_lab.engines import registry

    return registry.missing(name, device) or registry.refuses(name, "int8", device)


def activation_bits(name: str, bits: int) -> int:
    """`bits`, or fewer where this processor's products of so many bits would saturate."""
    return min(bits, exact_activation_bits()) if name in _ON_CPU else bits


def execute(
    name: str,
    model: nn.Module,
    scales: Mapping[str, LayerScales],
    example: torch.Tensor,
    threads: Optional[int] = None,
) -> Executed:
    """`model` (eval, float, BatchNorm folded) by its scales. `example` [B, …] is what an export
    runs; `threads`: of ONNX Runtime, None: as many as torch takes now.

    Raises what the adapters raise, and BadValueError for tensorrt, which finds scales of its own:
    `by_tensorrt`.
    """
    if name == "fake":
        return Executed(fake_quantized(model, scales).eval(), "rounded values in float arithmetic")
    if name == "torch":
        engine = choose_engine()
        return Executed(to_int8(model, scales, engine), f"torch's operators by {engine}")
    if name == "onnxruntime":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            export_qdq(model, scales, example, path)
            session, size = OrtModel(path, threads), path.stat().st_size
        ran = ", ".join(f"{count} {each}" for each, count in sorted(session.operators.items()))
        return Executed(session, f"ONNX Runtime: {ran}", size)
    if name not in EXECUTORS:
        raise UnknownNameError("executor", name, EXECUTORS)
    raise BadValueError(
        f"{name} takes no scales here", next_step="give it images: quant.executors.by_tensorrt"
    )


def float_twin(
    name: str, model: nn.Module, example: torch.Tensor, threads: Optional[int] = None
) -> Executed:
    """The float32 network by the same means, for what integers save. Raises as `execute` does."""
    if name != "onnxruntime":
        return Executed(model, "torch, float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(export_float(model, example))
        session, size = OrtModel(path, threads), path.stat().st_size
    return Executed(session, "ONNX Runtime, float32", size)


# unverified: quantised networks by TensorRT | needs a GPU and TensorRT | -p executor=tensorrt there
def by_tensorrt(
    model: nn.Module, images: torch.Tensor, device: torch.device, most: int, precision: str = "int8"
) -> Executed:
    """`model` (eval, float32, on the CPU) as an engine for 1 to `most` images, calibrated by
    TensorRT on `images` [B, C, H, W]; `precision`: int8, or fp32 for its twin. Raises what
    `engines.registry.prepare` raises."""
    from narrowgauge_lab.engines import registry
    from narrowgauge_lab.engines.base import Preparation

    wanted = Preparation(
        precision, device, (images.cpu(),) if precision == "int8" else (), (1, 1, most)
    )
    runner = registry.prepare("tensorrt", model, images[:1].to(device), wanted)
    # Its memory is written over by the next call.
    return Executed(lambda x: runner(x).clone(), f"TensorRT, {precision}")
