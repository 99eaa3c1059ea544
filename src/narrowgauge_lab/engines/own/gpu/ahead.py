"""Whether our kernels are launched ahead of their turn (CUDA's programmatic dependent launch)."""

from __future__ import annotations

import dataclasses
from typing import Dict

import torch

__all__ = ["LAUNCHED_AHEAD", "Turn", "ahead"]

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


# Beside thirteen other processes, 18 of 150 replays of an fp16 network on two streams had other
# bits, once, while whatever came next could begin early.
@dataclasses.dataclass
class Turn:
    """Whether what is launched now lets the one after it begin beside it: 1 or 0.

    The one after has to be ours and to wait for nothing else. What a library launches may be marked
    as ready to begin early and not wait; what begins after a fork or a join waits for two.
    """

    allow_next: int = 1
