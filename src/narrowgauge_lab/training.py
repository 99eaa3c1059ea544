"""The one training loop. Experiments bring a model, an optimiser, a schedule and data.

Everything random comes from generators whose states are in the checkpoint; everything an epoch
measured is in it too, so a resumed row on a CPU gives the same weights and the same metrics, whole.
On a GPU it goes on with the same images, crops and rates; the last bits are as free there as
between any two runs, because cuDNN picks algorithms by speed and some of them add atomically.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, Dict, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab import checkpoint, precision, torch_compat
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.evaluation import Evaluation, evaluate, write_confusion
from narrowgauge_lab.graphs import make_step
from narrowgauge_lab.history import History
from narrowgauge_lab.measure import probe, window
from narrowgauge_lab.optim import FlatOptimizer, OptimizerMaker
from narrowgauge_lab.schedule import Schedule
from narrowgauge_lab.seeding import seed_everything

__all__ = ["Recipe", "Training", "seed_everything", "train"]

_PROGRESS_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train. `graphs`: auto | off. A checkpoint is due this long after the one before."""

    epochs: int
    batch_size: int
    precision: str
    schedule: Schedule
    optimizer: OptimizerMaker
    graphs: str = "auto"
    test_batch_size: int = 1000
    checkpoint_seconds: float = 10.0
    save_weights: bool = False


def train(
    ctx: RowContext,
    model: nn.Module,
    training_set: Feed,
    test_set: Feed,
    classes: Sequence[str],
    recipe: Recipe,
) -> None:
    """Train `model` (already on `ctx.device`, giving logits [B, classes]) and record every epoch.

    Records the metrics of `history` per epoch, what precision ran, and after the last epoch
    `confusion.json` over the whole test set, and `weights.pt` where the recipe says so. The row
    becomes invalid where another precision ran than asked, or where a loss is not finite; training
    then stops, and what there is stays recorded.
    Raises NotApplicableError for a precision that does not work here, and what checkpoints raise.
    """
    training = Training(ctx, model, training_set, test_set, recipe)
    training.prepare()
    training.resume()
    evaluation = training.run()
    if evaluation is not None:
        write_confusion(ctx, test_set.labels, evaluation.predicted, classes)
        if recipe.save_weights:
            checkpoint.write_weights(ctx.side_file("weights.pt"), model)


