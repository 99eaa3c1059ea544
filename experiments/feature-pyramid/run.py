"""One row of `feature-pyramid`: a network whose exits fuse maps top-down, or its rival of plain
heads that cost the same."""

from __future__ import annotations

from pathlib import Path

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import training
from narrowgauge_lab.anytime import operating
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.objective import ExitLosses
from narrowgauge_lab.anytime.systems.pyramid import PyramidNet, apart
from narrowgauge_lab.anytime.training import train_anytime
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.recipes import stepped_sgd
from narrowgauge_lab.shared_weights import asked_file

__all__ = ["run"]

_HERE = Path(__file__).parent
_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 200}
#: Where the rate falls to a tenth, as shares of the epochs.
_STEPS = (0.5, 0.75)
#: What "equal cost" allows, at each exit, with the heads before it and without them.
_EQUAL = 0.01


def run(ctx: RowContext) -> None:
    """Train as `ctx.parameters` say and score every exit."""
    parameters = ctx.parameters
    splits = splits_of(ctx, ctx.asked_data(**_SYNTHETIC), Augmentation(padding=4, flip=True))
    training.seed_everything(ctx.seed)
    net = _pyramid(ctx, splits)
    # Before an hour goes into training.
    operating.require_policy(parameters["policy"], net.exits, paper=False)
    rival = _equal_rival(ctx, net, splits)
    net = net if parameters["heads"] == "pyramid" else rival
    net.to(ctx.device)
    trained = train_anytime(
        ctx, net, splits, stepped_sgd(ctx.parameters, _STEPS, ExitLosses(net.exits)), _about(ctx),
        weights=asked_file(parameters["weights"], _HERE),
    )  # fmt: skip
    if trained:
        operating.operate_row(ctx, "max-probability")


def _pyramid(ctx: RowContext, splits: Splits) -> PyramidNet:
    given = ctx.parameters
    return PyramidNet(
        given["form"],
        given["blocks"],
        given["width"],
        given["channels"],
        given["exits_per_scale"],
        len(splits.classes),
    )


def _equal_rival(ctx: RowContext, net: PyramidNet, splits: Splits) -> PyramidNet:
    """The network of plain heads that cost the same. Both are counted: the facts `macs_apart` (the
    share by which an exit's costs differ at most), `heads_apart` (the same of the heads alone,
    which the trunk does not hide) and `plain_channels` say how equal they are.

    Raises BadValueError where whole channels cannot make them equal within one percent.
    """
    rival = net.rival()
    example = splits.test.images[:1].float().cpu()
    ours, others = exit_costs(net, example), exit_costs(rival, example)
    difference = max(apart(ours.direct, others.direct), apart(ours.cumulative, others.cumulative))
    ctx.fact("macs_apart", difference)
    ctx.fact("heads_apart", apart(ours.heads, others.heads))
    ctx.fact("plain_channels", rival.plain_channels)
    if difference > _EQUAL:
        raise BadValueError(
            f"plain heads come within {100 * difference:.2f} % of the pyramid's cost, not 1 %",
            why="a head has whole channels, and these are few against a trunk this small",
            next_step="more channels of the fused maps, more blocks, or a greater width",
        )
    return rival


def _about(ctx: RowContext) -> About:
    given = ctx.parameters
    form = f"pyramid of {given['channels']} channels, form {given['form']}"
    words = [form if given["heads"] == "pyramid" else f"plain heads at the cost of a {form}"]
    words += [f"{given['blocks']} blocks a scale"]
    words += [] if given["width"] == 1 else [f"twin of width {given['width']:g}"]
    variant = ", ".join(words)
    ctx.fact("variant", variant)
    return About("feature-pyramid", variant)
