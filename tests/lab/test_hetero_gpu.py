"""Placed layers on a GPU: results, bytes against the profiler's, stages against the wall, streams
that overlap, late gradients, page-locked memory, mapped copies."""

from __future__ import annotations

import copy
import itertools
import json
import time
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import pytest
import torch
from placed_cases import images, loss_of, plan, residual, resnet20
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_kernels.library import has_kernels
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.layers.hetero.convert import Converted, convert
from narrowgauge_lab.layers.hetero.coverage import coverage
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.ledger import HOST, Ledger
from narrowgauge_lab.optim import SGD

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]
CUDA = torch.device("cuda")
#: Of the largest value, after five layers with batch norms between them.
_LIMITS = {"fp32": 1e-4, "bf16": 0.15, "fp16": 0.05}


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    tf32_flags.allow_tf32(False)
    yield
    tf32_flags.allow_tf32(False)


def _placed(model: nn.Module, mode: str = "off", **said: Any) -> Converted:
    return convert(model, plan(**said), CUDA, Ledger(mode, CUDA))


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("policy", ["pageable", "pinned", "overlapped"])
@pytest.mark.parametrize("pieces", [0, 3])
def test_gradients_are_those_of_the_cpu(policy: str, pieces: int) -> None:
    model = residual()
    other = copy.deepcopy(model)
    converted = _placed(other, policy=policy, pieces=pieces)
    for batch in (4, 7, 4):
        x = images(batch, size=16)
        expected = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
        with deferred_weight_grads():
            found = torch.autograd.grad(loss_of(other, x), list(other.parameters()))
        for ours, theirs in zip(found, expected):
            assert ours.device.type == "cpu"
            assert _off(ours, theirs) < _LIMITS["fp32"]
    assert not converted.bus.notes()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions(precision: str) -> None:
    model = residual()
    other = copy.deepcopy(model)
    _placed(other, precision=precision, wire=precision)
    expected = torch.autograd.grad(loss_of(model, images()), list(model.parameters()))
    found = torch.autograd.grad(loss_of(other, images()), list(other.parameters()))
    for ours, theirs in zip(found, expected):
        assert _off(ours, theirs) < _LIMITS[precision]


@pytest.mark.parametrize("name", ["hetero-int8", "hetero-fp8"])
def test_eight_bits_train(name: str) -> None:
    model = resnet20()
    try:
        convert(model, parse_plan(BUILTIN[name], name), CUDA)
    except NotApplicableError as error:
        pytest.skip(error.why)
    labels = torch.arange(32) % 10
    x = torch.randn(32, 3, 32, 32)
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(x), labels)
        losses.append(float(loss.detach()))
        for parameter, grad in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters()))
        ):
            with torch.no_grad():
                parameter.sub_(grad, alpha=0.05)
    assert all(loss == loss for loss in losses)
    assert losses[-1] < 0.7 * losses[0]


def test_many_steps_race_nothing() -> None:
    """Late gradients, in pieces, on four streams, forty steps: memory that is reused too early
    would show as a difference from the twin that waits for everything."""
    twins = [resnet20(), resnet20()]
    handles = [
        convert(twins[0], plan(pieces=2), CUDA),
        convert(twins[1], plan(policy="pageable", pieces=2), CUDA),
    ]
    optimisers = [SGD(each, 0.01) for each in twins]
    for handle, optimiser in zip(handles, optimisers):
        handle.watch(optimiser.values)
    torch.backends.cudnn.deterministic = True
    try:
        for step in range(40):
            x = images(32, size=32, seed=step)
            found = []
            for model, optimiser in zip(twins, optimisers):
                with deferred_weight_grads():
                    optimiser.differentiate(loss_of(model, x) / 320)
                optimiser.step()
                found.append(optimiser.gradient.clone())
            assert bool(torch.isfinite(found[0]).all())
            assert torch.equal(found[0], found[1]), f"step {step}"
    finally:
        torch.backends.cudnn.deterministic = False


def _copied(path: Path) -> Tuple[int, int]:
    """Bytes to the device and from it, by torch's profiler."""
    found = {"HtoD": 0, "DtoH": 0}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            direction = event["name"].split()[1]
            if direction in found:
                found[direction] += int(event["args"]["bytes"])
    return found["HtoD"], found["DtoH"]


