"""Statistics of normalisation taken anew over some batches."""

from __future__ import annotations

import contextlib
from typing import Iterator, List

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab import precision
from narrowgauge_lab.anytime.systems.iresnext import iresnext
from narrowgauge_lab.anytime.systems.iresnext_parts import ExitNorm
from narrowgauge_lab.augment import Augmentation, Feed
from narrowgauge_lab.batch_statistics import normalisations, reestimate, reestimate_from

CPU = torch.device("cpu")
PLAIN = Augmentation()


def _iresnext(form: str = "shared") -> nn.Module:
    torch.manual_seed(0)
    return iresnext(form, blocks=1, width=0.25, classes=4).train()


def _feed(count: int, augmentation: Augmentation = PLAIN) -> Feed:
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (count, 3, 32, 32)).astype(np.uint8)
    return Feed(images, np.arange(count) % 4, (0.5,) * 3, (0.25,) * 3, CPU, augmentation)


def _mode() -> precision.Mode:
    return precision.enter("fp32", CPU)


def _batches(*sizes: int) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, 3, 5, 5, generator=generator) for size in sizes]


class TestOfAFeed:
    @pytest.mark.parametrize("form", ["shared", "incremental"])
    def test_statistics_are_the_plain_means_over_the_batches(self, form: str) -> None:
        net, feed = _iresnext(form), _feed(20)
        net(torch.randn(8, 3, 32, 32) * 9)  # statistics that have to go

        taken = reestimate(net, feed, _mode(), images=16, batch_size=8, seed=0)

        assert taken == 16
        first = net.blocks[0].norm1
        streams = [
            F.conv2d(feed.batch(torch.arange(k, k + 8))[0], net.stem, padding=1) for k in (0, 8)
        ]
        mean = sum(stream.mean((0, 2, 3)) for stream in streams) / 2
        var = sum(stream.var((0, 2, 3)) for stream in streams) / 2
        rows = first.running_mean if isinstance(first, ExitNorm) else first.running_mean[None]
        spreads = first.running_var if isinstance(first, ExitNorm) else first.running_var[None]
        for row, spread in zip(rows, spreads):
            assert torch.allclose(row, mean, atol=1e-5)
            assert torch.allclose(spread, var, rtol=1e-3, atol=1e-5)

    def test_augmentation_is_drawn_by_the_seed(self) -> None:
        found = []
        for seed in (1, 1, 2):
            net, feed = _iresnext(), _feed(8, Augmentation(padding=4, flip=True))
            feed.redraw(torch.Generator().manual_seed(99 + len(found)))  # what an epoch left
            reestimate(net, feed, _mode(), images=8, batch_size=8, seed=seed)
            found.append(net.norm.running_mean.clone())

        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])

    def test_of_no_images_nothing_changes(self) -> None:
        net = _iresnext()
        before = net.norm.running_mean.clone()

        assert reestimate(net, _feed(4), _mode(), images=0, batch_size=4, seed=0) == 0
        assert torch.equal(net.norm.running_mean, before)

    def test_more_images_than_there_are_is_all_of_them(self) -> None:
        assert reestimate(_iresnext(), _feed(6), _mode(), images=99, batch_size=4, seed=0) == 6


class _Dropping(nn.Module):
    """A normalisation of what dropout leaves, and one that stays in eval mode in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3, momentum=None)
        self.dropout = nn.Dropout(0.9)
        self.second = nn.BatchNorm2d(3, momentum=0.25)
        self.bare = nn.BatchNorm2d(3, track_running_stats=False)
        self.frozen = nn.BatchNorm2d(3).eval()
        self.weight = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.dropout(self.first(images * self.weight)))
        return self.frozen(self.bare(hidden))


class TestOfBatches:
    def test_nothing_is_dropped_out_meanwhile(self) -> None:
        net, batches = _Dropping().train(), _batches(6)

        reestimate_from(net, batches)

        normal = F.batch_norm(batches[0], None, None, training=True)
        assert torch.allclose(net.second.running_mean, normal.mean((0, 2, 3)), atol=1e-6)
        assert torch.allclose(net.second.running_var, normal.var((0, 2, 3)), rtol=1e-4)

    def test_batches_count_alike_whatever_their_sizes(self) -> None:
        net, batches = _Dropping(), _batches(6, 2)

        assert reestimate_from(net, iter(batches)) == 8

        mean = sum(batch.mean((0, 2, 3)) for batch in batches) / 2
        assert torch.allclose(net.first.running_mean, mean, atol=1e-6)

    def test_weights_modes_and_momenta_stay(self) -> None:
        net = _Dropping().train()
        net.frozen.eval()
        modes = [module.training for module in net.modules()]
        weights = [each.clone() for each in net.parameters()]

        reestimate_from(net, _batches(4, 4))

        assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters()))
        assert [module.training for module in net.modules()] == modes
        assert (net.first.momentum, net.second.momentum) == (None, 0.25)
        assert all(each.grad is None for each in net.parameters())

    def test_what_keeps_no_statistics_is_left_alone(self) -> None:
        net = _Dropping()

        assert normalisations(net) == [net.first, net.second, net.frozen]

    def test_each_pass_runs_within_the_context(self) -> None:
        entered = []

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            entered.append(True)
            yield

        reestimate_from(_Dropping(), _batches(2, 2, 2), context)

        assert len(entered) == 3

    def test_a_pass_that_fails_leaves_modes_and_momenta_as_they_were(self) -> None:
        net = _Dropping().train()

        with pytest.raises(RuntimeError):
            reestimate_from(net, [*_batches(2), torch.zeros(2, 4, 5, 5)])

        assert net.training
        assert net.dropout.training
        assert net.second.momentum == 0.25
