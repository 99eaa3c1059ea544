"""What a trained network thinks about: cost of each image, active positions, maps, resolutions."""

from __future__ import annotations

from typing import Iterator, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.ponder_maps import ponder_map, sheet, write_png
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet, Thought
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.precision import Mode

__all__ = ["draw_maps", "plain_macs", "record_resolutions", "record_thoughts"]

_BATCH = 250


def plain_macs(net: AdaptiveResNet, side: int) -> int:
    """MACs for one image of the same network without halting."""
    total = net.conv.weight.numel() * side * side + net.linear.weight.numel()
    for number, block in enumerate(net.blocks):
        positions = (side // 2**number) ** 2
        total += sum(sum(unit.macs_at()) for unit in block.units) * positions
    return total


def record_thoughts(ctx: RowContext, net: AdaptiveResNet, test: Feed, mode: Mode) -> None:
    """What the test images need: MACs of each, the share of the plain network's, how many units
    deep a position is thought about, and the share of positions at which each unit ran."""
    found = [thought for thought, _ in _thoughts(net, test, mode, 32)]
    macs = torch.cat([thought.macs for thought in found])
    ctx.metric("needed_macs", macs.mean(), unit="MAC", source="computed")
    # What the paper gives behind its mean: over images, of a population.
    ctx.metric("needed_macs_sd", macs.std(unbiased=False), unit="MAC", source="computed")
    ctx.metric(
        "share_of_plain", 100.0 * macs.mean() / plain_macs(net, 32), unit="%", source="computed"
    )
    active = torch.cat([thought.active for thought in found]).double().mean(0)
    ctx.metric("active_share", 100.0 * active, unit="%", source="computed", index="unit")
    if net.kind == "plain":
        return
    for number in range(len(net.blocks)):
        ponder = torch.cat([each.ponder[number].double().mean((1, 2, 3)) for each in found])
        ctx.metric(f"block{number}_ponder", ponder.mean(), unit="1", source="computed")
        steps = torch.cat([each.steps[number].double().mean((1, 2, 3)) for each in found])
        ctx.metric(f"block{number}_steps", steps.mean(), unit="1", source="computed")


def record_resolutions(
    ctx: RowContext, net: AdaptiveResNet, test: Feed, mode: Mode, sides: Sequence[int]
) -> None:
    """Accuracy and cost of the test images brought to other sizes (bilinear), weights and running
    statistics as they are."""
    accuracies: List[float] = []
    needed: List[float] = []
    shares: List[float] = []
    for side in sides:
        right, macs, count = 0.0, 0.0, 0
        for thought, labels in _thoughts(net, test, mode, side):
            right += float((thought.logits.argmax(1) == labels).sum())
            macs += float(thought.macs.sum())
            count += len(labels)
        accuracies.append(100.0 * right / count)
        needed.append(macs / count)
        shares.append(100.0 * macs / count / plain_macs(net, side))
    if sides:
        about = {"source": "computed", "index": "resolution"}
        ctx.fact("resolutions", list(sides))
        ctx.metric("resolution_accuracy", accuracies, unit="%", **about)
        ctx.metric("resolution_macs", needed, unit="MAC", **about)
        ctx.metric("resolution_share_of_plain", shares, unit="%", **about)


def draw_maps(ctx: RowContext, net: AdaptiveResNet, test: Feed, mode: Mode, count: int) -> None:
    """`ponder.png`: the first test images, each above its map of Σ ρ over blocks."""
    count = min(count, len(test))
    if not count:
        return
    chosen = torch.arange(count, device=mode.device)
    images, _ = test.batch(chosen)
    with in_eval_mode(net), torch_compat.inference_mode(), mode.autocast():
        maps = ponder_map(net.think(images).ponder, images.shape[-1]).cpu().numpy()
    ctx.fact("ponder_map_range", [float(maps.min()), float(maps.max())])
    pictures = test.images[chosen].cpu().numpy()
    write_png(ctx.side_file("ponder.png"), sheet(pictures, maps))


def _thoughts(
    net: AdaptiveResNet, test: Feed, mode: Mode, side: int
) -> Iterator[Tuple[Thought, torch.Tensor]]:
    with in_eval_mode(net), torch_compat.inference_mode():
        for indices in torch.arange(len(test), device=mode.device).split(_BATCH):
            images, labels = test.batch(indices)
            if images.shape[-1] != side:
                images = F.interpolate(
                    images, size=(side, side), mode="bilinear", align_corners=False
                )
            with mode.autocast():
                yield net.think(images), labels
