"""What is pruned: single weights by magnitude, or whole channels by a score.

| method       | takes out                                          | ranked over       |
|--------------|----------------------------------------------------|-------------------|
| `magnitude`  | weights of the least magnitude (Han et al. 2015)   | the whole network |
| `bn-gamma`   | channels of the least gammas (Liu et al. 2017)     | the whole network |
| `l1-channel` | filters of the least absolute sum (Li et al. 2017) | each layer        |

arXiv 1506.02626, 1708.06519 and 1608.08710.

Weights that are zero cost as much as others where a library computes dense products: only channels
that are removed (`channel_removal`) make a network smaller and faster by themselves.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.transforms.channel_groups import ChannelGroup, ChannelMap

__all__ = [
    "CHANNEL_METHODS", "METHODS", "Chosen", "Weights", "apply_masks", "channel_scores",
    "choose_channels", "magnitude_masks", "nonzero_macs", "prunable_weights", "require_ratio",
]  # fmt: skip

CHANNEL_METHODS = ("bn-gamma", "l1-channel")
METHODS = ("magnitude", *CHANNEL_METHODS)
#: Methods whose scores of two layers are compared.
_WHOLE_NETWORK = ("bn-gamma",)
#: By exact type: the weight of a subclass may be something else.
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_OTHERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.Embedding, nn.RNNBase)
#: 0.3 of 10 is 3, though 0.3 · 10 may be a little less.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Weights:
    """`layers`: the names of those whose weights can be zeroed singly; `left_alone`: of the other
    layers with weights, with the reason."""

    layers: Tuple[str, ...]
    left_alone: Dict[str, str]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """`kept`: by group, int64, the channels that stay; `held`: groups that would have lost more,
    had they not reached the least that they keep; `removed`: the share of all channels that go,
    those of earlier choices with them."""

    kept: Dict[str, torch.Tensor]
    held: Tuple[str, ...]
    removed: float


def require_ratio(ratio: float) -> float:
    """`ratio`, if it is the share of something to take out: 0 or more and less than 1. Raises
    BadValueError, for NaN too."""
    if not 0.0 <= ratio < 1.0:
        raise BadValueError(
            f"a pruning ratio of {ratio:g}",
            why="it is the share that is taken out, and something has to stay",
            next_step="a number from 0 up to, and without, 1",
        )
    return ratio


def prunable_weights(model: nn.Module) -> Weights:
    """Convolutions and linear layers with a weight of their own."""
    modules = dict(model.named_modules())
    owners: Dict[int, List[str]] = {}
    for name, module in modules.items():
        for tensor in module._parameters.values():
            if tensor is not None:
                owners.setdefault(id(tensor), []).append(name)
    layers, left = [], {}
    for name, module in modules.items():
        if not isinstance(module, _OTHERS):
            continue
        weight = module._parameters.get("weight")
        if type(module) not in _LAYERS:
            left[name] = f"a {type(module).__name__}"
        elif weight is None:
            left[name] = "its weight is no parameter: something else makes it"
        elif len(owners[id(weight)]) > 1:
            left[name] = f"its weight is that of {', '.join(owners[id(weight)])}"
        else:
            layers.append(name)
    return Weights(tuple(layers), left)


def magnitude_masks(
    model: nn.Module, ratio: float, before: Optional[Mapping[str, torch.Tensor]] = None
) -> Dict[str, torch.Tensor]:
    """By parameter name, bool in the shape of the weight: true where it stays. Of all weights that
    can be pruned, the `ratio` of least magnitude go; of equal ones the first in the network. What
    masks `before` took out stays out.

    Raises BadValueError for a ratio outside [0, 1), for no weights to prune, for NaN among them,
    and for a ratio that gives back what was taken out before.
    """
    require_ratio(ratio)
    found = prunable_weights(model)
    _require_some(found.layers, "weights", found.left_alone)
    parameters = dict(model.named_parameters())
    names = [f"{layer}.weight" if layer else "weight" for layer in found.layers]
    sizes = [parameters[name].detach().abs().flatten() for name in names]
    for name, size in zip(names, sizes):
        if not bool(torch.isfinite(size).all()):
            raise BadValueError(f"{name} has NaN or infinity, and no order by magnitude")
        if before is not None:
            size[~before[name].flatten()] = -1.0
    everything = torch.cat(sizes)
    count = math.floor(ratio * everything.numel() + _ROUNDING)
    gone = int((everything < 0).sum())
    if gone > count:
        raise BadValueError(
            f"a pruning ratio of {ratio:g} after {gone} of {everything.numel()} weights are gone",
            why="what was pruned is not trained any more, and does not come back",
            next_step="prune in steps of rising ratios",
        )
    keep = torch.ones_like(everything, dtype=torch.bool)
    keep[_ascending(everything)[:count]] = False
    parts = keep.split([size.numel() for size in sizes])
    return {name: part.view(parameters[name].shape) for name, part in zip(names, parts)}


def apply_masks(model: nn.Module, masks: Mapping[str, torch.Tensor]) -> None:
    """Zero what the masks take out, in place."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, mask in masks.items():
            parameters[name].mul_(mask.to(parameters[name].dtype))


