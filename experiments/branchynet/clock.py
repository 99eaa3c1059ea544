"""What leaving early saves on a clock, one image at a time, as a device would see them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.device_exit import EagerExits, make_exits
from narrowgauge_lab.anytime.policies import Memory, Policy
from narrowgauge_lab.anytime.systems.branchynet import BranchyNet
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.cpu_threads import cpu_threads
from narrowgauge_lab.engines.graph import capture
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure import window
from narrowgauge_lab.precision import Mode

__all__ = ["leave", "record_clock"]

_WARM_UP = 20
#: The plain trunk; everything that leaving early takes; of that the trunk's part alone; and the
#: plain trunk launch by launch.
_WHOLE, _EARLY, _TRUNK, _LAUNCHED = "whole", "early", "early_trunk", "launched"
#: An image and the exit at which it leaves.
_Way = Callable[[torch.Tensor, int], Any]


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
    """Time each of `images` in several ways in turn, first another one for each image, in the
    precision of `mode`.

    `whole_latency`: the trunk without branches. `early_latency`: trunk, branches, confidence and
    decision until the image leaves; the fact `clock_exits` says how. Both are captured, or neither:
    a launch costs the same then whatever is in it. `early_trunk_latency`: the trunk's segments up
    to there alone, launch by launch, which is all that the published program timed; and
    `launched_latency`, the trunk launched likewise, where `whole_latency` is not that already.
    `clock_gain` is the whole trunk over the early one, `published_clock_gain` the two that are
    launched, by their sums. `threads` of the CPU, 0 as they are: a layer of this size is slower on
    several.
    """
    with cpu_threads(threads) as running, in_eval_mode(net), torch_compat.inference_mode():
        with mode.autocast():
            _record(ctx, net, images, policy)
        ctx.fact("clock_threads", running)


def _record(ctx: RowContext, net: BranchyNet, images: torch.Tensor, policy: Policy) -> None:
    ways = _ways(ctx, net, images[:1], policy)
    taken: Dict[str, List[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-_WARM_UP, len(images)):
        image = images[number % len(images)][None]
        exits = leave(net, image, policy)
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            with window(ctx.device) as clock:
                ways[name](image, exits)
            if number >= 0:
                taken[name].append(clock.seconds)
    for name, seconds in taken.items():
        ctx.metric(f"{name}_latency", seconds, unit="s", source=clock.source, index="image")
    total = {name: sum(seconds) for name, seconds in taken.items()}
    launched = total.get(_LAUNCHED, total[_WHOLE])
    ctx.metric("clock_gain", total[_WHOLE] / total[_EARLY], unit="1", source="computed")
    ctx.metric("published_clock_gain", launched / total[_TRUNK], unit="1", source="computed")
    ctx.fact("clock_images", len(images))


def _ways(ctx: RowContext, net: BranchyNet, image: torch.Tensor, policy: Policy) -> Dict[str, _Way]:
    """What is timed, of images like this one and the exits at which they leave. Early on a GPU is
    the fastest way that works there; where host and device are one, `leave`, which has no batch to
    put together."""

    def whole(given: torch.Tensor, _: int) -> None:
        net.forward_until(net.exits - 1, given)

    def trunk(given: torch.Tensor, exits: int) -> None:
        _segments(net, given, exits)

    if ctx.device.type != "cuda":
        ctx.fact("clock_exits", "host read after each exit")
        early: _Way = lambda given, _: leave(net, given, policy)  # noqa: E731
        return {_WHOLE: whole, _EARLY: early, _TRUNK: trunk}
    made = make_exits(net, image, policy)
    ctx.fact("clock_exits", made.description)
    ways: Dict[str, _Way] = {_WHOLE: whole, _EARLY: lambda given, _: made(given), _TRUNK: trunk}
    if not isinstance(made, EagerExits):
        ways.update({_WHOLE: _captured(net, image), _LAUNCHED: whole})
    return ways


# unverified: the whole trunk as a graph | no GPU since | pytest -m gpu tests/experiments
def _captured(net: BranchyNet, image: torch.Tensor) -> _Way:
    """The whole trunk as one graph, which reads a copy of the image as the captured stages do."""
    kept = image.clone()
    replay = capture(lambda: net.forward_until(net.exits - 1, kept), image.device)

    def call(given: torch.Tensor, _: int) -> None:
        kept.copy_(given)
        replay()

    return call


def _segments(net: BranchyNet, image: torch.Tensor, exits: int) -> None:
    """The trunk up to an exit, and its end where the image goes all the way."""
    if exits == net.exits - 1:
        net.forward_until(exits, image)
        return
    state = net.begin(image)
    for number in range(exits + 1):
        state = net.advance(number, state, head=False).state
