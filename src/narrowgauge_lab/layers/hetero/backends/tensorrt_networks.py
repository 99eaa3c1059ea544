"""What TensorRT is asked to build for each pass of a layer; nothing here calls it before a build.

    forward      one convolution; refitted when the weights change
    input_grad   one deconvolution with the forward weights; refitted when they change
    weight_grad  x is laid out as its windows by a convolution with a constant kernel of zeros and
                 ones (exact in every precision), and multiplied with g as a matrix, over images and
                 pixels at once. x and g are inputs: nothing is refitted, nothing is repeated, and
                 the batch may change from call to call.

Why not g as a kernel, as the original had it: a kernel is refitted, call by call. As an input
(`IConvolutionLayer.set_input(1, ...)`) TensorRT 8 takes only constants behind Q/DQ nodes, and later
versions want its shape, which holds the batch, to be fixed. Windows and a product need no more than
what every version since 8.0 has.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional, Sequence, Tuple

import torch

from narrowgauge_lab.engines.tensorrt import ConvolutionSpec
from narrowgauge_lab.engines.tensorrt.features import data_types
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.network import Definition, create_network, weights_of
from narrowgauge_lab.layers.hetero.backends.shapes import output_padding
from narrowgauge_lab.layers.passes import Problem

__all__ = ["InputGradient", "WeightGradient", "forward_spec", "input_gradient", "weight_gradient"]

Pair = Tuple[int, int]


def forward_spec(like: Problem, image: Sequence[int], kernel: Sequence[int]) -> ConvolutionSpec:
    """The bias is added elsewhere: an engine that can be refitted may drop one (known issue of
    TensorRT 11.3)."""
    return ConvolutionSpec(
        inputs=image[1], outputs=kernel[0], image=_pair(image), kernel=_pair(kernel),
        stride=like.stride, pre=like.padding, post=like.padding, dilation=like.dilation,
        groups=like.groups,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class InputGradient:
    """A deconvolution of g, which gets `rows` and `columns` of zeros at its end before.

    `spread`: how far apart the kernel's values are to lie, with zeros between them; 1 where the
    layer's own dilation does that.
    """

    spec: ConvolutionSpec
    rows: int
    columns: int
    spread: Pair

    def kernel(self, weight: torch.Tensor) -> torch.Tensor:
        """The forward weights [Co, Ci/G, R, S] as the engine has them."""
        if self.spread == (1, 1):
            return weight
        wide = weight.new_zeros(self.spec.weight_shape())
        wide[:, :, :: self.spread[0], :: self.spread[1]] = weight
        return wide


def input_gradient(like: Problem, image: Sequence[int], kernel: Sequence[int]) -> InputGradient:
    """`image` and `kernel` are the forward pass's shapes.

    What the last window did not reach has to be added at the end. TensorRT cuts away and never
    adds: it refuses negative padding, and goes on with none. So where the padding is too small to
    be cut less, g gets one more row of zeros, which adds a stride, and more is cut. Strided and
    dilated deconvolutions it does not have at once: then the kernel is spread instead.
    """
    extra = output_padding(like, image, kernel)
    more = tuple(int(add > pad) for add, pad in zip(extra, like.padding))
    post = tuple(
        pad - add + one * stride
        for pad, add, one, stride in zip(like.padding, extra, more, like.stride)
    )
    outputs = like.output_shape(image, kernel)
    both = max(like.stride) > 1 and max(like.dilation) > 1
    spread = like.dilation if both else (1, 1)
    window = tuple(step * (size - 1) + 1 for step, size in zip(spread, kernel[2:]))
    spec = ConvolutionSpec(
        inputs=outputs[1], outputs=image[1],
        image=(outputs[2] + more[0], outputs[3] + more[1]), kernel=(window[0], window[1]),
        stride=like.stride, pre=like.padding, post=(post[0], post[1]),
        dilation=(1, 1) if both else like.dilation, groups=like.groups, transposed=True,
    )  # fmt: skip
    return InputGradient(spec, more[0], more[1], spread)


@dataclasses.dataclass(frozen=True)
class WeightGradient:
    """`windows`: the convolution that lays x [B, Ci, H, W] out as [B, Ci*R*S, Ho, Wo]; None where x
    is that already. Then, for each of `groups`: g [Co/G, B*Ho*Wo] by x [Ci/G*R*S, B*Ho*Wo]."""

    image: Tuple[int, int, int]
    grad: Tuple[int, int, int]
    window: Pair
    groups: int
    windows: Optional[ConvolutionSpec]

    @property
    def per_channel(self) -> int:
        return self.window[0] * self.window[1]

    def constant(self) -> torch.Tensor:
        """The kernel of `windows`, float32: one at another place for each of a channel's maps."""
        ones = torch.eye(self.per_channel).view(self.per_channel, 1, *self.window)
        return ones.repeat(self.image[0], 1, 1, 1)

    def definition(self, dtype: torch.dtype) -> Callable[[Library, Any, bool], Definition]:
        """For `TensorRTEngine.prepare_network`: inputs `image` and `output_grad`, in the order of
        their names; the output is [G, Co/G, Ci/G*R*S]."""

        def define(library: Library, builder: Any, strong: bool) -> Definition:
            trt, kept = library.trt, []
            network = create_network(library, builder, strong)
            kind = {each: name for name, each in data_types(trt).items()}[dtype]
            laid = network.add_input(name="image", dtype=kind, shape=(-1, *self.image))
            grad = network.add_input(name="output_grad", dtype=kind, shape=(-1, *self.grad))
            if self.windows is not None:
                value, owner = weights_of(trt, self.constant().to(dtype))
                kept += [value, owner]
                laid = _windows(network, laid, self.windows, value)
            left = _rows(trt, network, grad, self.groups, self.grad[0])
            right = _rows(trt, network, laid, self.groups, self.image[0] * self.per_channel)
            as_is, turned = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
            product = network.add_matrix_multiply(left, as_is, right, turned)
            product.name = "weight_grad"
            output = product.get_output(0)
            output.name = "output"
            network.mark_output(output)
            return Definition(network, tuple(kept))

        return define


