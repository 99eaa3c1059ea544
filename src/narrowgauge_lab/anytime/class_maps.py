"""Where in an image a network sees a class: class activation maps, and how good they are.

CAM (Zhou et al. 2016, arXiv 1512.04150) is of answers that are linear in the means of feature maps:
M(x, y) = Σ_k w_k f_k(x, y). Grad-CAM (Selvaraju et al. 2017, arXiv 1610.02391) takes the mean
gradient of the class's logit by a feature map in place of w_k, and the positive part; of such an
answer it is the positive part of CAM over the number of positions.

Maps are of the tensors that a head reads (`Head`), so no hook is left on a module or anywhere else,
and no parameter gets a gradient. A flat map says nothing: it is normalised to 0, and has no region.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import BadValueError

__all__ = [
    "Head", "area_under", "blurred", "cam", "centre", "enlarged", "flat", "grad_cam", "inside",
    "normalised", "overlap", "positive", "region", "shuffled", "unveiled",
]  # fmt: skip

#: A map whose values differ by less than this part of the largest is flat: what is left of its
#: differences is rounding.
_FLAT = 1e-6
#: Side and deviation of the blur in pixels, those of RISE.
_BLUR_SIDE, _BLUR_DEVIATION = 11, 5.0


@dataclasses.dataclass(frozen=True)
class Head:
    """What an exit answers from: `features` [B, C, h, w], and `answer`, which makes logits
    [B, classes] of them, each sample by itself. `weight` [classes, C]: where the answer is that,
    times the means of the features, and a bias; None: it is something else, and there is no CAM."""

    features: torch.Tensor
    answer: Callable[[torch.Tensor], torch.Tensor]
    weight: Optional[torch.Tensor] = None


def cam(head: Head, classes: torch.Tensor) -> torch.Tensor:
    """Class activation maps [B, h, w] of `classes` int64 [B], negative where positions speak
    against them. Raises BadValueError for a head that is not linear in the means of its features.
    """
    if head.weight is None:
        raise BadValueError(
            "this answer has no class activation map",
            why="it is not linear in the means of its features",
            next_step="Grad-CAM, which asks for no more than a gradient",
        )
    with torch.no_grad():
        features = head.features.float()
        chosen = head.weight.float().index_select(0, classes).unsqueeze(1)
        found = torch.bmm(chosen, features.flatten(2)).float()  # autocast may have narrowed it
        return found.view(len(features), *features.shape[2:])


def grad_cam(head: Head, classes: torch.Tensor) -> torch.Tensor:
    """Grad-CAM [B, h, w] of `classes` int64 [B], 0 or more. Takes gradients within `no_grad` too,
    not within inference mode, which has none; none reaches a parameter."""
    with torch.enable_grad():
        # A clone: what inference mode made cannot be differentiated.
        features = head.features.detach().clone().float().requires_grad_()
        logits = head.answer(features).float()
        asked = logits.gather(1, classes.unsqueeze(1)).sum()
        (gradient,) = torch.autograd.grad(asked, features)
    weights = gradient.mean((2, 3), keepdim=True)
    return (weights * features.detach()).sum(1).clamp(min=0)


def positive(maps: torch.Tensor) -> torch.Tensor:
    """What speaks for a class: 0 where positions speak against it."""
    return maps.clamp(min=0)


def flat(maps: torch.Tensor) -> torch.Tensor:
    """bool [B]: which maps [B, h, w] have one value everywhere, or one that is no number."""
    values = maps.flatten(1)
    high, low = values.max(1)[0], values.min(1)[0]
    largest = torch.max(high.abs(), low.abs())
    # Written so that NaN and infinity are flat too.
    return ~(high - low > _FLAT * largest) | ~torch.isfinite(values).all(1)


def normalised(maps: torch.Tensor) -> torch.Tensor:
    """Maps [B, h, w] brought to 0 … 1, each by its own least and greatest value; a flat one is 0
    everywhere, and nothing is divided by its range."""
    level = flat(maps)[:, None, None]
    known = torch.where(level, torch.zeros_like(maps), maps)
    low = known.flatten(1).min(1)[0][:, None, None]
    high = known.flatten(1).max(1)[0][:, None, None]
    span = torch.where(level, torch.ones_like(high), high - low)
    return (known - low) / span


def enlarged(maps: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Maps [B, h, w] at the size of an image, bilinear: [B, height, width]."""
    size = (height, width)
    found = F.interpolate(maps.unsqueeze(1), size=size, mode="bilinear", align_corners=False)
    return found[:, 0]


