"""The original's algorithm, written anew from a description, to repeat and explain its tables.

Every pass sends all that it reads and brings all that it makes, by pageable copies, call by call:

    forward      x and the weights go, y comes
    input_grad   g and the weights go, gx comes, by a transposed convolution with output padding
    weight_grad  x goes as one image of B*Ci channels, and g goes as its kernel, repeated for each
                 input channel on the CPU: B*Co*Ci/G maps. A grouped convolution with stride and
                 dilation exchanged gives a weight gradient per image; the CPU adds them up.

The repeated g is the bulk of what travels, Ci/G times the gradient itself. Kernels are handed over
in the stage `refit`, as in the original's TensorRT variant; in its PyTorch variant that was part of
the copy to the GPU.

At fp16 the CPU converts what goes, without loss scaling, and float32 comes back, as from the
original's engines. What the original left out is added on the CPU or done right: bias, groups,
dilation, non-square maps, any batch. Linear layers the original left on the CPU. One that a plan
gives to this backend is a 1x1 convolution whose g is not repeated: that is nothing to blame on it.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, Iterator, Optional, Sequence, Tuple

import torch
from torch.nn import functional

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.layers.hetero.backends import BackendOptions, WholeBackend
from narrowgauge_lab.layers.hetero.backends.shapes import (
    as_image,
    convolution_of,
    image_shape,
    output_padding,
)
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.layers.passes.primitives import float32_math, without_autocast

__all__ = ["FaithfulBackend", "bytes_per_call", "tiled"]

_SENT = {"fp32": torch.float32, "fp16": torch.float16}
_FLOAT32 = 4


class FaithfulBackend(WholeBackend):
    """`options.stride_bug`: the weight gradient of the original's TensorRT variant, which kept the
    forward pass's stride and had no dilation: right at stride 1 and dilation 1 only. The plan's
    wires and policy are for other backends: this one has its own.
    """

    def __init__(
        self,
        layer: str,
        problem: Problem,
        precision: str,
        device: torch.device,
        ledger: Ledger,
        options: BackendOptions,
    ) -> None:
        super().__init__(layer, problem, precision, device, ledger, options)
        if precision not in _SENT:
            raise NotApplicableError(
                f"the backend 'faithful' of layer '{layer}' has no {precision}",
                why=f"the original computed in {' and '.join(_SENT)}",
                next_step='backend = "torch" has it',
            )
        self._sent_dtype = _SENT[precision]
        self._convolution = convolution_of(problem)

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> torch.Tensor:
        shape = self.problem.output_shape(x.shape, weight.shape)
        if not x.numel():
            return x.new_zeros(shape)
        like, images = self._convolution, as_image(x, self.problem)
        image, kernel = self._sent("forward", images, as_image(weight, self.problem))
        with self._computing("forward"):
            y = functional.conv2d(
                *self._operands(image, kernel), None, like.stride, like.padding, like.dilation,
                like.groups,
            )  # fmt: skip
            y = self._result(y)
        y = self._brought("forward", y)
        with self._stage("forward", "reshape"):
            if bias is not None:
                y += bias.detach().view(1, -1, 1, 1)
            return y.reshape(shape)

    @torch.no_grad()
    def input_grad(
        self, grad: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int]
    ) -> torch.Tensor:
        if not grad.numel():
            return grad.new_zeros(tuple(input_shape))
        like, weights = self._convolution, as_image(weight, self.problem)
        extra = output_padding(like, image_shape(input_shape, self.problem), weights.shape)
        above, kernel = self._sent("input_grad", as_image(grad, self.problem), weights)
        with self._computing("input_grad"):
            result = functional.conv_transpose2d(
                *self._operands(above, kernel), None, like.stride, like.padding, extra,
                like.groups, like.dilation,
            )  # fmt: skip
            result = self._result(result)
        result = self._brought("input_grad", result)
        with self._stage("input_grad", "reshape"):
            return result.reshape(tuple(input_shape))

    @torch.no_grad()
    def weight_grad(
        self, grad: torch.Tensor, x: torch.Tensor, weight_shape: Sequence[int]
    ) -> torch.Tensor:
        if not grad.numel():
            return grad.new_zeros(tuple(weight_shape))
        if self.problem.kind == "linear":
            return self._linear_weight_grad(grad, x)
        like, images = self._convolution, as_image(x, self.problem)
        window = image_shape(weight_shape, self.problem)
        geometry = _Geometry(like, images.shape, window, self.options.stride_bug)
        with self._stage("weight_grad", "reshape"):
            kernel = tiled(as_image(grad, self.problem), images.shape[1], like.groups)
            images = images.view(1, -1, *images.shape[2:])
        image, kernel = self._sent("weight_grad", images, kernel)
        with self._computing("weight_grad"):
            parts = functional.conv2d(
                *self._operands(image, kernel), None, geometry.stride, like.padding,
                geometry.dilation, image.shape[1],
            )  # fmt: skip
            parts = self._result(parts)
        parts = self._brought("weight_grad", parts)
        with self._stage("weight_grad", "reshape"):
            result = geometry.summed(parts).reshape(tuple(weight_shape))
            del image, kernel, parts  # letting go of so much takes time, and belongs here
            return result

    def _linear_weight_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows, above = (each.detach().reshape(-1, each.shape[-1]) for each in (x, grad))
        rows, above = self._sent("weight_grad", rows, above)
        with self._computing("weight_grad"):
            rows, above = self._operands(rows, above)
            result = self._result(above.t().matmul(rows))
        return self._brought("weight_grad", result)

    def _sent(
        self, pass_: str, image: torch.Tensor, kernel: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Both on the device, in the dtype that is sent."""
        if self._sent_dtype != torch.float32:
            with self._stage(pass_, "quantise"):
                image, kernel = image.to(self._sent_dtype), kernel.to(self._sent_dtype)
        sent = []
        for stage, each in (("to_device", image), ("refit", kernel)):
            with self._stage(pass_, stage, to_device=_bytes(each), streamed=True):
                sent.append(torch.empty(each.shape, dtype=each.dtype, device=self.device))
                sent[-1].copy_(each)
        return sent[0], sent[1]

    def _brought(self, pass_: str, result: torch.Tensor) -> torch.Tensor:
        with self._stage(pass_, "from_device", from_device=_bytes(result), streamed=True):
            return torch.empty(result.shape, dtype=result.dtype).copy_(result)

    def _operands(
        self, image: torch.Tensor, kernel: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """A CPU that stands in multiplies the rounded values in float32: not every torch has fp16
        convolutions there, and on a GPU they add up in float32 too."""
        if self.device.type == "cpu":
            return image.float(), kernel.float()
        return image, kernel

    def _result(self, result: torch.Tensor) -> torch.Tensor:
        """float32 of what the precision can hold."""
        return result.to(self._sent_dtype).float()

    @contextlib.contextmanager
    def _computing(self, pass_: str) -> Iterator[None]:
        math = float32_math(tf32=False, device=self.device)
        with self._stage(pass_, "compute", streamed=True), math, without_autocast(self.device):
            yield

    def _stage(
        self, pass_: str, stage: str, to_device: int = 0, from_device: int = 0,
        streamed: bool = False,
    ) -> ContextManager[Any]:  # fmt: skip
        on_gpu = streamed and self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        return self.ledger.stage(
            self.layer, pass_, stage, stream=stream, to_device=to_device, from_device=from_device
        )


class _Geometry:
    """The grouped convolution of a weight gradient, and how its result becomes the gradient."""

    def __init__(self, like: Problem, image: Sequence[int], window: Sequence[int], bug: bool):
        """`image` [B, Ci, H, W] and `window` [Co, Ci/G, R, S] are shapes."""
        self._window, self._groups = tuple(window), like.groups
        self._batch, self._inputs = image[0], image[1]
        self.stride = like.stride if bug else like.dilation
        self.dilation = (1, 1) if bug else like.stride
        #: The gradient's maps are the kernel.
        exchanged = Problem("conv2d", self.stride, like.padding, self.dilation)
        self.sides = exchanged.output_shape(image, like.output_shape(image, window))[2:]
        if any(side < wanted for side, wanted in zip(self.sides, window[2:])):
            raise NotApplicableError(
                f"the original's weight gradient is {self.sides[0]} x {self.sides[1]} here",
                why=f"stride_bug is on, and the weights are {window[2]} x {window[3]}",
                next_step="stride_bug = false, or a larger image",
            )

    def numel(self) -> int:
        """Values that come back: a gradient per image, before the crop."""
        return self._batch * self._inputs * (self._window[0] // self._groups) * _numel(self.sides)

    def summed(self, parts: torch.Tensor) -> torch.Tensor:
        """[1, B*Ci*Co/G, ...] summed over the images, transposed, and cropped to the window."""
        groups, outputs = self._groups, self._window[0]
        per_image = parts.view(
            self._batch, groups, self._inputs // groups, outputs // groups, *self.sides
        )
        height, width = self._window[2:]
        whole = per_image.sum(0).transpose(1, 2)[..., :height, :width]
        return whole.reshape(self._window)


def tiled(grad: torch.Tensor, inputs: int, groups: int) -> torch.Tensor:
    """g [B, Co, Ho, Wo] as the kernel of a convolution in B*Ci groups: [B*Co*Ci/G, 1, Ho, Wo], for
    each image and input channel the gradients of the outputs that the channel has a part in."""
    batch, outputs, height, width = grad.shape
    parts = grad.view(batch, groups, 1, outputs // groups, height, width)
    repeated = parts.expand(-1, -1, inputs // groups, -1, -1, -1)
    return repeated.reshape(-1, 1, height, width)


def bytes_per_call(
    problem: Problem,
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    precision: str = "fp32",
    stride_bug: bool = False,
) -> Dict[str, Tuple[int, int]]:
    """What each pass sends and brings, in bytes: of x, w, y; g, w, gx; x, the repeated g, and the
    weight gradients of the single images."""
    like = convolution_of(problem)
    image, window = image_shape(input_shape, problem), image_shape(weight_shape, problem)
    x, w, y = _numel(image), _numel(window), _numel(like.output_shape(image, window))
    size = torch.empty(0, dtype=_SENT[precision]).element_size()
    repeated, parts = y, w
    if problem.kind == "conv2d":
        repeated *= image[1] // like.groups
        parts = _Geometry(like, image, window, stride_bug).numel()
    return {
        "forward": ((x + w) * size, y * _FLOAT32),
        "input_grad": ((y + w) * size, x * _FLOAT32),
        "weight_grad": ((x + repeated) * size, parts * _FLOAT32),
    }


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
