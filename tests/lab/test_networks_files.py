"""Weights out of others' files: state dicts that may hold code, and folders of `.bin` files."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import SkippedError, UsageError
from narrowgauge_contract.image_bin import IMAGE_BYTES, PREPROCESSING, SIDE
from narrowgauge_lab import safe_pickle, torch_compat
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_lab.networks import build, pictures, registry
from narrowgauge_lab.networks.bin_folder import (
    BIN_NETWORKS,
    layers_of,
    load_bin_folder,
    write_bin_folder,
)
from narrowgauge_lab.networks.densenet import DenseNet
from narrowgauge_lab.networks.pictures import Sources, pictured, read_image_bin
from narrowgauge_lab.networks.resnet import EarlyBottleneck, ResNet
from narrowgauge_lab.networks.state_files import load_state_file, read_state
from narrowgauge_lab.networks.vgg import VGG

#: Small ones of the families that the artefact has, by the name that says the layout.
FAMILIES: Dict[str, Any] = {
    "resnet50-v1": lambda: ResNet((1, 2, 1, 1), 8, 10, EarlyBottleneck),
    "densenet121": lambda: DenseNet((2, 1, 1, 1), 4, 8, 10),
    "vgg16": lambda: VGG((1, 1, 1, 1, 1), norm=False, classes=10, width=2, hidden=6),
}


class _Touch:
    """What a file that is no state dict may do."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def _made(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.0)
    return model


def _old_names(state: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    renamed = {
        name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): tensor
        for name, tensor in state.items()
    }
    return {k: v for k, v in renamed.items() if not k.endswith("num_batches_tracked")}


