"""What an experiment runs through engines: a network with its weights, and images to run it on."""

from __future__ import annotations

import dataclasses
from typing import Callable, Optional, Tuple

import torch
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.networks.registry import build, network
from narrowgauge_lab.networks.scaling import scale_activations
from narrowgauge_lab.networks.trained import (
    IMAGES,
    TRAINED,
    Files,
    Labelled,
    labelled_images,
    load_trained,
)

__all__ = ["WEIGHTS", "Right", "Subject", "count_right", "make_subject"]

#: The values of a parameter that says which weights to use.
WEIGHTS = ("random", "trained")
#: Where a network has no weights of its own, its images are normalised as MobileNetV2's are.
_USUAL = "mobilenet_v2-imagenet"
#: Images that random weights are scaled on, and that a network is calibrated on at least.
_SCALED_ON, _CALIBRATED_ON = 4, 8


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network (eval, float32, on the CPU) and what to run it on.

    `images`: one batch, float32 [B, 3, H, W] on the CPU. `calibration`: other batches of the kind,
    the same ones for every repeat of a run, as the weights are: built engines are kept by both.
    `labelled`: real images with their classes, only where the weights are trained: with random ones
    no answer is right. `weights` and `pictures` say in words what they are.
    """

    model: nn.Module
    images: torch.Tensor
    calibration: Tuple[torch.Tensor, ...]
    labelled: Optional[Labelled]
    weights: str
    pictures: str


def make_subject(
    name: str,
    wanted: str,
    batch: int,
    *,
    run_seed: int,
    images_seed: int,
    files: Callable[[str], Files],
) -> Subject:
    """The network `name`; `wanted` is one of WEIGHTS.

    `trained`: weights where there are any, otherwise random ones all the same, and real images for
    either. `random`: nothing is read, the images are noise. `run_seed` is for what has to be the
    same in every repeat, `images_seed` for the noise that is timed; `files` gives the files of a
    data set. Raises UnknownNameError and what `files` raises.
    """
    model = build(name, run_seed)
    size = network(name).size
    has_weights = wanted == "trained" and name in TRAINED
    if has_weights:
        load_trained(model, name, files(TRAINED[name].set_name))
        weights = f"trained: {TRAINED[name].set_name}"
    else:
        scale_activations(model, _noise(_SCALED_ON, size, run_seed))
        weights = (
            f"random, seed {run_seed}, activations scaled to variance 1, residual branches to 1/16"
        )
    if wanted == "trained":
        normalised = TRAINED[name].set_name if has_weights else _USUAL
        real = labelled_images(files(IMAGES), normalised, size)
        return Subject(
            model,
            _repeated(real.images, batch),
            (real.images,),
            real if has_weights else None,
            weights,
            f"{len(real.images)} of ImageNet ({IMAGES}), over and over",
        )
    return Subject(
        model,
        _noise(batch, size, images_seed),
        (_noise(_CALIBRATED_ON, size, run_seed),),
        None,
        weights,
        "noise, mean 0 and variance 1",
    )


@dataclasses.dataclass(frozen=True)
class Right:
    """Of `images`, how many have their class first, and among the first five."""

    first: int
    first_five: int
    images: int


def count_right(
    call: Callable[[torch.Tensor], torch.Tensor], labelled: Labelled, like: torch.Tensor
) -> Right:
    """Run the labelled images through `call` in batches as `like` is: its size, dtype, device."""
    batch = len(like)
    first = first_five = 0
    for start in range(0, len(labelled.images), batch):
        images = labelled.images[start : start + batch]
        classes = labelled.classes[start : start + batch]
        given = _repeated(images, batch).to(device=like.device, dtype=like.dtype)
        best = call(given)[: len(images)].float().cpu().topk(5, dim=1).indices
        hits = best == classes[:, None]
        first += int(hits[:, 0].sum())
        first_five += int(hits.any(dim=1).sum())
    return Right(first, first_five, len(labelled.images))


def _noise(count: int, size: int, seed: int) -> torch.Tensor:
    generator = torch_compat.generator_for(torch.device("cpu"), seed)
    return torch.randn(count, 3, size, size, generator=generator)


def _repeated(images: torch.Tensor, count: int) -> torch.Tensor:
    """`count` images, those given over and over."""
    return images[torch.arange(count) % len(images)]
