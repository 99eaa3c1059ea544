"""What leaving early saves on a clock, one image at a time, as a device would see them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.device_exit import make_exits
from narrowgauge_lab.anytime.policies import Memory, Policy
from narrowgauge_lab.anytime.systems.branchynet import BranchyNet
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.cpu_threads import cpu_threads
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure import window
from narrowgauge_lab.precision import Mode

__all__ = ["leave", "record_clock"]

_WARM_UP = 20
#: The plain trunk; everything that leaving early takes; and of that the trunk's part alone.
_WHOLE, _EARLY, _TRUNK = "whole", "early", "early_trunk"


def leave(net: BranchyNet, image: torch.Tensor, policy: Policy) -> int:
    """Where one image [1, C, H, W] leaves. The host asks the device at every exit but the last."""
    state, memory = net.begin(image), Memory()
    for number in range(net.exits - 1):
        answer = net.advance(number, state)
        state = answer.state
        if bool(policy.leaves(number, answer.logits, memory)):
            return number
    net.advance(net.exits - 1, state)
    return net.exits - 1


def record_clock(
    ctx: RowContext,
    net: BranchyNet,
    images: torch.Tensor,
    policy: Policy,
    mode: Mode,
    threads: int,
) -> None:
    """Time each of `images` three ways in turn, first another one for each image, in the precision
    of `mode`.

    `whole_latency`: the trunk without branches. `early_latency`: trunk, branches, confidence and
    decision until the image leaves; the fact `clock_exits` says how. `early_trunk_latency`: the
    trunk's segments up to there alone, which is all that the published program timed. `clock_gain`
    and `published_clock_gain`: the first over each of these, by their sums. `threads` of the CPU, 0
    as they are: a layer of this size is slower on several.
    """
    with cpu_threads(threads) as running, in_eval_mode(net), torch_compat.inference_mode():
        with mode.autocast():
            _record(ctx, net, images, policy)
        ctx.fact("clock_threads", running)


def _record(ctx: RowContext, net: BranchyNet, images: torch.Tensor, policy: Policy) -> None:
    taken: Dict[str, List[float]] = {_WHOLE: [], _EARLY: [], _TRUNK: []}
    early = _way_out(ctx, net, images[:1], policy)
    for number in range(-_WARM_UP, len(images)):
        image = images[number % len(images)][None]
        exits = leave(net, image, policy)
        calls = (
            (_WHOLE, lambda: net.forward_until(net.exits - 1, image)),  # noqa: B023
            (_EARLY, lambda: early(image)),  # noqa: B023
            (_TRUNK, lambda: _segments(net, image, exits)),  # noqa: B023
        )
        for turn in range(3):
            name, call = calls[(turn + number) % 3]
            with window(ctx.device) as clock:
                call()
            if number >= 0:
                taken[name].append(clock.seconds)
    for name, seconds in taken.items():
        ctx.metric(f"{name}_latency", seconds, unit="s", source=clock.source, index="image")
    whole = sum(taken[_WHOLE])
    ctx.metric("clock_gain", whole / sum(taken[_EARLY]), unit="1", source="computed")
    ctx.metric("published_clock_gain", whole / sum(taken[_TRUNK]), unit="1", source="computed")
    ctx.fact("clock_images", len(images))


def _way_out(
    ctx: RowContext, net: BranchyNet, image: torch.Tensor, policy: Policy
) -> Callable[[torch.Tensor], Any]:
    """How images like this one leave: on a GPU the fastest way that works there; where host and
    device are one, `leave`, which has no batch to put together."""
    if ctx.device.type != "cuda":
        ctx.fact("clock_exits", "host read after each exit")
        return lambda given: leave(net, given, policy)
    exits = make_exits(net, image, policy)
    ctx.fact("clock_exits", exits.description)
    return exits


def _segments(net: BranchyNet, image: torch.Tensor, exits: int) -> None:
    """The trunk up to an exit, and its end where the image goes all the way."""
    if exits == net.exits - 1:
        net.forward_until(exits, image)
        return
    state = net.begin(image)
    for number in range(exits + 1):
        state = net.advance(number, state, head=False).state
