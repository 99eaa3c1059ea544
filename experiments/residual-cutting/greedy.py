"""One residual branch after another left out of a network, that which the validation images miss
least each time: a curve of accuracy over cost, with no training but what the row asks for."""

from __future__ import annotations

import dataclasses
import math
from typing import List, Sequence, Tuple

from torch import nn

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.transforms.residual_links import Cut, NoResidual, block_names, cut

from .variants import Variants


@dataclasses.dataclass(frozen=True)
class Step:
    """The network after `out` were left out, in that order; what it costs, and its accuracy on the
    validation and the test images [%]."""

    net: nn.Module
    out: Tuple[str, ...]
    macs: int
    validation: float
    accuracy: float

    @property
    def name(self) -> str:
        """Of its rung."""
        return f"{len(self.out)} out: {self.out[-1]}" if self.out else "whole"


def remove_greedily(
    ctx: RowContext, variants: Variants, net: nn.Module, steps: int
) -> Tuple[Step, ...]:
    """The whole network and then up to `steps` cuts of it; one residual branch stays at least.

    Candidates have their batch statistics taken anew before they are compared, where the row takes
    any; the chosen one is fine-tuned, where the row asks for that, and cut further. The test images
    choose nothing. Records the curve.
    """
    found = [_step(variants, cut(net, ()), ())]
    for number in range(min(steps, len(block_names(net)) - 1)):
        before = found[-1]
        left = _whole_blocks(before.net)
        best, chosen = _least_missed(variants, before.net, left)
        variants.tune(best)
        found.append(_step(variants, best, (*before.out, chosen)))
        ctx.progress(number + 1, steps, unit="cut", phase="greedy removal")
    _record(ctx, found)
    return tuple(found)


def _whole_blocks(net: nn.Module) -> List[str]:
    modules = dict(net.named_modules())
    return [name for name in block_names(net) if not isinstance(modules[name], NoResidual)]


def _least_missed(
    variants: Variants, net: nn.Module, candidates: Sequence[str]
) -> Tuple[nn.Module, str]:
    """The candidate without which most validation images are right; of equal ones that of the
    least loss, and a loss that is not finite is the worst."""
    ranked = []
    for name in candidates:
        trial = cut(net, [Cut(name, "no_residual")])
        variants.settle(trial)
        seen = variants.on(variants.splits.validation, trial)
        loss = seen.loss if math.isfinite(seen.loss) else math.inf
        ranked.append((-seen.accuracy, loss, len(ranked), trial, name))
    _, _, _, best, chosen = min(ranked, key=lambda each: each[:3])
    return best, chosen


def _step(variants: Variants, net: nn.Module, out: Tuple[str, ...]) -> Step:
    validation = variants.on(variants.splits.validation, net).accuracy
    accuracy = variants.on(variants.splits.test, net).accuracy
    return Step(net, out, variants.macs(net), validation, accuracy)


def _record(ctx: RowContext, found: Sequence[Step]) -> None:
    ctx.fact("greedy_order", list(found[-1].out))
    columns = {
        "greedy_accuracy": ([each.accuracy for each in found], "%"),
        "greedy_validation_accuracy": ([each.validation for each in found], "%"),
        "greedy_macs": ([each.macs for each in found], "MAC"),
    }
    for name, (values, unit) in columns.items():
        ctx.metric(name, values, unit=unit, source="computed", index="branches left out")
