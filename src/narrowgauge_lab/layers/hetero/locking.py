"""Whether a process's CPU tensors lie in page-locked memory while a plan runs."""

from __future__ import annotations

import os

import torch

from narrowgauge_contract.placement import PlacementPlan

__all__ = ["lock_pages", "locks_pages"]

#: Of the host's memory: what is page-locked cannot be swapped out, and there are other processes.
_SHARE = 0.25


def locks_pages(plan: PlacementPlan, device: torch.device) -> bool:
    """Whether copies of this plan's tensors go faster from page-locked memory, and only from there
    beside other work. Not those of the original, which are pageable."""
    away = any(each.device == "accelerator" and each.backend == "torch" for each in plan.passes())
    return (
        device.type == "cuda"
        and plan.elsewhere == "cpu"
        and plan.transfers.policy != "pageable"
        and away
    )


def lock_pages(plan: PlacementPlan, device: torch.device) -> bool:
    """Page-lock the CPU tensors that this process makes from now on, for good, where the plan's
    copies want it; whether that was done. Tensors made before are staged.

    Raises KernelsNotBuiltError, with the command that builds, and RuntimeError where the driver
    gives no page-locked memory at all.
    """
    if not locks_pages(plan, device):
        return False
    from narrowgauge_kernels import pinned

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pinned.install(int(total * _SHARE), device.index)
    return True
