"""What the exits of a trained network look at: maps of the test images, and what they are worth."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Dict, List, Sequence

import numpy as np
import torch

from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.anytime import class_maps
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.mapped_heads import heads_of
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.ponder_maps import ponder_map
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode

__all__ = ["look"]

_BATCH = 100
#: Digits of the maps that are kept for pictures.
_DIGITS = 3


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Of a batch, exit by exit: `coarse` maps [exits, B, h, w] as each head has them (lists: heads
    may differ in size), `maps` [exits, B, H, W] normalised at the size of the images, `plain`
    bool [exits, B], which are flat; `differences` [exits with CAM] between CAM and Grad-CAM."""

    images: torch.Tensor
    classes: torch.Tensor
    coarse: List[torch.Tensor]
    maps: torch.Tensor
    plain: torch.Tensor
    differences: List[float]


def look(ctx: RowContext, net: AnytimeNetwork, splits: Splits) -> None:
    """Record what the maps of the first `images` test images are worth, and keep some as side
    files. All exits are asked for the class that the last one gives. In IEEE float32, whatever the
    row was trained in."""
    precision.enter("fp32", ctx.device)
    count = min(ctx.parameters["images"], len(splits.test))
    scores: Dict[str, List[torch.Tensor]] = {}
    differences: List[float] = []
    shown: List[_Seen] = []
    generator = torch_compat.generator_for(torch.device("cpu"), ctx.seed)
    with in_eval_mode(net):
        for indices in torch.arange(count, device=ctx.device).split(_BATCH):
            seen = _see(net, splits.test.batch(indices)[0])
            differences += seen.differences
            for name, values in _scored(ctx, net, seen, generator).items():
                scores.setdefault(name, []).append(values)
            shown += [] if shown else [seen]
            ctx.progress(int(indices[-1]) + 1, count, unit="image", phase="maps")
        _keep_pictures(ctx, net, splits, shown[0])
    ctx.fact("mapped_images", count)
    _record(ctx, net, {name: torch.cat(parts) for name, parts in scores.items()})
    if differences:
        worst = max(differences)
        ctx.metric("cam_difference", worst, unit="1", source="computed")


def _see(net: AnytimeNetwork, images: torch.Tensor) -> _Seen:
    with torch.no_grad():
        classes = net(images)[-1].argmax(1)
    coarse, maps, differences = [], [], []
    for head in heads_of(net, images):
        found = class_maps.grad_cam(head, classes)
        coarse.append(found)
        maps.append(class_maps.normalised(class_maps.enlarged(found, *images.shape[2:])))
        if head.weight is not None:
            other = class_maps.positive(class_maps.cam(head, classes))
            apart = class_maps.normalised(other) - class_maps.normalised(found)
            differences.append(float(apart.abs().max()))
    whole = torch.stack(maps)
    plain = torch.stack([class_maps.flat(each) for each in whole])
    return _Seen(images, classes, coarse, whole, plain, differences)


def _scored(
    ctx: RowContext, net: AnytimeNetwork, seen: _Seen, generator: torch.Generator
) -> Dict[str, torch.Tensor]:
    """float64 [B] by the metric's name; NaN where a map is flat and has no score."""
    steps, found = ctx.parameters["steps"], {}
    veiled, grey = class_maps.blurred(seen.images), torch.zeros_like(seen.images)
    nothing = torch.full_like(seen.classes, float("nan"), dtype=torch.float64)

    for exit, coarse in enumerate(seen.coarse):

        def score(images: torch.Tensor, exit: int = exit) -> torch.Tensor:
            with torch.no_grad():
                chances = net.forward_until(exit, images).float().softmax(1)
            return chances.gather(1, seen.classes.unsqueeze(1))[:, 0]

        cells = class_maps.shuffled(coarse, generator)
        other = class_maps.enlarged(cells, *seen.images.shape[2:])
        for name, maps in (("", seen.maps[exit]), ("_shuffled", other)):
            for kind, first, second in (
                ("deletion", seen.images, grey),
                ("insertion", veiled, seen.images),
            ):
                curve = class_maps.unveiled(score, first, second, maps, steps)
                area = class_maps.area_under(curve)
                kept = torch.where(seen.plain[exit], nothing, area)
                found[f"exit{exit}_{kind}{name}"] = kept
        found[f"exit{exit}_flat_maps"] = 100.0 * seen.plain[exit].double()
    regions = [class_maps.region(maps) for maps in seen.maps]
    for one, other_exit in itertools.combinations(range(len(regions)), 2):
        both = class_maps.overlap(regions[one], regions[other_exit])
        # A flat map says nothing, and so does not disagree with another either.
        silent = seen.plain[one] | seen.plain[other_exit]
        found[f"overlap_{one}_{other_exit}"] = torch.where(silent, nothing, both)
    found.update(_pondered(net, seen))
    return found


