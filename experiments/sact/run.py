"""One row of `sact`: train one kind of network, and record what it thinks about, where, and for
how long."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime.feeds import splits_of
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.objective import ExitLosses, Objective
from narrowgauge_lab.anytime.systems.pondering import PonderLoss
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.anytime.training import train_anytime
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.recipes import stepped_sgd
from narrowgauge_lab.shared_weights import asked_file

from .clock import record_clock
from .thoughts import draw_maps, record_resolutions, record_thoughts

_HERE = Path(__file__).parent
_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 200}
#: Channels of the first block where the width is 1.
_CHANNELS = 16
#: The rate falls tenfold at 60,000, 75,000 and 90,000 of 100,000 updates.
_FALLS = (0.6, 0.75, 0.9)


# unverified: profile paper of sact | sact for half of it | narrowgauge run sact --profile paper
def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    # Before anything is read or trained for what there is not.
    resolutions = numbers(parameters["resolutions"], "resolutions", multiple=4)
    batches = numbers(parameters["clock_batch"], "clock_batch")
    training.seed_everything(ctx.seed)
    splits = splits_of(ctx, ctx.asked_data(**_SYNTHETIC), Augmentation(padding=2, flip=True))
    net = network(parameters, len(splits.classes)).to(ctx.device)
    trained = train_anytime(
        ctx, net, splits, stepped_sgd(ctx.parameters, _FALLS, _objective(ctx)), _about(ctx),
        weights=asked_file(parameters["weights"], _HERE),
    )  # fmt: skip
    if not trained:
        return
    mode = precision.enter(parameters["precision"], ctx.device)
    record_thoughts(ctx, net, splits.test, mode)
    record_resolutions(ctx, net, splits.test, mode, resolutions)
    if net.kind == "sact":
        draw_maps(ctx, net, splits.test, mode, parameters["maps"])
        record_clock(ctx, net, splits.test, batches)


def network(parameters: object, classes: int) -> AdaptiveResNet:
    """The network that a row's parameters ask for."""
    assert hasattr(parameters, "__getitem__")
    channels = round(_CHANNELS * float(parameters["width"]))
    return AdaptiveResNet(parameters["kind"], parameters["units"], channels, classes)


def numbers(text: str, name: str, multiple: int = 1) -> Tuple[int, ...]:
    """Of `24,32`; none of an empty text. Raises BadValueError for what are no numbers from 1 on, or
    not multiples of what they should be."""
    try:
        found = tuple(int(each) for each in text.split(",")) if text.strip() else ()
    except ValueError as error:
        raise BadValueError(f"{name} '{text}' are no numbers", next_step="such as 24,32") from error
    wrong = [each for each in found if each < 1 or each % multiple]
    if wrong:
        raise BadValueError(
            f"{name} cannot be {', '.join(map(str, wrong))}",
            why="maps are halved twice" if multiple > 1 else "there is no such batch",
            next_step=f"multiples of {multiple} from {multiple} on",
        )
    return found


def _objective(ctx: RowContext) -> Objective:
    parameters = ctx.parameters
    if parameters["kind"] == "plain":
        return ExitLosses(1)
    return PonderLoss(parameters["tau"], parameters["tau_warm_up"], ctx.device)


def _about(ctx: RowContext) -> About:
    parameters = ctx.parameters
    words = [parameters["kind"], f"{parameters['units']} units"]
    words += [] if parameters["kind"] == "plain" else [f"tau {parameters['tau']:g}"]
    words += [] if parameters["width"] == "1" else [f"twin of width {parameters['width']}"]
    ctx.fact("variant", ", ".join(words))
    return About("sact", ", ".join(words))
