"""The plain network as fast as torch's convolutions have it: what leaving positions out is held to.

Batch normalisation is folded, as `sparse_sact` folds it: the second one of a unit into the first
convolution, the first one is one multiply-add; and maps lie in a memory layout that the caller
chooses. So what sparse gains over it is of skipping, and of nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.systems.sact import SLOPE, AdaptiveResNet, Unit
from narrowgauge_lab.anytime.systems.sparse_sact import affine

__all__ = ["FoldedPlain", "FoldedUnit"]


class FoldedUnit:
    """A unit in eval mode, its weights taken over at construction in the memory `layout`."""

    def __init__(self, unit: Unit, layout: torch.memory_format) -> None:
        self.scale, self.shift = (part.view(-1, 1, 1) for part in affine(unit.bn1))
        after, self.added = affine(unit.bn2)
        first = unit.conv1.weight.detach() * after.view(-1, 1, 1, 1)
        self.first = first.contiguous(memory_format=layout)
        self.second = unit.conv2.weight.detach().clone(memory_format=layout)
        self.bias = unit.conv2.bias.detach().clone()
        self.source = unit

    def residual(self, ready: torch.Tensor) -> torch.Tensor:
        """r [B, C', h', w'] of the activation."""
        hidden = F.conv2d(ready, self.first, self.added, stride=self.source.stride, padding=1)
        return F.conv2d(F.leaky_relu_(hidden, SLOPE), self.second, self.bias, padding=1)

    def ready(self, maps: torch.Tensor) -> torch.Tensor:
        """The activation before the first convolution, of maps [B, C, h, w]."""
        return F.leaky_relu_(torch.addcmul(self.shift, maps, self.scale), SLOPE)

    def __call__(self, maps: torch.Tensor) -> torch.Tensor:
        """What `Unit` gives in eval mode."""
        ready = self.ready(maps)
        shortcut = self.source.shortcut(ready if self.source.early else maps)
        return self.residual(ready).add_(shortcut)


class FoldedPlain:
    """`AdaptiveResNet` of kind `plain` for inference, as it is now, in the memory `layout`
    (torch.contiguous_format or torch.channels_last). Raises BadValueError for another kind."""

    def __init__(self, net: AdaptiveResNet, layout: torch.memory_format) -> None:
        if net.kind != "plain":
            raise BadValueError(f"a network of kind '{net.kind}' halts; the plain one is asked for")
        self._layout = layout
        self._stem = net.conv.weight.detach().clone(memory_format=layout)
        self._added = net.conv.bias.detach().clone()
        self._units = [FoldedUnit(unit, layout) for block in net.blocks for unit in block.units]
        self._norm = affine(net.norm)
        self._linear = (net.linear.weight.detach().clone(), net.linear.bias.detach().clone())

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]."""
        if not len(images):  # torch 1.8 convolves nothing where channels are last
            return images.new_empty(0, len(self._linear[1]))
        with torch.no_grad():
            maps = images.contiguous(memory_format=self._layout)
            maps = F.conv2d(maps, self._stem, self._added, padding=1)
            for unit in self._units:
                maps = unit(maps)
            scale, shift = self._norm
            features = torch.addcmul(shift, maps.mean((2, 3)), scale)
            return F.linear(F.leaky_relu_(features, SLOPE), *self._linear)
