"""A glance, and a second look at the window that its class map points at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.adaptive import adaptive
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.policies import parse
from narrowgauge_lab.anytime.resolution import AtSize, sharing
from narrowgauge_lab.anytime.systems.glance import Glance
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet


def _images(count: int = 5, size: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


def _net(place: str = "cam", combined: str = "look", **given: Any) -> Glance:
    torch.manual_seed(0)
    net = cifar_resnet(18, 0.0625, 4)
    crop, look = given.get("crop", 24), given.get("look", 24)
    parts = AtSize(net, 16), AtSize(sharing(net), look)
    return Glance(*parts, crop, place, combined).eval()


def test_both_exits_are_the_network_at_its_sizes() -> None:
    net, images = _net("whole"), _images()

    first, second = net(images)

    assert torch.equal(first, net.glance(images))
    assert torch.equal(second, net.look(images))


def test_the_mean_is_of_both_answers() -> None:
    images = _images()
    first, look = _net("cam")(images)

    _, mean = _net("cam", "mean")(images)

    assert torch.allclose(mean, (first + look) / 2)


@pytest.mark.parametrize(
    ("cell", "corner"), [((0, 0), (0, 0)), ((0, 3), (0, 16)), ((2, 1), (12, 4)), ((3, 3), (16, 16))]
)
def test_the_window_is_where_the_map_is(cell: Any, corner: Any) -> None:
    """Cells of a 4×4 map have 8 pixels; the window's middle is theirs, as far as there is room."""
    net, maps = _net(crop=16), torch.zeros(1, 4, 4)
    maps[0, cell[0], cell[1]] = 2.0

    top, left = net.corners(_images(1), maps)

    assert (int(top), int(left)) == corner


def test_a_flat_map_points_at_the_middle() -> None:
    net = _net(crop=16)
    maps = torch.stack([torch.zeros(2, 2), torch.ones(2, 2), torch.full((2, 2), float("nan"))])

    top, left = net.corners(_images(3), maps)

    assert top.tolist() == left.tolist() == [8, 8, 8]


def test_the_middle_is_a_control() -> None:
    net, images = _net("centre"), _images()

    assert torch.equal(net.window(images), images[:, :, 4:28, 4:28])


def test_a_window_is_a_part_of_the_picture() -> None:
    net, images = _net("cam", crop=20), _images()

    found = net.window(images)

    assert found.shape == (5, 3, 20, 20)
    for image, window in zip(images, found):
        parts = image.unfold(1, 20, 1).unfold(2, 20, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
        assert (parts == window).flatten(1).all(1).any()


@pytest.mark.parametrize(
    ("place", "combined", "needs_glance"),
    [("cam", "look", True), ("centre", "look", False), ("centre", "mean", True)],
)
def test_an_answer_costs_what_it_needs(place: str, combined: str, needs_glance: bool) -> None:
    net = _net(place, combined)
    costs = exit_costs(net, _images(1))
    alone = exit_costs(_net("whole"), _images(1))

    glance, look = alone.direct
    pointing = net.glance.net.linear.in_features * 4 if place == "cam" else 0
    assert costs.cumulative == (glance + pointing, glance + pointing + look)
    assert costs.direct[1] == (glance + pointing + look if needs_glance else look)


def test_who_is_sure_leaves_with_the_glance() -> None:
    net, images = _net("cam"), _images(6)
    first, second = (each.detach() for each in net(images))
    entropy = torch.distributions.Categorical(logits=first).entropy()
    limit = float(entropy.median()) + 1e-6

    found = adaptive(net, images, parse(f"entropy:{limit!r}"))

    leaves = entropy < limit
    assert found.exits.tolist() == (~leaves).long().tolist()
    assert 0 < int(leaves.sum()) < 6
    wanted = torch.where(leaves[:, None], first, second)
    assert torch.allclose(found.logits, wanted, atol=1e-5)


def test_a_batch_of_none_is_answered() -> None:
    assert adaptive(_net(), _images(0), parse("entropy:0.5")).logits.shape == (0, 4)


class TestRefusals:
    @pytest.mark.parametrize("shape", [(1, 3, 20, 20), (1, 3, 32, 30), (1, 1, 28, 28)])
    def test_pictures_that_it_cannot_take(self, shape: Any) -> None:
        with pytest.raises(BadValueError, match="picture"):
            _net()(torch.zeros(shape))

    def test_a_small_picture_will_do_where_no_window_is_cut(self) -> None:
        assert len(_net("whole")(torch.zeros(1, 3, 20, 20))) == 2

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"place": "corner"}, "a second look at 'corner'"),
            ({"combined": "vote"}, "answers by 'vote'"),
            ({"look": 16}, "a look at 16 pixels"),
            ({"crop": 0}, "a window of 0"),
        ],
    )
    def test_second_looks_that_are_none(self, given: Any, message: str) -> None:
        with pytest.raises(BadValueError, match=message):
            _net(**given)

    def test_a_network_without_maps(self) -> None:
        parts = AtSize(nn.Identity(), 16), AtSize(nn.Identity(), 24)

        with pytest.raises(BadValueError, match="no class activation map"):
            Glance(*parts, 24)