def region(maps: torch.Tensor, level: float = 0.5) -> torch.Tensor:
    """bool [B, h, w]: where normalised maps reach `level`; nowhere of a flat one."""
    return (normalised(maps) >= level) & ~flat(maps)[:, None, None]


def overlap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """float64 [B]: positions of both regions, bool [B, h, w], over those of either (IoU). NaN where
    there is none in either."""
    both = (one & other).flatten(1).sum(1).double()
    either = (one | other).flatten(1).sum(1).double()
    return both / either  # 0 / 0 is NaN, and says that nothing was compared


def inside(maps: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """float64 [B]: the part of the sum of maps [B, h, w], 0 or more, that lies `within` bool
    [B, h, w]. NaN of a map that is 0 everywhere."""
    values = maps.double()
    return (values * within).flatten(1).sum(1) / values.flatten(1).sum(1)


def shuffled(maps: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same maps [B, h, w] with each one's cells in another order: as coarse, and pointing at
    nothing. What a score of maps has to be held against. `generator` is a CPU's."""
    batch, height, width = maps.shape
    orders = [torch.randperm(height * width, generator=generator) for _ in range(batch)]
    if not orders:
        return maps
    order = torch.stack(orders).to(maps.device)
    return maps.flatten(1).gather(1, order).view(batch, height, width)


def unveiled(
    score: Callable[[torch.Tensor], torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
    maps: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """Scores float64 [steps + 1, B] while pixels of `first` [B, C, H, W] become those of `second`,
    in `steps` equal parts, from where maps [B, H, W] are largest to where they are least.

    `score` gives [B] of images. Deletion: from the image to one without content; insertion: from
    there to the image (RISE, Petsiuk et al. 2018, arXiv 1806.07421). Of equal values the first in
    reading order comes first. Raises BadValueError for no steps, and for more than pixels.
    """
    batch, _, height, width = first.shape
    pixels = height * width
    if not 1 <= steps <= pixels:
        raise BadValueError(
            f"{steps} steps through {height}×{width} pixels",
            why="each step changes one pixel at least",
            next_step=f"1 to {pixels} steps",
        )
    # numpy's sort: torch's is stable since 1.9 only.
    order = np.argsort(-maps.detach().cpu().numpy().reshape(batch, pixels), axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(pixels)[None].repeat(batch, 0), axis=1)
    place = torch.from_numpy(ranks).to(first.device).view(batch, 1, height, width)
    found = []
    for step in range(steps + 1):
        changed = place < round(pixels * step / steps)
        found.append(score(torch.where(changed, second, first)).double())
    return torch.stack(found)


def area_under(scores: torch.Tensor) -> torch.Tensor:
    """float64 [B]: the mean of scores [steps + 1, B] by trapezoids. Little is good of a deletion,
    much of an insertion."""
    return (scores[1:] + scores[:-1]).mean(0) / 2


def blurred(images: torch.Tensor) -> torch.Tensor:
    """Images [B, C, H, W] under a Gaussian of 11×11 pixels and deviation 5, edges repeated."""
    kernel = _gaussian(images)
    channels, half = images.shape[1], _BLUR_SIDE // 2
    wide = F.pad(images, (half, half, half, half), mode="replicate")
    across = kernel.view(1, 1, 1, -1).expand(channels, 1, 1, -1)
    down = kernel.view(1, 1, -1, 1).expand(channels, 1, -1, 1)
    return F.conv2d(F.conv2d(wide, across, groups=channels), down, groups=channels)


def _gaussian(like: torch.Tensor) -> torch.Tensor:
    at = torch.arange(_BLUR_SIDE, device=like.device, dtype=like.dtype) - _BLUR_SIDE // 2
    weights = torch.exp(-((at / _BLUR_DEVIATION) ** 2) / 2)
    return weights / weights.sum()


def centre(maps: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each map's centre of mass, float [B], in cells from the first cell's middle
    on. `maps` [B, h, w] are 0 or more; of one that is 0 everywhere it is the middle."""
    height, width = maps.shape[1:]
    total = maps.flatten(1).sum(1)
    nothing = ~(total > 0) | ~torch.isfinite(total)
    safe = torch.where(nothing, torch.ones_like(total), total)
    found = []
    for dimension, count in ((2, height), (1, width)):
        at = torch.arange(count, device=maps.device, dtype=maps.dtype)
        mean = (maps.sum(dimension) * at).sum(1) / safe
        found.append(torch.where(nothing, torch.full_like(mean, (count - 1) / 2), mean))
    return found[0], found[1]