class Training:
    """The state of one row's training; `train` is the way in."""

    def __init__(
        self, ctx: RowContext, model: nn.Module, training_set: Feed, test_set: Feed, recipe: Recipe
    ) -> None:
        self.ctx = ctx
        self.model = model
        self.training_set = training_set
        self.test_set = test_set
        self.recipe = recipe
        self.mode = precision.enter(recipe.precision, ctx.device)
        self.optimizer: FlatOptimizer = recipe.optimizer(model)
        self.loss_scale = precision.LossScale(ctx.device) if self.mode.scales_loss else None
        #: Sums over the epoch so far: loss · images, and correct answers. Read once per epoch.
        self.totals = torch.zeros(2, dtype=torch.float64, device=ctx.device)
        self.step = make_step(recipe.graphs, self._step, recipe.batch_size, ctx.device)
        self.generators = {
            # On the CPU, where every torch gives the same permutation for a seed.
            "shuffle": torch_compat.generator_for(torch.device("cpu"), ctx.seed),
            "augment": torch_compat.generator_for(ctx.device, ctx.seed),
        }
        self.history = History(scaling=self.mode.scales_loss)
        self.epoch = 0
        self._saved_at = self._began = time.monotonic()
        #: Seconds that this row took in the processes before a resume.
        self._seconds_before = 0.0
        self._shown_at = 0.0
        self._said = ""

    def prepare(self) -> None:
        """Set the device up and record what will run; invalid where that is not what was asked."""
        if self.ctx.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        count = min(len(self.training_set), self.recipe.batch_size)
        images, _ = self.training_set.batch(torch.arange(count, device=self.ctx.device))
        tf32 = probe.tf32_by_arithmetic(self.ctx.device)
        seen = probe.observe(lambda: self._differentiate(images))
        probe.require_precision(self.ctx, self.recipe.precision, seen, tf32)
        self.ctx.fact("parameter_count", sum(p.numel() for p in self.model.parameters()))
        self.ctx.fact("training_images", len(self.training_set))
        self.ctx.fact("test_images", len(self.test_set))

    def _differentiate(self, images: torch.Tensor) -> None:
        """A step's forward and backward pass that changes nothing: eval mode, gradients dropped."""
        with in_eval_mode(self.model):
            with self.mode.autocast():
                logits = self.model(images)
            wanted = [each for each in self.model.parameters() if each.requires_grad]
            torch.autograd.grad(logits.float().sum(), wanted, allow_unused=True)

    def resume(self) -> None:
        """Go on from the row's checkpoint, if there is one to go on from."""
        state = self.ctx.checkpoints.load()
        if state is None:
            return
        if state["identity"] != self._identity():
            raise checkpoint.CheckpointMismatchError(
                "the checkpoint is of another configuration",
                why=f"it was written for {state['identity']}, this row is {self._identity()}",
                next_step="resume with the parameters the run was started with, or start a new run",
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        checkpoint.set_random_state(state["random"], self.generators)
        self.epoch = state["epoch"]
        self.history.load_state_dict(state["history"])
        # The row began anew in the record: what the epochs before gave has to be said again.
        self.history.emit(self.ctx)
        self._seconds_before = state["seconds"]
        self.ctx.fact("resumed_after_epoch", self.epoch)
        # The row's own duration is of its last process only.
        self.ctx.fact("seconds_before_resume", self._seconds_before)

    def run(self) -> Optional[Evaluation]:
        """Train the epochs that are left. None where the loss diverged."""
        evaluation = None
        while self.epoch < self.recipe.epochs:
            evaluation = self._run_epoch()
            self.epoch += 1
            self._say_how_steps_ran()
            self.history.emit(self.ctx, first=self.epoch - 1)
            losses = (self.history.last("train_loss"), self.history.last("test_loss"))
            if not all(map(math.isfinite, losses)):
                self.ctx.invalid(f"diverged: loss is NaN/inf at epoch {self.epoch}")
                return None
            self._save_if_due()
        return evaluation

    def _run_epoch(self) -> Evaluation:
        started = time.monotonic()
        rate = self.recipe.schedule.rate(self.epoch)
        skipped_before = self._skipped()
        self.optimizer.set_rate(rate)
        with window(self.ctx.device) as training_window:
            self._train_epoch()
        loss, correct = self.totals.tolist()
        count = len(self.training_set)
        evaluation = evaluate(self.model, self.test_set, self.mode, self.recipe.test_batch_size)
        values = {
            "train_loss": loss / count,
            "train_accuracy": 100.0 * correct / count,
            "test_loss": evaluation.loss,
            "test_accuracy": evaluation.accuracy,
            "images_per_second": count / training_window.seconds,
            "learning_rate": rate,
            "epoch_seconds": time.monotonic() - started,
        }
        if self.loss_scale is not None:
            values["loss_scale"] = float(self.loss_scale.scale)
            values["skipped_steps"] = float(self._skipped() - skipped_before)
        self.history.add(values, training_window.source)
        return evaluation

    def _train_epoch(self) -> None:
        self.model.train()
        self.totals.zero_()
        count = len(self.training_set)
        order = torch.randperm(count, generator=self.generators["shuffle"]).to(self.ctx.device)
        if self.training_set.augmentation.active:
            self.training_set.redraw(self.generators["augment"])
        seen = 0
        for indices in order.split(self.recipe.batch_size):
            self.step(indices)
            seen += indices.shape[0]
            self._show_progress(seen)

    def _step(self, indices: torch.Tensor) -> None:
        """One update. Nothing here asks the device for an answer: it may be under capture."""
        images, labels = self.training_set.batch(indices)
        with self.mode.autocast():
            logits = self.model(images)
        logits = logits.float()
        loss = F.cross_entropy(logits, labels)
        if self.loss_scale is None:
            self.optimizer.differentiate(loss)
            self.optimizer.step()
        else:
            self.optimizer.differentiate(self.loss_scale.apply(loss))
            overflowed = self.loss_scale.unscale(self.optimizer.gradient)
            self.optimizer.step(skip=overflowed)
            self.loss_scale.update(overflowed)
        correct = (logits.detach().argmax(1) == labels).sum()
        self.totals.add_(torch.stack((loss.detach().double() * len(labels), correct.double())))

    def _say_how_steps_ran(self) -> None:
        """After an epoch, not before: what was asked for need not be what ran."""
        if self.step.description != self._said:
            self._said = self.step.description
            self.ctx.fact("graphs_ran", self._said)

    def _skipped(self) -> int:
        return int(self.loss_scale.skipped) if self.loss_scale is not None else 0

    def _show_progress(self, seen: int) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _PROGRESS_SECONDS:
            self._shown_at = now
            count, epochs = len(self.training_set), self.recipe.epochs
            phase = f"epoch {self.epoch + 1}/{epochs}"
            self.ctx.progress(self.epoch * count + seen, epochs * count, unit="image", phase=phase)

    def _identity(self) -> Dict[str, Any]:
        return {"seed": self.ctx.seed, "parameters": dict(self.ctx.parameters)}

    def _save_if_due(self) -> None:
        last = self.epoch == self.recipe.epochs
        if last or time.monotonic() - self._saved_at < self.recipe.checkpoint_seconds:
            return
        scale = self.loss_scale.state_dict() if self.loss_scale is not None else {}
        self.ctx.checkpoints.save(
            {
                "identity": self._identity(),
                "epoch": self.epoch,
                "seconds": self._seconds_before + time.monotonic() - self._began,
                "history": self.history.state_dict(),
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "loss_scale": scale,
                "random": checkpoint.random_state(self.generators),
            }
        )
        self._saved_at = time.monotonic()
