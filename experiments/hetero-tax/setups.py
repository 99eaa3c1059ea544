"""A network made ready to train by a row's setup: a placement plan, or the best of a GPU alone."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, ContextManager, List, Optional

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import SkippedError, UsageError
from narrowgauge_contract.placement import BUILTIN, NO_PLAN, PlacementPlan, parse_plan
from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.compiling import require_compiler
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.distributed import ALONE, Group
from narrowgauge_lab.graphs import GraphedStep
from narrowgauge_lab.layers.hetero.convert import home_of
from narrowgauge_lab.measure import probe
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.placed import Placed

from .subjects import Subject

__all__ = ["BEST", "Training", "asked_plan", "require_here"]

#: Everything on the GPU in bfloat16, channels_last, compiled, the whole step one CUDA graph.
BEST = "best"
#: The value of `setup` for a plan of the user's own.
_OWN = "plan"
#: Of a loss scale: from its first value to 1.
_HALVINGS = 16


def asked_plan(ctx: RowContext) -> Optional[PlacementPlan]:
    """The row's plan; None for the setup `best`. UsageError where setup and plan disagree."""
    setup, plan = ctx.parameters["setup"], ctx.parameters["plan"]
    if (setup == _OWN) != (plan != NO_PLAN):
        raise UsageError(
            f"-p setup={setup} and -p plan={plan} do not go together",
            why="a plan of your own is the setup 'plan', and no other setup takes one",
            next_step=f"-p setup={_OWN} -p plan=FILE",
        )
    if setup == BEST:
        return None
    return ctx.plan(plan) if setup == _OWN else parse_plan(BUILTIN[setup], f"the plan {setup}")


