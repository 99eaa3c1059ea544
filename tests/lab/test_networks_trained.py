"""Weights that others trained, labelled images, and what experiments make of both."""

from __future__ import annotations

import json
from typing import Dict, List

import numpy as np
import pytest
import torch
from torch import nn

from narrowgauge_contract.datasets import DATA_SETS
from narrowgauge_lab.errors import DataCorruptError
from narrowgauge_lab.networks import build
from narrowgauge_lab.networks.subject import Labelled, count_right, make_subject
from narrowgauge_lab.networks.trained import (
    IMAGES,
    TRAINED,
    _keras_names,
    _keras_resnet50,
    labelled_images,
    load_trained,
)


def test_each_set_of_weights_is_declared() -> None:
    for trained in TRAINED.values():
        declared = DATA_SETS[trained.set_name]
        assert len(declared.mean) == len(declared.std) == 3
        assert all(flat.name.startswith("weights.") for flat in declared.files)


def _pictures() -> Dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    return {
        "test-images.u8": random.randint(0, 256, (20, 3, 224, 224)).astype(np.uint8),
        "test-labels.u8": np.array([[i, i % 2] for i in range(20)], np.uint8),
    }


def test_labels_have_two_bytes_and_images_are_normalised_for_their_network() -> None:
    files = _pictures()
    found = labelled_images(files, "resnet50-v1-imagenet", 224)

    assert found.classes[:4].tolist() == [0, 257, 2, 259]
    red = files["test-images.u8"][0, 0].astype(np.float32)
    assert torch.allclose(found.images[0, 0], torch.from_numpy(red) - 123.68, atol=1e-3)
    assert labelled_images(files, "mobilenet_v2-imagenet", 32).images.shape == (20, 3, 32, 32)


class _Keras:
    """Keras' layout of random weights: what `_keras_resnet50` reads."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(1)
        self.arrays: Dict[str, np.ndarray] = {}
        state = build("resnet50-v1").state_dict()
        for conv, norm, ours, _ in _keras_names():
            out, into, height, width = state[f"{ours}.weight"].shape
            self._add(f"{conv}/kernel", height, width, into, out)
            self._add(f"{conv}/bias", out)
            for part in ("gamma", "beta", "moving_mean", "moving_variance"):
                self._add(f"{norm}/{part}", out)
        self._add("fc1000/kernel", 2048, 1000)
        self._add("fc1000/bias", 1000)

    def _add(self, name: str, *shape: int) -> None:
        self.arrays[name] = self.random.rand(*shape).astype("<f4")

    def files(self) -> Dict[str, np.ndarray]:
        described = [
            {"name": n, "shape": a.shape, "dtype": "float32"} for n, a in self.arrays.items()
        ]
        raw = b"".join(array.tobytes() for array in self.arrays.values())
        return {
            "weights.json": np.frombuffer(json.dumps(described).encode(), np.uint8),
            "weights.bin": np.frombuffer(raw, np.uint8),
        }


@pytest.fixture(scope="module")
def keras() -> _Keras:
    return _Keras()


def test_keras_weights_compute_what_keras_computes(keras: _Keras) -> None:
    """Its first layers, by hand: blue first, a bias, epsilon 1e-3."""
    state = _keras_resnet50(keras.files())
    model = build("resnet50-v1")
    model.load_state_dict(state)
    arrays = {name: torch.from_numpy(array.copy()) for name, array in keras.arrays.items()}
    images = torch.rand(1, 3, 32, 32)

    kernel = arrays["conv1/kernel"].permute(3, 2, 0, 1)
    hidden = nn.functional.conv2d(images.flip(1), kernel, arrays["conv1/bias"], 2, 3)
    mean, variance, gamma, beta = (
        arrays[f"bn_conv1/{part}"].reshape(1, -1, 1, 1)
        for part in ("moving_mean", "moving_variance", "gamma", "beta")
    )
    expected = (hidden - mean) / (variance + 1e-3).sqrt() * gamma + beta
    with torch.no_grad():
        assert torch.allclose(model.bn1(model.conv1(images)), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(state["fc.weight"], arrays["fc1000/kernel"].t())
    assert model.layer2[0].conv1.stride == (2, 2)
    assert model.layer2[0].conv2.stride == (1, 1)


@pytest.mark.parametrize("wrong", ["a name", "cut short"])
def test_weights_of_another_network_are_refused(keras: _Keras, wrong: str) -> None:
    files = keras.files()
    if wrong == "a name":
        renamed = files["weights.json"].tobytes().replace(b"fc1000/bias", b"fc1000/bies")
        files["weights.json"] = np.frombuffer(renamed, np.uint8)
    else:
        files["weights.bin"] = files["weights.bin"][:-8]

    with pytest.raises(DataCorruptError, match="not those of resnet50-v1"):
        load_trained(nn.Identity(), "resnet50-v1", files)


def test_what_does_not_fit_the_network_is_named(keras: _Keras) -> None:
    with pytest.raises(DataCorruptError, match="not those of resnet50-v1") as caught:
        load_trained(nn.Identity(), "resnet50-v1", keras.files())

    heading = "Error(s) in loading state_dict for Identity: Unexpected key(s) in state_dict: "
    assert caught.value.why.startswith(heading)


def _no_files(name: str) -> Dict[str, np.ndarray]:
    raise AssertionError(f"{name} was read")


def test_random_weights_read_nothing_and_have_nothing_to_be_right_about() -> None:
    first, again = (
        make_subject("resnet18-tiny", "random", 3, run_seed=1, images_seed=seed, files=_no_files)
        for seed in (1, 2)
    )

    assert first.labelled is None
    assert first.weights.startswith("random, seed 1, activations scaled")
    assert first.images.shape == (3, 3, 32, 32)
    assert not torch.equal(first.images, again.images), "a repeat has images of its own"
    assert torch.equal(first.calibration[0], again.calibration[0])
    for one, other in zip(first.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)


def test_a_network_without_weights_runs_real_images_and_still_has_no_accuracy() -> None:
    read: List[str] = []

    def files(name: str) -> Dict[str, np.ndarray]:
        read.append(name)
        return _pictures()

    subject = make_subject("resnet18-tiny", "trained", 23, run_seed=0, images_seed=0, files=files)

    assert read == [IMAGES]
    assert subject.labelled is None
    assert subject.weights.startswith("random")
    assert torch.equal(subject.images[20:], subject.images[:3]), "over and over"
    assert subject.calibration[0].shape == (20, 3, 32, 32)


def test_right_answers_are_counted_over_whole_batches_and_the_rest() -> None:
    labelled = Labelled(torch.arange(5.0).reshape(5, 1), torch.tensor([3, 3, 7, 1, 0]))
    sizes = []

    def call(images: torch.Tensor) -> torch.Tensor:
        """Class 3 first for the image 0, sixth for the image 1, third for the others."""
        sizes.append(len(images))
        logits = torch.zeros(len(images), 10)
        for row, image in enumerate(images[:, 0].long().tolist()):
            order = {0: [3], 1: [9, 8, 6, 5, 4, 3]}.get(image, [9, 8, int(labelled.classes[image])])
            for place, chosen in enumerate(order):
                logits[row, chosen] = 10.0 - place
        return logits.half()

    right = count_right(call, labelled, torch.zeros(2, 1, dtype=torch.float64))

    assert (right.first, right.first_five, right.images) == (1, 4, 5)
    assert sizes == [2, 2, 2]
