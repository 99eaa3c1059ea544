"""What a batch takes by a policy, beside torch's own layers."""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure import Comparison, TimingPlan, interleave
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily

__all__ = ["record_times"]

_PAIRS = 200
#: A warm-up that does not become steady ends after so many times the limit of samples.
_WARM_UP_LIMITS = 2.0


def record_times(
    ctx: RowContext, exact: nn.Module, manual: nn.Module, feed: Feed, batch: int
) -> None:
    """Record `time_per_image`, `macs_per_second` and `slowdown`, the time over that of torch's own
    layers on the same images; the two take turns.

    Calls are of the whole network, on images that are on the device, without gradients. Of 8-bit
    policies they have the making of the codes in them, too.
    """
    size = min(batch, len(feed))
    images = feed.batch(torch.arange(size, device=feed.images.device))[0]
    macs = count(exact, images).macs
    limit = ctx.parameters["limit_s"]
    plan = TimingPlan(limit_s=limit, warm_up_limit_s=_WARM_UP_LIMITS * limit)

    def measure() -> Comparison:
        return interleave(
            lambda: exact(images), lambda: manual(images), ctx.device, plan, pairs=_PAIRS
        )

    with torch.no_grad():
        compared = steadily(ctx, measure, ctx.device)
    seconds = compared.second.seconds
    ctx.fact("macs_per_image", macs // size)
    record_samples(ctx, "time_per_image", compared.second, [each / size for each in seconds])
    record_samples(
        ctx, "macs_per_second", compared.second, [macs / each for each in seconds], "MAC/s"
    )
    record_samples(ctx, "slowdown", compared.second, compared.ratios, "1")
