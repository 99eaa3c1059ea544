"""One update of a model: its share of a batch, the gradient of all processes, the optimiser.

The gradient is one flat tensor (`optim`), so processes exchange it in one all-reduce. It is not
overlapped with the backward pass: 100 MB (ResNet-50) take a thousandth of its step over NVLink.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, Callable, ContextManager, Dict, Hashable, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab import precision
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.compiling import Forward, compiled_call, compiled_or_say
from narrowgauge_lab.distributed import Group
from narrowgauge_lab.graphs import EagerStep, GraphedStep, make_step
from narrowgauge_lab.layouts import require_sound_channels_last
from narrowgauge_lab.optim import FlatOptimizer
from narrowgauge_lab.sentry import Lookout, Sentry

__all__ = ["Placing", "Stepper"]

_AnyStep = Union[EagerStep, GraphedStep]


@dataclasses.dataclass(frozen=True)
class Placing:
    """What placed layers change of a step: the context of its backward pass, whether the loss is
    scaled, whether it can be captured, and what goes before each. Such a step stops before an
    update that is not finite."""

    backward: Callable[[], ContextManager[Any]]
    scales_loss: bool
    captured: bool
    begin: Callable[[], None]


class Stepper:
    """Updates `model`, and sums what its batches gave.

    `graphs`: auto | off, whether steps are captured in a CUDA graph, each kind of update in one of
    its own. Where there are other processes, what they do together stays outside of it. `placing`:
    see there. `compiles`: whether full batches go through torch.compile.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: FlatOptimizer,
        training_set: Feed,
        mode: precision.Mode,
        group: Group,
        batch_size: int,
        graphs: str,
        placing: Optional[Placing] = None,
        compiles: bool = False,
    ) -> None:
        """Raises BadValueError for a layout that this network is not to be trained in."""
        if training_set.channels_last:
            require_sound_channels_last(model, mode.device)
        self.model = model
        self._forward = Forward(
            model, batch_size, compiled_call(model, model) if compiles else None
        )
        self.optimizer = optimizer
        self.training_set = training_set
        self.mode = mode
        self.group = group
        scales = mode.scales_loss if placing is None else placing.scales_loss
        self.loss_scale = precision.LossScale(mode.device) if scales else None
        self._backward = contextlib.nullcontext if placing is None else placing.backward
        self._sentry = None if placing is None else Sentry(mode.device)
        self._announce = None if placing is None else placing.begin
        #: Sums over the epoch so far: loss · images, and correct answers. Read once per epoch.
        self.totals = torch.zeros(2, dtype=torch.float64, device=mode.device)
        self._loss = torch.zeros((), device=mode.device)
        self._lookout = Lookout(self.totals[0] if self._sentry is None else self._sentry.first)
        self._full = batch_size * group.size
        #: The part of all images of this update that are this process's.
        self._part = torch.ones((), device=mode.device)
        self._part_set = 1.0
        shared = group.size > 1
        body = self._gradients if shared else self._update

        def make() -> _AnyStep:
            if placing is not None and not placing.captured:
                return EagerStep(body, "layers are placed by a plan, and their copies wait")
            return make_step(graphs, body, batch_size, mode.device, beside_threads=shared)

        self._make: Callable[[], _AnyStep] = make
        #: What tells the next update from those that launch other kernels, or on other sizes.
        self.kind: Hashable = None
        self._steps: Dict[Hashable, _AnyStep] = {self.kind: make()}

    @property
    def description(self) -> str:
        """How steps ran by now, for the fact `graphs_ran`."""
        found = [step.description for step in self._steps.values()]
        ran = "cuda-graph" if "cuda-graph" in found else found[0]
        if ran != "cuda-graph" or self.group.size == 1:
            return ran
        return "cuda-graph of forward and backward pass; all-reduce and update launch by launch"

    def release(self) -> None:
        """Let go of captured steps, after the last one. They and this object keep each other and
        gigabytes of the device, until Python happens to look for cycles."""
        over = EagerStep(_released, self.description)
        self._make = lambda: over
        self._steps = {None: over}

    @property
    def skipped(self) -> int:
        """Updates that an overflow has cost; waits for the device."""
        return int(self.loss_scale.skipped) if self.loss_scale is not None else 0

    def begin(self) -> None:
        """Begin an epoch: its sums are 0."""
        self.totals.zero_()
        if self._sentry is not None:
            self._sentry.begin()

    def stopped(self) -> bool:
        """Whether a loss was not finite, some updates ago at the latest; asked once an update. Not
        of several processes, whose losses are their own: they compare them after the epoch."""
        if self.group.size > 1:
            return False
        seen = self._lookout.look()
        return seen > 0 if self._sentry is not None else not math.isfinite(seen)

    def failed_at(self) -> int:
        """The update that made a sentry stop, counted from 1 in its epoch; 0 where none did. Waits
        for the device."""
        return int(self._sentry.first) if self._sentry is not None else 0

    def buffers(self) -> List[torch.Tensor]:
        """What the model keeps beside its parameters, such as running statistics."""
        return [buffer.detach() for buffer in self.model.buffers()]

    def __call__(self, indices: torch.Tensor) -> None:
        """One update from the images at `indices`, of which this process takes its shard."""
        if self._announce is not None:
            self._announce()
        step = self._step()
        if self.group.size == 1:
            step(indices)
            return
        mine = self.group.shard(indices)
        self._set_part(len(mine) / len(indices))
        if len(indices) == self._full:
            step(mine)
        elif len(mine) > 0:  # eager on all: a captured step of one may not meet eager ones
            self._gradients(mine)
        else:
            self.optimizer.gradient.zero_()
        self.group.all_reduce_(self.optimizer.gradient)
        self._apply()

    def _step(self) -> _AnyStep:
        """Of the kind that comes next."""
        if self.kind not in self._steps:
            self._steps[self.kind] = self._make()
        return self._steps[self.kind]

    def _set_part(self, part: float) -> None:
        if part != self._part_set:
            self._part.fill_(part)
            self._part_set = part

    def _update(self, indices: torch.Tensor) -> None:
        """Nothing here asks the device for an answer: it may be under capture."""
        self._gradients(indices)
        self._apply()

    def _gradients(self, indices: torch.Tensor) -> None:
        """Put the gradient into the optimiser: scaled, and this process's part of the whole one."""
        with compiled_or_say():
            loss, logits, labels = self.loss(indices)
            self.differentiate(loss if self.group.size == 1 else loss * self._part)
        known = loss.detach()
        if self._sentry is not None:
            self._loss = known
        correct = (logits.detach().argmax(1) == labels).sum()
        self.totals.add_(torch.stack((known.double() * len(labels), correct.double())))

    def loss(self, indices: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean loss of the images at `indices`, their logits, and their labels."""
        images, labels = self.training_set.batch(indices)
        with self.mode.autocast():
            logits = self._forward(images)
        logits = logits.float()
        return F.cross_entropy(logits, labels), logits, labels

    def differentiate(self, loss: torch.Tensor) -> None:
        """Put the gradient of a loss into the optimiser, scaled where the loss is."""
        with self._backward():
            self.optimizer.differentiate(
                loss if self.loss_scale is None else self.loss_scale.apply(loss)
            )

    def _apply(self) -> None:
        """Update from the gradient of all processes, which all of them have; so they all skip it
        where one overflowed."""
        gradient, scale = self.optimizer.gradient, self.loss_scale
        overflowed = None if scale is None else scale.unscale(gradient)
        skip = overflowed
        if self._sentry is not None:
            now = None if scale is None else scale.scale
            held = self._sentry.judge(self._loss, gradient, now)
            skip = held if overflowed is None else held | overflowed
        self.optimizer.step(skip=skip)
        if scale is not None and overflowed is not None:
            scale.update(overflowed)


def _released(indices: torch.Tensor) -> None:
    raise RuntimeError(f"a step on {len(indices)} images, after the training was over")
