"""Local gradients of float policies: each product's own slope around its operands.

A slope is taken from two more evaluations of the product, one on either side of the operand. The
compiled layer itself forms them, as a depthwise layer that adds nothing up, so this holds for any
policy on any device. It reads and writes memory for every product: it takes some tens of times as
long as the layer.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple

import torch
from torch.nn import functional

from narrowgauge_kernels.mac import Mac
from narrowgauge_lab.layers.manual import kernels
from narrowgauge_lab.layers.passes import Problem

__all__ = ["around", "gradients"]

#: A slope's two points are this share of the operand away from it: further than a step of the
#: coarser multipliers (2^-7 with bfloat16), near enough to tell the logarithmic one's segments.
_SHARE = 2.0**-3
#: And at least this far, where the operand is zero or nearly: products with weights down to 2^-60
#: are normal numbers still.
_LEAST_STEP = 2.0**-60
#: Elements that are held at a time of the products, and of the unfolded input: 64 MB each.
_HELD = 1 << 24


def around(values: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The points below and above each value that its slope is taken between."""
    step = (values.abs() * _SHARE).clamp(min=_LEAST_STEP)
    return values - step, values + step


def gradients(
    problem: Problem,
    mac: Mac,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    wanted: Tuple[bool, bool],
) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """The gradients of a layer by input and weight that are `wanted`."""
    if problem.kind == "linear":
        grad, image, kernel = (each[..., None, None] for each in (grad, x, weight))
        by_input, by_weight = gradients(Problem("conv2d"), mac, grad, image, kernel, wanted)
        return (
            None if by_input is None else by_input.reshape(x.shape),
            None if by_weight is None else by_weight.reshape(weight.shape),
        )
    groups, taps = problem.groups, weight[0].numel()
    apart = weight.reshape(groups, -1, taps).transpose(1, 2).contiguous()
    by_input = torch.zeros_like(x) if wanted[0] else None
    by_weight = torch.zeros_like(apart) if wanted[1] else None
    window = (tuple(weight.shape[2:]), problem.dilation, problem.padding, problem.stride)
    count = max(1, _HELD // max(1, groups * taps * grad[0, 0].numel()))
    for start in range(0, len(x), count):
        images, above = x[start : start + count], grad[start : start + count]
        columns = functional.unfold(images, *window)
        # [G, taps, P] and [G, outputs of a group, P], P the pixels of these images.
        flat = columns.transpose(0, 1).reshape(groups, taps, -1)
        above = above.flatten(2).transpose(0, 1).reshape(groups, -1, flat.shape[2])
        products = _Products(mac, apart)
        if by_input is not None:
            slopes = products.by_column(flat, above).reshape(groups * taps, len(images), -1)
            slopes = slopes.transpose(0, 1).contiguous()
            by_input[start : start + count] = functional.fold(slopes, tuple(x.shape[2:]), *window)
        if by_weight is not None:
            by_weight += products.by_weight(flat, above)
    if by_weight is not None:
        by_weight = by_weight.transpose(1, 2).reshape(weight.shape)
    return by_input, by_weight


@dataclasses.dataclass(frozen=True, eq=False)
class _Products:
    """Sums of slopes times the gradient above. weight: [G, taps, O]; columns: [G, taps, P]; grad:
    [G, O, P]."""

    mac: Mac
    weight: torch.Tensor

    def by_column(self, columns: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """[G, taps, P]."""
        parts = []
        for at in self._parts(columns):
            low, high = around(columns[..., at])
            rise = self._formed(high, self.weight) - self._formed(low, self.weight)
            total = torch.einsum("gtop,gop->gtp", rise, grad[..., at])
            parts.append(total / (high - low))
        return torch.cat(parts, dim=2)

    def by_weight(self, columns: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """[G, taps, O]."""
        low, high = around(self.weight)
        total = torch.zeros_like(self.weight)
        for at in self._parts(columns):
            part = columns[..., at]
            rise = self._formed(part, high) - self._formed(part, low)
            total += torch.einsum("gtop,gop->gto", rise, grad[..., at])
        return total / (high - low)

    def _parts(self, columns: torch.Tensor) -> Tuple[slice, ...]:
        size = max(1, _HELD // self.weight.numel())
        return tuple(slice(at, at + size) for at in range(0, columns.shape[2], size))

    def _formed(self, columns: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Every product by itself, [G, taps, O, P]: each tap of each group is a channel of one
        image, and has the outputs as filters of its own."""
        groups, taps, outputs = weight.shape
        image = columns.reshape(1, groups * taps, -1, 1)
        filters = weight.reshape(-1, 1, 1, 1)
        problem = Problem("conv2d", groups=groups * taps)
        found = kernels.float_layer(problem, image, filters, None, self.mac)
        return found.reshape(groups, taps, outputs, -1)
