"""torch's own convolution gradients, which have had other names, and its float32 math.

`aten::convolution_backward` came with torch 1.11 and computes only what is asked for. Before it,
each library had a primitive for each gradient; autograd would run the forward pass to get there.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Iterator, Sequence

import torch

from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.layers.passes.problem import Problem
from narrowgauge_lab.measure.watch import declare

__all__ = ["float32_math", "input_gradient", "weight_gradient", "without_autocast"]


def input_gradient(
    problem: Problem, grad: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int]
) -> torch.Tensor:
    """Of a convolution's output `grad` [B, K, Ho, Wo] by its input. No part may be empty."""
    if torch_compat.torch_version() >= (1, 11):
        # Only its shape is asked for; by a view of one element it costs nothing.
        image = grad.new_empty(1).expand(tuple(input_shape))
        return _convolution_backward(problem, grad, image, weight, (True, False, False))[0]
    result = _library_gradient(problem, "input", list(input_shape), grad, weight)
    if result is None:
        image = grad.new_zeros(tuple(input_shape))
        result = _by_autograd(problem, grad, image, weight, wanted=0)
    declare("aten::convolution_backward", grad, weight, result)
    return result


def weight_gradient(
    problem: Problem, grad: torch.Tensor, image: torch.Tensor, weight_shape: Sequence[int]
) -> torch.Tensor:
    """Of a convolution's output `grad` by its weight. No part may be empty."""
    if torch_compat.torch_version() >= (1, 11):
        weight = grad.new_empty(1).expand(tuple(weight_shape))
        return _convolution_backward(problem, grad, image, weight, (False, True, False))[1]
    # oneDNN of torch 1.8 gives a wrong one for depthwise 3 x 3 windows of stride 2 over sides that
    # are even: by a quarter of it and more, in torch's own autograd too.
    depthwise = problem.groups > 1 and problem.groups == weight_shape[0] and weight_shape[1] == 1
    with torch.backends.mkldnn.flags(enabled=not depthwise):
        result = _library_gradient(problem, "weight", list(weight_shape), grad, image)
        if result is None:
            weight = grad.new_zeros(tuple(weight_shape))
            result = _by_autograd(problem, grad, image, weight, wanted=1)
    declare("aten::convolution_backward", grad, image, result)
    return result


def _convolution_backward(
    problem: Problem, grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, wanted: Any
) -> Any:
    if not torch_compat.has_dispatch_mode():
        declare("aten::convolution_backward", grad, weight, grad)
    return torch.ops.aten.convolution_backward(
        grad, image, weight, None, problem.stride, problem.padding, problem.dilation, False,
        (0, 0), problem.groups, wanted,
    )  # fmt: skip


# unverified: gradients by cuDNN's primitives of torch 1.8 to 1.10 | needs such a torch and a CUDA
# device | nox -s gpu on one
def _library_gradient(
    problem: Problem, which: str, size: Any, grad: torch.Tensor, other: torch.Tensor
) -> Any:
    """By the primitive that torch's own autograd would take; None where it would take none."""
    sizes = (list(problem.padding), list(problem.stride), list(problem.dilation), problem.groups)
    grad, other = grad.contiguous(), other.contiguous()
    if grad.is_cuda and torch.backends.cudnn.is_acceptable(grad):
        flags = torch.backends.cudnn
        name = f"cudnn_convolution_backward_{which}"
        modes = (flags.benchmark, flags.deterministic, flags.allow_tf32)
        return getattr(torch.ops.aten, name)(size, grad, other, *sizes, *modes)
    float32 = grad.device.type == "cpu" and grad.dtype == torch.float32
    if float32 and torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled():
        # The primitives themselves insist on being called by this one. Of the operand that it does
        # not use only the shape is asked for.
        unused = grad.new_empty(1).expand(size)
        wanted = (which == "input", which == "weight", False)
        image, weight = (unused, other) if which == "input" else (other, unused)
        with _untraced():
            both = torch.ops.aten.mkldnn_convolution_backward(image, grad, weight, *sizes, wanted)
        return both[0 if which == "input" else 1]
    return None


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """TorchScript's tracer, by which this old torch is watched, has no word for a list of bools."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


def _by_autograd(
    problem: Problem, grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *, wanted: int
) -> torch.Tensor:
    """For what no library of this old torch takes, as float64: the forward pass runs too."""
    with torch.enable_grad():
        leaves = [image.detach(), weight.detach()]
        leaves[wanted].requires_grad_(True)
        result = torch.nn.functional.conv2d(
            leaves[0], leaves[1], None, problem.stride, problem.padding, problem.dilation,
            problem.groups,
        )  # fmt: skip
        return torch.autograd.grad(result, leaves[wanted], grad)[0]


def float32_math(*, tf32: bool, device: torch.device) -> ContextManager[Any]:
    """Float32 products on `device` in TF32, or in IEEE float32, for the length of a block.

    The flags are the process's. They are touched only where they say otherwise, so that layers of
    one kind, in whatever threads, leave them alone.
    """
    if _math_is(tf32=tf32, device=device):
        return contextlib.nullcontext()
    return tf32_flags.tf32_set_to(tf32)


def _math_is(*, tf32: bool, device: torch.device) -> bool:
    if device.type == "cuda":
        return set(tf32_flags.tf32_allowed().values()) == {tf32}
    return tf32_flags.cpu_float32_is_strict()


def without_autocast(device: torch.device) -> ContextManager[Any]:
    """Products in the dtypes that they are given, also inside somebody's autocast."""
    if not _autocasting(device):
        return contextlib.nullcontext()
    if torch_compat.torch_version() < (1, 10):
        return torch.cuda.amp.autocast(enabled=False)
    return torch.autocast(device.type, enabled=False)


def _autocasting(device: torch.device) -> bool:
    """Whether operators on `device` are being autocast now, in this thread."""
    if device.type == "cuda":
        return bool(torch.is_autocast_enabled())
    if torch_compat.torch_version() >= (2, 4):
        return bool(torch.is_autocast_enabled(device.type))
    return torch_compat.torch_version() >= (1, 10) and bool(torch.is_autocast_cpu_enabled())
