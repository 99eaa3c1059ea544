"""The checkpoints of a training: what they hold, when one is due, and going on from one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List

import torch

from narrowgauge_lab import checkpoint, facts
from narrowgauge_lab.context import RowContext

if TYPE_CHECKING:
    from narrowgauge_lab.training import Training

__all__ = ["TrainingCheckpoints"]

#: A checkpoint of a large network takes seconds: the next one is so many times as far away. What
#: counts is the quickest so far: one for which a disk or a GPU was busy puts off none after it.
_TIMES_A_SAVE = 20.0
#: Linux makes it up anew at each start, for containers too.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class TrainingCheckpoints:
    """Those of one `Training`, which is read and set through its public attributes, and not kept:
    the two would keep each other's tensors until Python looks for cycles."""

    def __init__(self, ctx: RowContext) -> None:
        self._here = _circumstances(ctx)
        self._saved_at = self._began = time.monotonic()
        self._quickest = math.inf
        #: Seconds that this row took in the processes before a resume.
        self._seconds_before = 0.0
        #: In what the circumstances of those differ, in words.
        self._elsewhere: List[str] = []

    def resume(self, training: Training) -> None:
        """Go on from the row's checkpoint, if there is one to go on from. Raises
        CheckpointMismatchError for one of other parameters or another seed."""
        ctx = training.ctx
        state = ctx.checkpoints.load()
        if state is None:
            return
        identity = _identity(ctx)
        if state["identity"] != identity:
            raise checkpoint.CheckpointMismatchError(
                "the checkpoint is of another configuration",
                why=f"it was written for {state['identity']}, this row is {identity}",
                next_step="resume with the parameters the run was started with, or start a new run",
            )
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        if training.placed is not None:
            training.placed.converted.weights_changed()
            training.placed.forget_after(state["epoch"])
        if training.step.loss_scale is not None:
            training.step.loss_scale.load_state_dict(state["loss_scale"])
        checkpoint.set_random_state(state["random"], training.generators)
        training.epoch = state["epoch"]
        training.history.load_state_dict(state["history"])
        self._say_where_it_began(training, state)
        # The row began anew in the record: what the epochs before gave has to be said again.
        training.history.emit(ctx)
        training.graphs_ran = state.get("graphs_ran", "")  # older versions' checkpoints lack it
        if training.graphs_ran:
            ctx.fact("graphs_ran", training.graphs_ran)
        self._seconds_before = state["seconds"]
        ctx.fact("resumed_after_epoch", training.epoch)
        # The row's own duration is of its last process only.
        ctx.fact("seconds_before_resume", self._seconds_before)
        ctx.fact("world_size_before_resume", state["world_size"])

    def _say_where_it_began(self, training: Training, state: Dict[str, Any]) -> None:
        """Of a checkpoint that was carried here without the run's events, whose circumstances a
        resume compares: the fact `began_elsewhere`, and no times, which would be of both places."""
        before = state.get("circumstances", self._here)  # older versions' checkpoints lack them
        self._elsewhere = list(state.get("elsewhere", ()))
        self._elsewhere += [
            f"{name} {before.get(name)} until epoch {state['epoch']}, {now} from there on"
            for name, now in self._here.items()
            if before.get(name) != now
        ]
        if self._elsewhere:
            training.history.forget_times()
            training.ctx.fact("began_elsewhere", self._elsewhere)

    def save_if_due(self, training: Training) -> None:
        """Write a checkpoint, unless the last one is young or nothing is left to do."""
        recipe = training.recipe
        patience = recipe.checkpoint_seconds
        if patience and math.isfinite(self._quickest):
            patience = max(patience, _TIMES_A_SAVE * self._quickest)
        begin = time.monotonic()
        early = begin - self._saved_at < patience
        skipped = not recipe.keep_last if training.epoch == recipe.epochs else early
        if skipped or not training.group.speaks:
            return
        training.ctx.checkpoints.save(self._state(training))
        self._saved_at = time.monotonic()
        self._quickest = min(self._quickest, self._saved_at - begin)

    def _state(self, training: Training) -> Dict[str, Any]:
        scale = training.step.loss_scale
        return {
            "identity": _identity(training.ctx),
            "circumstances": self._here,
            "elsewhere": list(self._elsewhere),
            "epoch": training.epoch,
            "world_size": training.group.size,
            "seconds": self._seconds_before + time.monotonic() - self._began,
            "history": training.history.state_dict(),
            "graphs_ran": training.graphs_ran,
            "model": dict(training.model.state_dict()),
            "optimizer": training.optimizer.state_dict(),
            "loss_scale": {} if scale is None else scale.state_dict(),
            "random": checkpoint.random_state(training.generators),
        }


def _identity(ctx: RowContext) -> Dict[str, Any]:
    """What a checkpoint belongs to; the number of processes may be another after a restart."""
    parameters = {k: v for k, v in ctx.parameters.items() if k != "nproc"}
    return {"seed": ctx.seed, "parameters": parameters}


def _circumstances(ctx: RowContext) -> Dict[str, str]:
    """What trains here: one record says it once, of its last process."""
    cuda = ctx.device.type == "cuda"
    return {
        "host": _boot(),
        "accelerator": torch.cuda.get_device_name(ctx.device) if cuda else "none",
        "torch": str(torch.__version__),
        "source": facts.source_hash()[:12],
    }


def _boot() -> str:
    """Which start of which host this is: nothing that says more of it than that."""
    try:
        return _BOOT.read_text(encoding="ascii")[:8]
    except OSError:
        return "unknown"
