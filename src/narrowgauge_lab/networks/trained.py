"""Weights that others trained, and labelled images to try them on.

They are data sets (`narrowgauge_contract.datasets`), fetched and checked as such. Networks without
such weights have random ones.
"""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any, Callable, Dict, List, Mapping, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.datasets import data_set
from narrowgauge_lab import torch_compat
from narrowgauge_lab.errors import DataCorruptError
from narrowgauge_lab.networks.state_files import first_reason

__all__ = ["IMAGES", "TRAINED", "Labelled", "Trained", "labelled_images", "load_trained"]

Files = Mapping[str, np.ndarray]
State = Dict[str, torch.Tensor]

#: The set of labelled images.
IMAGES = "imagenet-20"
#: Keras' and torchvision's, added to a variance before its root is taken.
_KERAS_EPSILON, _TORCH_EPSILON = 1e-3, 1e-5


@dataclasses.dataclass(frozen=True)
class Trained:
    """Where a network's weights are, and how their files become its state dict."""

    set_name: str
    state: Callable[[Files], State]


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Images normalised for a network, float32 [B, 3, H, W], and their classes, int64 [B]."""

    images: torch.Tensor
    classes: torch.Tensor


def load_trained(model: nn.Module, name: str, files: Files) -> None:
    """Put the weights of `TRAINED[name]` into `model`, which `build(name)` made.

    `files` are those of its set. Raises DataCorruptError where they are not this network's.
    """
    trained = TRAINED[name]
    try:
        model.load_state_dict(trained.state(files))
    except (KeyError, ValueError, RuntimeError) as error:
        raise DataCorruptError(
            f"the weights of {trained.set_name} are not those of {name}",
            why=first_reason(error),
            next_step=f"fetch the data set {trained.set_name} again",
        ) from error


def labelled_images(files: Files, set_name: str, size: int) -> Labelled:
    """All images of the set IMAGES, as the weights of `set_name` want them, `size` pixels wide."""
    declared = data_set(set_name)
    pixels = torch.from_numpy(np.array(files["test-images.u8"])).float().div_(255)
    if pixels.shape[-1] != size:
        pixels = F.adaptive_avg_pool2d(pixels, size)
    mean, std = (torch.tensor(each).reshape(1, -1, 1, 1) for each in (declared.mean, declared.std))
    pairs = np.array(files["test-labels.u8"]).astype(np.int64)
    return Labelled((pixels - mean) / std, torch.from_numpy(pairs[:, 0] + 256 * pairs[:, 1]))


def _torchvision(files: Files) -> State:
    """A state dict under these names already."""
    state: State = dict(torch_compat.load_state(io.BytesIO(files["weights.pth"].tobytes())))
    return state


def _keras_resnet50(files: Files) -> State:
    """Keras' ResNet-50 ("v1") under torchvision's names.

    Kernels are [height, width, in, out] there; the biases of convolutions go into the running means
    of the batch normalisations behind them, Keras' larger epsilon into the variances; the first
    kernel takes colours in the order blue, green, red.
    """
    arrays = _tfjs_arrays(files)
    state: State = {}
    for theirs, norm, ours, ours_norm in _keras_names():
        kernel = arrays.pop(f"{theirs}/kernel").permute(3, 2, 0, 1)
        state[f"{ours}.weight"] = kernel.flip(1) if theirs == "conv1" else kernel
        state[f"{ours_norm}.weight"] = arrays.pop(f"{norm}/gamma")
        state[f"{ours_norm}.bias"] = arrays.pop(f"{norm}/beta")
        bias = arrays.pop(f"{theirs}/bias")
        state[f"{ours_norm}.running_mean"] = arrays.pop(f"{norm}/moving_mean") - bias
        variance = arrays.pop(f"{norm}/moving_variance").double()
        state[f"{ours_norm}.running_var"] = (variance + (_KERAS_EPSILON - _TORCH_EPSILON)).float()
        state[f"{ours_norm}.num_batches_tracked"] = torch.tensor(0)
    state["fc.weight"] = arrays.pop("fc1000/kernel").t()
    state["fc.bias"] = arrays.pop("fc1000/bias")
    if arrays:
        raise ValueError(f"weights that no layer has: {', '.join(sorted(arrays))}")
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _keras_names() -> List[Tuple[str, str, str, str]]:
    """Convolution and batch normalisation there, and both here."""
    names = [("conv1", "bn_conv1", "conv1", "bn1")]
    for stage, count in enumerate((3, 4, 6, 3), start=1):
        for position in range(count):
            there = f"{stage + 1}{'abcdef'[position]}_branch"
            here = f"layer{stage}.{position}"
            branches = [(f"2{'abc'[i]}", f"conv{i + 1}", f"bn{i + 1}") for i in range(3)]
            if position == 0:
                branches.append(("1", "downsample.0", "downsample.1"))
            names += [
                (f"res{there}{branch}", f"bn{there}{branch}", f"{here}.{conv}", f"{here}.{norm}")
                for branch, conv, norm in branches
            ]
    return names


def _tfjs_arrays(files: Files) -> State:
    """The arrays of TensorFlow.js' format by their names."""
    description: List[Dict[str, Any]] = json.loads(files["weights.json"].tobytes().decode("utf-8"))
    values = np.frombuffer(files["weights.bin"].tobytes(), "<f4")
    arrays: State = {}
    at = 0
    for each in description:
        shape = tuple(each["shape"])
        size = int(np.prod(shape))
        arrays[each["name"]] = torch.from_numpy(values[at : at + size].reshape(shape).copy())
        at += size
    if at != values.size:
        raise ValueError(f"{at} weights are described, {values.size} are there")
    return arrays


#: The networks for which weights are obtainable.
TRAINED: Dict[str, Trained] = {
    "mobilenet_v2": Trained("mobilenet_v2-imagenet", _torchvision),
    "resnet50-v1": Trained("resnet50-v1-imagenet", _keras_resnet50),
}
