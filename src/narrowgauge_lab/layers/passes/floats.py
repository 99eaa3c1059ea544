"""The three products of a layer in a float precision, by torch's real primitives.

At fp16 a sum beyond -65504 should come out as minus infinity. The kernel of cuDNN 9.19 for some
convolutions (measured: 3x3, up to 64 channels, an H200) writes zero there, in the forward pass
alone; gradients, where loss scaling looks for infinities, are right.
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch.nn import functional

from narrowgauge_lab.layers.passes.primitives import (
    float32_math,
    input_gradient,
    weight_gradient,
    without_autocast,
)
from narrowgauge_lab.layers.passes.problem import Operand, Problem, Quantised
from narrowgauge_lab.layers.passes.seeds import Seed

__all__ = ["DTYPES", "FloatPasses"]

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class FloatPasses:
    """`forward` and `input_grad` give the precision's own dtype, or `result_dtype`; `weight_grad`
    float32. What is quantised is taken for the values that it stands for. `seed` is not used here.
    Nothing is differentiated: operands are detached, which costs less than `no_grad` around them.
    """

    def __init__(
        self,
        precision: str,
        device: torch.device,
        problem: Problem,
        result_dtype: Optional[torch.dtype] = None,
    ) -> None:
        self.precision, self.device, self.problem = precision, device, problem
        self.product = "torch"
        self._dtype = DTYPES[precision]
        self.result_dtype = result_dtype or self._dtype

    def require(self, weight_shape: Sequence[int]) -> None:
        """Any layer can go."""

    def prepared_input(self, x: Operand) -> torch.Tensor:
        """`x` as `forward` and `weight_grad` take it; given to both, it is made once."""
        if isinstance(x, Quantised):
            return x.dequantised(self._dtype)
        return x.detach().to(self._dtype)

    def prepared_grad(self, grad: Operand, seed: Seed = 0) -> torch.Tensor:
        """`grad` as `input_grad` and `weight_grad` take it."""
        del seed
        return self.prepared_input(grad)

    def forward(
        self, x: Operand, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        problem, image, kernel = self.problem, self.prepared_input(x), self._cast(weight)
        added = None if bias is None else self._cast(bias)
        if _empty(image, kernel):
            shape = problem.output_shape(image.shape, kernel.shape)
            return image.new_zeros(shape, dtype=self.result_dtype)
        with self._math():
            if problem.kind == "linear":
                result = functional.linear(image, kernel, added)
            else:
                result = functional.conv2d(
                    image, kernel, added, problem.stride, problem.padding, problem.dilation,
                    problem.groups,
                )  # fmt: skip
        return result.to(self.result_dtype)

    def input_grad(
        self, grad: Operand, weight: torch.Tensor, input_shape: Sequence[int], seed: Seed = 0
    ) -> torch.Tensor:
        from_above, kernel = self.prepared_grad(grad, seed), self._cast(weight)
        if _empty(from_above, kernel):
            return from_above.new_zeros(tuple(input_shape), dtype=self.result_dtype)
        with self._math():
            if self.problem.kind == "linear":
                result = from_above.matmul(kernel)
            else:
                result = input_gradient(self.problem, from_above, kernel, input_shape)
        return result.to(self.result_dtype)

    def weight_grad(
        self, grad: Operand, x: Operand, weight_shape: Sequence[int], seed: Seed = 0
    ) -> torch.Tensor:
        from_above, image = self.prepared_grad(grad, seed), self.prepared_input(x)
        if _empty(from_above, image):
            return from_above.new_zeros(tuple(weight_shape), dtype=torch.float32)
        with self._math():
            if self.problem.kind == "linear":
                rows = from_above.reshape(-1, from_above.shape[-1])
                result = rows.t().matmul(image.reshape(-1, image.shape[-1]))
            else:
                result = weight_gradient(self.problem, from_above, image, weight_shape)
        return result.float()

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._dtype)

    def _math(self) -> _Math:
        return _Math(self.precision, self.device)


class _Math:
    """The precision's arithmetic, whatever flags and autocast say outside."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self._autocast = without_autocast(device)
        self._float32 = None
        if DTYPES[precision] == torch.float32:
            self._float32 = float32_math(tf32=precision == "tf32", device=device)

    def __enter__(self) -> None:
        self._autocast.__enter__()
        if self._float32 is not None:
            self._float32.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._float32 is not None:
            self._float32.__exit__(*error)
        self._autocast.__exit__(*error)


def _empty(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == 0 or other.numel() == 0
