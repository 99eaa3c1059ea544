"""One network at several sizes: what it is trained at, shared weights, and what is no size."""

from __future__ import annotations

from typing import Any, List

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision
from narrowgauge_lab.anytime.resolution import (
    AtSize,
    RandomSizes,
    at_size,
    require_size,
    sharing,
    sizes,
    windows,
)
from narrowgauge_lab.anytime.stepping import ExitStepper
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.batch_statistics import reestimate_from
from narrowgauge_lab.data import synthetic_data
from narrowgauge_lab.distributed import ALONE
from narrowgauge_lab.graphs import EagerStep
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.optim import SGD

CPU = torch.device("cpu")


def _images(count: int = 4, size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(2))


class TestSizes:
    def test_they_are_read_least_first(self) -> None:
        assert sizes("32,16,24") == (16, 24, 32)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("16,7", "a size of 7 pixels"), ("0", "a size of 0"), ("-16", "a size of -16"),
            ("129", "a size of 129"), ("16,16", "name one twice"), ("", "no whole numbers"),
            ("16,", "no whole numbers"), ("16.5", "no whole numbers"), ("small", "no whole"),
        ],
    )  # fmt: skip
    def test_what_no_network_takes_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(BadValueError, match=message):
            sizes(text)

    def test_what_they_are_of_is_said(self) -> None:
        with pytest.raises(BadValueError, match="a glance of 4 pixels") as refused:
            require_size(4, "a glance")
        assert "8 to 128" in str(refused.value.next_step)


class TestPictures:
    def test_half_the_side_takes_means_of_four_pixels(self) -> None:
        images = _images()

        assert torch.allclose(at_size(images, 16), F.avg_pool2d(images, 2), atol=1e-6)
        assert at_size(images, 32) is images
        assert at_size(images, 40).shape == (4, 3, 40, 40)

    @pytest.mark.parametrize("shape", [(2, 3, 32, 24), (2, 3, 0, 0)])
    def test_a_picture_that_is_not_square_is_refused(self, shape: Any) -> None:
        with pytest.raises(BadValueError, match=f"a picture of {shape[3]}×{shape[2]} pixels"):
            at_size(torch.zeros(shape), 16)

    @pytest.mark.parametrize("shape", [(2, 1, 28, 28), (3, 32, 32)])
    def test_a_picture_of_other_channels_is_refused(self, shape: Any) -> None:
        net = AtSize(cifar_resnet(18, 0.0625), 16)

        with pytest.raises(BadValueError, match="pictures") as refused:
            net(torch.zeros(shape))
        assert "3 channels" in str(refused.value.why)

    def test_a_picture_of_another_size_is_brought_to_it(self) -> None:
        net = AtSize(cifar_resnet(18, 0.0625).eval(), 16)
        images = _images(size=28)

        assert torch.equal(net(images), net.net(at_size(images, 16)))


@pytest.mark.parametrize(
    ("size", "over"), [(16, 1.0), (24, 1.0), (40, 1.0), (20, 1.105), (28, 1.073)]
)
def test_a_size_costs_its_area_where_its_maps_halve_without_a_rest(size: int, over: float) -> None:
    """20 and 28 pixels halve to 3 and 4, which are more than an eighth of them."""
    net = cifar_resnet(18, 0.25)
    cost = [count(AtSize(net, each), torch.zeros(1, 3, 32, 32)).macs for each in (size, 32)]

    assert cost[0] / cost[1] * (32 / size) ** 2 == pytest.approx(over, abs=1e-3)
    assert cost[1] == 35_046_656


class TestSharing:
    def test_weights_are_the_same_and_statistics_are_not(self) -> None:
        net = cifar_resnet(18, 0.0625)
        other = sharing(net)

        reestimate_from(other, [_images() + 3])

        assert [id(p) for p in other.parameters()] == [id(p) for p in net.parameters()]
        assert not net.bn1.running_mean.any()
        assert other.bn1.running_mean.any()
        with torch.no_grad():
            net.linear.bias.add_(1.0)
        assert torch.equal(other.linear.bias, net.linear.bias)


class TestRandomSizes:
    class _Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: List[int] = []
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.seen.append(images.shape[-1])
            return images.mean((1, 2, 3))[:, None] * self.weight

    def _epoch(self, seed: int, epoch: int, updates: int = 40) -> List[int]:
        objective, net = RandomSizes((8, 12, 16), seed, updates), self._Noting()
        objective.losses(net, _images(), torch.zeros(4, dtype=torch.int64))  # a look beforehand
        net.seen.clear()
        objective.begin_epoch(epoch, net)
        for _ in range(updates):
            kind = objective.begin_update()
            objective.losses(net, _images(), torch.zeros(4, dtype=torch.int64))
            assert net.seen[-1] == kind
        return net.seen

    def test_an_epoch_has_the_same_sizes_again(self) -> None:
        first = self._epoch(0, 1)

        assert first == self._epoch(0, 1)
        assert first != self._epoch(0, 2)
        assert first != self._epoch(1, 1)
        assert set(first) == {8, 12, 16}

    def test_the_loss_is_that_of_the_network_at_the_size(self) -> None:
        objective, net = RandomSizes((16,), 0, 1), cifar_resnet(18, 0.0625).eval()
        images, labels = _images(), torch.tensor([0, 1, 2, 3])

        losses = objective.losses(net, images, labels)

        wanted = F.cross_entropy(net(at_size(images, 16)), labels)
        assert losses.per_exit[0] is not None
        assert float(losses.per_exit[0].detach()) == pytest.approx(float(wanted.detach()))
        assert objective.begin_update() == 16

    def test_each_size_has_a_step_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: List[EagerStep] = []

        def make(graphs: str, step: Any, *_: Any, **__: Any) -> EagerStep:
            made.append(EagerStep(step))
            return made[-1]

        monkeypatch.setattr("narrowgauge_lab.stepping.make_step", make)
        data = synthetic_data(0, channels=3, size=16, classes=2, train=20, test=4)
        feed = Feed(data.train_images, data.train_labels, (0.5,) * 3, (0.2,) * 3, CPU)
        net, objective = self._Noting(), RandomSizes((8, 12, 16), 0, 30)
        mode = precision.enter("fp32", CPU)
        stepper = ExitStepper(net, SGD(net, 0.1), feed, mode, ALONE, 4, "auto", objective)
        for _ in range(30):
            stepper(torch.arange(4))

        assert set(net.seen) == {8, 12, 16}
        assert len(made) == 4  # and the one of before the first update

    def test_a_size_that_no_network_takes_is_refused(self) -> None:
        with pytest.raises(BadValueError, match="a size of 5"):
            RandomSizes((16, 5), 0, 1)


def test_windows_are_each_images_own() -> None:
    images = torch.arange(2 * 3 * 6 * 6).view(2, 3, 6, 6)

    found = windows(images, torch.tensor([0, 2]), torch.tensor([3, 1]), 3)

    assert torch.equal(found[0], images[0, :, 0:3, 3:6])
    assert torch.equal(found[1], images[1, :, 2:5, 1:4])
