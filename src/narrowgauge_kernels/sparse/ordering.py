"""A layer's weight in the order of the generated kernels, made once where its changes are seen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, List, Optional

if TYPE_CHECKING:
    import torch

__all__ = ["OrderedWeight"]


@dataclasses.dataclass
class _Kept:
    """`weight` is kept so that its address does not become another's. `captured`: whether a CUDA
    graph reads `ordered`."""

    weight: torch.Tensor
    version: int
    ordered: torch.Tensor
    captured: bool = False

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether that is the same weight, perhaps with other values."""
        mine = self.weight
        same = mine.data_ptr() == weight.data_ptr() and mine.device == weight.device
        return same and mine.shape == weight.shape and mine.stride() == weight.stride()


class OrderedWeight:
    """[filters, channels, k, k] as [channels, k, k, filters].

    A weight that is being trained (requires_grad), or whose changes are not counted (inference
    mode), is put in order at each call; in a CUDA graph that is a part of the graph. Another is put
    in order once and, when it has changed, at the next call, in the same memory: graphs that read
    it stay valid, and see a change from the next call outside of them on.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._kept: Optional[_Kept] = None
        #: What graphs may still read, of weights that others followed.
        self._retired: List[torch.Tensor] = []

    def of(self, weight: torch.Tensor, capturing: bool) -> torch.Tensor:
        """`capturing`: whether the current stream is being recorded, and runs nothing now."""
        import torch

        turned = weight.detach().permute(1, 2, 3, 0)
        if not self._keeps or weight.requires_grad or _is_uncounted(weight):
            return turned.contiguous()
        kept = self._kept
        if kept is None or not kept.is_of(weight):
            if capturing:  # the memory would be the graph's, and empty until a replay
                return turned.contiguous()
            if kept is not None and kept.captured:
                self._retired.append(kept.ordered)
            # A copy even where the order is the same already: it is written to.
            ordered = turned.clone(memory_format=torch.contiguous_format)
            self._kept = _Kept(weight.detach(), weight._version, ordered)
            return ordered
        if kept.version != weight._version:
            kept.ordered.copy_(turned)
            # What is recorded has not run, and the next call has to do it itself.
            kept.version = kept.version if capturing else weight._version
        kept.captured = kept.captured or capturing
        return kept.ordered


def _is_uncounted(weight: torch.Tensor) -> bool:
    ask = getattr(weight, "is_inference", None)
    return ask is not None and bool(ask())
