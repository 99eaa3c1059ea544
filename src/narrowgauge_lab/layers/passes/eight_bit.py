"""What all 8-bit passes share: operands, scales, and what is asked of a problem."""

from __future__ import annotations

import abc
from typing import Optional, Sequence

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.layers.passes.problem import Operand, Problem, Quantised
from narrowgauge_lab.layers.passes.quantise import FORMATS, Format, quantise
from narrowgauge_lab.layers.passes.seeds import Seed

__all__ = ["LEAST_OF_GROUP", "EightBitPasses"]

#: Channels that a group has to have on either side. A matrix unit sums over 32 at a time; of less
#: than a quarter of that a convolution is no matter of products any more, but of memory.
LEAST_OF_GROUP = 8


class EightBitPasses(abc.ABC):
    """int8: both operands int8. fp8: gradients e5m2, all else e4m3.

    `forward` and `input_grad` give `result_dtype`, `weight_grad` float32. Scales of what is summed
    over go into the weight before it is quantised; those of a weight gradient are on its outside.
    Subclasses multiply; they are given what is not empty.
    """

    product = ""

    def __init__(
        self,
        precision: str,
        device: torch.device,
        problem: Problem,
        result_dtype: Optional[torch.dtype] = None,
    ) -> None:
        self.precision, self.device, self.problem = precision, device, problem
        self.result_dtype = result_dtype or torch.float32
        self.inputs: Format = FORMATS["int8" if precision == "int8" else "e4m3"]
        self.gradients: Format = FORMATS["int8" if precision == "int8" else "e5m2"]

    def prepared_input(self, x: Operand) -> Quantised:
        """`x` as `forward` and `weight_grad` take it; given to both, it is quantised once."""
        return self._quantised(x, self.inputs, None)

    def prepared_grad(self, grad: Operand, seed: Seed = 0) -> Quantised:
        """`grad` as `input_grad` and `weight_grad` take it, by one scale: int8 is rounded
        stochastically."""
        return self._quantised(grad, self.gradients, seed, whole=True)

    @torch.no_grad()
    def forward(
        self, x: Operand, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        self.require(weight.shape)
        shape = self.problem.output_shape(x.shape, weight.shape)
        if 0 in shape or 0 in x.shape:
            return torch.zeros(shape, dtype=self.result_dtype, device=x.device)
        return self._forward(self.prepared_input(x), weight.detach().float(), bias)

    @torch.no_grad()
    def input_grad(
        self, grad: Operand, weight: torch.Tensor, input_shape: Sequence[int], seed: Seed = 0
    ) -> torch.Tensor:
        self.require(weight.shape)
        shape = tuple(input_shape)
        if 0 in shape or 0 in grad.shape:
            return torch.zeros(shape, dtype=self.result_dtype, device=grad.device)
        return self._input_grad(self.prepared_grad(grad, seed), weight.detach().float(), shape)

    @torch.no_grad()
    def weight_grad(
        self, grad: Operand, x: Operand, weight_shape: Sequence[int], seed: Seed = 0
    ) -> torch.Tensor:
        shape = tuple(weight_shape)
        self.require(shape)
        if 0 in x.shape or 0 in grad.shape:
            return torch.zeros(shape, device=grad.device)
        return self._weight_grad(self.prepared_grad(grad, seed), self.prepared_input(x), shape)

    def require(self, weight_shape: Sequence[int]) -> None:
        """Raises NotApplicableError where a layer of such weights cannot go."""
        groups = self.problem.groups
        if groups == 1:
            return
        least = min(weight_shape[0] // groups, weight_shape[1])
        if least < LEAST_OF_GROUP:
            kind = "depthwise" if weight_shape[1] == 1 else "grouped"
            raise NotApplicableError(
                f"no {self.precision} for a {kind} convolution of {groups} groups",
                why=f"a side of a group has {least} channels, and a matrix unit sums over 32 at a "
                f"time: below {LEAST_OF_GROUP} there is next to nothing to multiply",
                next_step="run this layer in bf16, fp16, tf32 or fp32",
            )

    def _quantised(
        self, x: Operand, form: Format, seed: Optional[Seed], *, whole: bool = False
    ) -> Quantised:
        return quantise(x, form, seed if form.name == "int8" else None, whole=whole)

    @abc.abstractmethod
    def _forward(
        self, x: Quantised, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> torch.Tensor: ...

    @abc.abstractmethod
    def _input_grad(
        self, grad: Quantised, weight: torch.Tensor, input_shape: Sequence[int]
    ) -> torch.Tensor: ...

    @abc.abstractmethod
    def _weight_grad(
        self, grad: Quantised, x: Quantised, weight_shape: Sequence[int]
    ) -> torch.Tensor: ...
