"""Batch normalisation by the kernels where everything else is on a CPU: the same module, the same
figures, and torch's own wherever the kernels have none."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Dict, List, Tuple

import pytest
import torch
from placed_cases import STAND_IN, Residual, images
from torch import nn

from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_lab.layers.hetero import elsewhere
from narrowgauge_lab.layers.hetero.convert import convert
from narrowgauge_lab.layers.hetero.elsewhere import HostBatchNorm2d, place_elsewhere
from narrowgauge_lab.layers.hetero.modules import HeteroConv2d
from narrowgauge_lab.networks.cifar import ResNet
from narrowgauge_lab.networks.rectified import rectified


class _Own(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _assert_close(got: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> None:
    assert got.dtype == wanted.dtype
    assert torch.allclose(got.double(), wanted.double(), rtol=rtol, atol=atol)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> List[Tuple[int, ...]]:
    """The shapes that the kernels were given."""
    found: List[Tuple[int, ...]] = []

    def counted(x: torch.Tensor, *given: Any) -> Any:
        found.append(tuple(x.shape))
        return kernels(x, *given)

    kernels = elsewhere.batch_norm
    monkeypatch.setattr(elsewhere, "batch_norm", counted)
    return found


def _twins(channels: int = 5, **said: Any) -> Tuple[nn.BatchNorm2d, nn.BatchNorm2d]:
    torch.manual_seed(3)
    torchs = nn.BatchNorm2d(channels, **said)
    if torchs.affine:
        nn.init.uniform_(torchs.weight, 0.5, 1.5)
        nn.init.normal_(torchs.bias)
    ours = copy.deepcopy(torchs)
    place_elsewhere(ours, "kernels")
    assert type(ours) is HostBatchNorm2d
    return torchs, ours


@pytest.mark.parametrize(
    "said",
    [{}, {"momentum": None}, {"momentum": 0.3, "eps": 0.1}, {"affine": False},
     {"track_running_stats": False}],
    ids=str,
)  # fmt: skip
def test_training_gives_torchs_figures_step_by_step_and_then_in_eval_mode(
    calls: List[Tuple[int, ...]], said: Dict[str, Any]
) -> None:
    torchs, ours = _twins(**said)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = 2 + 3 * torch.randn((4, 5, 6, 7), generator=generator)
        grad = torch.randn(x.shape, generator=generator)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        wanted, got = torchs(one), ours(other)
        wanted.backward(grad)
        got.backward(grad)
        _assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        _assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)
        for mine, theirs in zip(ours.parameters(), torchs.parameters()):
            _assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert len(calls) == 3
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for name, theirs in torchs.state_dict().items():
        _assert_close(ours.state_dict()[name], theirs, rtol=1e-5, atol=1e-6)
    torchs.eval()
    ours.eval()
    _assert_close(ours(x), torchs(x), rtol=1e-5, atol=1e-5)
    # Without running averages torch takes the batch's in eval mode too.
    assert len(calls) == 3


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_what_follows_is_as_by_torch(
    calls: List[Tuple[int, ...]], added: bool, training: bool
) -> None:
    torchs, ours = _twins()
    generator = torch.Generator().manual_seed(4)
    x, beside, grad = (torch.randn((4, 5, 6, 7), generator=generator) for _ in range(3))
    found = []
    for module in (torchs.train(training), ours.train(training)):
        leaves = [x.clone().requires_grad_(), beside.clone().requires_grad_()]
        result = rectified(module, leaves[0], leaves[1] if added else None)
        wanted = leaves if added else leaves[:1]
        found.append([result, *torch.autograd.grad(result, wanted, grad)])
    for wanted, got in zip(*found):
        _assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert len(calls) == training
    assert found[1][0].min() == 0


def test_what_is_added_may_be_what_torch_repeats() -> None:
    torchs, ours = _twins()
    x = torch.randn((4, 5, 6, 7), generator=torch.Generator().manual_seed(4))
    beside = torch.randn((5, 1, 1), generator=torch.Generator().manual_seed(5))
    assert torch.equal(rectified(ours, x, beside), rectified(torchs, x, beside))
    assert torch.equal(rectified(nn.Identity(), x, beside), torch.relu(x + beside))


@pytest.mark.parametrize("kind", ["channels_last", "double", "wide running mean", "eval", "slice"])
def test_what_the_kernels_do_not_have_is_torchs_to_the_bit(
    calls: List[Tuple[int, ...]], kind: str
) -> None:
    torchs, ours = _twins()
    x = torch.randn((4, 5, 6, 7), generator=torch.Generator().manual_seed(1))
    for module in (torchs, ours):
        if kind == "double":
            module.double()
        elif kind == "wide running mean":
            module.running_mean, module.running_var = (
                module.running_mean.double(), module.running_var.double()
            )  # fmt: skip
        module.train(kind != "eval")
    if kind == "double":
        x = x.double()
    elif kind == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif kind == "slice":
        x = x[:, :, 1:]
    results = []
    for module in (torchs, ours):
        try:
            results.append(module(x))
        except RuntimeError as error:  # what torch refuses, it refuses
            results.append(str(error))
    assert calls == []
    assert type(results[0]) is type(results[1])
    if isinstance(results[0], torch.Tensor):
        assert torch.equal(results[0], results[1])
    else:
        assert results[0] == results[1]


@pytest.mark.parametrize("shape", [(4, 6, 3, 3), (1, 5, 1, 1), (4, 5, 3), (0, 5, 3, 3)], ids=str)
def test_what_torch_refuses_is_refused_in_its_words(shape: Tuple[int, ...]) -> None:
    torchs, ours = _twins()
    said = []
    for module in (torchs, ours):
        try:
            result = module(torch.ones(shape))
            said.append(str(tuple(result.shape)))  # of no images some versions make none
        except (RuntimeError, ValueError) as error:
            said.append(str(error).splitlines()[0])
    assert said[0] == said[1]


def test_convert_places_them_and_places_them_back() -> None:
    model = Residual()
    model.own = _Own(8)
    names = [name for name, each in model.named_modules() if type(each) is nn.BatchNorm2d]
    keys, count = list(model.state_dict()), len(names)
    assert count > 1

    converted = convert(model, parse_plan(BUILTIN["hetero-fp32"], "x"), STAND_IN)
    found = dict(model.named_modules())
    assert {type(found[name]) for name in names} == {HostBatchNorm2d}
    assert isinstance(model.stem, HeteroConv2d)
    assert type(model.own) is _Own
    facts = converted.facts()
    assert (facts["elsewhere_by"], facts["normalised_by_kernels"]) == ("kernels", 0), "none ran"
    for layout, by_kernels in ((torch.channels_last, 0), (torch.contiguous_format, count)):
        model.norm(torch.ones(2, 8, 4, 4).contiguous(memory_format=layout))
        if by_kernels:
            model(images())
        assert model.norm.by_kernels is bool(by_kernels)
    assert converted.facts()["normalised_by_kernels"] == count
    assert list(model.state_dict()) == keys
    assert type(copy.deepcopy(model.norm)) is HostBatchNorm2d
    assert type(pickle.loads(pickle.dumps(model.norm))) is HostBatchNorm2d

    again = convert(model, parse_plan(BUILTIN["original-fp32"], "x"), STAND_IN)
    assert {type(found[name]) for name in names} == {nn.BatchNorm2d}
    model(images())
    assert (again.elsewhere_by, again.facts()["normalised_by_kernels"]) == ("torch", 0)


def test_a_network_trains_alike_by_either(calls: List[Tuple[int, ...]]) -> None:
    document = copy.deepcopy(BUILTIN["hetero-fp32"])
    losses = {}
    for by in ("torch", "kernels"):
        document["plan"]["elsewhere_by"] = by
        torch.manual_seed(0)
        model = Residual()
        convert(model, parse_plan(document, by), STAND_IN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[by] = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(images(6, seed=step)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses[by].append(loss.item())
    assert len(calls) == 4 * sum(type(each) is HostBatchNorm2d for each in model.modules())
    assert losses["kernels"] == pytest.approx(losses["torch"], rel=1e-4)
    assert losses["kernels"][-1] != losses["kernels"][0]


def test_resnet_20_gives_one_pass_all_that_follows(calls: List[Tuple[int, ...]]) -> None:
    found = {}
    for by in ("torch", "kernels"):
        torch.manual_seed(0)
        model = ResNet(20)
        place_elsewhere(model, by)
        loss = model(images(2, 32)).pow(2).mean()
        found[by] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    assert len(calls) == 19
    for wanted, got in zip(found["torch"], found["kernels"]):
        assert (got - wanted).norm() <= 1e-3 * wanted.norm()
    # Nothing is left to rectify: no node of ReLU is on the way back.
    names, seen = [], [found["kernels"][0].grad_fn]
    while seen:
        node = seen.pop()
        names.append(type(node).__name__)
        seen += [each for each, _ in node.next_functions if each is not None]
    assert not [name for name in names if "Relu" in name]


def test_without_kernels_it_is_torchs_and_the_facts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "has_kernels", lambda device: False)
    model = Residual()
    converted = convert(model, parse_plan(BUILTIN["hetero-fp32"], "x"), STAND_IN)
    assert converted.facts()["elsewhere_by"] == "torch"
    assert converted.facts()["normalised_by_kernels"] == 0
    assert type(model.norm) is nn.BatchNorm2d
