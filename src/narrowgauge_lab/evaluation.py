"""One pass over a test set, and the confusion matrix that comes of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Callable, ContextManager, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.distributed import ALONE, Group
from narrowgauge_lab.precision import Mode

__all__ = ["Evaluation", "evaluate", "write_confusion"]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`loss`: mean in nats; `accuracy`: percent; `predicted`: int64 [N], on the device."""

    loss: float
    accuracy: float
    predicted: torch.Tensor


def evaluate(
    model: nn.Module,
    test_set: Feed,
    mode: Mode,
    batch_size: int,
    group: Group = ALONE,
    without_grad: Callable[[], ContextManager[None]] = torch_compat.inference_mode,
) -> Evaluation:
    """Loss and accuracy over the whole of `test_set`, in eval mode and in the row's precision.

    Each process of `group`, which must have the same model, takes its part; all get the whole.
    `without_grad`: torch.no_grad for a model that keeps memory from call to call, which inference
    mode would spoil for training.
    """
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=mode.device)
    predicted = torch.zeros(len(test_set), dtype=torch.int64, device=mode.device)
    everything = torch.arange(len(test_set), device=mode.device)
    with without_grad():
        for indices in group.shard(everything).split(batch_size):
            if len(indices) == 0:  # what `split` makes of nothing
                continue
            images, labels = test_set.batch(indices)
            with mode.autocast():
                logits = model(images)
            logits = logits.float()
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            predicted[indices] = logits.argmax(1)
    group.all_reduce_(loss)
    group.all_reduce_(predicted)  # zeros from all but the one that has seen the image
    correct = (predicted == test_set.labels).sum().item()
    count = len(test_set)
    return Evaluation(loss.item() / count, 100.0 * correct / count, predicted)


def write_confusion(
    ctx: RowContext, labels: torch.Tensor, predicted: torch.Tensor, classes: Sequence[str]
) -> None:
    """`confusion.json`: `labels`, and `counts[true][predicted]`."""
    count = len(classes)
    flat = torch.bincount(labels * count + predicted, minlength=count * count)
    table = {"labels": list(classes), "counts": flat.view(count, count).tolist()}
    ctx.side_file("confusion.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
