"""Channels last on a CPU: the same answers, kept from stage to stage, and where it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict

import numpy as np
import pytest
import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision
from narrowgauge_lab.anytime.network import AnytimeNetwork, added, laid_out, rectified, select
from narrowgauge_lab.anytime.systems import branchynet, iresnext_incremental, nested, sact
from narrowgauge_lab.anytime.systems.branchynet import branchy_net
from narrowgauge_lab.anytime.systems.iresnext import iresnext
from narrowgauge_lab.anytime.systems.nested import NestedNet
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.distributed import ALONE
from narrowgauge_lab.layouts import require_sound_channels_last
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.stepping import Stepper

CPU = torch.device("cpu")
LAST = torch.channels_last

NETS: Dict[str, Callable[[], AnytimeNetwork]] = {
    "b-lenet": lambda: branchy_net("b-lenet"),
    "b-alexnet": lambda: branchy_net("b-alexnet", 0.25),
    "b-resnet-110": lambda: branchy_net("b-resnet-110", 0.25),
    "nested": lambda: NestedNet(channels=4),
    "iresnext": lambda: iresnext("incremental", 1, 0.25),
    "sact": lambda: AdaptiveResNet("sact", 2, 4),
}


def images(name: str, count: int = 3) -> torch.Tensor:
    shape = branchynet.NETS[name].image if name in branchynet.NETS else (3, 32, 32)
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def is_last(tensor: torch.Tensor) -> bool:
    """By its strides: of one channel or one pixel both layouts are the same."""
    return tensor.stride() == torch.empty_like(tensor, memory_format=LAST).stride()


def many(tensor: torch.Tensor) -> bool:
    """Whether it is maps of several channels."""
    return tensor.dim() == 4 and tensor.shape[1] > 1


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 1, 1, 1), (0, 3, 4, 4)])
def test_images_are_the_same_images(shape: tuple) -> None:
    given = torch.randn(shape)
    found = laid_out(given)

    assert torch.equal(found, given)
    assert is_last(found)
    assert laid_out(found).stride() == found.stride()


def test_what_a_cpu_does_not_compute_is_left_as_it_is() -> None:
    given: Any = SimpleNamespace(device=torch.device("cuda", 0))

    assert laid_out(given) is given


@pytest.mark.parametrize("name", NETS)
def test_answers_are_those_of_channels_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = NETS[name]().double().eval()
    given = images(name).double()
    with torch.no_grad():
        last = net(given)
        for module in (branchynet, iresnext_incremental, nested, sact):
            monkeypatch.setattr(module, "laid_out", lambda maps: maps)
        first = net(given)

    for ours, theirs in zip(last, first):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["b-lenet", "b-alexnet", "b-resnet-110", "nested"])
def test_gradients_in_place_are_those_beside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = NETS[name]().double().eval()
    given, found = images(name).double(), []
    for ways in ({}, {"rectified": torch.relu, "added": torch.add}):
        for module in (branchynet, nested):
            for word, way in ways.items():
                monkeypatch.setattr(module, word, way, raising=False)
        net.zero_grad()
        sum(logits.pow(2).sum() for logits in net(given)).backward()  # type: ignore[union-attr]
        found.append([parameter.grad.clone() for parameter in net.parameters()])

    assert all(grad.any() for grad in found[0][:1])
    for ours, theirs in zip(*found):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_memory_is_saved_on_a_cpu_alone() -> None:
    maps, others = torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 1.0])

    assert rectified(maps).data_ptr() == maps.data_ptr()
    assert added(maps, others).data_ptr() == maps.data_ptr()
    assert maps.tolist() == [1.0, 3.0]
    assert others.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", [name for name in NETS if name != "sact"])
def test_who_goes_on_keeps_the_layout(name: str) -> None:
    if torch.__version__.startswith("1.8"):
        pytest.skip("its convolutions put channels first")
    net = NETS[name]().eval()
    with torch.no_grad():
        state = net.advance(0, net.begin(images(name))).state
        chosen = select(state, torch.tensor([2, 0]))
        everyone = torch.stack(net(images(name)))

        assert all(is_last(part) for part in state if many(part))
        assert all(is_last(part) for part in chosen if many(part))
        for part, whole in zip(chosen, state):
            assert torch.equal(part, whole[[2, 0]])
        assert torch.allclose(net.advance(1, chosen).logits, everyone[1][[2, 0]], atol=1e-4)


@pytest.mark.parametrize("name", NETS)
def test_networks_that_lie_so_are_sound(name: str) -> None:
    require_sound_channels_last(NETS[name](), CPU)


def _stepper(width: float, channels_last: bool) -> Stepper:
    torch.manual_seed(0)
    net = cifar_resnet(18, width, 10)
    feed = Feed(
        np.zeros((8, 3, 32, 32), np.uint8), np.zeros(8, np.int64), (0.5,) * 3, (0.25,) * 3, CPU,
        channels_last=channels_last,
    )  # fmt: skip
    return Stepper(net, SGD(net, 0.1), feed, precision.enter("fp32", CPU), ALONE, 4, "off")


def test_gradients_that_would_leave_their_memory_are_refused() -> None:
    with pytest.raises(BadValueError, match="over 8 channels") as error:
        _stepper(0.125, channels_last=True)

    assert "layout=nchw" in str(error.value)


@pytest.mark.parametrize(("width", "channels_last"), [(0.125, False), (0.25, True)])
def test_others_are_trained(width: float, channels_last: bool) -> None:
    stepper = _stepper(width, channels_last)
    stepper(torch.arange(4))

    assert float(stepper.totals[0]) > 0


def test_a_gpu_has_other_kernels() -> None:
    require_sound_channels_last(cifar_resnet(18, 0.125, 10), torch.device("cuda", 0))
