"""The one training loop. Experiments bring a model, an optimiser, a schedule and data.

Everything random comes from generators whose states are in the checkpoint; everything an epoch
measured is in it too, so a resumed row on a CPU gives the same weights and the same metrics, whole.
On a GPU it goes on with the same images, crops and rates; the last bits are as free there as
between any two runs, because cuDNN picks algorithms by speed and some of them add atomically. By a
placement plan it picks only such as give the same bits again.
"""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from typing import Dict, Optional, Sequence

import torch
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_lab import checkpoint, precision, torch_compat
from narrowgauge_lab.anytime.objective import Objective
from narrowgauge_lab.anytime.stepping import ExitStepper
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.compiling import require_compilable
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.distributed import ALONE, Group
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.evaluation import Evaluation, evaluate, write_confusion
from narrowgauge_lab.history import History
from narrowgauge_lab.measure import probe, window
from narrowgauge_lab.optim import FlatOptimizer, OptimizerMaker
from narrowgauge_lab.placed import Placed
from narrowgauge_lab.schedule import Schedule
from narrowgauge_lab.seeding import seed_everything
from narrowgauge_lab.stepping import Stepper
from narrowgauge_lab.training_checkpoints import TrainingCheckpoints

__all__ = ["Recipe", "Training", "rank_seed", "seed_everything", "train"]

