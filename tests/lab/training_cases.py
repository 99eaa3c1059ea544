"""A small row to train: made-up images, a small network, and a context that writes real events."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_lab import training
from narrowgauge_lab.augment import Augmentation, Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.schedule import MultiStep

CPU = torch.device("cpu")
CLASSES = ("a", "b", "c")


class SmallNet(nn.Module):
    """Convolution, batch normalisation, dropout, linear: every kind of state a checkpoint holds.

    `fail_at` raises in that training forward (counted from 1), as a kill in mid-epoch would;
    without it none are counted.
    """

    def __init__(self, fail_at: int = 0, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(8 * 3 * 3, len(CLASSES))
        self.fail_at = fail_at
        self.forwards = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and self.fail_at:  # a compiler would look at the counter each time
            self.forwards += 1
            if self.forwards == self.fail_at:
                raise KeyboardInterrupt
        hidden = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)
        return self.linear(self.drop(hidden.flatten(1)))


def _images(count: int, seed: int) -> Tuple[np.ndarray, np.ndarray]:
    """Noise that is brighter in one channel; which one is the class, whatever the crop or flip."""
    random = np.random.RandomState(seed)
    labels = random.randint(0, 3, count).astype(np.uint8)
    images = random.randint(0, 200, (count, 3, 8, 8))
    images[np.arange(count), labels] += 55
    return images.astype(np.uint8), labels


def feeds(device: torch.device = CPU, train: int = 70, test: int = 33) -> Tuple[Feed, Feed]:
    """Training and test set of 8×8 colour images in three classes."""
    mean, std = (0.45,) * 3, (0.25,) * 3
    crop = Augmentation(padding=1, flip=True)
    return (
        Feed(*_images(train, seed=7), mean, std, device, crop),
        Feed(*_images(test, seed=8), mean, std, device),
    )


def recipe(
    epochs: int = 4,
    precision: str = "fp32",
    rate: float = 0.05,
    graphs: str = "auto",
    batch_size: int = 16,
    checkpoint_seconds: float = 0.0,
    falls_at: int = 2,
    compiles: bool = False,
) -> training.Recipe:
    """SGD with momentum; a checkpoint after every epoch; 70 images leave a partial batch of 6."""
    return training.Recipe(
        epochs=epochs,
        batch_size=batch_size,
        precision=precision,
        schedule=MultiStep(rate, (falls_at,)),
        optimizer=functools.partial(SGD, rate=rate, momentum=0.9, weight_decay=1e-3),
        graphs=graphs,
        compile=compiles,
        test_batch_size=20,
        checkpoint_seconds=checkpoint_seconds,
    )


class Case:
    """One row in a folder. `train` may be called again: the row then starts anew, as on resume."""

    def __init__(
        self, out: Path, device: torch.device = CPU, parameters: Optional[Dict[str, Any]] = None
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.device = device
        self.plan = RowPlan(index=0, repeat=0, seed=3, parameters=parameters or {})

    def train(
        self, given: training.Recipe, fail_at: int = 0, dropout: float = 0.2, resume: bool = False
    ) -> SmallNet:
        """Train as `given` says and end the row; what training raises leaves the row unfinished."""
        with EventLog(self.out / EVENTS_FILE) as log:
            ctx = RowContext(
                self.plan, log, self.out, device=self.device, profile="short", resume=resume
            )
            head = {"repeat": 0, "seed": 3, "parameters": self.plan.parameters}
            log.emit(EventKind.ROW_START, 0, **head)
            training.seed_everything(ctx.seed)
            model = SmallNet(fail_at, dropout).to(self.device)
            training.train(ctx, model, *feeds(self.device), CLASSES, given)
            ctx.finish()
            log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)
        return model

    def row(self) -> Row:
        (row,) = Fold().add_all(read_events(self.out / EVENTS_FILE)).rows()
        return row

    def values(self, name: str) -> Tuple[float, ...]:
        metric = self.row().metric(name)
        assert metric is not None, f"no metric {name}"
        return metric.values