class TestStateFiles:
    @pytest.mark.parametrize("zipped", [True, False])
    def test_weights_come_back_from_either_format(self, tmp_path: Path, zipped: bool) -> None:
        saved, model = _made("resnet50-v1", 1), _made("resnet50-v1", 2)
        path = tmp_path / "net.pth"
        torch.save(saved.state_dict(), str(path), _use_new_zipfile_serialization=zipped)

        load_state_file(model, path)

        for name, tensor in saved.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)

    def test_older_names_of_densenets_are_known(self, tmp_path: Path) -> None:
        saved, model = _made("densenet121", 1), _made("densenet121", 2)
        old = _old_names(dict(saved.state_dict()))
        assert "features.denseblock1.denselayer1.norm.1.weight" in old
        torch.save(old, str(tmp_path / "net.pth"))

        load_state_file(model, tmp_path / "net.pth")

        key = "features.denseblock1.denselayer1.conv2.weight"
        assert torch.equal(model.state_dict()[key], saved.state_dict()[key])

    @pytest.mark.parametrize("zipped", [True, False])
    def test_what_a_file_says_is_not_run(self, tmp_path: Path, zipped: bool) -> None:
        made = tmp_path / "made"
        path = tmp_path / "net.pth"
        torch.save({"w": _Touch(made)}, str(path), _use_new_zipfile_serialization=zipped)

        with pytest.raises(DataCorruptError, match="torch does not read it"):
            read_state(path)
        assert not made.exists()

    def test_the_reader_of_older_torches_runs_nothing_either(self, tmp_path: Path) -> None:
        """It is torch's own below 1.13; here whatever torch there is reads by it."""
        made, path = tmp_path / "made", tmp_path / "net.pth"
        weights = {"w": torch.arange(3.0), "n": {"list": [1, "two", None]}}
        options: Dict[str, Any] = {"pickle_module": safe_pickle, "map_location": "cpu"}
        if torch_compat.torch_version() >= (1, 13):
            options["weights_only"] = False

        torch.save(weights, str(path))
        found = torch.load(str(path), **options)
        torch.save({"w": _Touch(made)}, str(path))
        with pytest.raises(pickle.UnpicklingError, match=r"wants to use (posix|nt)\.mkdir"):
            torch.load(str(path), **options)

        assert torch.equal(found["w"], weights["w"])
        assert found["n"] == weights["n"]
        assert not made.exists()

    def test_a_program_of_torchscript_is_refused_before_it_is_read(self, tmp_path: Path) -> None:
        """torch.load hands such a file to another reader, which runs what it holds."""
        path = tmp_path / "net.pth"
        with torch_compat.torchscript():
            torch.jit.script(nn.Linear(2, 2)).save(str(path))
        with pytest.raises(DataCorruptError, match="torch does not read it") as caught:
            read_state(path)
        assert "a TorchScript archive: it holds code" in caught.value.why
        with path.open("rb") as stream, pytest.raises(pickle.UnpicklingError, match="TorchScript"):
            torch_compat.load_state(stream)

    def test_a_tar_is_refused_and_nothing_unpacked(self, tmp_path: Path) -> None:
        path, inside = tmp_path / "net.pth", tmp_path / "storages"
        inside.write_bytes(b"bytes")
        with tarfile.open(str(path), "w") as archive:
            archive.add(str(inside), arcname="storages")
        with pytest.raises(DataCorruptError) as caught:
            read_state(path)
        assert "a tar archive" in caught.value.why

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no pickle", bytes(1024)])
    def test_what_is_none_of_these_is_an_error(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "net.pth"
        path.write_bytes(content)
        with pytest.raises(DataCorruptError, match="does not hold this network's weights"):
            read_state(path)

    @pytest.mark.parametrize(
        "held", [b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n"]
    )
    def test_a_file_sets_no_attributes_of_torchs_own(self, held: bytes) -> None:
        """They would be there for the whole process."""
        for state in (b"}S'poisoned'\nI1\ns", b"(N}S'poisoned'\nI1\nst"):
            with pytest.raises(pickle.UnpicklingError, match="wants to set attributes of a"):
                safe_pickle.load(io.BytesIO(held + state + b"b."))
        assert not hasattr(torch.FloatStorage, "poisoned")
        assert not hasattr(torch._utils._rebuild_tensor_v2, "poisoned")

    def test_the_attributes_of_a_state_dict_come_back(self, tmp_path: Path) -> None:
        saved = nn.Sequential(nn.BatchNorm2d(2)).state_dict()
        found = safe_pickle.load(io.BytesIO(pickle.dumps(type(saved)(), protocol=2)))
        assert found == {}
        torch.save(saved, str(tmp_path / "net.pth"))
        state = read_state(tmp_path / "net.pth")
        assert state._metadata == saved._metadata

    def test_two_names_of_one_tensor_are_refused(self, tmp_path: Path) -> None:
        model = _made("densenet121")
        state = dict(model.state_dict())
        name = "features.denseblock1.denselayer1.norm1.weight"
        state[name.replace("norm1", "norm.1")] = state[name]
        torch.save(state, str(tmp_path / "net.pth"))
        with pytest.raises(DataCorruptError) as caught:
            load_state_file(model, tmp_path / "net.pth")
        assert f"two of its names are {name}" in caught.value.why

    def test_another_network_is_refused_in_a_line(self, tmp_path: Path) -> None:
        torch.save(_made("vgg16").state_dict(), str(tmp_path / "net.pth"))
        with pytest.raises(DataCorruptError, match="names are not the network's") as caught:
            load_state_file(_made("resnet50-v1"), tmp_path / "net.pth")
        assert len(caught.value.why) < 400
        with pytest.raises(DataUnavailableError, match="no weights in"):
            load_state_file(_made("vgg16"), tmp_path / "none.pth")


class TestBinFolders:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_a_folder_gives_the_network_that_wrote_it(self, tmp_path: Path, name: str) -> None:
        saved, model = _made(name, 1), _made(name, 2)

        written = write_bin_folder(saved, name, tmp_path)
        load_bin_folder(model, name, tmp_path)

        assert len(written) == len(set(written)) == len(layers_of(name, model))
        for key, tensor in saved.state_dict().items():
            assert torch.allclose(model.state_dict()[key], tensor, rtol=1e-6), key

    @pytest.mark.parametrize(
        ("name", "files", "some"),
        [
            ("densenet169", 338, ("pool3_conv.bin", "conv5_block32_2_conv.bin", "bn.bin")),
            ("densenet201", 402, ("conv4_block48_0_bn.bin", "predictions.bin")),
            ("resnet50-v1", 107, ("conv2_block1_0_conv.bin", "conv5_block3_3_bn.bin")),
            ("resnet152-v1", 311, ("conv4_block36_2_conv.bin",)),
            ("vgg19", 19, ("block5_conv4.bin", "fc1.bin", "fc2.bin")),
        ],
    )
    def test_the_files_are_the_artefacts(
        self, name: str, files: int, some: Tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Their numbers and names are those of its folders."""
        for draw in ("kaiming_uniform_", "kaiming_normal_", "normal_", "uniform_"):
            monkeypatch.setattr(nn.init, draw, lambda tensor, *_, **__: tensor)
        names = [layer.file for layer in layers_of(name, registry.network(name).construct())]

        assert len(names) == len(set(names)) == files
        assert set(some) <= set(names)

    def test_a_linear_layer_is_turned_and_sees_height_width_channel(self, tmp_path: Path) -> None:
        model = _made("vgg16")
        write_bin_folder(model, "vgg16", tmp_path)
        hidden, channels = 6, 16
        theirs = np.fromfile(str(tmp_path / "fc1.bin"), "<f4")[: 49 * channels * hidden]
        kernel = torch.from_numpy(theirs.reshape(49 * channels, hidden))
        maps = torch.rand(2, channels, 7, 7)

        by_keras = maps.permute(0, 2, 3, 1).reshape(2, -1) @ kernel
        linear = model.classifier[0]
        ours = nn.functional.linear(maps.flatten(1), linear.weight)

        assert torch.allclose(by_keras, ours, rtol=1e-4)

    def test_biases_go_into_the_means_and_blue_comes_first(self, tmp_path: Path) -> None:
        name, model = "resnet50-v1", _made("resnet50-v1", 3)
        write_bin_folder(model, name, tmp_path)
        path = tmp_path / "conv1_conv.bin"
        values = np.fromfile(str(path), "<f4")
        values[-8:] = 2.0
        values.tofile(str(path))
        wanted = model.bn1.running_mean.clone() - 2.0
        kernel = torch.from_numpy(values[:-8].reshape(8, 3, 7, 7).copy())

        load_bin_folder(model, name, tmp_path)

        assert torch.allclose(model.bn1.running_mean, wanted)
        assert torch.equal(model.conv1.weight.detach(), kernel.flip(1))
        variance = np.fromfile(str(tmp_path / "conv1_bn.bin"), "<f4")[-8:]
        assert model.bn1.running_var.numpy() == pytest.approx(variance + 1e-8, rel=1e-6)

    def test_missing_and_damaged_files_are_named(self, tmp_path: Path) -> None:
        name, model = "vgg16", _made("vgg16", 1)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        write_bin_folder(_made(name, 2), name, tmp_path)

        (tmp_path / "fc2.bin").rename(tmp_path / "kept")
        with pytest.raises(DataUnavailableError, match="lacks 1 of the 8 files") as caught:
            load_bin_folder(model, name, tmp_path)
        assert "fc2.bin" in caught.value.why
        (tmp_path / "fc2.bin").write_bytes((tmp_path / "kept").read_bytes()[:-4])
        with pytest.raises(DataCorruptError, match=r"fc2.bin is not of vgg16") as damaged:
            load_bin_folder(model, name, tmp_path)
        assert "164 bytes where 168 are due" in damaged.value.why
        np.full(42, np.inf, "<f4").tofile(str(tmp_path / "fc2.bin"))
        with pytest.raises(DataCorruptError, match="not finite"):
            load_bin_folder(model, name, tmp_path)
        with pytest.raises(UsageError, match=r"no folder of \.bin files for alexnet"):
            load_bin_folder(model, "alexnet", tmp_path)
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[key])


def test_networks_of_the_artefact_have_their_stride_in_the_1x1() -> None:
    assert set(BIN_NETWORKS) <= set(registry.NETWORKS)
    for name in registry.EARLY_STRIDE:
        block = ResNet((1, 1, 1, 1), 8, 10, EarlyBottleneck).layer2[0]
        assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1)), name
        assert registry.network(name).construct.keywords["block"] is EarlyBottleneck


def _no_files(name: str) -> Dict[str, np.ndarray]:
    raise AssertionError(f"{name} was read")


def _picture_files(_name: str) -> Dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    return {
        "test-images.u8": random.randint(0, 256, (3, 3, 224, 224)).astype(np.uint8),
        "test-labels.u8": np.array([[i, 1] for i in range(3)], np.uint8),
    }


class TestPictures:
    def test_pictures_are_prepared_as_weights_want_them_or_not_at_all(self) -> None:
        files = _picture_files("")
        red = torch.from_numpy(files["test-images.u8"][:, 0]).float()

        name = "resnet50-tiny"
        right, raw = (
            pictured(name, Sources("random", "imagenet-20", how, _picture_files), 0)
            for how in ("right", "raw")
        )

        pooled = nn.functional.adaptive_avg_pool2d(red, 32)
        assert torch.allclose(right.images[:, 0], (pooled - 123.675) / 58.395, atol=1e-4)
        # Blue first into a network that wants red first: red is in the last place.
        assert torch.allclose(raw.images[:, 2], pooled)
        assert right.classes is None, "random weights are right about nothing"
        assert "random, seed 0" in right.weights

    @pytest.mark.parametrize(("mean", "red"), [("caffe", 0), ("torchvision", 2)])
    def test_blue_first_is_right_by_what_weights_want(
        self, monkeypatch: pytest.MonkeyPatch, mean: str, red: int
    ) -> None:
        """Not by the network's name: torchvision's weights of a ResNet want red first."""
        how = PREPROCESSING[mean]
        monkeypatch.setattr(pictures, "_weigh", lambda *_: ((how.mean, how.std), "of a test", True))
        sources = Sources("file", "imagenet-20", "raw", _picture_files)
        made = pictured("resnet50-tiny", sources, 0)

        wanted = torch.from_numpy(_picture_files("")["test-images.u8"][:, 0]).float()
        pooled = nn.functional.adaptive_avg_pool2d(wanted, 32)
        assert torch.allclose(made.images[:, red], pooled)

    def test_files_of_images_are_blue_first(self, tmp_path: Path) -> None:
        values = np.zeros((2, SIDE, SIDE, 3), "<f4")
        values[0, 1, 2] = (10, 20, 30)
        values.tofile(str(tmp_path / "two.bin"))

        images = read_image_bin(tmp_path / "two.bin")

        assert images.shape == (2, 3, SIDE, SIDE)
        assert images[0, :, 1, 2].tolist() == [30, 20, 10]
        sources = Sources("random", "file", "right", _no_files, "", str(tmp_path / "two.bin"))
        made = pictured("resnet50-tiny", sources, 0)
        assert made.images.shape == (2, 3, 32, 32)
        assert made.pictures == "2 of the file two.bin"

    def test_a_file_of_images_that_is_none(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.bin"
        path.write_bytes(bytes(IMAGE_BYTES - 4))
        with pytest.raises(DataCorruptError, match="no whole images"):
            read_image_bin(path)
        np.full(IMAGE_BYTES // 4, np.nan, "<f4").tofile(str(path))
        with pytest.raises(DataCorruptError, match="not finite"):
            read_image_bin(path)
        with pytest.raises(DataUnavailableError, match="no images in"):
            read_image_bin(tmp_path / "none.bin")

    def test_noise_is_the_artefacts(self) -> None:
        made = pictured("resnet50-tiny", Sources("random", "noise", "right", _no_files), 0)

        assert 900 < float(made.images.max()) <= 1000
        assert 0 <= float(made.images.min()) < 100
        assert made.preprocessing == "none: noise as it is"

    def test_weights_that_are_not_there(self, tmp_path: Path) -> None:
        def sources(weights: str, path: str = "") -> Sources:
            return Sources(weights, "noise", "right", _no_files, path)

        with pytest.raises(SkippedError, match="no trained weights of resnet50-tiny"):
            pictured("resnet50-tiny", sources("trained"), 0)
        assert pictured("resnet50-tiny", sources("obtainable"), 0).weights.startswith("random")
        with pytest.raises(UsageError, match="needs the path"):
            pictured("resnet50-tiny", sources("file"), 0)
        with pytest.raises(DataUnavailableError, match="no weights in"):
            pictured("resnet50-tiny", sources("file", str(tmp_path / "none.pth")), 0)
        torch.save(build("resnet50-tiny", 7).state_dict(), str(tmp_path / "net.pth"))
        made = pictured("resnet50-tiny", sources("file", str(tmp_path / "net.pth")), 0)
        assert made.trained
        assert made.weights.startswith("the file net.pth, sha256 ")
