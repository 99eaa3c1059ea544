"""Networks with hooks: what every engine makes of them, and that nothing is kept of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CPU, images
from torch import nn

from narrowgauge_contract.errors import ExitCode
from narrowgauge_lab import engines
from narrowgauge_lab.engines import EngineCache, Preparation, registry
from narrowgauge_lab.engines.errors import HooksNotTakenError
from narrowgauge_lab.engines.hooks import hooked
from narrowgauge_lab.engines.own.cpu.fusion import fuse
from narrowgauge_lab.engines.own.cpu.onednn import works
from narrowgauge_lab.engines.own.gpu.tracing import trace
from narrowgauge_lab.engines.xla_operators import Library, translate

PLACES = ["", "block", "block.0", "block.1", "block.2", "pool", "head"]
COMPILING = pytest.mark.filterwarnings("ignore:::torch")
needs_onednn = pytest.mark.skipif(
    bool(works("conv", "none", torch.float32)), reason="this torch has no fused convolution"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.pool(self.block(x)), 1))


def after(_module: nn.Module, _given: Any, result: torch.Tensor) -> torch.Tensor:
    return result + result.abs()


def before(_module: nn.Module, given: Any) -> Any:
    return (given[0] + given[0].abs(),)


def network(place: str, when: str) -> nn.Module:
    torch.manual_seed(1)
    model = Net().eval()
    module = dict(model.named_modules())[place]
    if when == "before":
        module.register_forward_pre_hook(before)
    else:
        module.register_forward_hook(after)
    return model


def wanted(precision: str = "fp32", **more: Any) -> Preparation:
    return Preparation(precision, CPU, (images(8),) if precision == "int8" else (), **more)


def test_all_modules_with_hooks_are_named() -> None:
    model = network("", "after")
    model.block[1].register_forward_pre_hook(before)
    assert hooked(model) == ("", "block.1")
    assert hooked(Net()) == ()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("eager", "fp32"), ("eager", "int8"), ("channels_last", "fp32"), ("torchscript", "fp32"),
        ("onnxruntime", "fp32"), ("narrowgauge", "fp32"), ("narrowgauge", "int8"),
        pytest.param("compile", "fp32", marks=[pytest.mark.slow, COMPILING]),
        pytest.param("onnxruntime", "int8", marks=pytest.mark.slow),
        pytest.param("openvino", "fp32", marks=[pytest.mark.slow, pytest.mark.last]),
        pytest.param("openvino", "int8", marks=[pytest.mark.slow, pytest.mark.last]),
    ],
)  # fmt: skip
def test_every_engine_runs_the_hooks(name: str, precision: str) -> None:
    reason = engines.missing(name, CPU) or registry.refuses(name, precision, CPU)
    if reason:
        pytest.skip(reason)
    x = images(2)
    options = {"tune_s": 0.0} if name == "narrowgauge" else {}
    for place in PLACES:
        for when in ("before", "after"):
            model = network(place, when)
            right = model(x).detach()
            runner = engines.prepare(name, model, x, wanted(precision, options=options))
            error = float((runner(x).float() - right).norm() / right.norm())
            assert error < (0.1 if precision == "int8" else 1e-4), (place, when)


@pytest.mark.parametrize("place", ["", "block.0", "head"])
def test_the_translator_for_xla_names_what_it_would_leave_out(place: str) -> None:
    with pytest.raises(HooksNotTakenError) as caught:
        translate(network(place, "after"), Library(None, None, None, None))
    assert f"the hooks of {place or 'the network itself'}" in caught.value.what
    assert "handle.remove()" in caught.value.next_step
    assert caught.value.exit_code is ExitCode.NOT_APPLICABLE


def test_a_graph_for_our_gpu_engine_has_the_hooks_of_layers_and_refuses_the_network_s() -> None:
    x = images(2)
    for place in PLACES[1:]:
        for when in ("before", "after"):
            model = network(place, when)
            assert torch.allclose(trace(model)(x), model(x), atol=1e-5), (place, when)
    for when in ("before", "after"):
        with pytest.raises(HooksNotTakenError, match="narrowgauge does not run the hooks of the n"):
            trace(network("", when))


@needs_onednn
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["block.0", "block.2", "head"])
def test_a_fused_form_leaves_layers_with_hooks_as_they_are(place: str, when: str) -> None:
    model, x = network(place, when), images(2)
    model.block[1] = nn.Identity()
    right = model(x)
    fusion = fuse(model, x, linear=True)
    assert torch.allclose(fusion.model(x.contiguous(memory_format=torch.channels_last)), right,
                          atol=1e-5)  # fmt: skip
    left = [each for each in fusion.layers if each.layer == place]
    assert [each.provider for each in left] == ["ATen"]
    with pytest.raises(HooksNotTakenError):
        fuse(network("", when), x, linear=True)


@pytest.mark.parametrize("name", ["narrowgauge", "onnxruntime"])
def test_an_engine_kept_without_hooks_is_not_used_with_them(name: str, tmp_path: Path) -> None:
    if engines.missing(name, CPU):
        pytest.skip(engines.missing(name, CPU))
    cache, x = EngineCache(tmp_path / "engines"), images(2)
    options = {"tune_s": 0.0} if name == "narrowgauge" else {}
    torch.manual_seed(1)
    plain = Net().eval()
    first = engines.prepare(name, plain, x, wanted(cache=cache, options=options))
    assert first.cache_key
    kept = sorted(path.name for path in cache.folder.iterdir())

    model = network("", "after")
    runner = engines.prepare(name, model, x, wanted(cache=cache, options=options))

    assert not runner.from_cache
    assert runner.cache_note == "not kept: there are hooks, of the network itself"
    assert torch.allclose(runner(x), model(x), atol=1e-4)
    assert sorted(path.name for path in cache.folder.iterdir()) == kept
    again = engines.prepare(name, plain, x, wanted(cache=cache, options=options))
    assert (again.from_cache, again.cache_note) == (True, "")


def test_an_engine_that_keeps_nothing_says_nothing_of_it(tmp_path: Path) -> None:
    model, x = network("pool", "after"), images(2)
    runner = engines.prepare("eager", model, x, wanted(cache=EngineCache(tmp_path)))
    assert runner.cache_note == ""
