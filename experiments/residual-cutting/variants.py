"""What becomes of a network that was cut: its accuracy as it is, with batch statistics taken anew,
and after a short fine-tuning; what it costs, and how long an image takes."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Optional, Tuple

import torch
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.batch_statistics import reestimate
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.evaluation import Evaluation, evaluate
from narrowgauge_lab.fine_tuning import fine_tune
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.measure.timing import Call, TimingPlan, interleave
from narrowgauge_lab.precision import Mode

_TEST_BATCH = 500
#: Of one variant, in turns with the whole network. A table has a hundred of them.
_TIMING, _PAIRS = TimingPlan(limit_s=2.0, warm_up_limit_s=0.5), 30


@dataclasses.dataclass(frozen=True)
class Clocked:
    """`seconds` of one image, the median, by `clock`; `speedup`: the whole network's over these,
    the median of pairs that were taken in turns."""

    seconds: float
    speedup: float
    clock: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Accuracies in percent of the test images; None: not asked for. `macs`: of one image."""

    accuracy: float
    anew: Optional[float]
    tuned: Optional[float]
    macs: int
    clocked: Optional[Clocked]

    def lost(self, whole: Outcome) -> Tuple[Tuple[str, float], ...]:
        """Points of accuracy that this cut costs: the ending of the treatment's metrics, and the
        difference to the `whole` network that was treated alike."""
        every = (
            ("", whole.accuracy, self.accuracy),
            ("_anew", whole.anew, self.anew),
            ("_tuned", whole.tuned, self.tuned),
        )
        return tuple(
            (ending, before - after)
            for ending, before, after in every
            if before is not None and after is not None
        )


class Variants:
    """Judges variants of one trained network, `whole`, by the row's parameters."""

    def __init__(self, ctx: RowContext, whole: nn.Module, splits: Splits, mode: Mode) -> None:
        self._whole = whole
        self.splits = splits
        self.mode = mode
        self._ctx = ctx
        self._parameters = ctx.parameters
        self._image = splits.test.batch(torch.arange(1, device=mode.device))[0]

    def judge(self, net: nn.Module) -> Outcome:
        """All that the row asks of `net`, which afterwards has new statistics or weights."""
        macs, clocked = self.macs(net), self.clocked(net)
        accuracy = self.on(self.splits.test, net).accuracy
        anew = self.on(self.splits.test, net).accuracy if self.settle(net) else None
        tuned = self.on(self.splits.test, net).accuracy if self.tune(net) else None
        return Outcome(accuracy, anew, tuned, macs, clocked)

    def on(self, feed: Feed, net: nn.Module) -> Evaluation:
        """`net` in eval mode on a feed."""
        return evaluate(net, feed, self.mode, _TEST_BATCH)

    def settle(self, net: nn.Module) -> bool:
        """Take the batch statistics of `net` anew; False where the row does not ask for it."""
        parameters = self._parameters
        images = reestimate(
            net,
            self.splits.training,
            self.mode,
            images=parameters["recalibration"],
            batch_size=parameters["batch_size"],
            seed=self._ctx.seed,
        )
        return images > 0

    def tune(self, net: nn.Module) -> bool:
        """Train `net` on for a short while; False where the row does not ask for it. The row is
        invalid where that diverges."""
        parameters = self._parameters
        if not parameters["finetune_images"]:
            return False
        done = fine_tune(
            net,
            self.splits.training,
            self.mode,
            images=parameters["finetune_images"],
            batch_size=parameters["batch_size"],
            rate=parameters["finetune_lr"],
            momentum=parameters["momentum"],
            weight_decay=parameters["weight_decay"],
            seed=self._ctx.seed,
        )
        if not done:
            self._ctx.invalid("a fine-tuning diverged: its loss is NaN or infinite")
        return True

    def macs(self, net: nn.Module) -> int:
        """Multiply-accumulates of one image, of what runs."""
        return count(net, self._image).macs

    def clocked(self, net: nn.Module) -> Optional[Clocked]:
        """`net` beside the whole network, one image at a time; None where the row does not ask for
        it."""
        if not self._parameters["latency"]:
            return None
        with in_eval_mode(net), in_eval_mode(self._whole), torch_compat.inference_mode():
            one, whole = self._answering(net), self._answering(self._whole)
            compared = interleave(one, whole, self.mode.device, _TIMING, _PAIRS)
        return Clocked(
            statistics.median(compared.first.seconds),
            statistics.median(compared.ratios),
            compared.first.source,
        )

    def _answering(self, net: nn.Module) -> Call:
        def call() -> torch.Tensor:
            with self.mode.autocast():
                answer: torch.Tensor = net(self._image)
            return answer

        return call
