"""What every exit says of every validation and test image, and what that costs: `logits.npz`."""

from __future__ import annotations

import dataclasses
import time
from typing import Callable, List, Optional, Tuple

import numpy as np
import torch

from narrowgauge_lab import torch_compat, turns
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.precision import Mode
from narrowgauge_scores.side_file import LOGITS_FILE, RunLogits, Split, write_logits

__all__ = ["About", "answers", "device_name", "latencies", "timed_images", "write"]

_WARM_UP = 3
#: Images that latencies are of, one after another: a network's time may depend on the image.
_TIMED = 30


@dataclasses.dataclass(frozen=True)
class About:
    """What a reader of the file has to know: `family` is the system (`branchynet`), `variant` which
    one of it, with all that makes it another (`b-lenet`, `width 1/4`). `base_accuracy` [%] and
    `base_macs` are of the plain network that it is judged against, where there is one: the accuracy
    is asked for once the network is trained and None where it is not known, and `base_macs` is
    given the costs of the exits. `base_correct`: bool [images], which test images it got right, in
    the feed's order; None where that is not known."""

    family: str
    variant: str
    exit_names: Tuple[str, ...] = ()
    base_accuracy: Optional[Callable[[], Optional[float]]] = None
    base_macs: Optional[Callable[[ExitCosts], int]] = None
    base_correct: Optional[Callable[[], Optional[np.ndarray]]] = None


def write(
    ctx: RowContext,
    net: AnytimeNetwork,
    splits: Splits,
    about: About,
    mode: Mode,
    *,
    batch_size: int = 1000,
    passes: int = 30,
) -> RunLogits:
    """Write the row's `logits.npz` and return what is in it: logits float32, costs, and what each
    exit took for one image, `passes` times (0: not measured), over the first test images in turn;
    the fact `latency_images` says over how many.

    Raises BadValueError where a logit is not finite, and what `exit_costs` raises.
    """
    images = timed_images(splits.test, mode, passes)
    costs = exit_costs(net, images[:1])
    base = about.base_accuracy() if about.base_accuracy is not None else None
    right = about.base_correct() if about.base_correct is not None else None
    test = answers(net, splits.test, splits.test_samples, costs, mode, batch_size)
    if right is not None:
        test = dataclasses.replace(test, base_correct=right.astype(np.uint8))
    if passes:
        ctx.fact("latency_images", len(images))
    run = RunLogits(
        family=about.family,
        variant=about.variant,
        data=splits.data,
        seed=ctx.seed,
        test=test,
        cumulative_macs=np.array(costs.cumulative, dtype=np.int64),
        direct_macs=np.array(costs.direct, dtype=np.int64),
        exit_names=about.exit_names,
        val=answers(net, splits.validation, splits.validation_samples, costs, mode, batch_size),
        latency=latencies(net, images, mode, passes) if passes else None,
        device=device_name(mode.device),
        synthetic=splits.data == "synthetic",
        base_accuracy=base,
        base_macs=None if base is None or about.base_macs is None else about.base_macs(costs),
    )
    write_logits(ctx.side_file(LOGITS_FILE), run)
    return run


def answers(
    net: AnytimeNetwork,
    feed: Feed,
    samples: np.ndarray,
    costs: ExitCosts,
    mode: Mode,
    batch_size: int,
) -> Split:
    """What the exits say of a feed's images, in eval mode and in the row's precision. Costs per
    image are there where a stage's work depends on the image."""
    parts: List[torch.Tensor] = []
    spent: List[torch.Tensor] = []
    depends = False
    with in_eval_mode(net), torch_compat.inference_mode():
        for indices in torch.arange(len(feed), device=mode.device).split(batch_size):
            images, _ = feed.batch(indices)
            logits, macs, differs = _pass(net, images, costs, mode)
            parts.append(logits)
            spent.append(macs)
            depends = depends or differs
    return Split(
        logits=torch.cat(parts, 1).numpy(),
        labels=feed.labels.cpu().numpy().astype(np.int64),
        samples=np.asarray(samples, dtype=np.int64),
        macs=torch.cat(spent, 1).numpy() if depends else None,
    )


def _pass(
    net: AnytimeNetwork, images: torch.Tensor, costs: ExitCosts, mode: Mode
) -> Tuple[torch.Tensor, torch.Tensor, bool]:
    """Logits float32 [exits, B, classes], cumulative MACs float64 [exits, B], and whether they
    depend on the image."""
    state = net.begin(images)
    logits: List[torch.Tensor] = []
    macs: List[torch.Tensor] = []
    depends = False
    for number, stage in enumerate(costs.stages):
        with mode.autocast():
            answer = net.advance(number, state)
        state = answer.state
        logits.append(answer.logits.float().cpu())
        alike = torch.full((len(images),), float(stage), dtype=torch.float64)
        depends = depends or answer.macs is not None
        macs.append(alike if answer.macs is None else answer.macs.double().cpu())
    return torch.stack(logits), torch.stack(macs).cumsum(0), depends


def timed_images(test: Feed, mode: Mode, passes: int) -> torch.Tensor:
    """The first test images, which so many passes take in turn: [B, C, H, W]."""
    timed = min(_TIMED, len(test), max(passes, 1))
    return test.batch(torch.arange(timed, device=mode.device))[0]


def latencies(net: AnytimeNetwork, images: torch.Tensor, mode: Mode, passes: int) -> np.ndarray:
    """Seconds from the start to the answer of each exit, one stage after another on one image, in
    so many passes over `images` [B, C, H, W] in turn: float64 [exits, passes]. Pass p is of image
    p modulo B, so a network whose work depends on the image shows it. A GPU is waited for at each
    exit: an answer has to be there."""
    taken = np.zeros((net.exits, passes))
    with in_eval_mode(net), torch_compat.inference_mode(), turns.alone():
        for number in range(-_WARM_UP, passes):
            place = number % len(images)
            image = images[place : place + 1]
            _wait(mode.device)
            began = time.perf_counter()
            state = net.begin(image)
            for stage in range(net.exits):
                with mode.autocast():
                    state = net.advance(stage, state).state
                _wait(mode.device)
                if number >= 0:
                    taken[stage, number] = time.perf_counter() - began
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """What a file calls the device that its seconds are of."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