_PROGRESS_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train. `batch_size`: images per update and process; `graphs`: auto | off. A checkpoint
    is due so many seconds after the one before, or later where writing takes more than a twentieth
    of the time; 0: after every epoch. With a `plan`, which says the precisions, model and
    data are where `placed.home` says. `ran`: what the probe has to see, where layers compute in
    others than `precision`, such as `fp32+int8`; empty: `precision`. `objective`: the losses of a
    model with several exits, one cross entropy otherwise. `compile`: steps go through
    torch.compile; not with a plan. `keep_last`: the last epoch leaves a
    checkpoint too, for a row that does more afterwards. `save_confusion`: not of a training before
    the one that the row is about.
    """

    epochs: int
    batch_size: int
    precision: str
    schedule: Schedule
    optimizer: OptimizerMaker
    graphs: str = "auto"
    compile: bool = False
    test_batch_size: int = 1000
    checkpoint_seconds: float = 10.0
    save_weights: bool = False
    plan: Optional[PlacementPlan] = None
    ran: str = ""
    objective: Optional[Objective] = None
    keep_last: bool = False
    save_confusion: bool = True


def train(
    ctx: RowContext,
    model: nn.Module,
    training_set: Feed,
    test_set: Feed,
    classes: Sequence[str],
    recipe: Recipe,
    group: Group = ALONE,
) -> bool:
    """Train `model` (already on `ctx.device`, giving logits [B, classes], or what the recipe's
    objective takes) and record every epoch. False where training diverged.

    Each process of `group` (`distributed.spread`) calls this with a model, data and a recipe of the
    same kind; weights and buffers begin as those of rank 0. Each takes its part of every batch, by
    one permutation and one draw of augmentation for all. Batch normalisation sees a process's own
    part; at the end of an epoch all go on with the running statistics of rank 0.

    Records the metrics of `history` per epoch, what precision ran, and after the last epoch
    `confusion.json` over the whole test set and `weights.pt`, where the recipe says so. The row
    becomes invalid where another precision ran than asked, or where a loss is not finite; training
    then stops, and what there is stays recorded.
    Raises NotApplicableError for a precision that does not work here, and what checkpoints raise.
    """
    training = Training(ctx, model, training_set, test_set, recipe, group)
    training.prepare()
    training.checkpoints.resume(training)
    evaluation = training.run()
    training.step.release()
    if evaluation is not None and group.speaks:
        if recipe.save_confusion:
            write_confusion(ctx, test_set.labels, evaluation.predicted, classes)
        if recipe.save_weights:
            checkpoint.write_weights(ctx.side_file("weights.pt"), model)
    return evaluation is not None


class Training:
    """The state of one row's training; `train` is the way in."""

    def __init__(
        self,
        ctx: RowContext,
        model: nn.Module,
        training_set: Feed,
        test_set: Feed,
        recipe: Recipe,
        group: Group = ALONE,
    ) -> None:
        self.ctx = ctx
        self.model = model
        self.training_set = training_set
        self.test_set = test_set
        self.recipe = recipe
        self.group = group
        self.placed = None if recipe.plan is None else Placed(ctx, model, recipe.plan)
        if self.placed is None:
            self.mode = precision.enter(recipe.precision, ctx.device)
        else:
            self.mode = self.placed.mode
        self.optimizer: FlatOptimizer = recipe.optimizer(model)
        self.step = self._stepper()
        group.broadcast_([self.optimizer.values, *self.step.buffers()])
        self.generators = {
            # On the CPU, where every torch gives the same permutation for a seed.
            "shuffle": torch_compat.generator_for(torch.device("cpu"), ctx.seed),
            "augment": torch_compat.generator_for(self.mode.device, ctx.seed),
        }
        short = self.placed is not None and self.placed.short_ranged
        self.history = History(
            scaling=self.step.loss_scale is not None,
            underflow=short,
            more=None if recipe.objective is None else recipe.objective.metrics(),
        )
        self.epoch = 0
        #: How steps ran, as far as that was said.
        self.graphs_ran = ""
        self.checkpoints = TrainingCheckpoints(ctx)
        self._shown_at = 0.0
        self._batches: Sequence[torch.Tensor] = ()
        #: Where a plan's epoch failed, in words.
        self._culprit = ""

    def _stepper(self) -> Stepper:
        recipe, objective = self.recipe, self.recipe.objective
        if recipe.compile:
            require_compilable(self.ctx, self.model, self.placed is not None)
        if objective is None:
            return Stepper(
                self.model, self.optimizer, self.training_set, self.mode, self.group,
                recipe.batch_size, recipe.graphs,
                None if self.placed is None else self.placed.placing, recipe.compile,
            )  # fmt: skip
        if self.placed is not None:
            raise UsageError(
                "a placement plan goes with networks of one output",
                why=f"this one is trained by {type(objective).__name__}",
                next_step="-p plan=none",
            )
        self.optimizer = objective.combination.optimizer(self.optimizer, objective.exits)
        return ExitStepper(
            self.model, self.optimizer, self.training_set, self.mode, self.group,
            recipe.batch_size, recipe.graphs, objective, recipe.compile,
        )  # fmt: skip

    def prepare(self) -> None:
        """Set the device up and record what will run; invalid where that is not what was asked."""
        if self.ctx.device.type == "cuda":
            # A row by a plan can be resumed bit for bit; the fastest algorithms may add atomically.
            torch.backends.cudnn.benchmark = self.placed is None
            torch.backends.cudnn.deterministic = self.placed is not None
        count = min(len(self.training_set), self.recipe.batch_size)
        images, labels = self.training_set.batch(torch.arange(count, device=self.mode.device))
        if self.placed is None:
            tf32 = probe.tf32_by_arithmetic(self.ctx.device)
            seen = probe.observe(lambda: self._differentiate(images, labels))
            asked = self.recipe.ran or self.recipe.precision
            probe.require_precision(self.ctx, asked, seen, tf32)
            if not self.group.agree(probe.precision_ran(seen, tf32)):
                self.ctx.invalid("the processes of the row ran different precisions")
        else:
            self.placed.record(
                lambda: self._differentiate(images, labels), count, self.optimizer.values
            )
            # With a gradient by the images too, so that the first layer has all its passes.
            wanted = images.clone().requires_grad_()
            seen = probe.observe(lambda: self._differentiate(wanted, labels))
            self.placed.require_precisions(seen)
        self.ctx.fact("parameter_count", sum(p.numel() for p in self.model.parameters()))
        self.ctx.fact("training_images", len(self.training_set))
        self.ctx.fact("test_images", len(self.test_set))

    def _differentiate(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """A step's forward and backward pass that changes nothing: eval mode, gradients dropped,
        and what the passes draw drawn again."""
        with in_eval_mode(self.model), torch.random.fork_rng(devices=[]):
            if isinstance(self.step, ExitStepper):
                outcome = self.step.losses(images, labels).total(self.step.objective.weights)
            else:
                with self.mode.autocast():
                    logits = self.model(images)
                outcome = logits.float().sum()
            wanted = [each for each in self.model.parameters() if each.requires_grad]
            if images.requires_grad:
                wanted.append(images)
            torch.autograd.grad(outcome, wanted, allow_unused=True)

    def run(self) -> Optional[Evaluation]:
        """Train the epochs that are left. None where the loss diverged."""
        evaluation = None
        while self.epoch < self.recipe.epochs:
            evaluation = self.run_epoch()
            losses = (self.history.last("train_loss"), self.history.last("test_loss"))
            if self.step.failed_at() or not all(map(math.isfinite, losses)):
                self.ctx.invalid(f"diverged: loss is NaN/inf at epoch {self.epoch}{self._culprit}")
                return None
            self.checkpoints.save_if_due(self)
        # Of a row that was stopped after its last epoch, and is told to go on.
        return self._evaluate() if evaluation is None else evaluation

    def run_epoch(self) -> Evaluation:
        """Train the next epoch and record it."""
        started = time.monotonic()
        rate = self._set_rate()
        skipped_before = self.step.skipped
        if self.recipe.objective is not None:
            self.recipe.objective.begin_epoch(self.epoch, self.model)
        self.group.wait()  # the windows of all begin together
        with window(self.mode.device) as training_window:
            count = self._train_epoch()
        self.group.all_reduce_(self.step.totals)
        self.group.broadcast_(self.step.buffers())
        loss, correct = self.step.totals.tolist()
        evaluation = self._evaluate()
        values = {
            "train_loss": loss / count,
            "train_accuracy": 100.0 * correct / count,
            "test_loss": evaluation.loss,
            "test_accuracy": evaluation.accuracy,
            "images_per_second": count / self.group.largest(training_window.seconds),
            "learning_rate": rate,
            "epoch_seconds": time.monotonic() - started,
        }
        if self.step.loss_scale is not None:
            values["loss_scale"] = float(self.step.loss_scale.scale)
            values["skipped_steps"] = float(self.step.skipped - skipped_before)
        if self.placed is not None:
            values.update(self._look_at_passes())
        if isinstance(self.step, ExitStepper):
            values.update(self.step.epoch_values(count))
            values.update(self.step.cosines())
            values.update(self.step.objective.after_epoch(self.model))
            exits = evaluation.exits
            for k in self.step.objective.numbers:
                accuracy = exits[k] if exits else evaluation.accuracy
                values[f"exit{k}_test_accuracy"] = accuracy
        self.history.add(values, training_window.source)
        self.epoch += 1
        self._say_how_steps_ran()
        self.history.emit(self.ctx, first=self.epoch - 1)
        return evaluation

    def _set_rate(self, part: float = 0.0) -> float:
        """To what the schedule has when such a part of the epoch is over."""
        rate = self.recipe.schedule.rate(self.epoch + part)
        self.optimizer.set_rate(rate)
        return rate

    def _evaluate(self) -> Evaluation:
        return evaluate(
            self.model, self.test_set, self.mode, self.recipe.test_batch_size, self.group,
            torch_compat.inference_mode if self.placed is None else torch.no_grad,
        )  # fmt: skip

    def _train_epoch(self) -> int:
        """One pass over the images, or until a loss is not finite; how many it took."""
        self.model.train()
        self.step.begin()
        if self.group.size > 1:
            # Or dropout would mask the same elements on every rank. A function of what every
            # checkpoint knows, so that none has to keep the states of all ranks.
            seed_everything(rank_seed(self.ctx.seed, self.epoch, self.group.rank))
        count = len(self.training_set)
        order = torch.randperm(count, generator=self.generators["shuffle"]).to(self.mode.device)
        if self.training_set.augmentation.active:
            self.training_set.redraw(self.generators["augment"])
        seen = 0
        self._batches = order.split(self.recipe.batch_size * self.group.size)
        for number, indices in enumerate(self._batches):
            if self.recipe.schedule.each_update:
                self._set_rate(number / len(self._batches))
            self.step(indices)
            seen += indices.shape[0]
            self._show_progress(seen)
            if self.step.stopped():
                break
        return seen

    def _look_at_passes(self) -> Dict[str, float]:
        """After an epoch by a plan: who failed, if that was its end, or what became 0."""
        assert self.placed is not None
        self.placed.record_ran()
        failed = self.step.failed_at()
        if failed:
            indices = self._batches[failed - 1]
            self.model.train()
            named = self.placed.name_overflow(lambda: self._loss_gradient(indices))
            self._culprit = f", update {failed}: {named}"
        if not self.placed.short_ranged:
            return {}
        with in_eval_mode(self.model):
            watch = self.placed.watch(lambda: self._loss_gradient(self._batches[0]))
        return {"gradient_underflow": self.placed.keep(self.epoch + 1, watch)}

    def _loss_gradient(self, indices: torch.Tensor) -> None:
        """The gradient of a batch at the weights of now, as a step takes it."""
        self.step.differentiate(self.step.loss(indices)[0])

    def _say_how_steps_ran(self) -> None:
        """After an epoch, not before: what was asked for need not be what ran."""
        if self.step.description != self.graphs_ran:
            self.graphs_ran = self.step.description
            self.ctx.fact("graphs_ran", self.graphs_ran)

    def _show_progress(self, seen: int) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _PROGRESS_SECONDS:
            self._shown_at = now
            count, epochs = len(self.training_set), self.recipe.epochs
            phase = f"epoch {self.epoch + 1}/{epochs}"
            self.ctx.progress(self.epoch * count + seen, epochs * count, unit="image", phase=phase)


def rank_seed(seed: int, epoch: int, rank: int) -> int:
    """A seed of its own for each epoch and rank, the same on every machine."""
    return zlib.crc32(f"{seed} {epoch} {rank}".encode("ascii"))
