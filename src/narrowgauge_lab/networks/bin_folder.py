"""Weights as the sparse-convolution artefact keeps them: a folder with a `.bin` file per layer.

They are tf.keras.applications' networks under its names for layers (`conv3_block2_1_conv.bin`),
float32, little-endian, without a header. A convolution: kernel [out, in, height, width], then its
bias where the network has one (ResNet, VGG). Batch normalisation: gamma, beta, mean, variance. A
linear layer is as Keras has it, [in, out], then its bias; the artefact's own programs read that as
[out, in], which gives other logits. The inputs of VGG's first one are in the order height, width,
channel. Keras' ResNets and VGGs take images blue first; their first kernels are turned round here,
so that every network of ours takes red first.

The sizes and orders were held against ResNet-50's files: they are, bit for bit, the numbers of the
data set `resnet50-v1-imagenet`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Dict, Iterator, List

import numpy as np
import torch
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError

__all__ = ["BIN_NETWORKS", "Layer", "layers_of", "load_bin_folder", "write_bin_folder"]

#: Networks that such folders are of.
BIN_NETWORKS = (
    "densenet121", "densenet169", "densenet201",
    "resnet50-v1", "resnet101-v1", "resnet152-v1", "vgg16", "vgg19",
)  # fmt: skip
#: What Keras adds to a variance in these networks, and torch in ours.
_KERAS_EPSILON, _TORCH_EPSILON = 1.001e-5, 1e-5
#: Height and width of what VGG's first linear layer sees.
_VGG_SIDE = 7

State = Dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A file and what it is of. `kind`: conv, norm or linear. `ours`: the module's name here.
    `after`: of a convolution with a bias there and none here, the batch normalisation behind it,
    whose mean takes the bias. `spatial`: of a linear layer, the side of the maps it is given.
    `blue_first`: of a network's first convolution, whether it takes colours in that order there."""

    file: str
    kind: str
    ours: str
    after: str = ""
    spatial: int = 1
    blue_first: bool = False


def layers_of(name: str, model: nn.Module) -> List[Layer]:
    """Every file of the network `name`, which `model` is. Raises UsageError for one that the
    artefact has no layout of."""
    if name not in BIN_NETWORKS:
        raise UsageError(
            f"there is no folder of .bin files for {name}",
            why=f"the layout is of {', '.join(BIN_NETWORKS)}",
        )
    family = name.rstrip("0123456789") if "-" not in name else "resnet"
    return list({"densenet": _densenet, "resnet": _resnet, "vgg": _vgg}[family](model))


def load_bin_folder(model: nn.Module, name: str, folder: Path) -> None:
    """Put the weights of `folder` into `model`, which `build(name)` made.

    Raises DataUnavailableError that names what is missing, DataCorruptError for a file of another
    length or with values that are not finite, UsageError; then the model is as it was.
    """
    layers = layers_of(name, model)
    missing = [each.file for each in layers if not (folder / each.file).is_file()]
    if missing:
        shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        raise DataUnavailableError(
            f"{folder} lacks {len(missing)} of the {len(layers)} files of {name}",
            why=f"missing: {shown}",
            next_step="give the folder with a .bin file for each layer",
        )
    wanted = model.state_dict()
    state: State = {}
    for layer in layers:
        values = _values(folder / layer.file, _size(layer, wanted), name)
        _read(layer, values, wanted, state)
    for key, tensor in wanted.items():
        if key.endswith("num_batches_tracked"):
            state[key] = torch.zeros_like(tensor)
    model.load_state_dict(state)


def write_bin_folder(model: nn.Module, name: str, folder: Path) -> List[Path]:
    """The reverse: `model`'s weights as files in `folder`, which exists. A bias that went into a
    batch normalisation is written as zeros, and its mean as it is."""
    state, written = model.state_dict(), []
    for layer in layers_of(name, model):
        path = folder / layer.file
        parts = [part.detach().double().cpu().numpy().ravel() for part in _parts(layer, state)]
        np.concatenate(parts).astype("<f4").tofile(str(path))
        written.append(path)
    return written


def _size(layer: Layer, wanted: State) -> int:
    weight = wanted[f"{layer.ours}.weight"]
    if layer.kind == "norm":
        return 4 * weight.numel()
    biased = layer.after or f"{layer.ours}.bias" in wanted
    return weight.numel() + (len(weight) if biased else 0)


def _values(path: Path, size: int, name: str) -> torch.Tensor:
    length = path.stat().st_size
    if length != 4 * size:
        raise DataCorruptError(
            f"{path} is not of {name}",
            why=f"it has {length} bytes where {4 * size} are due, {size} float32",
            next_step="copy it again, or give the folder of this network",
        )
    values = torch.from_numpy(np.fromfile(str(path), "<f4").astype(np.float32))
    if not bool(torch.isfinite(values).all()):
        raise DataCorruptError(f"{path} has values that are not finite", next_step="copy it again")
    return values


