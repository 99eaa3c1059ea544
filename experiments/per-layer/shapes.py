"""The convolutions of ResNet-20 by the original's groups, each of which it measured once."""

from __future__ import annotations

import dataclasses
from typing import Dict, Tuple

__all__ = ["GROUPS", "Shape"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A convolution without bias. `image` [Ci, H, W], `filters` Co; windows are 3×3, padding 1."""

    image: Tuple[int, int, int]
    filters: int
    stride: int = 1

    def text(self) -> str:
        """As a table has it: 16x32x32 -> 32x16x16."""
        channels, height, width = self.image
        after = (self.filters, *(-(-side // self.stride) for side in (height, width)))
        return f"{channels}x{height}x{width} -> {'x'.join(map(str, after))}"


#: Group 1 is as the original's document prints it: CIFAR's images are 32×32, and `1c` has these.
#: (Its weights are printed as 32×3×3×3, its output as 16 maps; 16 is what ResNet-20 has.)
GROUPS: Dict[str, Shape] = {
    "1": Shape((3, 224, 224), 16),
    "1c": Shape((3, 32, 32), 16),
    "2-6": Shape((16, 32, 32), 16),
    "7": Shape((16, 32, 32), 32, stride=2),
    "8-12": Shape((32, 16, 16), 32),
    "13": Shape((32, 16, 16), 64, stride=2),
    "14-18": Shape((64, 8, 8), 64),
}
