"""One pass over a test set, and the confusion matrix that comes of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.precision import Mode

__all__ = ["Evaluation", "evaluate", "write_confusion"]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`loss`: mean in nats; `accuracy`: percent; `predicted`: int64 [N], on the device."""

    loss: float
    accuracy: float
    predicted: torch.Tensor


def evaluate(model: nn.Module, test_set: Feed, mode: Mode, batch_size: int) -> Evaluation:
    """Loss and accuracy over the whole of `test_set`, in eval mode and in the row's precision."""
    model.eval()
    losses, predictions = [], []
    everything = torch.arange(len(test_set), device=mode.device)
    with torch_compat.inference_mode():
        for indices in everything.split(batch_size):
            images, labels = test_set.batch(indices)
            with mode.autocast():
                logits = model(images)
            logits = logits.float()
            losses.append(F.cross_entropy(logits, labels, reduction="sum").double())
            predictions.append(logits.argmax(1))
        predicted = torch.cat(predictions)
        correct = (predicted == test_set.labels).sum().item()
        loss = torch.stack(losses).sum().item()
    return Evaluation(loss / len(test_set), 100.0 * correct / len(test_set), predicted)


def write_confusion(
    ctx: RowContext, labels: torch.Tensor, predicted: torch.Tensor, classes: Sequence[str]
) -> None:
    """`confusion.json`: `labels`, and `counts[true][predicted]`."""
    count = len(classes)
    flat = torch.bincount(labels * count + predicted, minlength=count * count)
    table = {"labels": list(classes), "counts": flat.view(count, count).tolist()}
    ctx.side_file("confusion.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
