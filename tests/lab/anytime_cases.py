"""A small network of three exits, its data, and a row to train it in."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from training_cases import CPU

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_lab import training
from narrowgauge_lab.anytime.feeds import Splits, make_splits
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.objective import ExitLosses, Objective
from narrowgauge_lab.anytime.training import Stage, train_anytime
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData, synthetic_data
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.schedule import MultiStep

__all__ = ["EXITS", "AnytimeCase", "ThreeExits", "made_up", "recipe", "splits"]

EXITS = 3
CLASSES = 4


class ThreeExits(AnytimeNetwork):
    """Three convolutions with a head after each; batch normalisation and dropout as real ones have.

    `fail_at` raises in that training pass (counted from 1) of any stage, as a kill would.
    """

    def __init__(self, fail_at: int = 0, dropout: float = 0.2) -> None:
        super().__init__()
        self.exits, self.classes = EXITS, CLASSES
        channels = (3, 6, 6, 6)
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in zip(channels, channels[1:])
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(EXITS))
        self.heads = nn.ModuleList(nn.Linear(6 * 16, CLASSES) for _ in range(EXITS))
        self.drop = nn.Dropout(dropout)
        self.fail_at = fail_at
        self.passes = 0

    def begin(self, images: torch.Tensor) -> State:
        if self.training:
            self.passes += 1
            if self.passes == self.fail_at:
                raise KeyboardInterrupt
        return (images,)

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        hidden = F.relu(self.norms[exit](self.convs[exit](state[0])))
        if not head:
            return Answer(hidden.new_zeros((len(hidden), 0)), (hidden,))
        pooled = F.adaptive_avg_pool2d(hidden, 4).flatten(1)
        return Answer(self.heads[exit](self.drop(pooled)), (hidden,))


def made_up(train: int = 90, test: int = 40, classes: int = CLASSES) -> FlatData:
    """Images of 8×8 that can be learnt."""
    return synthetic_data(0, channels=3, size=8, classes=classes, train=train, test=test)


def splits(validation: int = 20, data: Optional[FlatData] = None) -> Splits:
    return make_splits(
        made_up() if data is None else data,
        CPU,
        validation=validation,
        augmentation=Augmentation(flip=True),
    )


def recipe(
    objective: Optional[Objective] = None, epochs: int = 3, rate: float = 0.05
) -> training.Recipe:
    """70 images in batches of 16: five updates an epoch; a checkpoint after each."""
    return training.Recipe(
        epochs=epochs,
        batch_size=16,
        precision="fp32",
        schedule=MultiStep(rate, (5,)),
        optimizer=functools.partial(SGD, rate=rate, momentum=0.9, weight_decay=1e-3),
        test_batch_size=16,
        checkpoint_seconds=0.0,
        objective=ExitLosses(EXITS) if objective is None else objective,
    )


@dataclasses.dataclass
class AnytimeCase:
    """One row in a folder. `run` may be called again: the row then starts anew, as on resume."""

    out: Path

    def run(
        self,
        given: training.Recipe,
        *,
        stages: Sequence[Stage] = (),
        net: Optional[AnytimeNetwork] = None,
        fail_at: int = 0,
        resume: bool = False,
        weights: Optional[Path] = None,
        parameters: Any = None,
    ) -> AnytimeNetwork:
        """Train and end the row; what training raises leaves it unfinished."""
        self.out.mkdir(parents=True, exist_ok=True)
        plan = RowPlan(index=0, repeat=0, seed=3, parameters=parameters or {})
        with EventLog(self.out / EVENTS_FILE) as log:
            ctx = RowContext(plan, log, self.out, device=CPU, profile="short", resume=resume)
            log.emit(EventKind.ROW_START, 0, repeat=0, seed=3, parameters=plan.parameters)
            training.seed_everything(ctx.seed)
            made = ThreeExits(fail_at) if net is None else net
            about = About("three-exits", "of tests")
            self.trained = train_anytime(
                ctx, made, splits(), given, about, stages=stages, weights=weights
            )
            ctx.finish()
            log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)
        return made

    def row(self) -> Row:
        (row,) = Fold().add_all(read_events(self.out / EVENTS_FILE)).rows()
        return row

    def values(self, name: str) -> Any:
        metric = self.row().metric(name)
        assert metric is not None, f"no metric {name}"
        return metric.values
