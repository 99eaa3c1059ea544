"""How a sparse layer may be computed: by torch's dense operators, or by kernels that skip zeros."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Optional, Tuple

import torch

from narrowgauge_kernels.errors import ToolchainMissingError
from narrowgauge_kernels.library import has_kernels
from narrowgauge_kernels.sparse.errors import DeviceError, SparseArgumentError
from narrowgauge_kernels.sparse_conv import (
    SparseConv2dFunction,
    run_packed,
    sparse_conv2d_ref,
    zeros_in,
)
from narrowgauge_kernels.sparse_generated import variant_of
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.layers.sparse.prepared import Prepared

__all__ = [
    "SAMPLE", "Call", "dense", "lacking", "reference", "sampled_zeros", "sparse", "zero_fraction",
]  # fmt: skip

#: Elements of a map that are looked at to tell its zeros, and how many lie side by side.
SAMPLE, _RUN = 1 << 15, 64


class Call(NamedTuple):
    """One layer's tensors beside its map, and its window; as `narrowgauge_kernels.sparse_conv` has
    them."""

    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    stride: Tuple[int, int]
    padding: Tuple[int, int]
    relu_input: bool
    relu_output: bool

    @property
    def rest(self) -> Tuple[Any, ...]:
        """What follows the bias in the order of `sparse_conv2d`."""
        return (self.stride, self.padding, self.relu_input, self.relu_output)


def dense(call: Call, x: torch.Tensor) -> torch.Tensor:
    """By torch's operators, which multiply zeros too."""
    return sparse_conv2d_ref(x, call.weight, call.bias, *call.rest)


def reference(call: Call, x: torch.Tensor) -> torch.Tensor:
    """In float64, rounded once to the dtype of x."""
    bias = None if call.bias is None else call.bias.double()
    return dense(call._replace(weight=call.weight.double(), bias=bias), x.double()).to(x.dtype)


def sparse(
    call: Call, x: torch.Tensor, prepared: Prepared, switched: Optional[float] = None
) -> torch.Tensor:
    """By the kernel of this device that skips zeros; gradients are torch's dense ones.

    `switched`, on CUDA: the device counts the zeros of x and, where their fraction is below this,
    runs a generated kernel that skips none. Raises what `narrowgauge_kernels.sparse_conv` and
    `sparse_generated` raise.
    """

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        if x.is_cuda:
            return _convolution(call, x, prepared, switched)(x, weight, bias)
        return run_packed(x, weight, prepared.packed(weight), bias, *call.rest)

    if not _wants_gradient(x, call):
        # A node that nobody goes back through costs as much as a small layer.
        return run(x, call.weight, call.bias)
    return SparseConv2dFunction.apply(x, call.weight, call.bias, *call.rest, run)


def _wants_gradient(x: torch.Tensor, call: Call) -> bool:
    if not torch.is_grad_enabled():
        return False
    biased = call.bias is not None and call.bias.requires_grad
    return x.requires_grad or call.weight.requires_grad or biased


def _convolution(call: Call, x: torch.Tensor, prepared: Prepared, switched: Optional[float]) -> Any:
    tf32 = x.dtype == torch.float32 and tf32_flags.tf32_allowed()["conv"]
    biased = call.bias is not None
    variant = variant_of(x, biased, call.relu_input, call.relu_output, tf32)
    if switched is not None:
        # By element alone: only there is a dense kernel beside the sparse one.
        precision = "fp16" if x.dtype == torch.float16 else "fp32"
        variant = dataclasses.replace(
            variant, precision=precision, granularity="element", path="switched"
        )
    least = min(max(switched or 0.0, 0.0), 1.0)
    return prepared.generated.convolution(x, call.weight, call.stride, call.padding, variant, least)


def lacking(call: Call, x: torch.Tensor, prepared: Prepared) -> str:
    """Why no kernel skips the zeros of this map, with how to get one; empty where one does. On CUDA
    the kernel is compiled for it; raises KernelBuildError for one that does not compile."""
    if x.device.type == "cuda":
        try:
            _convolution(call, x, prepared, None).prepare(x.device)
        except SparseArgumentError as error:
            return f"no kernel can be generated: {error.what}"
        except (ToolchainMissingError, DeviceError) as error:
            next_step = f"; {error.next_step}" if error.next_step else ""
            return f"generated kernels cannot be made here: {error.what}{next_step}"
        return ""
    if x.device.type != "cpu":
        return f"there are no sparse kernels for {x.device.type}"
    if x.dtype != torch.float32:
        return f"the sparse kernels of the CPU do not take {x.dtype}"
    if not has_kernels("cpu"):
        return "no kernels are built: python -m narrowgauge_kernels.build"
    return ""


def zero_fraction(x: torch.Tensor, relu: bool) -> float:
    """The fraction of x that is zero, or with `relu` becomes zero by it; 1 of nothing. On CUDA the
    host waits for it."""
    if x.numel() == 0:
        return 1.0
    if x.device.type == "cpu" and x.dtype == torch.float32 and has_kernels("cpu"):
        return zeros_in(x, relu) / x.numel()
    given = x.detach()
    return float(((given <= 0) if relu else (given == 0)).double().mean())


def sampled_zeros(x: torch.Tensor, relu: bool) -> float:
    """`zero_fraction` of a map that has a sparse kernel on the CPU: float32, built. Of more than
    `SAMPLE` elements by runs of them all over it, as they lie in memory: to read a large map costs
    a twentieth of its convolution."""
    count = x.numel()
    if count > SAMPLE and _is_dense(x):
        # Odd: runs fall on other places of each channel, or of each pixel.
        every = count // SAMPLE | 1
        runs = count // (_RUN * every)
        x, count = x.detach().as_strided((runs, _RUN), (_RUN * every, 1)), runs * _RUN
    return zeros_in(x, relu) / count if count else 1.0


def _is_dense(x: torch.Tensor) -> bool:
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
