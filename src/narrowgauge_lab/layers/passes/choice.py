"""Which precision runs where, and who computes it."""

from __future__ import annotations

import functools
from typing import Any, Optional, Protocol, Sequence

import torch

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError
from narrowgauge_lab.layers.passes.floats import DTYPES, FloatPasses
from narrowgauge_lab.layers.passes.matrix import MatrixPasses
from narrowgauge_lab.layers.passes.problem import Operand, Problem
from narrowgauge_lab.layers.passes.quantise import FORMATS
from narrowgauge_lab.layers.passes.seeds import Seed

__all__ = [
    "PRECISIONS", "PRODUCTS", "Passes", "missing", "passes_for", "product_of", "seeds_on_device",
]  # fmt: skip

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "int8", "fp8")
#: What multiplies 8-bit numbers; `Passes.product` says which it is.
PRODUCTS = ("triton", "torch._int_mm", "torch._scaled_mm", "float64")
#: The least compute capability whose matrix units take it.
_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "int8": (7, 5), "fp8": (8, 9)}
#: Of our Triton kernels: below it their copies into shared memory are not asynchronous.
_TRITON = (8, 0)


class Passes(Protocol):
    """Products of one layer on one device. `seed` is for what is rounded stochastically: the same
    one gives the same bits, so that a run that is resumed goes on as it would have."""

    precision: str
    #: "torch", or one of PRODUCTS.
    product: str
    #: Of what `forward` and `input_grad` give.
    result_dtype: torch.dtype

    def require(self, weight_shape: Sequence[int]) -> None: ...

    def prepared_input(self, x: Operand) -> Any: ...

    def prepared_grad(self, grad: Operand, seed: Seed = 0) -> Any: ...

    def forward(
        self, x: Any, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor: ...

    def input_grad(
        self, grad: Any, weight: torch.Tensor, input_shape: Sequence[int], seed: Seed = 0
    ) -> torch.Tensor: ...

    def weight_grad(
        self, grad: Any, x: Any, weight_shape: Sequence[int], seed: Seed = 0
    ) -> torch.Tensor: ...


def missing(precision: str, device: torch.device) -> str:
    """Why `precision` cannot be had on `device` with this torch; empty where it can."""
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if device.type == "cuda":
        least, has = _CAPABILITY.get(precision), torch.cuda.get_device_capability(device)
        if least is not None and has < least:
            return (
                f"its compute capability is {has[0]}.{has[1]}, and {precision} needs "
                f"{least[0]}.{least[1]}"
            )
    elif precision in ("tf32", "fp8"):
        return f"{precision} is an arithmetic of GPUs"
    if precision in DTYPES:
        return _refused(DTYPES[precision], device)
    if precision == "fp8" and "e4m3" not in FORMATS:
        return f"torch {torch.__version__} has no numbers of 8-bit floating point"
    if not product_of(precision, device):
        return f"torch {torch.__version__} has no {precision} product, and Triton is not here"
    return ""


def product_of(precision: str, device: torch.device) -> str:
    """Who multiplies at `int8` or `fp8`, the fastest first; empty where nobody does."""
    if device.type != "cuda":
        return "torch._int_mm" if _int_mm_works() else "float64"
    if torch.cuda.get_device_capability(device) >= _TRITON and _triton_works():
        return "triton"
    name = "torch._int_mm" if precision == "int8" else "torch._scaled_mm"
    return name if hasattr(torch, name.partition(".")[2]) else ""


def passes_for(
    precision: str,
    device: torch.device,
    problem: Problem,
    result_dtype: Optional[torch.dtype] = None,
    *,
    product: str = "",
) -> Passes:
    """The products of `problem` on `device`. `result_dtype`: what `forward` and `input_grad` give;
    None: the precision's own for floats, float32 for int8 and fp8. `product`: one of PRODUCTS
    instead of the one that is chosen.

    Raises UnknownNameError, and NotApplicableError for what device or torch do not have. What a
    layer's weights do not allow, `require` tells, and every pass.
    """
    reason = missing(precision, device)
    if reason:
        works = [name for name in PRECISIONS if not missing(name, device)]
        raise NotApplicableError(
            f"no {precision} on {device}",
            why=reason,
            next_step="here there are " + ", ".join(works),
        )
    if precision in DTYPES:
        return FloatPasses(precision, device, problem, result_dtype)
    chosen = product or product_of(precision, device)
    if chosen not in PRODUCTS:
        raise UnknownNameError("product", chosen, PRODUCTS)
    if chosen == "triton":
        from narrowgauge_lab.layers.passes.implicit import ImplicitPasses

        return ImplicitPasses(precision, device, problem, result_dtype)
    return MatrixPasses(precision, device, problem, result_dtype, product=chosen)


def seeds_on_device(passes: Passes) -> bool:
    """Whether what they round stochastically may be seeded by a number that is on the device."""
    return passes.product == "triton"


@functools.lru_cache(maxsize=None)
def _refused(dtype: torch.dtype, device: torch.device) -> str:
    """What torch says when it is asked for the passes of small layers in `dtype`; empty if nothing.

    Tried rather than looked up: which primitives take which dtype differs between its versions and
    between processors.
    """
    problem = Problem("conv2d", (1, 1), (2, 2), (2, 2))
    name = next(name for name, each in DTYPES.items() if each == dtype)
    try:
        for kind, image, weight in (
            (problem, (2, 2, 5, 5), (2, 2, 3, 3)),
            (Problem("linear"), (2, 3), (4, 3)),
        ):
            passes = FloatPasses(name, device, kind)
            x, kernel = torch.ones(image, device=device), torch.ones(weight, device=device)
            grad = passes.forward(x, kernel, None)
            passes.input_grad(grad, kernel, image)
            passes.weight_grad(grad, x, weight)
    except RuntimeError as error:
        return f"torch {torch.__version__}: {str(error).splitlines()[0]}"
    return ""


@functools.lru_cache(maxsize=None)
def _int_mm_works() -> bool:
    """On the CPU: the operator is older than its code for it."""
    if not hasattr(torch, "_int_mm"):
        return False
    one = torch.ones(2, 2, dtype=torch.int8)
    try:
        torch.ops.aten._int_mm(one, one)
    except RuntimeError:
        return False
    return True


@functools.lru_cache(maxsize=None)
def _triton_works() -> bool:
    try:
        import narrowgauge_lab.layers.passes.triton_kernels  # noqa: F401
    except ImportError:
        return False
    return True
