"""Whether our kernels are launched ahead of their turn (CUDA's programmatic dependent launch)."""

from __future__ import annotations

from typing import Dict

import torch

__all__ = ["LAUNCHED_AHEAD", "ahead"]

#: Whether a kernel may be put on the device while the one before it still runs, and wait there: its
#: blocks are in place when its turn comes. From this compute capability on.
LAUNCHED_AHEAD = True
_SINCE = (9, 0)


def ahead(device: torch.device) -> Dict[str, bool]:
    """What each of our launches on `device` is given besides its own; see `kernels._await_turn`."""
    if not LAUNCHED_AHEAD or device.type != "cuda":
        return {"AHEAD": False}
    on = torch.cuda.get_device_capability(device) >= _SINCE
    return {"AHEAD": True, "launch_pdl": True} if on else {"AHEAD": False}
