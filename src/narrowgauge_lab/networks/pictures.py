"""A network of ImageNet and pictures for it: where its weights come from, what is done to pixels.

Pictures are those of the set `imagenet-20`, of a `.bin` file, or noise; they are prepared as the
network's weights want it ("right"), or not at all ("raw"), as the sparse-convolution artefact did.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.datasets import data_set
from narrowgauge_contract.errors import BadValueError, SkippedError, UsageError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.image_bin import CHANNELS, PREPROCESSING, SIDE, count_of
from narrowgauge_lab import torch_compat
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_lab.networks.bin_folder import BIN_NETWORKS, load_bin_folder
from narrowgauge_lab.networks.registry import build, network
from narrowgauge_lab.networks.scaling import scale_activations
from narrowgauge_lab.networks.state_files import load_state_file
from narrowgauge_lab.networks.trained import IMAGES, TRAINED, Files, load_trained

__all__ = ["Pictured", "Sources", "pictured", "read_image_bin"]

#: What the noise of the artefact's energy programs is drawn from, uniformly.
_NOISE_MOST = 1000.0
_SCALED_ON = 4


@dataclasses.dataclass(frozen=True)
class Sources:
    """What is asked for.

    `weights`: `trained` (a declared set), `random`, `obtainable` (trained where there are any, else
    random), or `file`: `weights_path` is a state dict (`.pth`) or a folder of `.bin` files.
    `images`: `imagenet-20`, `noise`, or `file`: `images_path` is a `.bin` file, values from 0 to
    255, blue first. `preprocessing`: `right` or `raw`; noise is never prepared. `files` gives those
    of a data set.
    """

    weights: str
    images: str
    preprocessing: str
    files: Callable[[str], Files]
    weights_path: str = ""
    images_path: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, Any], files: Callable[[str], Files]) -> Sources:
        """Of a row's parameters, which have these names; a row without `preprocessing` is right."""
        return cls(
            weights=str(parameters["weights"]),
            images=str(parameters["images"]),
            preprocessing=str(parameters.get("preprocessing", "right")),
            files=files,
            weights_path=str(parameters["weights_path"]),
            images_path=str(parameters["images_path"]),
        )


@dataclasses.dataclass(frozen=True)
class Pictured:
    """`model`: eval mode, float32, CPU. `images`: float32 [N, 3, S, S], red first, prepared.
    `classes`: int64 [N] where they are known and the weights are trained. The texts say what
    weights, pictures and preprocessing are; `trained`: whether somebody trained the weights."""

    model: nn.Module
    images: torch.Tensor
    classes: Optional[torch.Tensor]
    weights: str
    pictures: str
    preprocessing: str
    trained: bool


def pictured(name: str, sources: Sources, seed: int) -> Pictured:
    """The network `name` with weights and pictures as `sources` ask; `seed` for what is random.

    Raises UnknownNameError, SkippedError where no trained weights of this network are obtainable,
    UsageError where a path is missing, and what the readers of files raise.
    """
    model = build(name, seed)
    style, weights, trained = _weigh(model, name, sources, seed)
    pixels, classes, pictures = _pixels(sources, network(name).size, seed)
    if sources.images == "noise":
        images, done = pixels, "none: noise as it is"
    elif sources.preprocessing == "right":
        mean, std = (torch.tensor(each).reshape(1, -1, 1, 1) for each in style)
        images, done = (pixels - mean) / std, "as the weights want it"
    elif sources.preprocessing == "raw":
        images, done = _as_artefact(pixels, style), "none: values from 0 to 255, as the artefact's"
    else:
        raise BadValueError(
            f"'{sources.preprocessing}' is no preprocessing", next_step="right or raw"
        )
    known = classes if trained else None
    return Pictured(model, images.contiguous(), known, weights, pictures, done, trained)


Style = Tuple[Tuple[float, ...], Tuple[float, ...]]


