"""One pass over a test set, and the confusion matrix that comes of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Callable, ContextManager, List, Sequence, Tuple

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
    """`loss`: mean in nats; `accuracy`: percent; `predicted`: int64 [N], on the device. They are of
    the last exit where the model has several; `exits`: the accuracy of each, empty for one output.
    """

    loss: float
    accuracy: float
    predicted: torch.Tensor
    exits: Tuple[float, ...] = ()


def evaluate(
    model: nn.Module,
    test_set: Feed,
    mode: Mode,
    batch_size: int,
    group: Group = ALONE,
    without_grad: Callable[[], ContextManager[None]] = torch_compat.inference_mode,
) -> Evaluation:
    """Loss and accuracy over the whole of `test_set`, in eval mode and in the row's precision, of a
    model that gives logits [B, classes] or a list of them, one for each exit.

    Each process of `group`, which must have the same model, takes its part; all get the whole.
    `without_grad`: torch.no_grad for a model that keeps memory from call to call, which inference
    mode would spoil for training.
    """
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=mode.device)
    predicted = torch.zeros(len(test_set), dtype=torch.int64, device=mode.device)
    everything = torch.arange(len(test_set), device=mode.device)
    right: List[torch.Tensor] = []
    with without_grad():
        for indices in group.shard(everything).split(batch_size):
            if len(indices) == 0:  # what `split` makes of nothing
                continue
            images, labels = test_set.batch(indices)
            with mode.autocast():
                logits = model(images)
            if not isinstance(logits, torch.Tensor):
                right.append(_right(logits, labels))
                logits = logits[-1]
            logits = logits.float()
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            predicted[indices] = logits.argmax(1)
    group.all_reduce_(loss)
    group.all_reduce_(predicted)  # zeros from all but the one that has seen the image
    correct = (predicted == test_set.labels).sum().item()
    count = len(test_set)
    exits: Tuple[float, ...] = ()
    # A process that had no image knows of no exits.
    several = int(group.largest(float(len(right[0]) if right else 0)))
    if several:
        none = torch.zeros(several, dtype=torch.int64, device=mode.device)
        summed = torch.stack([none, *right]).sum(0)
        group.all_reduce_(summed)
        exits = tuple(100.0 * number / count for number in summed.tolist())
    return Evaluation(loss.item() / count, 100.0 * correct / count, predicted, exits)


def _right(answers: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """How many images each exit gets right: int64 [exits]."""
    return torch.stack([(logits.argmax(1) == labels).sum() for logits in answers])


def write_confusion(
    ctx: RowContext, labels: torch.Tensor, predicted: torch.Tensor, classes: Sequence[str]
) -> None:
    """`confusion.json`: `labels`, and `counts[true][predicted]`."""
    count = len(classes)
    flat = torch.bincount(labels * count + predicted, minlength=count * count)
    table = {"labels": list(classes), "counts": flat.view(count, count).tolist()}
    ctx.side_file("confusion.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
