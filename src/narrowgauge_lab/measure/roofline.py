"""Whether a speed is possible: no network can multiply faster than the device's best product."""

from __future__ import annotations

import re
from typing import Callable

import torch

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.ceilings import MACS, PRECISIONS, Ceiling, ceiling
from narrowgauge_lab.measure.cost import Cost

__all__ = [
    "TOLERANCE", "ceiling_of_precision", "ceiling_over", "most_per_second", "require_possible",
]  # fmt: skip

#: Two measurements of one ceiling differ by about so much.
TOLERANCE = 0.03
#: How often a ceiling is measured that seems to be beaten.
_LOOKS = 3


def ceiling_of_precision(precision: str, device: torch.device, seconds: float = 0.25) -> Ceiling:
    """The ceiling that holds for work in `precision`: of its parts, the highest.

    On a CPU float32 is one of the parts, because what has no instruction of its own there is
    computed in it. Raises NotApplicableError where no part has a ceiling here; `none`, `fp64` and
    whatever else is not among PRECISIONS have none anywhere.
    """
    names = set(re.split(r"[+*]", precision)) | ({"fp32"} if device.type == "cpu" else set())
    found, missing = [], []
    for name in sorted(names):
        if name not in PRECISIONS:
            missing.append(_unmeasured(name))
            continue
        try:
            found.append(ceiling(name, device, seconds))
        except NotApplicableError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    return max(found, key=lambda each: each.per_second)


def ceiling_over(cost: Cost, items_per_second: float, look: Callable[[], Ceiling]) -> Ceiling:
    """What `look` measures; where that leaves no room for this speed, the highest of three looks.

    A ceiling is what was reached once. On a busy host it is not reached each time, and what was
    measured in quieter moments would be called impossible.
    """
    best = look()
    for _ in range(_LOOKS - 1):
        if items_per_second <= most_per_second(cost, best):
            break
        best = max(best, look(), key=lambda each: each.per_second)
    return best


def _unmeasured(name: str) -> NotApplicableError:
    return NotApplicableError(
        f"there is no ceiling for work in '{name}'",
        why=f"products are measured in {', '.join(PRECISIONS)}",
    )


def most_per_second(cost: Cost, limit: Ceiling) -> float:
    """The items per second that `limit` leaves room for, by its `least_macs`."""
    if limit.unit != MACS:
        raise UsageError(f"the ceiling '{limit.name}' is one of {limit.unit}, not of products")
    return limit.per_second * cost.batch / cost.least_macs if cost.least_macs else float("inf")


def require_possible(
    ctx: RowContext, cost: Cost, images_per_second: float, precision: str, limit: Ceiling
) -> None:
    """The row is invalid where its speed is above the ceiling, even at `least_macs`.

    Facts: `ceiling`, `cost`, `roofline_share` (of the ceiling, by the MACs as they are counted, so
    it can be above 1 with Winograd's algorithm) and `roofline_limit` (images per second).
    """
    most = most_per_second(cost, limit)
    ctx.fact("cost", cost.to_fact())
    ctx.fact("ceiling", limit.to_fact())
    ctx.fact("roofline_share", images_per_second * cost.macs / cost.batch / limit.per_second)
    ctx.fact("roofline_limit", most)
    if not images_per_second <= most * (1.0 + TOLERANCE):
        ctx.invalid(
            f"impossible: {images_per_second:.4g} images/s in {precision}: at "
            f"{cost.least_macs / cost.batch:.4g} MACs each, 3×3 convolutions by F(6×6, 3×3), "
            f"{limit.library} of {'×'.join(map(str, limit.shape))} at "
            f"{limit.per_second:.4g} MAC/s leaves room for {most:.4g}"
        )