def _weigh(model: nn.Module, name: str, sources: Sources, seed: int) -> Tuple[Style, str, bool]:
    """Give `model` its weights; mean and standard deviation of pixels that these want."""
    usual = PREPROCESSING["torchvision"]
    if sources.weights == "file":
        return _from_path(model, name, sources.weights_path)
    if sources.weights == "trained" or (sources.weights == "obtainable" and name in TRAINED):
        if name not in TRAINED:
            raise SkippedError(
                f"no trained weights of {name} are obtainable",
                why=f"there are those of {', '.join(TRAINED)}",
                next_step="-p weights=file -p weights_path=PATH, or -p weights=random",
            )
        declared = data_set(TRAINED[name].set_name)
        load_trained(model, name, sources.files(declared.name))
        style = tuple(tuple(255 * each for each in of) for of in (declared.mean, declared.std))
        return (style[0], style[1]), f"trained: {declared.name}", True
    size = network(name).size
    scale_activations(model, _noise(_SCALED_ON, size, seed))
    said = f"random, seed {seed}, activations scaled to variance 1, residual branches to 1/16"
    return (usual.mean, usual.std), said, False


def _from_path(model: nn.Module, name: str, text: str) -> Tuple[Style, str, bool]:
    if not text:
        raise UsageError("weights=file needs the path", next_step="-p weights_path=FILE.pth")
    path = Path(text).expanduser()
    if path.is_dir():
        load_bin_folder(model, name, path)
        caffe = name in BIN_NETWORKS and not name.startswith("densenet")
        how = PREPROCESSING["caffe" if caffe else "torchvision"]
        return (how.mean, how.std), f"the folder {path.name} of .bin files", True
    load_state_file(model, path)
    how = PREPROCESSING["torchvision"]
    return (how.mean, how.std), f"the file {path.name}, sha256 {sha256_file(path)}", True


def _pixels(
    sources: Sources, size: int, seed: int
) -> Tuple[torch.Tensor, Optional[torch.Tensor], str]:
    """float32 [N, 3, size, size], values from 0 to 255, red first; classes; what they are."""
    if sources.images == "noise":
        generator = torch_compat.generator_for(torch.device("cpu"), seed)
        noise = torch.rand(_SCALED_ON, CHANNELS, size, size, generator=generator)
        return _NOISE_MOST * noise, None, f"uniform noise from 0 to {_NOISE_MOST:g}"
    if sources.images == "file":
        if not sources.images_path:
            raise UsageError("images=file needs the path", next_step="-p images_path=FILE.bin")
        path = Path(sources.images_path).expanduser()
        pixels = read_image_bin(path)
        return _resized(pixels, size), None, f"{len(pixels)} of the file {path.name}"
    files = sources.files(IMAGES)
    pixels = torch.from_numpy(np.array(files["test-images.u8"])).float()
    pairs = np.array(files["test-labels.u8"]).astype(np.int64)
    classes = torch.from_numpy(pairs[:, 0] + 256 * pairs[:, 1])
    return _resized(pixels, size), classes, f"{len(pixels)} of ImageNet ({IMAGES})"


def read_image_bin(path: Path) -> torch.Tensor:
    """The images of a `.bin` file as the artefact has them (values from 0 to 255, blue first), as
    float32 [N, 3, 224, 224], red first.

    Raises DataUnavailableError where there is none, DataCorruptError for a length of no whole
    images, or values that are not finite.
    """
    try:
        length = path.stat().st_size
        values = np.fromfile(str(path), "<f4")
    except OSError as error:
        raise DataUnavailableError(
            f"no images in {path}",
            why=error.strerror or str(error),
            next_step="narrowgauge image-bin pack PICTURE… --out FILE.bin",
        ) from error
    count = count_of(length, str(path))
    if not np.isfinite(values).all():
        raise DataCorruptError(
            f"{path} is no file of images", why="it has values that are not finite"
        )
    images = torch.from_numpy(values.astype(np.float32)).reshape(count, SIDE, SIDE, CHANNELS)
    return images.permute(0, 3, 1, 2).flip(1).contiguous()


def _as_artefact(pixels: torch.Tensor, style: Style) -> torch.Tensor:
    """Blue first into whatever network it is: right for weights that Keras' ResNets and VGGs have,
    whose kernels are turned round here, and wrong for its DenseNets' and for torchvision's. The
    weights are told by what they want of pixels, not by the network's name."""
    caffe = PREPROCESSING["caffe"].std
    blue_first_is_right = np.allclose(style[1], caffe)
    return pixels if blue_first_is_right else pixels.flip(1)


def _resized(pixels: torch.Tensor, size: int) -> torch.Tensor:
    return pixels if pixels.shape[-1] == size else F.adaptive_avg_pool2d(pixels, size)


def _noise(count: int, size: int, seed: int) -> torch.Tensor:
    generator = torch_compat.generator_for(torch.device("cpu"), seed)
    return torch.randn(count, CHANNELS, size, size, generator=generator)
