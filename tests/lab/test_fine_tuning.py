"""A short training on of a network that was changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from narrowgauge_lab import precision
from narrowgauge_lab.augment import Augmentation, Feed
from narrowgauge_lab.fine_tuning import fine_tune

CPU = torch.device("cpu")
AUGMENTED = Augmentation(padding=1, flip=True)


def _feed(count: int = 96, augmentation: Augmentation = AUGMENTED) -> Feed:
    """Two kinds of images, dark and bright."""
    random = np.random.RandomState(0)
    labels = np.arange(count) % 2
    images = random.randint(0, 120, (count, 3, 8, 8)) + 120 * labels[:, None, None, None]
    return Feed(images.astype(np.uint8), labels, (0.5,) * 3, (0.25,) * 3, CPU, augmentation)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)
    ).eval()


def _tuned(net: nn.Module, feed: Feed, **given: float) -> bool:
    chosen = {"images": 96, "batch_size": 16, "rate": 0.05, "seed": 3, **given}
    return fine_tune(net, feed, precision.enter("fp32", CPU), **chosen)  # type: ignore[arg-type]


def _loss(net: nn.Module, feed: Feed) -> float:
    images, labels = feed.batch(torch.arange(len(feed)))
    return float(nn.functional.cross_entropy(net(images), labels).detach())


def test_it_learns_and_leaves_the_mode_as_it_was() -> None:
    net, plain = _net(), _feed(augmentation=Augmentation())
    before = _loss(net, plain)

    assert _tuned(net, _feed())

    assert _loss(net, plain) < before / 2
    assert not any(module.training for module in net.modules())
    assert net[1].running_mean.abs().max() > 0


def test_the_seed_says_what_is_drawn() -> None:
    def weights(seed: int) -> torch.Tensor:
        net, feed = _net(), _feed()
        feed.redraw(torch.Generator().manual_seed(50 + seed))  # what something else left
        _tuned(net, feed, images=32, seed=seed)
        return net[4].weight.detach().clone()

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_no_images_change_nothing() -> None:
    net = _net()
    before = [each.clone() for each in net.state_dict().values()]

    assert _tuned(net, _feed(), images=0)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before))


def test_each_image_is_seen_once_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    feed = _feed()
    batch = feed.batch

    def noted(indices: torch.Tensor) -> object:
        seen.extend(indices.tolist())
        return batch(indices)

    monkeypatch.setattr(feed, "batch", noted)
    _tuned(_net(), feed, images=1000)

    assert sorted(seen) == list(range(96))


def test_a_loss_that_is_not_finite_is_said() -> None:
    assert not _tuned(_net(), _feed(), rate=1e30)
