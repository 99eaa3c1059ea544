"""Augmentation on the device against a plain loop over images and pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowgauge_lab.augment import Augmentation, Draws, Feed, crop_and_flip, draw, normalise

CPU = torch.device("cpu")
_PLAIN = Augmentation()


def _generator(seed: int = 0) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def _loop(image: np.ndarray, flip: bool, top: int, left: int, padding: int) -> np.ndarray:
    """One image, pixel by pixel: outside the image it is black."""
    height, width = image.shape[1:]
    window = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row + top - padding, column + left - padding
            if 0 <= y < height and 0 <= x < width:
                window[:, row, column] = image[:, y, x]
    return window[:, :, ::-1] if flip else window


@pytest.mark.parametrize("shape", [(3, 7, 5), (1, 4, 4), (2, 1, 3)])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_every_corner_and_both_flips_agree_with_a_loop(shape: tuple, padding: int) -> None:
    """All offsets, so all borders; the images are not square."""
    places = range(2 * padding + 1)
    cases = [(f, t, s) for f in (False, True) for t in places for s in places]
    random = np.random.RandomState(1)
    images = random.randint(1, 256, (len(cases), *shape)).astype(np.uint8)
    flip, top, left = (torch.tensor(part) for part in zip(*cases))

    result = crop_and_flip(torch.from_numpy(images), flip, top, left, padding)

    assert result.dtype == torch.uint8
    assert result.is_contiguous()
    expected = [_loop(image, *case, padding) for image, case in zip(images, cases)]
    assert np.array_equal(result.numpy(), np.stack(expected))


def test_an_empty_batch_stays_empty() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)

    assert crop_and_flip(empty, none.bool(), none, none, 2).shape == (0, 3, 8, 8)


def test_draws_are_uniform_over_their_whole_range() -> None:
    """18,000 draws over 9 places: each 2,000 ± 5 standard deviations; the flip half of the time."""
    draws = draw(Augmentation(padding=4, flip=True), 18000, _generator())

    for corner in (draws.top, draws.left):
        counts = torch.bincount(corner, minlength=9)
        assert counts.shape == (9,)
        assert (counts - 2000).abs().max() <= 5 * 42.2
    assert abs(int(draws.flip.sum()) - 9000) <= 5 * 67.1
    assert not torch.equal(draws.top, draws.left)


def test_draws_come_from_the_generator_alone() -> None:
    crop = Augmentation(padding=2, flip=True)
    torch.manual_seed(1)
    one = draw(crop, 50, _generator(9))
    torch.manual_seed(2)
    two = draw(crop, 50, _generator(9))
    three = draw(crop, 50, _generator(10))

    assert all(torch.equal(getattr(one, n), getattr(two, n)) for n in ("flip", "top", "left"))
    assert not torch.equal(one.top, three.top)


def test_no_flip_means_none() -> None:
    assert not draw(Augmentation(padding=4), 1000, _generator()).flip.any()


def test_normalise_gives_the_declared_statistics() -> None:
    random = np.random.RandomState(0)
    images = torch.from_numpy(random.randint(0, 256, (20, 3, 6, 6)).astype(np.uint8))
    scaled = images.double() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3), unbiased=False)

    ready = normalise(images, mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1))

    assert ready.dtype == torch.float32
    expected = (scaled - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    assert (ready.double() - expected).abs().max() <= 1e-5


def _feed(augmentation: Augmentation = _PLAIN, channels_last: bool = False) -> Feed:
    random = np.random.RandomState(4)
    images = random.randint(0, 256, (11, 3, 6, 6)).astype(np.uint8)
    labels = np.arange(11, dtype=np.uint8)
    images.setflags(write=False)  # a memory map is read-only
    return Feed(images, labels, (0.5,) * 3, (0.25,) * 3, CPU, augmentation, channels_last)


def test_a_batch_holds_the_images_and_labels_asked_for() -> None:
    feed = _feed()
    images, labels = feed.batch(torch.tensor([10, 0, 4]))

    assert labels.tolist() == [10, 0, 4]
    expected = (feed.images[[10, 0, 4]].float() / 255 - 0.5) / 0.25
    assert (images - expected).abs().max() <= 1e-6


def test_an_image_has_one_draw_per_epoch_whatever_batch_it_is_in() -> None:
    feed = _feed(Augmentation(padding=2, flip=True))
    feed.redraw(_generator())
    together, _ = feed.batch(torch.arange(11))
    alone = torch.cat([feed.batch(torch.tensor([index]))[0] for index in range(11)])
    assert torch.equal(together, alone)

    feed.redraw(_generator(1))
    assert not torch.equal(feed.batch(torch.arange(11))[0], together)


def test_redrawing_writes_where_a_captured_graph_reads() -> None:
    feed = _feed(Augmentation(padding=2, flip=True))
    before = [part.data_ptr() for part in _parts(feed._draws)]
    feed.redraw(_generator())

    assert [part.data_ptr() for part in _parts(feed._draws)] == before
    assert len(set(before)) == 3


def _parts(draws: Draws) -> tuple:
    return draws.flip, draws.top, draws.left


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(padding=1, flip=True)])
def test_channels_last_changes_the_layout_and_nothing_else(augmentation: Augmentation) -> None:
    plain, last = _feed(augmentation), _feed(augmentation, channels_last=True)
    for feed in (plain, last):
        feed.redraw(_generator())
    one, other = (feed.batch(torch.arange(5))[0] for feed in (plain, last))

    assert one.is_contiguous()
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(one, other)


def test_unequal_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 images, 2 labels"):
        Feed(np.zeros((3, 1, 4, 4)), np.zeros(2), (0.5,), (0.5,), CPU)
