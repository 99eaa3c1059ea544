"""Every difference between torch 1.8 and today that the lab meets, in one place.

Other modules ask here and never compare versions. Importing this module touches no device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from typing import Any, BinaryIO, ContextManager, Dict, Tuple

import torch

__all__ = [
    "allow_tf32",
    "autocast",
    "autocast_dtypes",
    "generator_for",
    "graphs_available",
    "inference_mode",
    "load_state",
    "tf32_allowed",
    "torch_version",
]


def torch_version() -> Tuple[int, int]:
    """Major and minor version of torch; `1.8.0+cu111` and `2.13.0.dev1` both parse."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def autocast_dtypes(device: torch.device) -> Tuple[torch.dtype, ...]:
    """The reduced precisions that this torch's autocast runs a convolution in on `device`.

    torch 1.8 and 1.9 autocast on CUDA to float16 only. CPU autocast came with 1.10 for bfloat16;
    float16 there came later and, where it is missing, only warns and runs float32, so it is tried
    out rather than looked up.
    """
    if torch_version() < (1, 10):
        return (torch.float16,) if device.type == "cuda" else ()
    if device.type != "cuda":
        wanted = (torch.bfloat16, torch.float16)
        return tuple(dtype for dtype in wanted if _cpu_autocast_works(dtype))
    # bfloat16 below 8.0 is emulated: slow, and not what anyone means by a bf16 measurement.
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return (torch.bfloat16, torch.float16)
    return (torch.float16,)


@functools.lru_cache(maxsize=None)
def _cpu_autocast_works(dtype: torch.dtype) -> bool:
    """Whether a convolution forward and backward really runs in `dtype` under CPU autocast."""
    image = torch.ones(1, 1, 4, 4)
    weight = torch.ones(1, 1, 3, 3, requires_grad=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with autocast(torch.device("cpu"), dtype):
                output = torch.nn.functional.conv2d(image, weight)
            output.float().sum().backward()
    except RuntimeError:
        return False
    return bool(output.dtype == dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> ContextManager[Any]:
    """Autocast to `dtype`; float32 is no autocast at all.

    The weight cache is off where that can be said: each weight is used once per forward, and a
    cast made outside a CUDA-graph capture must not be reused inside it.
    """
    if dtype == torch.float32:
        return contextlib.nullcontext()
    if torch_version() < (1, 10):
        return torch.cuda.amp.autocast()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def _per_operator_math() -> bool:
    """torch 2.9 replaced `allow_tf32` by `fp32_precision`; mixing the two is an error there."""
    return hasattr(torch.backends.cudnn, "conv")


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products and convolutions use TF32, or hold them to IEEE float32."""
    if not _per_operator_math():
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed
        return
    word = "tf32" if allowed else "ieee"
    torch.backends.cuda.matmul.fp32_precision = word
    torch.backends.cudnn.conv.fp32_precision = word
    torch.backends.cudnn.rnn.fp32_precision = word
    # oneDNN can be told to use bf16 or tf32 inside float32 operators; a float32 row means float32.
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    torch.backends.mkldnn.conv.fp32_precision = "ieee"


def tf32_allowed() -> Dict[str, bool]:
    """Whether TF32 may be used now, for matrix products and for convolutions.

    That is what the math-mode flags say, unless NVIDIA_TF32_OVERRIDE=0 is set: NVIDIA's libraries
    then never use it, whatever the flags say, and the flags do not show that.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return {"matmul": False, "conv": False}
    if not _per_operator_math():
        return {
            "matmul": bool(torch.backends.cuda.matmul.allow_tf32),
            "conv": bool(torch.backends.cudnn.allow_tf32),
        }
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "conv": torch.backends.cudnn.conv.fp32_precision == "tf32",
    }


def graphs_available(device: torch.device) -> bool:
    """CUDA graphs came with torch 1.10."""
    return device.type == "cuda" and hasattr(torch.cuda, "CUDAGraph")


def inference_mode() -> ContextManager[Any]:
    """`torch.inference_mode` (1.9), or `no_grad` before it."""
    if hasattr(torch, "inference_mode"):
        return torch.inference_mode()
    return torch.no_grad()


def generator_for(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own on `device`, so that no library call can shift its stream."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return generator


def load_state(stream: BinaryIO) -> Any:
    """`torch.load` onto the CPU; only tensors and plain containers where torch can insist on it."""
    if torch_version() >= (1, 13):
        return torch.load(stream, map_location="cpu", weights_only=True)
    return torch.load(stream, map_location="cpu")
