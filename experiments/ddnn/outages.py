"""What is left of both exits when devices fail: they send nothing, and the rest knows."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.systems.ddnn import DDNN
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.precision import Mode

__all__ = ["record_outages"]

_BATCH = 500


def record_outages(ctx: RowContext, net: DDNN, test: Feed, mode: Mode) -> None:
    """Accuracies [%] over the whole test split.

    `outage_local_accuracy`, `outage_cloud_accuracy`: without each one view, by its number, and the
    latter's `cloud_without_<v>`. `cloud_without_<v>_to_<last>`: without that view and all after it.
    `view_accuracy`: of each device's own class vector, where it sees the object.
    `cameras_local_accuracy`, `cameras_cloud_accuracy`: with the worst view alone, the two worst, …
    of the same trained network.
    """
    every = list(range(net.views))
    own = _own_accuracies(net, test, mode)
    ctx.metric("view_accuracy", own, unit="%", source="computed", index="view")
    one = _accuracies(net, test, mode, [[view] for view in every])
    _series(ctx, "outage", "missing view", one)
    for view, (_, cloud) in zip(every, one):
        ctx.metric(f"cloud_without_{view}", cloud, unit="%", source="computed")
    tails = [every[first:] for first in every[1:-1]]
    for lost, (_, cloud) in zip(tails, _accuracies(net, test, mode, tails)):
        name = f"cloud_without_{lost[0]}_to_{lost[-1]}"
        ctx.metric(name, cloud, unit="%", source="computed")
    order = sorted(every, key=lambda view: own[view])
    ctx.fact("views_worst_first", order)
    kept = [order[number:] for number in every[1:]] + [[]]
    _series(ctx, "cameras", "views", _accuracies(net, test, mode, kept))


def _series(ctx: RowContext, name: str, index: str, pairs: Sequence[Tuple[float, float]]) -> None:
    for part, where in enumerate(("local", "cloud")):
        values = [pair[part] for pair in pairs]
        ctx.metric(f"{name}_{where}_accuracy", values, unit="%", source="computed", index=index)


def _accuracies(
    net: DDNN, test: Feed, mode: Mode, outages: Sequence[Sequence[int]]
) -> List[Tuple[float, float]]:
    """Of both exits without these views, in percent."""
    right = torch.zeros((len(outages), net.exits), dtype=torch.int64, device=mode.device)
    with in_eval_mode(net), torch_compat.inference_mode():
        for indices in torch.arange(len(test), device=mode.device).split(_BATCH):
            images, labels = test.batch(indices)
            for number, lost in enumerate(outages):
                with net.losing(lost), mode.autocast():
                    answers = net(images)
                for exit, logits in enumerate(answers):
                    right[number, exit] += (logits.argmax(1) == labels).sum()
    shares = (100.0 * right.double() / len(test)).tolist()
    return [(local, cloud) for local, cloud in shares]


def _own_accuracies(net: DDNN, test: Feed, mode: Mode) -> List[float]:
    right = torch.zeros(net.views, dtype=torch.int64, device=mode.device)
    seen = torch.zeros(net.views, dtype=torch.int64, device=mode.device)
    with in_eval_mode(net), torch_compat.inference_mode():
        for indices in torch.arange(len(test), device=mode.device).split(_BATCH):
            images, labels = test.batch(indices)
            with mode.autocast():
                vectors, present, _ = net.answers(images)
            right += ((vectors.argmax(2) == labels[:, None]) & present).sum(0)
            seen += present.sum(0)
    return (100.0 * right.double() / seen.clamp(min=1).double()).tolist()