def channel_scores(
    model: nn.Module, groups: Sequence[ChannelGroup], method: str
) -> Dict[str, torch.Tensor]:
    """By group, float64 [channels] on the CPU: how much a channel matters. bn-gamma: the mean
    magnitude of its gammas; l1-channel: the absolute sum of its filters.

    Raises UnknownNameError, and BadValueError where a group has no gamma or a score is not finite.
    """
    if method not in CHANNEL_METHODS:
        raise UnknownNameError("method of pruning channels", method, CHANNEL_METHODS)
    modules = dict(model.named_modules())
    scores = {}
    for group in groups:
        if method == "bn-gamma":
            if not group.norms:
                raise BadValueError(
                    f"the channels of {group.name} have no gamma to go by",
                    why="no batch normalisation is behind that layer",
                    next_step="prune by l1-channel",
                )
            parts = [modules[name].weight.detach().abs() for name in group.norms]
        else:
            parts = [modules[name].weight.detach().abs().flatten(1).sum(1) for name in group.makers]
        score = torch.stack([part.double().cpu() for part in parts]).mean(0)
        if not bool(torch.isfinite(score).all()):
            raise BadValueError(f"{group.name} has NaN or infinity, and its channels no order")
        scores[group.name] = score
    return scores


def choose_channels(
    found: ChannelMap,
    scores: Mapping[str, torch.Tensor],
    ratio: float,
    *,
    method: str,
    least: int = 0,
    original: Optional[Mapping[str, int]] = None,
) -> Chosen:
    """Take the `ratio` of least score out of the groups that have scores: of each (l1-channel) or
    of all together (bn-gamma). A group keeps its `least` best whatever their score.

    `original`: how many channels each group had before anything was removed, where that is not what
    it has; `ratio` is of those. Raises BadValueError for a ratio outside [0, 1), for no groups, and
    where `least` is 0 and nothing of a group would be left: it is named.
    """
    require_ratio(ratio)
    groups = [group for group in found.groups if group.name in scores]
    _require_some(groups, "channels", found.left_alone)
    had = {group.name: group.channels for group in groups}
    had.update({name: original[name] for name in had} if original is not None else {})
    if method in _WHOLE_NETWORK:
        stays = _over_all(groups, scores, sum(had.values()), ratio)
    else:
        stays = {group.name: _best(scores[group.name], had[group.name], ratio) for group in groups}
    emptied = [name for name, mask in stays.items() if not bool(mask.any())]
    if emptied and least < 1:
        raise BadValueError(
            f"a pruning ratio of {ratio:g} by {method} leaves no channel of {', '.join(emptied)}",
            why="all of their channels are among the least of the network",
            next_step="prune less, by l1-channel, or let each layer keep a channel or more",
        )
    kept, held = {}, []
    for name, mask in stays.items():
        wanted = min(least, len(mask))
        if int(mask.sum()) < wanted:
            held.append(name)
            mask[_ascending(scores[name])[-wanted:]] = True
        kept[name] = mask.nonzero(as_tuple=False).flatten()
    remaining = sum(len(index) for index in kept.values())
    return Chosen(kept, tuple(held), 1.0 - remaining / sum(had.values()))


def _over_all(
    groups: Sequence[ChannelGroup], scores: Mapping[str, torch.Tensor], had: int, ratio: float
) -> Dict[str, torch.Tensor]:
    joined = torch.cat([scores[group.name] for group in groups])
    parts = _best(joined, had, ratio).split([group.channels for group in groups])
    return {group.name: part.clone() for group, part in zip(groups, parts)}


def _best(scores: torch.Tensor, had: int, ratio: float) -> torch.Tensor:
    """bool: which stay, if `ratio` of the `had` that there were go, some of them already."""
    remaining = had - math.floor(ratio * had + _ROUNDING)
    stays = torch.ones(len(scores), dtype=torch.bool)
    stays[_ascending(scores)[: max(0, len(scores) - remaining)]] = False
    return stays


def _ascending(values: torch.Tensor) -> torch.Tensor:
    """Places from the least to the largest, of equal ones the first first, on every torch."""
    # `stable` came to torch.sort with 1.9; numpy has had it for ever.
    order = values.detach().cpu().numpy().argsort(kind="stable")
    return torch.from_numpy(order).to(values.device)


def _require_some(things: Sequence[object], what: str, left_alone: Mapping[str, str]) -> None:
    if not things:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_alone.items())
        raise BadValueError(
            f"this network has no {what} that can be pruned",
            why=reasons or "it has no layer with weights",
        )


def nonzero_macs(model: nn.Module, example: torch.Tensor) -> int:
    """Multiply-accumulates of one image of `example` [B, …] by weights that are not zero, in
    convolutions and linear layers: what a machine that skips zero weights at no cost would do."""
    total = 0

    def add(module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        nonlocal total
        weight = module.weight
        uses = output.numel() // len(output) // weight.shape[0]  # of each weight of a filter
        total += int((weight != 0).sum()) * uses

    handles = [
        module.register_forward_hook(add)
        for module in model.modules()
        if type(module) in _LAYERS
    ]  # fmt: skip
    try:
        with in_eval_mode(model), torch.no_grad():
            model(example[:1])
    finally:
        for handle in handles:
            handle.remove()
    return total
