"""Channels that are removed: the smaller network computes what the masked one does."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict

import pytest
import torch
import torch.nn.functional as F
from pruning_cases import Branching, Plain, assert_close, randomised
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.networks.resnet import BasicBlock, ResNet
from narrowgauge_lab.transforms.channel_groups import ChannelMap, channel_groups
from narrowgauge_lab.transforms.channel_removal import masked_channels, removed_channels
from narrowgauge_lab.transforms.masked_training import PruningSGD
from narrowgauge_lab.transforms.pruning import nonzero_macs

#: Batch statistics of maps of one pixel are of few numbers: enough images to tell them apart.
IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(3)).double()
LABELS = torch.arange(8) % 3


def _some(found: ChannelMap, keep: float = 0.6, seed: int = 0) -> Dict[str, torch.Tensor]:
    """Of each group some channels, at least one."""
    chance = torch.Generator().manual_seed(seed)
    kept = {}
    for group in found.groups:
        drawn = torch.randperm(group.channels, generator=chance)
        kept[group.name] = drawn[: max(1, round(keep * group.channels))].sort()[0]
    return kept


def _networks() -> Dict[str, nn.Module]:
    return {
        "resnet-18": cifar_resnet(18, 1 / 16),
        "resnet-50": cifar_resnet(50, 1 / 16),
        "torchvision's form": ResNet((1, 1, 1, 1), 4, 10, BasicBlock),
        "flattened, biases": Plain(),
    }


@pytest.mark.parametrize("name", list(_networks()))
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_the_removed_network_is_the_masked_one(name: str, training: bool) -> None:
    model = randomised(_networks()[name]).train(training)
    found = channel_groups(model)
    kept = _some(found)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    masked, removed = (how(model, found, kept) for how in (masked_channels, removed_channels))

    assert all(bool((before[k] == v).all()) for k, v in model.state_dict().items())
    wanted, given = masked(IMAGES), removed(IMAGES)
    assert (wanted - model(IMAGES)).abs().max() > 1e-3, "nothing that mattered was taken out"
    assert_close(given, wanted)
    for net, output in ((masked, wanted), (removed, given)):
        parameters = list(net.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(output, LABELS), parameters)
        for parameter, gradient in zip(parameters, gradients):
            parameter.data = gradient
    # The gradients of the masked one, cut as its weights are.
    cut = dict(removed_channels(masked, found, kept).named_parameters())
    for key, gradient in removed.named_parameters():
        assert_close(gradient.data, cut[key].data, 1e-9)


def test_both_train_alike() -> None:
    model = randomised(cifar_resnet(18, 1 / 32))
    found = channel_groups(model)
    kept = _some(found)
    masked, removed = (how(model, found, kept) for how in (masked_channels, removed_channels))
    masks = {k: v != 0 for k, v in masked.named_parameters()}

    for net, mask in ((masked, masks), (removed, None)):
        optimizer = PruningSGD(_float(net), 0.05, 0.9, 5e-4, masks=mask)
        for step in range(3):
            images = IMAGES.float().roll(step, 3)
            loss = F.cross_entropy(net(images), LABELS)
            optimizer.differentiate(loss)
            optimizer.step()

    assert_close(removed.eval()(IMAGES.float()), masked.eval()(IMAGES.float()), 1e-4)


def _float(net: nn.Module) -> nn.Module:
    return net.float().train()


def test_inner_channels_cost_their_share_and_streams_more() -> None:
    model = cifar_resnet(18, 1 / 4).eval()
    example = torch.zeros(1, 3, 32, 32)
    found = channel_groups(model)
    half = {g.name: torch.arange(g.channels // 2) for g in found.groups}
    inner = {g.name: half[g.name] for g in found.groups if not g.stream}
    ends = count(nn.Sequential(model.conv1), example).macs + model.linear.weight.numel()
    shortcuts = sum(
        count(block.shortcut[0], torch.zeros(1, block.conv1.in_channels, size, size)).macs
        for block, size in ((model.layer2[0], 32), (model.layer3[0], 16), (model.layer4[0], 8))
    )

    whole = count(model, example)
    smaller = count(removed_channels(model, found, inner), example)
    least = count(removed_channels(model, found, half), example)

    assert smaller.macs == (whole.macs - ends - shortcuts) // 2 + ends + shortcuts
    assert least.macs == (whole.macs - ends) // 4 + ends // 2
    twin = count(cifar_resnet(18, 1 / 8).eval(), example)
    assert (least.macs, least.parameters) == (twin.macs, twin.parameters)
    assert least.bytes < smaller.bytes < whole.bytes


def test_zero_weights_are_not_counted_where_asked() -> None:
    model = randomised(cifar_resnet(18, 1 / 16)).train()
    example = torch.zeros(2, 3, 16, 16, dtype=torch.float64)
    assert nonzero_macs(model, example) == count(model, example[:1]).macs

    weight = model.layer1[0].conv1.weight
    with torch.no_grad():
        weight[0, 0] = 0
    assert nonzero_macs(model, example) == count(model, example[:1]).macs - 9 * 16 * 16
    assert model.training


def test_groups_of_a_resnet() -> None:
    found = channel_groups(cifar_resnet(18))
    groups = {group.name: group for group in found.groups}

    assert [g.name for g in found.groups if g.stream] == [
        "conv1", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2",
    ]  # fmt: skip
    assert groups["conv1"].makers == ("conv1", "layer1.0.conv2", "layer1.1.conv2")
    assert groups["conv1"].norms == ("bn1", "layer1.0.bn2", "layer1.1.bn2")
    readers = {reader.name for reader in groups["conv1"].readers}
    assert readers == {
        "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "layer2.0.shortcut.0",
    }  # fmt: skip
    inner = groups["layer3.1.conv1"]
    assert (inner.channels, inner.makers, inner.stream) == (256, ("layer3.1.conv1",), False)
    assert len(found.groups) == 4 + 8
    assert list(found.left_alone) == ["linear"]
    assert "only inputs" in found.left_alone["linear"]


def test_what_cannot_be_taken_out_is_named_and_left_alone() -> None:
    model = randomised(Branching())
    found = channel_groups(model)

    assert [group.name for group in found.groups] == ["free"]
    reasons = {
        "grouped": "grouped has 2 groups",
        "before_groups": "grouped has 2 groups",
        "joined": "cat reads them",
        "beside": "cat reads them",
        "shifted": "add reads them",
        "twice": "twice is called more than once",
        "plain": "norm has no gamma",
        "hooked": "hooked has hooks",
        "last": "the network gives them",
        "linear": "only inputs",
        "unused": "does not call",
    }
    assert set(found.left_alone) == set(reasons)
    for name, why in reasons.items():
        assert why in found.left_alone[name], found.left_alone[name]
    kept = {"free": torch.tensor([1])}
    masked, removed = (how(model, found, kept) for how in (masked_channels, removed_channels))
    for given, wanted in zip(removed(IMAGES), masked(IMAGES)):
        assert_close(given, wanted)
    with pytest.raises(BadValueError, match="no channels of 'grouped'") as refused:
        removed_channels(model, found, {"grouped": torch.tensor([0])})
    assert "2 groups" in refused.value.why


def test_a_network_that_cannot_be_traced_is_left_alone_whole() -> None:
    class Deciding(Plain):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images if images.sum() > 0 else -images)

    found = channel_groups(Deciding())
    assert found.groups == ()
    assert set(found.left_alone) == {"first", "second", "linear"}
    assert "torch.fx cannot read" in found.left_alone["first"]


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ([], "nothing of 'first' would be left"),
        ([4], "channels 0 to 3"),
        ([-1, 0], "channels 0 to 3"),
        ([1, 1], "ascending"),
        ([2, 1], "ascending"),
    ],
)
@pytest.mark.parametrize("how", [masked_channels, removed_channels])
def test_channels_that_there_are_not_are_refused(how: Any, index: Any, what: str) -> None:
    model = Plain()
    found = channel_groups(model)
    with pytest.raises(BadValueError, match=what):
        how(model, found, {"first": torch.tensor(index, dtype=torch.int64)})


def test_a_group_is_what_it_says() -> None:
    (first, second) = channel_groups(Plain()).groups
    assert (first.name, first.norms) == ("first", ())
    assert [dataclasses.astuple(reader) for reader in second.readers] == [("linear", 64)]
    whole = copy.deepcopy(Plain())
    smaller = removed_channels(whole, channel_groups(whole), {"second": torch.tensor([0, 5])})
    assert smaller.linear.in_features == 128
    assert smaller.linear.weight.equal(whole.linear.weight[:, [*range(64), *range(320, 384)]])
