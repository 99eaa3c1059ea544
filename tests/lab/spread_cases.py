"""A small row trained in several processes, for the tests of `distributed`."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.nn.functional as F
from torch import nn
from training_cases import CLASSES, CPU, Case, SmallNet, feeds

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_lab import distributed, training
from narrowgauge_lab.context import RowContext

__all__ = ["PlainNet", "RowFailedError", "Spread", "gone"]

#: Forks from a process that has run nothing of torch, as the lab does: torch 1.8 refuses a backward
#: pass in a process forked from one that has run one, as the process of other tests has.
_SERVER = multiprocessing.get_context("forkserver")
# Python before 3.12 looks for these without this process's path, and passes over what it misses.
_SERVER.set_forkserver_preload(["torch.distributed", "narrowgauge_lab.training"])


class RowFailedError(Exception):
    """What a row raised, in the words of its process."""


class PlainNet(nn.Module):
    """No normalisation and no dropout: the mean gradient of a batch is that of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8 * 3 * 3, len(CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(F.max_pool2d(F.relu(self.conv(images)), 2).flatten(1))


class Spread(Case):
    """A case whose `train_by` trains in so many processes; `states` is what each ended with."""

    def __init__(self, out: Path, parameters: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(out, CPU, parameters)

    def spread(self, nproc: int, body: distributed.Body, resume: bool = False) -> None:
        """A row that does `body`; what it raises leaves the row unfinished."""
        with EventLog(self.out / EVENTS_FILE) as log:
            ctx = RowContext(self.plan, log, self.out, device=CPU, profile="short", resume=resume)
            head = {"repeat": 0, "seed": 3, "parameters": self.plan.parameters}
            log.emit(EventKind.ROW_START, 0, **head)
            distributed.spread(ctx, nproc, body)
            ctx.finish()
            log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)

    def train_by(
        self,
        nproc: int,
        given: training.Recipe,
        images: int = 70,
        fail_at: int = 0,
        stop_after: int = 0,
        resume: bool = False,
        make: Callable[[], nn.Module] = PlainNet,
    ) -> None:
        """Train in a row's process of its own. Raises RowFailedError with what training raised.

        `stop_after`: kill it after so many epochs, its checkpoint written."""
        how = functools.partial(_train, given, images, fail_at, stop_after, make, self.out)
        error = self.out / "error.txt"
        process = _SERVER.Process(target=_row, args=(self, nproc, how, resume, error))
        process.start()
        process.join(300)
        assert process.exitcode == 0, f"the row's process ended with {process.exitcode}"
        if error.exists():
            raise RowFailedError(error.read_text())

    @property
    def states(self) -> List[Dict[str, torch.Tensor]]:
        return [torch.load(str(path)) for path in sorted(self.out.glob("state-*.pt"))]


def _row(case: Spread, nproc: int, body: distributed.Body, resume: bool, error: Path) -> None:
    """What a row's process does."""
    torch.set_num_threads(1)
    if error.exists():
        error.unlink()
    try:
        case.spread(nproc, body, resume)
    except (Exception, KeyboardInterrupt) as raised:
        error.write_text(f"{type(raised).__name__}: {raised}")


def _train(
    given: training.Recipe,
    images: int,
    fail_at: int,
    stop_after: int,
    make: Callable[[], nn.Module],
    out: Path,
    ctx: RowContext,
    group: distributed.Group,
) -> None:
    """What each rank does."""
    # They begin apart, so that only what is made the same is the same.
    training.seed_everything(ctx.seed + group.rank)
    model = SmallNet(fail_at) if fail_at else make()
    training_set, test_set = feeds(train=images)
    loop = training.Training(ctx, model, training_set, test_set, given, group)
    loop.prepare()
    loop.checkpoints.resume(loop)
    for _ in range(stop_after):
        loop.run_epoch()
        loop.checkpoints.save_if_due(loop)
    if stop_after:
        raise KeyboardInterrupt
    loop.run()
    state = dict(model.state_dict(), **loop.optimizer.state_dict())
    if loop.step.loss_scale is not None:
        state.update(loop.step.loss_scale.state_dict())
    torch.save(state, str(out / f"state-{group.rank}.pt"))


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether the process has ended, or does within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # ended; whoever inherited it has not looked yet
        time.sleep(0.02)
    return False