def weight_gradient(like: Problem, image: Sequence[int], kernel: Sequence[int]) -> WeightGradient:
    """`image` and `kernel` are the forward pass's shapes."""
    inputs, window = image[1], _pair(kernel)
    outputs = like.output_shape(image, kernel)
    spec = ConvolutionSpec(
        inputs=inputs, outputs=inputs * window[0] * window[1], image=_pair(image), kernel=window,
        stride=like.stride, pre=like.padding, post=like.padding, dilation=like.dilation,
        groups=inputs,
    )  # fmt: skip
    plain = window == like.stride == (1, 1) and like.padding == (0, 0)
    return WeightGradient(
        image=(inputs, *_pair(image)), grad=(outputs[1], outputs[2], outputs[3]), window=window,
        groups=like.groups, windows=None if plain else spec,
    )  # fmt: skip


def _windows(network: Any, source: Any, spec: ConvolutionSpec, kernel: Any) -> Any:
    layer = network.add_convolution_nd(source, spec.outputs, spec.kernel, kernel)
    layer.name = "windows"
    layer.stride_nd, layer.dilation_nd = spec.stride, spec.dilation
    layer.pre_padding, layer.post_padding = spec.pre, spec.post
    layer.num_groups = spec.groups
    return layer.get_output(0)


def _rows(trt: Any, network: Any, source: Any, groups: int, channels: int) -> Any:
    """[B, C, H, W] as [G, C/G, B*H*W]."""
    layer = network.add_shuffle(source)
    layer.name = f"{channels} rows"
    layer.first_transpose = trt.Permutation([1, 0, 2, 3])
    layer.reshape_dims = (groups, channels // groups, -1)
    return layer.get_output(0)


def _pair(shape: Sequence[int]) -> Pair:
    return shape[2], shape[3]