@pytest.mark.parametrize("name", ["hetero-fp32", "hetero-bf16", "hetero-int8", "original-fp32"])
def test_bytes_are_the_profilers(name: str, tmp_path: Path) -> None:
    model = resnet20()
    try:
        converted = convert(model, parse_plan(BUILTIN[name], name), CUDA, Ledger("bytes", CUDA))
    except NotApplicableError as error:
        pytest.skip(error.why)
    x = torch.randn(32, 3, 32, 32)
    for _ in range(3):
        with deferred_weight_grads():
            loss_of(model, x).backward()
        model.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0)
    torch.cuda.synchronize()
    for parameter in model.parameters():
        parameter.grad = None
    converted.ledger.clear()
    with torch_compat.make_profiler(cuda=True) as profiler:
        with deferred_weight_grads():
            loss_of(model, x).backward()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    for ours, theirs in zip(converted.ledger.bytes_moved(), _copied(tmp_path / "trace.json")):
        assert theirs > 0
        assert abs(ours - theirs) <= 0.001 * theirs


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_serial_stages_make_up_a_calls_wall_time(wire: str) -> None:
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    ledger = _placed(layer, mode="serial", wire=wire).ledger
    x = torch.randn(32, 16, 32, 32, requires_grad=True)
    ratios: List[float] = []
    for _ in range(30):
        ledger.clear()
        layer(x).sum().backward()
        for call in ledger.calls():
            end = call.start + call.seconds
            inside = [e for e in ledger.intervals() if call.start <= e.start and e.end <= end]
            ratios.append(sum(each.seconds for each in inside) / call.seconds)
    assert sorted(ratios)[len(ratios) // 2] >= 0.97


def test_overlapped_stages_and_idle_time_make_up_the_wall() -> None:
    model = resnet20()
    ledger = _placed(model, mode="overlapped", pieces=2).ledger
    # Large enough for a copy to last longer than the launch of the product beside it.
    x = torch.randn(256, 3, 32, 32)
    for _ in range(3):
        loss_of(model, x).backward()
    torch.cuda.synchronize()
    ledger.clear()
    began = time.perf_counter()
    with deferred_weight_grads():
        loss_of(model, x).backward()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    intervals = ledger.intervals()
    found = coverage(intervals, began, ended)
    assert found.ratio == pytest.approx(1.0, abs=0.03)
    lanes = {each.lane for each in intervals}
    assert {HOST, "up", "work", "down", "side"} <= lanes
    # Copies of one piece and products of another, at the same time.
    spans = [each for each in intervals if each.lane != HOST]
    assert any(
        one.lane != two.lane and one.start <= two.start < one.end
        for one, two in itertools.permutations(spans, 2)
    )


def test_pageable_memory_is_not_locked_and_pinned_is() -> None:
    layer = nn.Conv2d(16, 16, 3, padding=1)
    converted = _placed(layer)
    y = layer(torch.randn(32, 16, 32, 32))
    assert y.is_pinned()
    assert converted.bus.host.page_locking() in ("torch's pool", "all CPU tensors")
    other = nn.Conv2d(16, 16, 3, padding=1)
    handle = _placed(other, policy="pageable")
    assert handle.bus.host.page_locking() == "none"


@pytest.mark.skipif(not has_kernels("cuda"), reason="the kernels are not built for CUDA")
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_mapped_copies_give_what_copies_give(wire: str) -> None:
    model = residual()
    other = copy.deepcopy(model)
    converted = _placed(model, policy="mapped", wire=wire, pieces=1)
    _placed(other, wire=wire, pieces=1)
    chooser = converted.bus.chooser
    assert chooser is not None
    for choice in chooser.document():
        assert choice["copied"] > 0
        assert choice["mapped"] > 0
    chooser.maps = lambda direction, size: True  # type: ignore[method-assign]
    found: List[Optional[torch.Tensor]] = []
    for each in (model, other):
        torch.manual_seed(3)
        found.append(each(images(size=16)))
    assert found[0] is not None
    assert torch.equal(found[0], found[1])  # type: ignore[arg-type]


def test_managed_memory_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="'managed'"):
        _placed(residual(), policy="managed")


def test_everything_on_the_accelerator_is_native_or_placed() -> None:
    model = residual().to(CUDA)
    x = images(size=16).to(CUDA)
    expected = model.eval()(x)
    converted = convert(model, parse_plan(BUILTIN["accelerator"], "accelerator"), CUDA)
    assert len(converted.native) == 5
    assert converted.native_precision == "fp32"
    handle = convert(
        model, plan(elsewhere="accelerator", layers={"first": {"device": "cpu"}}), CUDA
    )
    assert [runner.layer for runner in handle.runners] == ["first"]
    assert _off(model(x), expected) < _LIMITS["fp32"]