def _read(layer: Layer, values: torch.Tensor, wanted: State, state: State) -> None:
    """Add what a file holds to `state`. A convolution comes before the normalisation behind it."""
    weight = wanted[f"{layer.ours}.weight"]
    if layer.kind == "norm":
        gamma, beta, mean, variance = values.reshape(4, -1)
        bias = state.pop(f"bias of {layer.ours}", torch.zeros(()))
        state[f"{layer.ours}.weight"], state[f"{layer.ours}.bias"] = gamma, beta
        state[f"{layer.ours}.running_mean"] = mean - bias
        wider = variance.double() + (_KERAS_EPSILON - _TORCH_EPSILON)
        state[f"{layer.ours}.running_var"] = wider.float()
        return
    kernel, bias = values[: weight.numel()], values[weight.numel() :]
    if layer.kind == "linear":
        kernel = _turned(kernel, weight, layer.spatial)
    kernel = kernel.reshape(weight.shape)
    state[f"{layer.ours}.weight"] = kernel.flip(1) if layer.blue_first else kernel.contiguous()
    if layer.after:
        state[f"bias of {layer.after}"] = bias
    elif len(bias):
        state[f"{layer.ours}.bias"] = bias


def _turned(kernel: torch.Tensor, weight: torch.Tensor, side: int) -> torch.Tensor:
    """[height, width, channel, out] as [out, channel, height, width]."""
    return kernel.reshape(side, side, -1, len(weight)).permute(3, 2, 0, 1)


def _parts(layer: Layer, state: State) -> Iterator[torch.Tensor]:
    weight = state[f"{layer.ours}.weight"]
    if layer.kind == "norm":
        yield weight
        yield state[f"{layer.ours}.bias"]
        yield state[f"{layer.ours}.running_mean"]
        yield state[f"{layer.ours}.running_var"].double() - (_KERAS_EPSILON - _TORCH_EPSILON)
        return
    if layer.kind == "linear":
        side = layer.spatial
        weight = weight.reshape(len(weight), -1, side, side).permute(2, 3, 1, 0)
    yield weight.flip(1) if layer.blue_first else weight
    if layer.after:
        yield torch.zeros(len(state[f"{layer.ours}.weight"]))
    elif f"{layer.ours}.bias" in state:
        yield state[f"{layer.ours}.bias"]


def _resnet(model: nn.Module) -> Iterator[Layer]:
    yield Layer("conv1_conv.bin", "conv", "conv1", after="bn1", blue_first=True)
    yield Layer("conv1_bn.bin", "norm", "bn1")
    for stage in range(1, 5):
        for number, block in enumerate(getattr(model, f"layer{stage}")):
            theirs, ours = f"conv{stage + 1}_block{number + 1}", f"layer{stage}.{number}"
            if block.downsample is not None:
                yield from _convolution(
                    f"{theirs}_0", f"{ours}.downsample.0", f"{ours}.downsample.1"
                )
            for part in (1, 2, 3):
                yield from _convolution(
                    f"{theirs}_{part}", f"{ours}.conv{part}", f"{ours}.bn{part}"
                )
    yield Layer("predictions.bin", "linear", "fc")


def _convolution(theirs: str, conv: str, norm: str) -> Iterator[Layer]:
    yield Layer(f"{theirs}_conv.bin", "conv", conv, after=norm)
    yield Layer(f"{theirs}_bn.bin", "norm", norm)


def _densenet(model: nn.Module) -> Iterator[Layer]:
    yield Layer("conv1_conv.bin", "conv", "features.conv0")
    yield Layer("conv1_bn.bin", "norm", "features.norm0")
    for stage in range(1, 5):
        block = getattr(model.features, f"denseblock{stage}")
        for number in range(1, len(block) + 1):
            theirs = f"conv{stage + 1}_block{number}"
            ours = f"features.denseblock{stage}.denselayer{number}"
            yield Layer(f"{theirs}_0_bn.bin", "norm", f"{ours}.norm1")
            yield Layer(f"{theirs}_1_conv.bin", "conv", f"{ours}.conv1")
            yield Layer(f"{theirs}_1_bn.bin", "norm", f"{ours}.norm2")
            yield Layer(f"{theirs}_2_conv.bin", "conv", f"{ours}.conv2")
        if stage < 4:
            yield Layer(f"pool{stage + 1}_bn.bin", "norm", f"features.transition{stage}.norm")
            yield Layer(f"pool{stage + 1}_conv.bin", "conv", f"features.transition{stage}.conv")
    yield Layer("bn.bin", "norm", "features.norm5")
    yield Layer("predictions.bin", "linear", "classifier")


def _vgg(model: nn.Module) -> Iterator[Layer]:
    stage, number = 1, 1
    for position, module in enumerate(model.features):
        if isinstance(module, nn.MaxPool2d):
            stage, number = stage + 1, 1
        elif isinstance(module, nn.Conv2d):
            file = f"block{stage}_conv{number}.bin"
            yield Layer(file, "conv", f"features.{position}", blue_first=position == 0)
            number += 1
    yield Layer("fc1.bin", "linear", "classifier.0", spatial=_VGG_SIDE)
    yield Layer("fc2.bin", "linear", "classifier.3")
    yield Layer("predictions.bin", "linear", "classifier.6")
