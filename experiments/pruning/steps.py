"""A network that is pruned to rising ratios: from the trained one each time, or step after step."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.batch_statistics import reestimate
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.agreement import LIMITS
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.transforms.channel_groups import ChannelMap, channel_groups
from narrowgauge_lab.transforms.channel_removal import masked_channels, removed_channels
from narrowgauge_lab.transforms.pruning import (
    Chosen,
    apply_masks,
    channel_scores,
    choose_channels,
    magnitude_masks,
    prunable_weights,
    require_ratio,
)

__all__ = ["Pruned", "Pruner", "ratios_of"]

#: Images on which the smaller network is held against the masked one. Sums of other lengths are
#: rounded in another order, and that is all that may tell them apart.
_COMPARED = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Pruned:
    """`ratio` as asked for, and the share of weights or channels that really went, `removed`.
    `masks`: what stays of single weights; None of channels, which are not there any more.
    `difference`: of the removed network's logits from the masked one's."""

    ratio: float
    model: nn.Module
    removed: float
    masks: Optional[Mapping[str, torch.Tensor]] = None
    difference: Optional[float] = None


def ratios_of(text: str) -> Tuple[float, ...]:
    """`0.1,0.5` as numbers. Raises BadValueError unless they rise within [0, 1)."""
    example = "-p ratios=0.1,0.3,0.5"
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise BadValueError(
            f"ratios '{text}'", why="they are numbers with commas between", next_step=example
        ) from None
    for ratio in found:
        require_ratio(ratio)
    if list(found) != sorted(set(found)):
        raise BadValueError(
            f"ratios '{text}' do not rise",
            why="what is pruned step by step never comes back",
            next_step=example,
        )
    return found


class Pruner:
    """Prunes by the row's parameters. `whole` is the network, trained by the first call of `prune`,
    which stays as it is; a step of `iterative` goes on from the network that the step before gave,
    as training has left it since."""

    def __init__(self, ctx: RowContext, whole: nn.Module) -> None:
        """Says what cannot be pruned, and raises what there is to say against the parameters."""
        self._ctx = ctx
        self._whole = whole
        self._last: Optional[Pruned] = None
        self._method = ctx.parameters["method"]
        self._held: Dict[str, Any] = {}
        if self._method == "magnitude":
            left = prunable_weights(whole).left_alone
        else:
            found = channel_groups(whole)
            left = dict(found.left_alone)
            if ctx.parameters["channels"] == "inner":
                streams = (group for group in found.groups if group.stream)
                left.update({m: "it adds to a residual stream" for g in streams for m in g.makers})
            self._original = {group.name: group.channels for group in self._taken(found).groups}
            least = ctx.parameters["least_channels"]
            short = [name for name, channels in self._original.items() if channels < least]
            if short:
                raise BadValueError(
                    f"least_channels={least}", why=f"{', '.join(short)} never had so many"
                )
        ctx.fact("layers_left_alone", left)

    def prune(self, ratio: float, feed: Feed, mode: Mode) -> Pruned:
        """The network with `ratio` of what it had once taken out, and statistics of batch
        normalisation taken anew where the row asks for it."""
        iterative = self._ctx.parameters["schedule"] == "iterative"
        last = self._last if iterative else None
        if self._method == "magnitude":
            pruned = self._weights(ratio, last)
        else:
            pruned = self._channels(ratio, last, feed)
        parameters = self._ctx.parameters
        reestimate(
            pruned.model, feed, mode, images=parameters["recalibration"],
            batch_size=parameters["batch_size"], seed=self._ctx.seed,
        )  # fmt: skip
        self._last = pruned
        return pruned

    def _weights(self, ratio: float, last: Optional[Pruned]) -> Pruned:
        model = copy.deepcopy(self._whole if last is None else last.model)
        masks = magnitude_masks(model, ratio, None if last is None else last.masks)
        apply_masks(model, masks)
        gone = sum(int((~mask).sum()) for mask in masks.values())
        return Pruned(ratio, model, gone / sum(mask.numel() for mask in masks.values()), masks)

    def _channels(self, ratio: float, last: Optional[Pruned], feed: Feed) -> Pruned:
        model = self._whole if last is None else last.model
        found = self._taken(channel_groups(model))
        chosen = choose_channels(
            found,
            channel_scores(model, found.groups, self._method),
            ratio,
            method=self._method,
            least=self._ctx.parameters["least_channels"],
            original=self._original,
        )
        smaller = removed_channels(model, found, chosen.kept)
        difference = self._difference(masked_channels(model, found, chosen.kept), smaller, feed)
        self._record_held(ratio, chosen)
        return Pruned(ratio, smaller, chosen.removed, difference=difference)

    def _taken(self, found: ChannelMap) -> ChannelMap:
        """Of the groups those that the row is about."""
        if self._ctx.parameters["channels"] == "all":
            return found
        inner = tuple(group for group in found.groups if not group.stream)
        return dataclasses.replace(found, groups=inner)

    def _record_held(self, ratio: float, chosen: Chosen) -> None:
        """Which layers keep channels that their scores would have cost them."""
        if chosen.held:
            self._held[f"{ratio:g}"] = list(chosen.held)
        self._ctx.fact("layers_held_at_least", self._held)

    def _difference(self, masked: nn.Module, smaller: nn.Module, feed: Feed) -> float:
        """The row is invalid where removing channels did anything but what zeroing them does."""
        count = min(_COMPARED, len(feed))
        images, _ = feed.batch(torch.arange(count, device=self._ctx.device))
        with torch_compat.inference_mode():
            wanted, given = masked.eval()(images), smaller.eval()(images)
        difference = float((given - wanted).norm() / wanted.norm())
        # Outside of autocast, so that 16 bits are not used here.
        limit = LIMITS["tf32" if self._ctx.parameters["precision"] == "tf32" else "fp32"]
        if not difference <= limit:  # NaN too
            self._ctx.invalid(
                f"a network without the channels is another than with zeros: {difference:.3g} of "
                f"the logits; rounding explains {limit:g}"
            )
        return difference
