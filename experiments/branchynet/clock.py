"""What leaving early saves on a clock, one image at a time, as a device would see them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple

import torch

from narrowgauge_lab import torch_compat, turns
from narrowgauge_lab.anytime.device_exit import EagerExits, make_exits
from narrowgauge_lab.anytime.policies import Memory, Policy
from narrowgauge_lab.anytime.systems.branchynet import BranchyNet
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.cpu_threads import cpu_threads
from narrowgauge_lab.engines.graph import capture
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure import window
from narrowgauge_lab.precision import Mode

__all__ = ["Policies", "leave", "record_clock"]

_WARM_UP = 20
#: The plain trunk; everything that leaving early takes; of that the trunk's part alone; the plain
#: trunk launch by launch; and the trunk's part by the thresholds of Table I.
_WHOLE, _EARLY, _TRUNK, _LAUNCHED = "whole", "early", "early_trunk", "launched"
_PAPER_TRUNK = "paper_early_trunk"


class Policies(NamedTuple):
    """By what images leave: the row's own policy, and that of Table I."""

    row: Policy
    paper: Policy


class _Exits(NamedTuple):
    """Where an image leaves by each of them."""

    row: int
    paper: int


_Way = Callable[[torch.Tensor, _Exits], Any]


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
    by: Policies,
    mode: Mode,
    threads: int,
) -> None:
    """Time each of `images` in several ways in turn, first another one for each image, in the
    precision of `mode`.

    `whole_latency`: the trunk without branches. `early_latency`: trunk, branches, confidence and
    decision until the image leaves; the fact `clock_exits` says how. Both are captured, or neither:
    a launch costs the same then whatever is in it. `early_trunk_latency`: the trunk's segments up
    to there alone, launch by launch, which is all that the published program timed, and
    `paper_early_trunk_latency` with the thresholds of Table I; and `launched_latency`, the trunk
    launched likewise, where `whole_latency` is not that already. `clock_gain` is the whole trunk
    over the early one, `published_clock_gain` and `paper_published_clock_gain` those that are
    launched, by their sums. `threads` of the CPU, 0 as they are: a layer of this size is slower on
    several.
    """
    with cpu_threads(threads) as running, in_eval_mode(net), torch_compat.inference_mode():
        with mode.autocast(), turns.alone():
            _record(ctx, net, images, by)
        ctx.fact("clock_threads", running)


def _record(ctx: RowContext, net: BranchyNet, images: torch.Tensor, by: Policies) -> None:
    ways = _ways(ctx, net, images[:1], by.row)
    taken: Dict[str, List[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-_WARM_UP, len(images)):
        image = images[number % len(images)][None]
        exits = _Exits(leave(net, image, by.row), leave(net, image, by.paper))
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
    for prefix, trunk in (("", _TRUNK), ("paper_", _PAPER_TRUNK)):
        gain = launched / total[trunk]
        ctx.metric(f"{prefix}published_clock_gain", gain, unit="1", source="computed")
    ctx.fact("clock_images", len(images))


def _ways(ctx: RowContext, net: BranchyNet, image: torch.Tensor, policy: Policy) -> Dict[str, _Way]:
    """What is timed, of images like this one and the exits at which they leave. Early on a GPU is
    the fastest way that works there; where host and device are one, `leave`, which has no batch to
    put together."""

    def whole(given: torch.Tensor, _: _Exits) -> None:
        net.forward_until(net.exits - 1, given)

    ways: Dict[str, _Way] = {
        _WHOLE: whole,
        _TRUNK: lambda given, exits: _segments(net, given, exits.row),
        _PAPER_TRUNK: lambda given, exits: _segments(net, given, exits.paper),
    }
    if ctx.device.type != "cuda":
        ctx.fact("clock_exits", "host read after each exit")
        ways[_EARLY] = lambda given, _: leave(net, given, policy)
        return ways
    made = make_exits(net, image, policy)
    ctx.fact("clock_exits", made.description)
    ways[_EARLY] = lambda given, _: made(given)
    if not isinstance(made, EagerExits):
        ways.update({_WHOLE: _captured(net, image), _LAUNCHED: whole})
    return ways


def _captured(net: BranchyNet, image: torch.Tensor) -> _Way:
    """The whole trunk as one graph, which reads a copy of the image as the captured stages do."""
    kept = image.clone()
    replay = capture(lambda: net.forward_until(net.exits - 1, kept), image.device)

    def call(given: torch.Tensor, _: _Exits) -> None:
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
