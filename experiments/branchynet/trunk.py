"""The plain network: the trunk as its own stage left it, before branches were trained with it."""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Optional

import numpy as np
import torch

from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.systems.branchynet import BranchyNet
from narrowgauge_lab.checkpoint import Checkpoints
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode

__all__ = ["trunk_accuracy", "trunk_correct"]

_BATCH = 1000


def trunk_accuracy(ctx: RowContext) -> Optional[float]:
    """The last `trunk_test_accuracy` [%]. None where this row trained no trunk by itself."""
    state = _state(ctx)
    return None if state is None else float(state["history"]["values"]["test_accuracy"][-1])


def trunk_correct(ctx: RowContext, net: BranchyNet, splits: Splits) -> Optional[np.ndarray]:
    """bool [images]: which test images it gets right. None as of `trunk_accuracy`."""
    state = _state(ctx)
    if state is None:
        return None
    right: List[torch.Tensor] = []
    plain = copy.deepcopy(net)
    plain.load_state_dict(state["model"])
    mode, test = precision.enter(ctx.parameters["precision"], ctx.device), splits.test
    with in_eval_mode(plain), torch_compat.inference_mode():
        for indices in torch.arange(len(test), device=ctx.device).split(_BATCH):
            images, labels = test.batch(indices)
            with mode.autocast():
                logits = plain.forward_until(plain.exits - 1, images)
            right.append((logits.argmax(1) == labels).cpu())
    found: np.ndarray = torch.cat(right).numpy()
    return found


def _state(ctx: RowContext) -> Optional[Dict[str, Any]]:
    """The stage's last checkpoint, which stays until the row's answers are kept."""
    if not ctx.parameters["trunk_epochs"] or ctx.parameters["weights"]:
        return None
    return Checkpoints(ctx.for_stage("trunk").checkpoints.folder, resume=True).load()
