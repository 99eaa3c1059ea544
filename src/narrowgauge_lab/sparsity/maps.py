"""Made-up feature maps, before their ReLU, with zeros as asked for: negative where ReLU gives zero.

What is positive is |normal|; the signs alone make the pattern, so maps of one shape, pattern and
fraction cost a kernel the same whatever their values.
"""

from __future__ import annotations

from typing import Callable, Dict, Tuple

import torch

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.sparsity.census import GROUP

__all__ = ["PATTERNS", "matched_map", "pattern_map"]

#: Of `blocky` maps: the side of the squares of pixels that are zero together, in one channel.
_BLOCK = 4
_STEPS = 60


def pattern_map(
    pattern: str, shape: Tuple[int, int, int, int], zeros: float, generator: torch.Generator
) -> torch.Tensor:
    """float32 of [B, C, H, W] whose ReLU is zero at a share of `zeros` places.

    `random`: places on their own. `blocky`: squares of 4×4 pixels of a channel together, as in
    maps where an object is not. `channel`: whole channels of an image together. `pixel`: all
    channels of a pixel together, as in point clouds. The share is exact but for rounding to whole
    places, squares, channels or pixels; smaller squares at edges make it vary.
    Raises UnknownNameError, BadValueError.
    """
    if pattern not in PATTERNS:
        raise UnknownNameError("pattern", pattern, PATTERNS)
    if not 0.0 <= zeros <= 1.0:
        raise BadValueError(f"{zeros} is no share of zeros", next_step="from 0 to 1")
    zero = PATTERNS[pattern](shape, zeros, generator)
    return _signed(zero, generator)


def matched_map(
    shape: Tuple[int, int, int, int], zeros: float, groups: float, generator: torch.Generator
) -> torch.Tensor:
    """float32 of [B, C, H, W] with a share of `zeros` zeros behind its ReLU and of `groups` groups
    of 2×4 pixels of a channel without any nonzero, both on average.

    Groups are zero as a whole with some probability, and what is left over is zero place by place:
    two probabilities that follow from the two shares. Raises BadValueError for two shares that no
    such map has.
    """
    place = _place_probability(zeros, groups)
    whole = 1.0 - (1.0 - zeros) / (1.0 - place) if place < 1.0 else 1.0
    images, channels, height, width = shape
    rows, columns = (-(-size // step) for size, step in zip((height, width), GROUP))
    coarse = torch.rand(images, channels, rows, columns, generator=generator) < whole
    zero = _spread(coarse, GROUP, height, width)
    return _signed(zero | (torch.rand(shape, generator=generator) < place), generator)


def _place_probability(zeros: float, groups: float) -> float:
    """q, where 1 + q + … + q⁷ = (1 - groups) / (1 - zeros): what is nonzero is so by both draws."""
    size = GROUP[0] * GROUP[1]
    if not 0.0 <= groups <= zeros < 1.0 or (1.0 - groups) > size * (1.0 - zeros):
        raise BadValueError(
            f"no map has {zeros:.3g} zeros and {groups:.3g} groups without a nonzero",
            why=f"a group has {size} pixels, so groups ≤ zeros ≤ (7 + groups) / 8",
        )
    wanted, low, high = (1.0 - groups) / (1.0 - zeros), 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if sum(middle**power for power in range(size)) < wanted:
            low = middle
        else:
            high = middle
    return low


def _signed(zero: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(zero.shape, generator=generator).abs_()
    # A draw of exactly 0 would be a zero that nobody asked for.
    values.clamp_(min=1e-3)
    return torch.where(zero, -values, values)


def _chosen(count: int, share: float, generator: torch.Generator) -> torch.Tensor:
    """bool [count], a share of which is true: exactly, but for rounding."""
    marked = torch.zeros(count, dtype=torch.bool)
    marked[torch.randperm(count, generator=generator)[: round(share * count)]] = True
    return marked


def _spread(coarse: torch.Tensor, step: Tuple[int, int], height: int, width: int) -> torch.Tensor:
    fine = coarse.repeat_interleave(step[0], dim=2).repeat_interleave(step[1], dim=3)
    return fine[:, :, :height, :width]


def _random(shape: Tuple[int, ...], zeros: float, generator: torch.Generator) -> torch.Tensor:
    size = 1
    for each in shape:
        size *= each
    return _chosen(size, zeros, generator).reshape(shape)


def _blocky(shape: Tuple[int, ...], zeros: float, generator: torch.Generator) -> torch.Tensor:
    images, channels, height, width = shape
    rows, columns = -(-height // _BLOCK), -(-width // _BLOCK)
    coarse = _random((images, channels, rows, columns), zeros, generator)
    return _spread(coarse, (_BLOCK, _BLOCK), height, width)


def _channel(shape: Tuple[int, ...], zeros: float, generator: torch.Generator) -> torch.Tensor:
    images, channels = shape[:2]
    whole = torch.stack([_chosen(channels, zeros, generator) for _ in range(images)])
    return whole[:, :, None, None].expand(shape)


def _pixel(shape: Tuple[int, ...], zeros: float, generator: torch.Generator) -> torch.Tensor:
    images, _, height, width = shape
    whole = torch.stack([_chosen(height * width, zeros, generator) for _ in range(images)])
    return whole.reshape(images, 1, height, width).expand(shape)


#: By name, what makes the places that are zero.
PATTERNS: Dict[str, Callable[[Tuple[int, ...], float, torch.Generator], torch.Tensor]] = {
    "random": _random,
    "blocky": _blocky,
    "channel": _channel,
    "pixel": _pixel,
}