def require_here(ctx: RowContext, plan: Optional[PlacementPlan]) -> None:
    """Raises SkippedError for what this device or torch has not, before anything runs."""
    nproc = ctx.parameters["nproc"]
    if nproc != 1 and plan is not None and plan.elsewhere == "cpu":
        raise SkippedError(
            f"the setup '{ctx.parameters['setup']}' has no nproc={nproc}",
            why="its plan divides a step between one CPU and one accelerator",
            next_step="-p nproc=1",
        )
    if plan is not None:
        return
    if ctx.device.type != "cuda":
        raise SkippedError("the setup 'best' is a GPU's", why="it ends in a CUDA graph")
    require_compiler("the setup 'best'")


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a step runs: `model` is called in `autocast`, differentiated in `backward`."""

    model: Callable[[torch.Tensor], torch.Tensor]
    autocast: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    backward: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    loss_scale: Optional[precision.LossScale] = None


class Training:
    """Steps of a network by one setup; calling it makes one.

    The learning rate is 0, so that every step is the first one over again; weights are written, and
    sent, all the same. `home`: where all but the placed products lives. `compiles`, `graphs`: of
    `best` only; tests without a GPU leave them out.
    """

    def __init__(
        self,
        ctx: RowContext,
        what: Subject,
        plan: Optional[PlacementPlan],
        group: Group = ALONE,
        *,
        compiles: bool = True,
        graphs: bool = True,
    ) -> None:
        self.group, self.device = group, ctx.device
        self.home = ctx.device if plan is None else home_of(plan, ctx.device)
        # Of the images: the optimiser keeps all weights in one flat tensor, in their own order.
        layout = torch.channels_last if plan is None else torch.contiguous_format
        self.network: nn.Module = what.model.to(self.home)
        self.images = what.images.to(self.home).to(memory_format=layout)
        self.labels = what.labels.to(self.home)
        self.optimizer = SGD(self.network, 0.0, weight_decay=1e-4)
        group.broadcast_([self.optimizer.values])
        self.loss = torch.zeros((), device=self.home)
        self.placed: Optional[Placed] = None
        self._graphed: Optional[GraphedStep] = None
        if plan is None:
            self._way = self._best(ctx, compiles, graphs)
        else:
            self._way = self._by_plan(ctx, plan)

    def _by_plan(self, ctx: RowContext, plan: PlacementPlan) -> _Way:
        self.placed = Placed(ctx, self.network, plan)
        self.placed.converted.watch(self.optimizer.values)
        placing = self.placed.placing
        scale = precision.LossScale(self.home) if placing.scales_loss else None
        return _Way(self.network, backward=placing.backward, loss_scale=scale)

    def _best(self, ctx: RowContext, compiles: bool, graphs: bool) -> _Way:
        mode = precision.enter("bf16", self.home)
        torch.backends.cudnn.benchmark = True  # of this row's process only
        eager = _Way(self.network, mode.autocast)
        self._way = eager
        # Before it is compiled: operators inside of compiled code are not seen one by one.
        tf32 = probe.tf32_by_arithmetic(self.home)
        probe.require_precision(ctx, "bf16", probe.observe(self.differentiate), tf32)
        compiled: Callable[..., Any] = self.network
        if compiles:
            compiled = torch_compat.compiled(self.network, ctx.parameters["compile_mode"])
        if graphs:
            beside = self.group.size > 1
            body = self._captured_shared if beside else self._captured
            self._graphed = GraphedStep(body, len(self.labels), self.home, beside_threads=beside)
            self._indices = torch.arange(len(self.labels), device=self.home)
        return dataclasses.replace(eager, model=compiled)

    def __call__(self) -> None:
        """One step: queued where the home is a GPU, done where it is the CPU."""
        if self._graphed is None:
            self.unreplayed()
            return
        self._graphed(self._indices)
        if self.group.size > 1:
            self.update()

    def unreplayed(self) -> None:
        """One step, launch by launch."""
        self.differentiate()
        self.update()

    def _captured(self, _: torch.Tensor) -> None:
        self.unreplayed()

    def _captured_shared(self, _: torch.Tensor) -> None:
        self.differentiate()

    def differentiate(self) -> None:
        """Forward and backward pass; the gradient is in the optimiser afterwards."""
        way = self._way
        with way.autocast():
            logits = way.model(self.images)
        loss = F.cross_entropy(logits.float(), self.labels)
        self.loss = loss.detach()
        if way.loss_scale is not None:
            loss = way.loss_scale.apply(loss)
        with way.backward():
            self.optimizer.differentiate(loss)

    def update(self) -> None:
        """The gradient of all processes, and the optimiser."""
        gradient, scale = self.optimizer.gradient, self._way.loss_scale
        if self.group.size > 1:
            self.group.all_reduce_(gradient)
            gradient.mul_(1.0 / self.group.size)
        skip = None if scale is None else scale.unscale(gradient)
        self.optimizer.step(skip=skip)
        if scale is not None and skip is not None:
            scale.update(skip)

    def settle(self) -> None:
        """Halve the loss scale until a gradient is finite, as the first steps of a training do."""
        for _ in range(_HALVINGS if self._way.loss_scale is not None else 0):
            self.differentiate()
            if bool(torch.isfinite(self.optimizer.gradient).all()):
                return
            self.update()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gradient_parts(self) -> List[torch.Tensor]:
        """The gradient by each parameter, flat, as `differentiate` left it: scaled."""
        gradient = self.optimizer.gradient
        # Parameters are parts of one tensor, and the gradient lies as they do.
        places = ((each.storage_offset(), each.numel()) for each in self.optimizer.parameters)
        return [gradient[start : start + count] for start, count in places]

    def loss_scale(self) -> float:
        """What the gradient is scaled by."""
        scale = self._way.loss_scale
        return 1.0 if scale is None else float(scale.scale)

    @property
    def description(self) -> str:
        """Whether steps are replayed, for the record."""
        if self._graphed is None:
            return "eager"
        shared = self.group.size > 1
        return f"{self._graphed.description}{' of forward and backward pass' if shared else ''}"

    def close(self) -> None:
        if self.placed is not None:
            self.placed.converted.close()