def _pondered(net: AnytimeNetwork, seen: _Seen) -> Dict[str, torch.Tensor]:
    """How much of the last exit's maps lies where the network thought for longer than on average
    over the image, and how much of the image that is, in percent."""
    if not isinstance(net, AdaptiveResNet):
        return {}
    maps = _ponder(net, seen.images)
    longer = (maps > maps.mean((1, 2), keepdim=True)) & ~class_maps.flat(maps)[:, None, None]
    area = longer.double().mean((1, 2))
    energy = class_maps.inside(seen.maps[-1], longer)
    # Both of the same images, or they would not compare.
    known = (area > 0) & ~torch.isnan(energy)
    nothing = torch.full_like(area, float("nan"))
    return {
        "ponder_area": 100.0 * torch.where(known, area, nothing),
        "ponder_energy": 100.0 * torch.where(known, energy, nothing),
    }


def _ponder(net: AdaptiveResNet, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return ponder_map(net.think(images, account=False).ponder, images.shape[-1])


_UNITS = {"flat_maps": "%", "ponder_area": "%", "ponder_energy": "%"}


def _record(ctx: RowContext, net: AnytimeNetwork, scores: Dict[str, torch.Tensor]) -> None:
    """The mean of each score over the images that have one; none where no image has."""
    means: Dict[str, float] = {}
    for name, values in scores.items():
        known = values[~torch.isnan(values)]
        if len(known):
            means[name] = float(known.mean())
            unit = _UNITS.get(name, _UNITS.get(name.partition("_")[2], "1"))
            ctx.metric(name, means[name], unit=unit, source="computed")
    if "ponder_area" in scores:
        ctx.fact("pondered_images", int((~torch.isnan(scores["ponder_area"])).sum()))
    pairs = list(itertools.combinations(range(net.exits), 2))
    if not pairs or any(f"overlap_{i}_{j}" not in means for i, j in pairs):
        return
    table = np.eye(net.exits)
    for i, j in pairs:
        table[i, j] = table[j, i] = means[f"overlap_{i}_{j}"]
    names = [f"exit {number}" for number in range(net.exits)]
    body = {"rows": names, "columns": names, "label": "overlap of regions (IoU)"}
    text = json.dumps({**body, "values": table.round(6).tolist()})
    ctx.side_file("agreement.json").write_text(text + "\n", encoding="utf-8")


def _keep_pictures(ctx: RowContext, net: AnytimeNetwork, splits: Splits, seen: _Seen) -> None:
    """`maps.json`: the first test images with the map of each exit, as drawings of kind `maps`
    take them."""
    count = min(ctx.parameters["pictures"], len(seen.images))
    if not count:
        return
    columns = [f"exit {number}" for number in range(net.exits)]
    maps = [class_maps.normalised(each)[:count] for each in seen.coarse]
    if isinstance(net, AdaptiveResNet):
        columns.append("pondering")
        maps.append(class_maps.normalised(_ponder(net, seen.images[:count])))
    pixels = splits.test.images[:count].cpu().numpy().transpose(0, 2, 3, 1)
    body = {
        "rows": _names(splits, seen.classes[:count]),
        "columns": columns,
        "images": pixels.tolist(),
        "maps": [[_rounded(each[number]) for each in maps] for number in range(count)],
    }
    text = json.dumps(body, separators=(",", ":"))
    ctx.side_file("maps.json").write_text(text + "\n", encoding="utf-8")


def _names(splits: Splits, classes: torch.Tensor) -> List[str]:
    labels: Sequence[int] = splits.test.labels[: len(classes)].tolist()
    return [
        splits.classes[label] + ("" if label == said else f", called {splits.classes[said]}")
        for label, said in zip(labels, classes.tolist())
    ]


def _rounded(values: torch.Tensor) -> List[List[float]]:
    return [[round(value, _DIGITS) for value in line] for line in values.double().tolist()]
