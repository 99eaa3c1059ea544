"""Layers as convolutions of four dimensions, which is what both whole backends know."""

from __future__ import annotations

from typing import Sequence, Tuple

import torch

from narrowgauge_lab.layers.passes import Problem

__all__ = ["Shape", "as_image", "convolution_of", "image_shape", "output_padding"]

Shape = Tuple[int, ...]


def convolution_of(problem: Problem) -> Problem:
    """A linear layer is a 1x1 convolution of images of one pixel."""
    return problem if problem.kind == "conv2d" else Problem("conv2d")


def image_shape(shape: Sequence[int], problem: Problem) -> Shape:
    """An activation's or a weight's; a linear layer's [..., C] is [B, C, 1, 1]."""
    if problem.kind == "conv2d":
        return tuple(shape)
    batch = 1
    for size in shape[:-1]:
        batch *= size
    return (batch, shape[-1], 1, 1)


def as_image(tensor: torch.Tensor, problem: Problem) -> torch.Tensor:
    """An activation or a weight with four dimensions, dense in their order."""
    return tensor.detach().reshape(image_shape(tensor.shape, problem)).contiguous()


def output_padding(
    convolution: Problem, image: Sequence[int], kernel: Sequence[int]
) -> Tuple[int, int]:
    """Rows and columns at the end of a padded image that no window reaches: what a transposed
    convolution has to add. Both are less than the stride."""
    outputs = convolution.output_shape(image, kernel)[2:]
    sides = zip(
        image[2:], kernel[2:], outputs, convolution.stride, convolution.padding,
        convolution.dilation,
    )  # fmt: skip
    rows, columns = (
        size + 2 * pad - (stride * (count - 1) + step * (window - 1) + 1)
        for size, window, count, stride, pad, step in sides
    )
    return rows, columns
