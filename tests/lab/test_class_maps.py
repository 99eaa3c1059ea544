"""Class activation maps: their arithmetic, and what they leave behind."""

from __future__ import annotations

from typing import Any, List

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime import class_maps
from narrowgauge_lab.anytime.class_maps import Head
from narrowgauge_lab.anytime.mapped_heads import heads_of, plain_head
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.systems.branchynet import branchy_net
from narrowgauge_lab.anytime.systems.nested import NestedNet
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet


def _images(count: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def _nested() -> NestedNet:
    torch.manual_seed(0)
    net = NestedNet(classes=5, exits=3, channels=4)
    with torch.no_grad():
        net(_images(8))  # statistics that are not those of a new network
    return net.eval()


def _linear_head() -> Head:
    torch.manual_seed(0)
    linear = nn.Linear(4, 3)
    return Head(torch.randn(2, 4, 3, 5), lambda maps: linear(maps.mean((2, 3))), linear.weight)


class TestCam:
    def test_it_is_the_weighted_sum_of_the_features(self) -> None:
        head, classes = _linear_head(), torch.tensor([2, 0])
        assert head.weight is not None

        found = class_maps.cam(head, classes)

        for sample, name in enumerate(classes.tolist()):
            for y in range(3):
                for x in range(5):
                    wanted = float(head.weight[name].detach() @ head.features[sample, :, y, x])
                    assert float(found[sample, y, x]) == pytest.approx(wanted, abs=1e-6)

    def test_grad_cam_of_a_linear_head_is_its_positive_part_over_the_positions(self) -> None:
        head, classes = _linear_head(), torch.tensor([1, 1])

        maps, by_gradient = class_maps.cam(head, classes), class_maps.grad_cam(head, classes)

        assert torch.allclose(by_gradient, maps.clamp(min=0) / 15, atol=1e-7)
        assert (by_gradient > 0).any()
        assert (maps < 0).any()

    @pytest.mark.parametrize("exit", range(3))
    def test_both_are_one_at_every_exit_of_a_nested_network(self, exit: int) -> None:
        net, images = _nested(), _images()
        head = heads_of(net, images)[exit]
        classes = net(images)[-1].argmax(1)

        one = class_maps.normalised(class_maps.cam(head, classes).clamp(min=0))
        other = class_maps.normalised(class_maps.grad_cam(head, classes))

        assert torch.allclose(one, other, atol=1e-5)
        assert float(one.max()) == 1

    def test_a_head_of_another_kind_has_none(self) -> None:
        net = branchy_net("b-alexnet", 0.25).eval()
        heads = heads_of(net, _images())

        with pytest.raises(BadValueError, match="no class activation map") as refused:
            class_maps.cam(heads[0], torch.zeros(3, dtype=torch.int64))

        assert "Grad-CAM" in str(refused.value.next_step)

    def test_negative_evidence_gives_a_map_of_nothing(self) -> None:
        linear = nn.Linear(2, 2)
        nn.init.constant_(linear.weight, -1.0)
        head = Head(torch.rand(1, 2, 4, 4), lambda maps: linear(maps.mean((2, 3))), linear.weight)

        found = class_maps.grad_cam(head, torch.tensor([0]))

        assert not found.any()
        assert not class_maps.normalised(found).any()


NETS: List[Any] = [
    pytest.param(_nested, id="nested"),
    pytest.param(lambda: branchy_net("b-alexnet", 0.25).eval(), id="b-alexnet"),
    pytest.param(lambda: AdaptiveResNet("sact", 2, 4).eval(), id="sact"),
]


@pytest.mark.parametrize("make", NETS)
class TestHeads:
    def test_each_gives_the_answer_of_its_exit(self, make: Any) -> None:
        net, images = make(), _images()

        heads = heads_of(net, images)

        with torch.no_grad():
            for head, logits in zip(heads, net(images)):
                assert torch.allclose(head.answer(head.features), logits, atol=1e-5)
        assert len(heads) == net.exits

    def test_nothing_is_left_on_the_network_or_on_torch(self, make: Any) -> None:
        net, images = make(), _images()
        with torch_compat.inference_mode():
            heads = heads_of(net, images)
        with torch.no_grad():
            maps = [class_maps.grad_cam(each, torch.tensor([0, 1, 2])) for each in heads]

        assert all(torch.isfinite(each).all() and (each >= 0).all() for each in maps)
        assert all(parameter.grad is None for parameter in net.parameters())
        for module in net.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not module._backward_hooks
        assert not torch_module._global_forward_hooks
        assert not torch_module._global_backward_hooks
        assert not any(module.training for module in net.modules())

    def test_a_network_in_training_is_refused(self, make: Any) -> None:
        with pytest.raises(BadValueError, match="training mode"):
            heads_of(make().train(), _images())


def test_a_gradient_that_fails_leaves_nothing_either() -> None:
    linear = nn.Linear(4, 3)

    def answer(maps: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        class_maps.grad_cam(Head(torch.rand(1, 4, 2, 2), answer), torch.tensor([0]))

    assert linear.weight.grad is None
    assert not torch_module._global_forward_hooks


def test_an_unknown_network_is_named() -> None:
    class Other(AnytimeNetwork):
        exits, classes = 1, 2

        def advance(self, exit: int, state: Any, head: bool = True) -> Any:
            raise NotImplementedError

    with pytest.raises(BadValueError, match="where Other answers from"):
        heads_of(Other().eval(), _images())


def test_a_plain_network_has_one_head_of_means() -> None:
    net, images = cifar_resnet(18, 0.0625, 4).eval(), _images(2, 16)

    head = plain_head(net, images)

    assert head.features.shape == (2, 32, 2, 2)
    assert torch.allclose(head.answer(head.features), net(images), atol=1e-6)


class TestFlatMaps:
    MAPS = torch.stack(
        [
            torch.zeros(2, 2), torch.full((2, 2), 3.0), torch.full((2, 2), float("nan")),
            torch.tensor([[0.0, float("inf")], [1.0, 2.0]]), torch.tensor([[1e6, 1e6], [1e6, 1e6]])
            + torch.tensor([[0.0, 0.06], [0.0, 0.0]]), torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
        ]
    )  # fmt: skip

    def test_they_are_told(self) -> None:
        assert class_maps.flat(self.MAPS).tolist() == [True] * 5 + [False]

    def test_they_are_divided_by_nothing(self) -> None:
        found = class_maps.normalised(self.MAPS)

        assert not found[:5].any()
        assert torch.equal(found[5], torch.tensor([[0.0, 0.25], [0.5, 1.0]]))

    def test_they_have_no_region(self) -> None:
        found = class_maps.region(self.MAPS, 0.0)

        assert not found[:5].any()
        assert found[5].all()

    def test_two_of_them_have_no_overlap_to_speak_of(self) -> None:
        nothing = class_maps.region(self.MAPS[:2])
        something = class_maps.region(self.MAPS[5:])

        assert torch.isnan(class_maps.overlap(nothing, nothing)).all()
        assert class_maps.overlap(nothing[:1], something).tolist() == [0.0]

    def test_nothing_of_a_map_of_zeros_is_anywhere(self) -> None:
        everywhere = torch.ones(6, 2, 2, dtype=torch.bool)

        assert torch.isnan(class_maps.inside(self.MAPS, everywhere)[0])

    def test_their_centre_is_the_middle(self) -> None:
        row, column = class_maps.centre(torch.zeros(2, 3, 4))

        assert (row.tolist(), column.tolist()) == ([1.0, 1.0], [1.5, 1.5])


def test_a_centre_is_that_of_mass() -> None:
    maps = torch.zeros(1, 4, 4)
    maps[0, 1, 3], maps[0, 3, 3] = 3.0, 1.0

    row, column = class_maps.centre(maps)

    assert (float(row), float(column)) == (1.5, 3.0)


def test_regions_overlap_by_intersection_over_union() -> None:
    one = torch.tensor([[[True, True], [False, False]]])
    other = torch.tensor([[[True, False], [True, False]]])

    assert class_maps.overlap(one, other).tolist() == [pytest.approx(1 / 3)]
    assert class_maps.overlap(one, one).tolist() == [1.0]


def test_energy_inside_a_region() -> None:
    maps = torch.tensor([[[1.0, 3.0], [0.0, 4.0]]])

    assert class_maps.inside(maps, maps >= 3).tolist() == [7 / 8]


def test_shuffled_maps_have_the_same_cells() -> None:
    maps = torch.rand(4, 3, 5)

    found = class_maps.shuffled(maps, torch.Generator().manual_seed(0))
    again = class_maps.shuffled(maps, torch.Generator().manual_seed(0))

    assert torch.equal(found, again)
    assert not torch.equal(found, maps)
    assert torch.equal(found.flatten(1).sort(1)[0], maps.flatten(1).sort(1)[0])
    assert class_maps.shuffled(maps[:0], torch.Generator()).shape == (0, 3, 5)


def test_a_blur_keeps_what_is_even_and_the_mean() -> None:
    even = torch.full((1, 2, 12, 12), 0.7)
    dot = torch.zeros(1, 1, 31, 31)
    dot[0, 0, 15, 15] = 1.0

    assert torch.allclose(class_maps.blurred(even), even, atol=1e-6)
    spread = class_maps.blurred(dot)
    assert float(spread.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(spread.max()) == float(spread[0, 0, 15, 15]) < 0.02


class TestUnveiling:
    def test_pixels_go_from_where_the_map_is_largest(self) -> None:
        first, second = torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 9.0)
        maps = torch.tensor([[[0.1, 0.4], [0.4, 0.9]]])
        seen: List[List[float]] = []

        def score(images: torch.Tensor) -> torch.Tensor:
            seen.append(images.flatten().tolist())
            return images.flatten(1).sum(1)

        scores = class_maps.unveiled(score, first, second, maps, 4)

        assert seen == [
            [0, 0, 0, 0], [0, 0, 0, 9], [0, 9, 0, 9], [0, 9, 9, 9], [9, 9, 9, 9],
        ]  # fmt: skip
        assert scores[:, 0].tolist() == [0, 9, 18, 27, 36]
        assert class_maps.area_under(scores).tolist() == [18.0]

    def test_a_map_that_points_at_the_object_deletes_it_sooner(self) -> None:
        """An 'object' of 3×3 in one corner, and a score that is how much of it is left."""
        images = torch.zeros(2, 1, 9, 9)
        images[:, :, :3, :3] = 1.0
        away = torch.arange(81.0).view(1, 9, 9)
        maps = torch.cat([images[:1, 0], away])

        def score(given: torch.Tensor) -> torch.Tensor:
            return given.flatten(1).sum(1) / 9

        nothing = torch.zeros_like(images)
        deletion = class_maps.area_under(class_maps.unveiled(score, images, nothing, maps, 9))
        insertion = class_maps.area_under(class_maps.unveiled(score, nothing, images, maps, 9))

        assert float(deletion[0]) == pytest.approx(1 / 18)
        assert float(insertion[0]) == pytest.approx(17 / 18)
        assert float(deletion[1]) > 0.8
        assert float(insertion[1]) < 0.2

    @pytest.mark.parametrize("steps", [0, 5, -1])
    def test_steps_that_change_nothing_are_refused(self, steps: int) -> None:
        images = torch.zeros(1, 1, 2, 2)

        with pytest.raises(BadValueError, match=f"{steps} steps through 2×2 pixels"):
            class_maps.unveiled(lambda x: x.sum((1, 2, 3)), images, images, images[:, 0], steps)
