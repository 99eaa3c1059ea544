"""What the sparse kernels of one layer keep between calls."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from narrowgauge_kernels.sparse_conv import packed
from narrowgauge_kernels.sparse_generated import Generated

__all__ = ["Prepared"]


class Prepared:
    """The packed weight of one layer, and its generated CUDA kernels (which order theirs).

    Writes to a weight that torch does not count, as through `.data`, are not seen: call `forget`
    after them. A copy or a pickle of this is empty.
    """

    def __init__(self) -> None:
        self.generated: Generated = Generated()
        self._weight: Optional[torch.Tensor] = None
        self._version = -1
        self._packed: Optional[torch.Tensor] = None

    def packed(self, weight: torch.Tensor) -> torch.Tensor:
        """A CPU weight as `narrowgauge_kernels.sparse_conv.packed` gives it, made anew when the
        weight has changed. Raises what that raises."""
        if getattr(weight, "is_inference", bool)():
            return packed(weight)  # its changes are not counted
        kept = self._weight
        # Keeping the weight keeps its address from being another's.
        same = kept is not None and kept.data_ptr() == weight.data_ptr()
        if not (same and kept.stride() == weight.stride() and self._version == weight._version):
            self._packed = packed(weight)
            self._weight, self._version = weight.detach(), weight._version
        assert self._packed is not None
        return self._packed

    def forget(self) -> None:
        """Prepare anew at the next call. CUDA graphs that captured the layer end with this."""
        self.__init__()  # type: ignore[misc]

    def __deepcopy__(self, memo: Dict[int, Any]) -> Prepared:
        return Prepared()

    def __reduce__(self) -> Tuple[Any, ...]:
        return (Prepared, ())
