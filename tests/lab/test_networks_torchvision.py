"""Held against torchvision itself, and trained weights against real images: slow."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Iterator, List

import pytest
import torch
from torch import fx, nn

from narrowgauge_contract.data_commands import LAUNCHER
from narrowgauge_contract.datasets import data_set
from narrowgauge_data import fetch
from narrowgauge_data.caller import Caller
from narrowgauge_lab.data import open_files
from narrowgauge_lab.networks import NOTES, build
from narrowgauge_lab.networks.subject import count_right, make_subject
from narrowgauge_lab.networks.trained import TRAINED
from narrowgauge_lab.torch_compat import torch_version

pytestmark = pytest.mark.slow


#: The torchvision of each torch that the tests run on.
VERSIONS = {(1, 8): "0.9.0", (2, 13): "0.28.0"}


@pytest.fixture(scope="module")
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """PyPI's, beside this torch, which it would otherwise replace by another build."""
    version = VERSIONS.get(torch_version())
    if version is None:
        pytest.skip(f"it is not known which torchvision belongs to torch {torch.__version__}")
    folder = str(tmp_path_factory.mktemp("torchvision"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*command, f"torchvision=={version}"], check=True)
    if torch_version() >= (2, 0):
        # It is built for CUDA and registers kernels of operators that, on a CPU torch, nobody
        # declared.
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor boxes, Tensor scores, float most) -> Tensor")
        library.define("qnms(Tensor boxes, Tensor scores, float most) -> Tensor")
    sys.path.append(folder)
    yield importlib.import_module("torchvision")
    sys.path.remove(folder)


@pytest.mark.parametrize("name", NOTES)
def test_it_is_torchvisions_weight_for_weight_and_operator_for_operator(
    name: str, torchvision: Any
) -> None:
    ours = build(name, 3)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions announce a change of a default
        theirs = getattr(torchvision.models, name)().eval()

    assert list(ours.state_dict()) == list(theirs.state_dict())
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values()):
        assert torch.equal(one, other)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))
    assert _operators(ours) == _operators(theirs)


def _operators(model: nn.Module) -> List[str]:
    """Modules and functions in the order in which they run. A reshape to the size that it has
    anyway, which torchvision 0.9 wrote, counts as the flatten that it was to be."""
    shaping = ("flatten", "reshape")
    found = []
    for node in fx.symbolic_trace(model).graph.nodes:
        name = (
            str(node.target) if node.op == "call_module" else getattr(node.target, "__name__", "")
        )
        name = name or str(node.target)
        if node.op in ("call_module", "call_function", "call_method"):
            if name in ("getattr", "getitem", "size"):
                continue
            found.append("flatten" if name in shaping else name)
    return found


@pytest.mark.parametrize(("name", "least"), [("mobilenet_v2", 17), ("resnet50-v1", 18)])
def test_trained_weights_know_real_images(name: str, least: int, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    caller = Caller(lambda text: None, dict(os.environ), LAUNCHER)
    for needed in ("imagenet-20", TRAINED[name].set_name):
        fetch.fetch(data_set(needed), tmp_path, caller)
    subject = make_subject(
        name, "trained", 5, run_seed=0, images_seed=0, files=lambda each: open_files(each, tmp_path)
    )
    assert subject.labelled is not None

    with torch.no_grad():
        right = count_right(subject.model, subject.labelled, subject.images)
    assert (right.first >= least, right.first_five) == (True, 20)
