"""How much of a feature map is zero: elements, and groups that kernels could skip as one.

A group is one channel of 8 neighbouring pixels: 2×4, or 8 of one row. What a tensor core multiplies
at once has 8 columns, so only a group without any nonzero saves it work. NaN is no zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "GROUP",
    "LayerMap",
    "Zeros",
    "capture",
    "group_zero_fraction",
    "zero_fraction",
    "zeros_of",
]

#: Height and width of a group in pixels.
GROUP = (2, 4)
_ROW_GROUP = (1, 8)


@dataclasses.dataclass(frozen=True)
class Zeros:
    """Fractions, 0 to 1: of elements, and of (channel × 8 pixels) groups in which all are zero.
    `channels`: of whole channels of an image."""

    elements: float
    groups_2x4: float
    groups_1x8: float
    channels: float


@dataclasses.dataclass(frozen=True, eq=False)
class LayerMap:
    """What one convolution of a network got. `convolution`: its module. `before_relu`: the tensor
    whose ReLU the input is, where there is one; `given`: the input, [B, C, H, W]."""

    name: str
    convolution: nn.Conv2d
    given: torch.Tensor
    before_relu: Optional[torch.Tensor]


def zero_fraction(maps: torch.Tensor) -> float:
    """Of the elements of a tensor; 0 of an empty one."""
    return float((maps == 0).double().mean()) if maps.numel() else 0.0


def group_zero_fraction(maps: torch.Tensor, group: Tuple[int, int] = GROUP) -> float:
    """Of the groups of `group` pixels of each channel, aligned to the upper left corner; at the
    other edges of [B, C, H, W] there are smaller ones. 0 of an empty tensor."""
    if not maps.numel():
        return 0.0
    height, width = maps.shape[-2:]
    below, right = (-size % step for size, step in zip((height, width), group))
    nonzero = F.pad((maps != 0).float(), (0, right, 0, below))
    return zero_fraction(F.max_pool2d(nonzero, group))


def zeros_of(maps: torch.Tensor) -> Zeros:
    """Of [B, C, H, W]."""
    return Zeros(
        zero_fraction(maps),
        group_zero_fraction(maps, GROUP),
        group_zero_fraction(maps, _ROW_GROUP),
        float((maps == 0).flatten(2).all(dim=2).double().mean()) if maps.numel() else 0.0,
    )


def capture(
    model: nn.Module,
    images: torch.Tensor,
    wanted: Callable[[nn.Conv2d], bool],
    take: Callable[[LayerMap], None],
) -> int:
    """Run `model` on `images`, and give `take` what each `wanted` convolution gets, in the order of
    the run; how many there were.

    `before_relu` is the output of the convolution or batch normalisation that ran last before,
    where its ReLU is, bit for bit, what the convolution gets. Maps are `take`'s own to keep.
    """
    names = {module: name for name, module in model.named_modules()}
    last: List[torch.Tensor] = []
    seen: Dict[str, int] = {}

    def remember(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        # A ReLU behind may work in place.
        last[:] = [output.detach().clone()]

    def look(module: nn.Module, inputs: Tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        if not wanted(module):
            return
        given, before = inputs[0].detach(), last[0] if last else None
        if before is not None and (
            before.shape != given.shape or not torch.equal(torch.relu(before), given)
        ):
            before = None
        name = names[module]
        seen[name] = seen.get(name, 0) + 1
        take(LayerMap(name, module, given.clone(), before))

    handles = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            handles.append(module.register_forward_pre_hook(look))
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
            handles.append(module.register_forward_hook(remember))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return sum(seen.values())
