"""8-bit passes on a GPU by our Triton kernels: implicit matrix products, no windows written out.

`forward` and `input_grad` read images NHWC: the latter convolves the gradient, each phase of the
stride by itself, so that no zeros are multiplied. Matrix units take 8-bit operands only along what
is summed over, which in a weight gradient is pixels: for it both images are turned first, and the
input is written once for each column of the window, so that rows stay aligned.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch

from narrowgauge_lab.layers.passes import launches
from narrowgauge_lab.layers.passes.eight_bit import EightBitPasses
from narrowgauge_lab.layers.passes.geometry import forward_phase, input_grad_phases
from narrowgauge_lab.layers.passes.launches import Folded
from narrowgauge_lab.layers.passes.matrix import DEEPEST, MatrixPasses
from narrowgauge_lab.layers.passes.problem import Operand, Problem, Quantised
from narrowgauge_lab.layers.passes.quantise import Format, recast
from narrowgauge_lab.layers.passes.seeds import Seed

__all__ = ["ImplicitPasses"]


class ImplicitPasses(EightBitPasses):
    """int8 sums are exact; they are float32 once they are whole, times scales."""

    product = "triton"

    def __init__(
        self,
        precision: str,
        device: torch.device,
        problem: Problem,
        result_dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__(precision, device, problem, result_dtype)
        # float64 holds any sum of int8 and is on every device.
        self._deep = MatrixPasses(precision, device, problem, result_dtype, product="float64")

    def _quantised(
        self, x: Operand, form: Format, seed: Optional[Seed], *, whole: bool = False
    ) -> Quantised:
        if isinstance(x, Quantised):
            return recast(x, form)
        drawn = seed if form.name == "int8" else None
        return launches.quantise(x.detach(), form, drawn, whole=whole)

    def folded_for(self, x: Quantised, weight: torch.Tensor) -> Folded:
        """The weight as `forward_by` takes it for an input with such scales."""
        return launches.fold(weight, x.scale, self.problem.groups, self.inputs, transposed=False)

    def folded_back_for(self, grad: Quantised, weight: torch.Tensor) -> Folded:
        """The weight as `input_grad_by` takes it for a gradient with such scales."""
        return launches.fold(weight, grad.scale, self.problem.groups, self.inputs, transposed=True)

    def forward_by(
        self, x: Quantised, kernel: Folded, shape: Sequence[int], bias: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """The product of `forward` alone; `shape` is its result's."""
        window = (kernel.rows, kernel.columns)
        result = _image(shape, self.result_dtype, x.device)
        phase = forward_phase(self.problem, window, _sides(shape))
        launches.convolve(x.values, kernel, phase, result, bias, self.problem.groups)
        return result

    def input_grad_by(
        self, grad: Quantised, kernel: Folded, input_shape: Sequence[int]
    ) -> torch.Tensor:
        """The product of `input_grad` alone."""
        window = (kernel.rows, kernel.columns)
        result = _image(input_shape, self.result_dtype, grad.device)
        phases = input_grad_phases(self.problem, window, _sides(input_shape))
        if sum(each.rows.size * each.columns.size for each in phases) != _area(input_shape):
            result.zero_()  # pixels that no tap met
        for phase in phases:
            launches.convolve(grad.values, kernel, phase, result, None, self.problem.groups)
        return result

    def _forward(
        self, x: Quantised, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> torch.Tensor:
        if self._too_deep(weight[0].numel()):
            return self._deep._forward(x, weight, bias)
        shape = self.problem.output_shape(x.shape, weight.shape)
        return self.forward_by(x, self.folded_for(x, weight), shape, bias)

    def _input_grad(
        self, grad: Quantised, weight: torch.Tensor, input_shape: Sequence[int]
    ) -> torch.Tensor:
        if self._too_deep(weight[:, 0].numel() // self.problem.groups):
            return self._deep._input_grad(grad, weight, input_shape)
        return self.input_grad_by(grad, self.folded_back_for(grad, weight), input_shape)

    def _weight_grad(
        self, grad: Quantised, x: Quantised, weight_shape: Sequence[int]
    ) -> torch.Tensor:
        problem = self.problem
        image, above = x.values, grad.values
        if _window(weight_shape) == (1, 1) and problem.padding == (0, 0):
            # What a window of one pixel does not meet is left out before anything is moved; then
            # rows need no bounds.
            (down, right), (height, width) = problem.stride, _sides(above.shape)
            if image.dim() == 4:
                image = image[:, :, : height * down : down, : width * right : right]
            image, above, problem = (
                _flat(image),
                _flat(above),
                Problem("conv2d", groups=problem.groups),
            )
        return launches.weight_grad(
            Quantised(above, grad.scale), Quantised(image, x.scale), problem, weight_shape
        )

    def _too_deep(self, depth: int) -> bool:
        return self.precision == "int8" and depth > DEEPEST


def _window(weight_shape: Sequence[int]) -> Tuple[int, int]:
    return (weight_shape[2], weight_shape[3]) if len(weight_shape) == 4 else (1, 1)


def _sides(shape: Sequence[int]) -> Tuple[int, int]:
    return (shape[2], shape[3]) if len(shape) == 4 else (1, 1)


def _area(shape: Sequence[int]) -> int:
    height, width = _sides(shape)
    return height * width


def _image(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if len(shape) == 2:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    batch, channels, height, width = shape
    # By hand: the memory format of a tensor with sides of 1 is not always what was asked for.
    return torch.empty((batch, height, width, channels), dtype=dtype, device=device).permute(
        0, 3, 1, 2
    )


def _flat(values: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] or [B, C] as one row of pixels [1, C, 1, P], or a row an image; a view where
    strides allow it."""
    if values.dim() == 2:
        return values.t()[None, :, None, :]
    batch, channels, height, width = values.shape
    _, _, along_h, along_w = values.stride()
    if batch * height == 1 or (values.stride(0) == along_h * height and along_h == along_w * width):
        return values.permute(1, 0, 2, 3).reshape(1, channels, 1, -1)
    return values.permute(0, 2, 3, 1).reshape(-1, channels).t()[None, :, None, :]
