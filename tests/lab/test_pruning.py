"""What is pruned: by magnitude, by gamma, by the absolute sums of filters; and what stays zero."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pruning_cases import Plain, assert_close, randomised
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.transforms.channel_groups import channel_groups
from narrowgauge_lab.transforms.masked_training import PruningSGD
from narrowgauge_lab.transforms.pruning import (
    apply_masks,
    channel_scores,
    choose_channels,
    magnitude_masks,
    prunable_weights,
    require_ratio,
)

RATIOS_THAT_ARE_NONE = (-0.1, 1.0, 1.5, math.nan, math.inf)


def _resnet() -> nn.Module:
    return randomised(cifar_resnet(18, 1 / 32))


@pytest.mark.parametrize("ratio", RATIOS_THAT_ARE_NONE)
def test_a_ratio_outside_of_0_to_1_is_refused(ratio: float) -> None:
    model = _resnet()
    found = channel_groups(model)
    scores = channel_scores(model, found.groups, "l1-channel")
    with pytest.raises(BadValueError, match="a pruning ratio of"):
        require_ratio(ratio)
    with pytest.raises(BadValueError, match="a pruning ratio of"):
        magnitude_masks(model, ratio)
    with pytest.raises(BadValueError, match="a pruning ratio of"):
        choose_channels(found, scores, ratio, method="l1-channel")


class TestMagnitude:
    @pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9])
    def test_the_least_of_the_whole_network_go(self, ratio: float) -> None:
        model = _resnet()
        masks = magnitude_masks(model, ratio)
        weights = dict(model.named_parameters())
        sizes = torch.cat([weights[name].detach().abs().flatten() for name in masks])
        keep = torch.cat([mask.flatten() for mask in masks.values()])

        assert int((~keep).sum()) == math.floor(ratio * len(keep) + 1e-9)
        if ratio > 0:
            assert sizes[~keep].max() < sizes[keep].min()
        assert set(masks) == {k for k, v in weights.items() if v.dim() > 1}, "no gamma, no bias"
        apply_masks(model, masks)
        for name, mask in masks.items():
            assert bool(((weights[name] != 0) == mask).all())

    def test_layers_differ_in_what_is_left_of_them(self) -> None:
        model = Plain()
        with torch.no_grad():
            model.first.weight.fill_(1.0)
            model.second.weight.fill_(0.1)
            model.linear.weight.fill_(0.5)
        few = model.second.weight.numel()
        every = few + model.first.weight.numel() + model.linear.weight.numel()
        masks = magnitude_masks(model, few / every)
        left = {name: int(mask.sum()) for name, mask in masks.items()}
        assert left["second.weight"] == 0
        assert left["first.weight"] == model.first.weight.numel()
        assert left["linear.weight"] == model.linear.weight.numel()

    def test_what_is_gone_stays_gone(self) -> None:
        model = _resnet()
        first = magnitude_masks(model, 0.3)
        apply_masks(model, first)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Trained on, even into what was pruned: then those are large again.
                parameter.add_(7.0 if name in first else 0.0)
        second = magnitude_masks(model, 0.6, first)
        for name, mask in second.items():
            assert not bool((mask & ~first[name]).any())
        gone = sum(int((~mask).sum()) for mask in second.values())
        assert gone == math.floor(0.6 * sum(mask.numel() for mask in second.values()) + 1e-9)
        with pytest.raises(BadValueError, match=r"ratio of 0.2 after"):
            magnitude_masks(model, 0.2, first)

    def test_layers_that_cannot_be_pruned_are_named(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.plain = nn.Conv2d(3, 4, 1)
                self.turned = nn.ConvTranspose2d(4, 4, 1)
                self.normed = nn.Conv2d(4, 4, 1)
                made = self.normed.weight.detach()  # as weight_norm does it
                del self.normed._parameters["weight"]
                self.normed.weight = made
                self.tied = nn.Linear(4, 4)
                self.twin = nn.Linear(4, 4)
                self.twin.weight = self.tied.weight
                self.words = nn.Embedding(5, 4)

        found = prunable_weights(Odd())
        assert found.layers == ("plain",)
        assert set(found.left_alone) == {"turned", "normed", "tied", "twin", "words"}
        assert "tied, twin" in found.left_alone["twin"]
        assert "ConvTranspose2d" in found.left_alone["turned"]
        assert set(magnitude_masks(Odd(), 0.5)) == {"plain.weight"}
        with pytest.raises(BadValueError, match="no weights that can be pruned") as none:
            magnitude_masks(nn.Sequential(nn.Embedding(3, 3)), 0.5)
        assert "Embedding" in none.value.why

    def test_nan_has_no_magnitude(self) -> None:
        model = Plain()
        model.first.weight.data[0, 0, 0, 0] = math.nan
        with pytest.raises(BadValueError, match=r"first\.weight has NaN"):
            magnitude_masks(model, 0.5)


class TestChannels:
    def test_filters_of_the_least_sum_go_from_each_layer(self) -> None:
        model = Plain()
        with torch.no_grad():
            for channel, size in enumerate((4.0, 1.0, 3.0, 2.0)):
                model.first.weight[channel] = size * (-1) ** channel
        found = channel_groups(model)
        scores = channel_scores(model, found.groups, "l1-channel")
        assert scores["first"].tolist() == [108.0, 27.0, 81.0, 54.0]
        chosen = choose_channels(found, scores, 0.5, method="l1-channel")
        assert chosen.kept["first"].tolist() == [0, 2]
        assert len(chosen.kept["second"]) == 3
        assert (chosen.held, chosen.removed) == ((), 0.5)

    def test_gammas_are_compared_over_the_network(self) -> None:
        model = _resnet()
        found = channel_groups(model)
        model.layer4[0].bn1.weight.data.fill_(1e-4)
        model.layer4[0].bn1.weight.data[:2] = torch.tensor([9.0, -8.0])
        scores = channel_scores(model, found.groups, "bn-gamma")
        streams = [model.bn1.weight, model.layer1[0].bn2.weight, model.layer1[1].bn2.weight]
        wanted = torch.stack([each.detach().abs() for each in streams]).mean(0)
        assert_close(scores["conv1"], wanted)

        chosen = choose_channels(found, scores, 14 / 90, method="bn-gamma")

        # 14 of the 90 channels: those of one layer.
        assert sum(group.channels for group in found.groups) == 90
        assert chosen.kept["layer4.0.conv1"].tolist() == [0, 1]
        others = [each for each in found.groups if each.name != "layer4.0.conv1"]
        assert all(len(chosen.kept[each.name]) == each.channels for each in others)

    def test_a_layer_without_channels_is_refused_or_holds_some(self) -> None:
        model = _resnet()
        found = channel_groups(model)
        scores = channel_scores(model, found.groups, "bn-gamma")
        scores["layer1.0.conv1"] = torch.ones(2, dtype=torch.float64)
        scores["layer2.1.conv1"] = torch.tensor([1e-9, 3e-9, 2e-9, 0.0], dtype=torch.float64)

        with pytest.raises(BadValueError, match=r"leaves no channel of layer2\.1\.conv1\n"):
            choose_channels(found, scores, 0.06, method="bn-gamma")
        chosen = choose_channels(found, scores, 0.06, method="bn-gamma", least=2)

        assert chosen.kept["layer2.1.conv1"].tolist() == [1, 2]
        assert chosen.held == ("layer2.1.conv1",)
        assert chosen.removed == pytest.approx((5 - 2) / 90)

    def test_ratios_are_of_the_channels_that_there_were(self) -> None:
        model = Plain()
        found = channel_groups(model)
        scores = channel_scores(model, found.groups, "l1-channel")
        original = {"first": 8, "second": 6}
        chosen = choose_channels(found, scores, 0.75, method="l1-channel", original=original)
        assert [len(chosen.kept[name]) for name in original] == [2, 2]
        assert chosen.removed == pytest.approx(10 / 14)
        less = choose_channels(found, scores, 0.25, method="l1-channel", original=original)
        assert len(less.kept["first"]) == 4, "channels do not come back"

    def test_what_no_method_can_say_is_said(self) -> None:
        model = Plain()
        found = channel_groups(model)
        with pytest.raises(UnknownNameError):
            channel_scores(model, found.groups, "bn-gama")
        with pytest.raises(BadValueError, match="first have no gamma"):
            channel_scores(model, found.groups, "bn-gamma")
        model.second.weight.data.fill_(math.nan)
        with pytest.raises(BadValueError, match="second has NaN"):
            channel_scores(model, found.groups, "l1-channel")
        linear = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        with pytest.raises(BadValueError, match="no channels that can be pruned") as none:
            choose_channels(channel_groups(linear), {}, 0.5, method="l1-channel")
        assert "1: outputs of linear layers" in none.value.why


class TestTraining:
    def _steps(self, model: nn.Module, optimizer: Any, count: int = 3) -> None:
        chance = torch.Generator().manual_seed(0)
        images = torch.randn(8, 3, 16, 16, generator=chance)
        for _ in range(count):
            loss = F.cross_entropy(model(images), torch.arange(8))
            optimizer.differentiate(loss)
            optimizer.step()

    def test_masks_hold_and_the_rest_learns(self) -> None:
        torch.manual_seed(0)
        model = Plain()
        masks = magnitude_masks(model, 0.7)
        apply_masks(model, masks)
        before = copy.deepcopy(model.state_dict())

        self._steps(model, PruningSGD(model, 0.1, 0.9, 5e-4, masks=masks))

        for name, parameter in model.named_parameters():
            moved = parameter.detach() != before[name]
            if name in masks:
                assert not bool(parameter.detach()[~masks[name]].any()), name
                assert bool(moved[masks[name]].any()), name
            else:
                assert bool(moved.any()), name

    def test_without_masks_it_is_sgd(self) -> None:
        torch.manual_seed(0)
        model, twin = Plain(), Plain()
        twin.load_state_dict(model.state_dict())
        self._steps(model, PruningSGD(model, 0.1, 0.9, 5e-4))
        self._steps(twin, SGD(twin, 0.1, 0.9, 5e-4))

        for one, wanted in zip(model.parameters(), twin.parameters()):
            assert torch.equal(one, wanted)

    def test_gammas_are_pushed_to_zero_and_nothing_else_is(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
        model[1].weight.data = torch.tensor([0.5, -0.5, 0.0])
        before = copy.deepcopy(model.state_dict())
        optimizer = PruningSGD(model, 0.1, 0.0, gamma_l1=0.2)
        optimizer.differentiate(sum(each.sum() * 0 for each in model.parameters()))
        optimizer.step()

        assert_close(model[1].weight.detach(), torch.tensor([0.48, -0.48, 0.0]), 1e-6)
        assert model[0].weight.equal(before["0.weight"])
        assert model[1].bias.equal(before["1.bias"])
