"""A glance at a small picture, and where that is not enough a second look at a part of it.

Exit 0 answers from the whole picture brought to a small size. The class activation map of its
answer says which window of the picture to cut out, and exit 1 answers from that window, finely.
Both are one network with statistics of normalisation of their own (`resolution.sharing`).

The window's middle is the map's centre of mass, of what speaks for the class: the map of a glance
of 16 pixels has 2×2 cells, and the peak of so few says no more than a quarter.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.class_maps import cam, centre, flat, positive
from narrowgauge_lab.anytime.mapped_heads import plain_head
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.resolution import AtSize, windows
from narrowgauge_lab.networks.cifar_resnet import CifarResNet

__all__ = ["COMBINED", "PLACES", "Glance"]

#: Where the second look goes: by the map, to the middle (a control), or at the whole picture.
PLACES = ("cam", "centre", "whole")
#: What exit 1 says: what the look says, or the mean of both answers' logits.
COMBINED = ("look", "mean")


class Glance(AnytimeNetwork):
    """Takes float32 [B, C, H, W], H = W of `crop` pixels at least. `glance` and `look` are a
    CifarResNet each, at the size that they see."""

    exits = 2

    def __init__(
        self, glance: AtSize, look: AtSize, crop: int, place: str = "cam", combined: str = "look"
    ) -> None:
        """`crop`: side of the window in the picture's pixels. Raises BadValueError for a look that
        is no finer than the glance, for unknown words, and for a window of nothing."""
        super().__init__()
        if place not in PLACES or combined not in COMBINED:
            raise BadValueError(
                f"a second look at '{place}' that answers by '{combined}'",
                next_step=f"{', '.join(PLACES)}; {', '.join(COMBINED)}",
            )
        if look.size <= glance.size or crop < 1:
            raise BadValueError(
                f"a look at {look.size} pixels of a window of {crop} after a glance at"
                f" {glance.size}",
                why="a second look that sees no more costs no more, and is no second exit",
                next_step="a look of more pixels than the glance",
            )
        if not isinstance(glance.net, CifarResNet) or not isinstance(look.net, CifarResNet):
            raise BadValueError("this network has no class activation map to go by")
        self.glance, self.look = glance, look
        self.crop, self.place, self.combined = crop, place, combined
        self.classes = glance.net.linear.out_features

    def begin(self, images: torch.Tensor) -> State:
        """Raises BadValueError for pictures that are not square, have other channels, or are
        smaller than the window."""
        self.glance.brought(images)
        if self.place != "whole" and images.shape[2] < self.crop:
            raise BadValueError(
                f"a picture of {images.shape[3]}×{images.shape[2]} pixels",
                why=f"the second look is at a window of {self.crop}×{self.crop}",
                next_step="a smaller window, or whole pictures",
            )
        return (images,)

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork. Without the head of exit 0 the glance is left out, unless the look
        depends on it."""
        self.require_exit(exit)
        if exit == 0:
            return self._glanced(state[0], head)
        images, window, said = state
        if not head:
            return Answer(images.new_empty((len(images), 0)), ())
        logits = self.look(window)
        return Answer((logits + said) / 2 if self.combined == "mean" else logits, ())

    def _glanced(self, images: torch.Tensor, head: bool) -> Answer:
        none = images.new_empty((len(images), 0))
        if not head and self.place != "cam" and self.combined == "look":
            return Answer(none, (images, self._window(images, None), none))
        small = self.glance.brought(images)
        seen = plain_head(self.glance.net, small)
        logits = seen.answer(seen.features)
        maps = positive(cam(seen, logits.argmax(1))) if self.place == "cam" else None
        return Answer(logits if head else none, (images, self._window(images, maps), logits))

    def window(self, images: torch.Tensor) -> torch.Tensor:
        """What the second look sees of images, before it is brought to its size."""
        return self.advance(0, self.begin(images)).state[1]

    def _window(self, images: torch.Tensor, maps: Optional[torch.Tensor]) -> torch.Tensor:
        if self.place == "whole":
            return images
        top, left = self.corners(images, maps)
        return windows(images, top, left, self.crop)

    def corners(
        self, images: torch.Tensor, maps: Optional[torch.Tensor]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Upper left corners, int64 [B], of windows around the centres of maps [B, h, w], inside
        the picture; in its middle where a map is flat, or where there is none."""
        side = images.shape[2]
        room = side - self.crop
        if maps is None:
            middle = torch.full((len(images),), room // 2, device=images.device)
            return middle.long(), middle.long()
        level = flat(maps)[:, None, None]
        found = []
        for at, cells in zip(centre(torch.where(level, torch.zeros_like(maps), maps)),
                             maps.shape[1:]):  # fmt: skip
            # A cell's middle lies half a cell from its edge.
            pixels = (at + 0.5) * side / cells
            corner = (pixels - self.crop / 2).round().clamp(min=0, max=room)
            found.append(corner.long())
        return found[0], found[1]
