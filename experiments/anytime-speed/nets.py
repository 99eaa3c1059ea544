"""The networks by their names, ready to be timed, and images for them."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Mapping, Tuple

import torch

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.policies import Threshold, parse
from narrowgauge_lab.anytime.systems.branchynet import NETS as BRANCHY
from narrowgauge_lab.anytime.systems.branchynet import branchy_net
from narrowgauge_lab.anytime.systems.iresnext import iresnext
from narrowgauge_lab.anytime.systems.nested import NestedNet, channels_of
from narrowgauge_lab.anytime.thresholds import for_shares
from narrowgauge_lab.batch_statistics import reestimate_from

__all__ = ["Subject", "nobody", "subject"]

_CIFAR = (3, 32, 32)
#: Of the pass that gives normalisation its statistics.
_SETTLING_IMAGES = 32

Parameters = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a row measures: a network in eval mode, its images, and what its exits cost."""

    net: AnytimeNetwork
    images: torch.Tensor
    costs: ExitCosts

    def leaving(self, kind: str, share: float) -> Threshold:
        """The policy by which this share of these images leaves at each exit, of who comes."""
        exits = self.net.exits
        with torch.no_grad():
            logits = torch.stack(self.net(self.images))
        shares = [share * (1 - share) ** number for number in range(exits)]
        return _between(for_shares(_rule(kind), logits, shares), logits)


def _between(policy: Threshold, logits: torch.Tensor) -> Threshold:
    """The same images leave, by thresholds half-way to the next one that stays: compaction computes
    in other batch sizes, and so in other orders, and nobody may stand on a threshold."""
    here = torch.arange(logits.shape[1])
    moved = list(policy.thresholds)
    for number, limit in enumerate(moved[: logits.shape[0] - 1]):
        measured = policy.measure(logits[number]).double().cpu()[here]
        leave = measured < limit if policy.below else measured >= limit
        going, staying = measured[leave], measured[~leave]
        if going.numel() and staying.numel():
            surest = going.max() if policy.below else going.min()
            next_one = staying.min() if policy.below else staying.max()
            moved[number] = float((surest + next_one) / 2)
        here = here[~leave]
    return policy.with_thresholds(moved)


def subject(parameters: Parameters, device: torch.device, seed: int, batch: int) -> Subject:
    """The network and the images of a row."""
    torch.manual_seed(seed)
    name = parameters["net"]
    net = _made(name, parameters).to(device)
    image = BRANCHY[name].image if name in BRANCHY else _CIFAR
    generator = torch_compat.generator_for(torch.device("cpu"), seed)
    images = torch.randn(batch, *image, generator=generator).to(device)
    # Without statistics of its own, a deep network of random weights answers with infinities.
    reestimate_from(net, [torch.randn(_SETTLING_IMAGES, *image, generator=generator).to(device)])
    net.eval()
    return Subject(net, images, exit_costs(net, images[:1]))


def nobody(kind: str) -> Threshold:
    """The policy by which nobody leaves early."""
    rule = _rule(kind)
    return rule.with_thresholds([0.0 if rule.below else float("inf")])


def _rule(kind: str) -> Threshold:
    rule = parse(f"{kind}:0")
    assert isinstance(rule, Threshold)  # the parameter has no other
    return rule


def _made(name: str, parameters: Parameters) -> AnytimeNetwork:
    width: float = parameters["width"]
    if name in BRANCHY:
        return branchy_net(name, width)
    others: Dict[str, Callable[[], AnytimeNetwork]] = {
        "iresnext-shared": lambda: iresnext("shared", parameters["blocks"], width),
        "iresnext-incremental": lambda: iresnext("incremental", parameters["blocks"], width),
        "nested": lambda: NestedNet(channels=channels_of(width)),
    }
    if name not in others:
        raise UnknownNameError("network", name, _names(others))
    return others[name]()


def _names(others: Dict[str, Callable[[], AnytimeNetwork]]) -> Tuple[str, ...]:
    return (*BRANCHY, *others)
