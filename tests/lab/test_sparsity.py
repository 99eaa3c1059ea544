"""Zeros in maps: counted, captured, and made."""

from __future__ import annotations

from typing import List, Tuple

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.networks import build
from narrowgauge_lab.sparsity import (
    PATTERNS,
    LayerMap,
    capture,
    group_zero_fraction,
    matched_map,
    pattern_map,
    zero_fraction,
    zeros_of,
)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_zeros_are_counted_and_nan_is_none() -> None:
    maps = torch.ones(1, 1, 2, 8)
    maps[0, 0, :, :4] = 0
    maps[0, 0, 0, 7] = float("nan")

    found = zeros_of(maps)

    assert found.elements == 0.5
    assert found.groups_2x4 == 0.5
    assert (found.groups_1x8, found.channels) == (0.0, 0.0)
    assert zeros_of(torch.zeros(2, 3, 5, 5)) == zeros_of(torch.zeros(1, 1, 1, 1))
    assert zeros_of(torch.zeros(1, 1, 1, 1)).groups_2x4 == 1.0
    assert zeros_of(torch.ones(0, 3, 4, 4)).channels == 0.0


@pytest.mark.parametrize("size", [(2, 4), (3, 5), (7, 7)])
def test_groups_are_what_loops_find(size: Tuple[int, int]) -> None:
    maps = torch.relu(torch.randn(2, 3, *size, generator=_generator()) - 1)
    groups = [
        image[channel, row : row + 2, column : column + 4]
        for image in maps
        for channel in range(3)
        for row in range(0, size[0], 2)
        for column in range(0, size[1], 4)
    ]

    assert group_zero_fraction(maps) == pytest.approx(
        sum(not bool(group.any()) for group in groups) / len(groups)
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("zeros", [0.0, 0.7, 1.0])
def test_patterns_have_the_zeros_that_are_asked_for(pattern: str, zeros: float) -> None:
    x = pattern_map(pattern, (2, 40, 8, 8), zeros, _generator())

    found = zeros_of(torch.relu(x))
    assert found.elements == pytest.approx(zeros, abs=0.02)
    assert bool((x != 0).all()), "zeros are the ReLU's"
    if zeros == 0.7:
        assert (found.channels > 0.6) is (pattern == "channel")
        assert (found.groups_2x4 > 0.5) is (pattern in ("blocky", "channel"))
    again = pattern_map(pattern, (2, 40, 8, 8), zeros, _generator())
    assert torch.equal(x, again)


def test_whole_pixels_are_zero_in_all_channels() -> None:
    given = torch.relu(pattern_map("pixel", (1, 6, 10, 10), 0.6, _generator()))

    zero = (given == 0).all(dim=1)
    assert int(zero.sum()) == 60
    assert torch.equal(zero[:, None].expand_as(given), given == 0)


@pytest.mark.parametrize(
    ("zeros", "groups"), [(0.53, 0.20), (0.76, 0.41), (0.5, 0.5), (0.6, 0.6**8)]
)
def test_matched_maps_have_both_shares(zeros: float, groups: float) -> None:
    found = zeros_of(torch.relu(matched_map((2, 64, 32, 32), zeros, groups, _generator(1))))

    assert found.elements == pytest.approx(zeros, abs=0.015)
    assert found.groups_2x4 == pytest.approx(groups, abs=0.015)


def test_shares_that_no_map_has() -> None:
    for zeros, groups in ((0.5, 0.6), (1.0, 0.9), (0.95, 0.2), (0.5, -0.1)):
        with pytest.raises(BadValueError, match="no map has"):
            matched_map((1, 8, 8, 8), zeros, groups, _generator())
    with pytest.raises(BadValueError, match="no share"):
        pattern_map("random", (1, 1, 4, 4), 1.5, _generator())
    with pytest.raises(UnknownNameError, match="blocki"):
        pattern_map("blocki", (1, 1, 4, 4), 0.5, _generator())


class _Small(nn.Module):
    """A convolution behind a ReLU that works in place, and one that is not behind any."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 5, 3)
        self.third = nn.Conv2d(5, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.relu(self.norm(self.first(x)))))


def test_maps_are_captured_before_their_relu() -> None:
    model, images = _Small().eval(), torch.randn(2, 3, 6, 6, generator=_generator())
    found: List[LayerMap] = []

    count = capture(model, images, lambda _conv: True, found.append)

    assert count == 3
    assert [each.name for each in found] == ["first", "second", "third"]
    first, second, third = found
    assert first.before_relu is None
    assert torch.equal(first.given, images)
    with torch.no_grad():
        before = model.norm(model.first(images))
    assert second.before_relu is not None
    assert torch.equal(second.before_relu, before)
    assert torch.equal(second.given, torch.relu(before))
    assert third.before_relu is None, "nothing was cut off"
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


@pytest.mark.parametrize("name", ["resnet50-tiny", "densenet-tiny", "vgg-tiny"])
def test_3x3_layers_of_networks_are_behind_relus(name: str) -> None:
    found: List[LayerMap] = []
    model = build(name)
    capture(
        model, torch.randn(1, 3, 32, 32, generator=_generator()),
        lambda conv: conv.kernel_size == (3, 3) and conv.in_channels != 3, found.append,
    )  # fmt: skip

    assert found
    behind = [each for each in found if each.before_relu is not None]
    # A pool stands between in VGG: its maps have zeros, and no ReLU of the same shape.
    assert len(behind) == (0 if name == "vgg-tiny" else len(found))
    assert all(0.1 < zero_fraction(each.given) < 0.95 for each in behind)
