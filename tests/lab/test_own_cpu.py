"""Our engine on a CPU: what it chooses, keeps, refuses and computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.engines import EngineCache, Preparation
from narrowgauge_lab.engines.errors import EngineClosedError, ShapeOutsideProfileError
from narrowgauge_lab.engines.own.cpu import runner as cpu
from narrowgauge_lab.engines.own.cpu import trial
from narrowgauge_lab.engines.own.cpu.choice import Candidate
from narrowgauge_lab.engines.own.cpu.forms import EAGER, FORMS, FloatForms, Form
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.networks import build
from narrowgauge_lab.torch_compat import threads_may_change, torch_version

CPU = torch.device("cpu")
UNMEASURED: Dict[str, Any] = {"tune_s": 0.0}
MEASURED: Dict[str, Any] = {"tune_s": 0.02}
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)) - 0.3
HAS_FUSED = torch_version() >= (2, 0)


def _wanted(precision: str = "fp32", **rest: Any) -> Preparation:
    return Preparation(precision, CPU, **{"options": UNMEASURED, **rest})


def _close(found: torch.Tensor, model: nn.Module, share: float = 1e-5) -> bool:
    with torch.no_grad():
        strict = model.double()(IMAGES.double())
    model.float()
    return bool((found.double() - strict).norm() / strict.norm() < share)


@pytest.fixture
def only_fused_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds as the test says: the noise of this machine decides nothing."""

    def measure(calls: Any, baseline: Candidate, *_: Any, **__: Any) -> Any:
        return {each: [1.0 if each.form == EAGER else 0.5] * 9 for each in calls}

    monkeypatch.setattr(trial, "measure", measure)


def test_it_computes_what_the_network_does_and_leaves_it_alone() -> None:
    model = build("resnet18-tiny")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    runner = cpu.prepare(model, IMAGES, _wanted())

    assert _close(runner(IMAGES), model)
    assert _close(runner(IMAGES.contiguous(memory_format=torch.channels_last)), model)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_what_becomes_of_the_model_afterwards_is_not_the_runner_s_matter() -> None:
    model, same = build("resnet18-tiny"), build("resnet18-tiny")
    runner = cpu.prepare(model, IMAGES, _wanted())

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    assert _close(runner(IMAGES), same)


def test_the_choice_is_told_with_its_figures() -> None:
    runner = cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted(options=MEASURED))

    told = json.loads(json.dumps(runner.choice.to_dict()))
    forms = {each["form"] for each in told["measured"]} | set(told["absent"])
    assert forms == set(FORMS)
    assert all(seconds > 0 for each in told["measured"] for seconds in each["seconds"])
    assert "measured on 2 of 2 images" in told["reason"]
    assert bool(told["absent"]) != HAS_FUSED
    assert all("fused" in form for form in told["absent"])


@pytest.mark.usefixtures("only_fused_is_fast")
def test_layers_say_what_they_run_as() -> None:
    runner = cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted(options=MEASURED))

    layers = {each.layer: each for each in runner.layers()}
    assert layers["layer1.0.conv1"].precision == "fp32"
    assert layers["layer1.0.conv1"].provider in ("oneDNN", "ATen")
    assert runner.choice.taken.form != EAGER
    seen = runner.observations()
    assert seen is not None
    assert {each.inputs for each in seen} == {"float32"}


def test_where_nothing_is_faster_eager_s_own_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(calls: Any, baseline: Candidate, *_: Any, **__: Any) -> Any:
        return {each: [1.0 if each == baseline else 1.2] * 9 for each in calls}

    monkeypatch.setattr(trial, "measure", measure)
    runner = cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted(options=MEASURED))

    assert runner.choice.taken == Candidate(EAGER, 0)
    assert {each.provider for each in runner.layers()} == {"ATen"}


def test_a_network_that_cannot_be_traced_runs_and_says_so() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return y.mean((2, 3)) if float(y.sum()) > 0 else y.amax((2, 3))

    model = Deciding().eval()
    runner = cpu.prepare(model, IMAGES, _wanted(options=MEASURED))

    assert _close(runner(IMAGES), model)
    assert "fused" in runner.choice.absent


def test_a_form_with_other_results_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    make = FloatForms.make

    def wrongly(self: FloatForms, name: str) -> Form:
        form = make(self, name)
        return form if name == EAGER else Form(lambda x: form.call(x) * 1.01, form.layers)

    monkeypatch.setattr(FloatForms, "make", wrongly)
    model = build("resnet18-tiny")
    runner = cpu.prepare(model, IMAGES, _wanted(options=MEASURED))

    assert runner.choice.taken.form == EAGER
    assert "differ from eager's by 0.01" in runner.choice.absent["folded"]
    assert _close(runner(IMAGES), model)


def test_unmeasured_it_takes_the_fused_form_if_there_is_one() -> None:
    runner = cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted())

    assert runner.choice.taken.form == ("fused" if HAS_FUSED else EAGER)
    assert runner.choice.reason == "not measured: tune_s=0"


@pytest.mark.skipif(not threads_may_change(), reason="this torch's convolutions do not bear it")
def test_a_number_of_threads_may_be_asked_for() -> None:
    asked = 1 if torch.get_num_threads() > 1 else 2
    options = {**MEASURED, "threads": asked}
    runner = cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted(options=options))

    assert runner.choice.taken.threads == asked
    assert {each.threads for each in runner.choice.rounds} == {asked}


def test_threads_that_cannot_be_set_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are there anyway."""
    monkeypatch.setattr(cpu, "find_openmp", lambda: None)
    model, there = build("resnet18-tiny"), torch.get_num_threads()

    with pytest.raises(BadValueError, match="cannot be set for a call"):
        cpu.prepare(model, IMAGES, _wanted(options={**UNMEASURED, "threads": there + 1}))
    runner = cpu.prepare(model, IMAGES, _wanted(options={**UNMEASURED, "threads": there}))

    assert runner.choice.taken.threads == there


def test_fewer_threads_than_none_are_refused() -> None:
    with pytest.raises(BadValueError, match="threads=-1"):
        cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted(options={"threads": -1}))


def test_a_second_time_the_choice_comes_from_the_cache(tmp_path: Path) -> None:
    model, cache = build("resnet18-tiny"), EngineCache(tmp_path)
    first = cpu.prepare(model, IMAGES, _wanted(cache=cache, options=MEASURED))
    second = cpu.prepare(model, IMAGES, _wanted(cache=cache, options=MEASURED))

    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.choice == first.choice
    assert second.layers() == first.layers()
    assert first.cache_key == second.cache_key != ""
    assert torch.equal(first(IMAGES).clone(), second(IMAGES))


def test_other_weights_or_another_number_of_threads_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = EngineCache(tmp_path)
    cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted(cache=cache))

    others = cpu.prepare(build("resnet18-tiny", seed=1), IMAGES, _wanted(cache=cache))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elsewhere = cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted(cache=cache))

    assert not others.from_cache
    assert not elsewhere.from_cache


def test_a_damaged_choice_is_measured_anew_and_said(tmp_path: Path) -> None:
    model, cache = build("resnet18-tiny"), EngineCache(tmp_path)
    cpu.prepare(model, IMAGES, _wanted(cache=cache))
    (file,) = tmp_path.glob("*.engine")
    file.write_bytes(file.read_bytes()[:-7])

    runner = cpu.prepare(model, IMAGES, _wanted(cache=cache))

    assert not runner.from_cache
    assert "damaged" in runner.cache_note


def test_a_cached_number_of_threads_that_cannot_be_set_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = {"form": "fused", "threads": 77, "reason": "", "measured": [], "absent": {}}
    payload = json.dumps({"choice": choice, "scales": {}}).encode()

    monkeypatch.setattr(cpu, "find_openmp", object)
    assert cpu._unusable(payload) == ""
    monkeypatch.setattr(cpu, "find_openmp", lambda: None)
    assert "77 threads" in cpu._unusable(payload)


def test_int8_multiplies_integers_and_keeps_its_scales(tmp_path: Path) -> None:
    model, cache = build("resnet18-tiny"), EngineCache(tmp_path)
    wanted = _wanted("int8", calibration=(IMAGES,), cache=cache)

    first = cpu.prepare(model, IMAGES, wanted)
    second = cpu.prepare(model, IMAGES, wanted)

    assert second.from_cache
    assert torch.equal(first(IMAGES).clone(), second(IMAGES))
    assert _close(first(IMAGES), model, share=0.3)
    assert not _close(first(IMAGES), model)
    seen = first.observations()
    assert seen is not None
    assert {(each.inputs, each.weight) for each in seen} == {("quint8", "qint8")}
    assert {each.precision for each in first.layers()} == {"int8"}


def test_int8_without_images_is_no_engine() -> None:
    with pytest.raises(CalibrationError, match="no calibration data"):
        cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted("int8"))


def test_large_batches_are_measured_with_fewer_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_LONGEST_CALL_S", 1e-9)
    model = build("resnet18-tiny")

    runner = cpu.prepare(model, IMAGES, _wanted(options=MEASURED))

    assert "measured on 1 of 2 images" in runner.choice.reason
    assert _close(runner(IMAGES), model)


def test_a_profile_of_batches_is_held() -> None:
    model = build("resnet18-tiny")
    runner = cpu.prepare(model, IMAGES, _wanted(batches=(1, 2, 4)))

    assert _close(torch.cat([runner(IMAGES[:1]).clone(), runner(IMAGES[1:])]), model)
    with pytest.raises(ShapeOutsideProfileError):
        runner(torch.rand(5, 3, 32, 32))


def test_a_closed_runner_does_not_run() -> None:
    runner = cpu.prepare(build("resnet18-tiny"), IMAGES, _wanted())
    runner.close()
    runner.close()

    with pytest.raises(EngineClosedError):
        runner(IMAGES)


def test_what_a_processor_has_not_is_refused_with_the_reason() -> None:
    assert cpu.refuses("fp32") == ""
    assert cpu.refuses("int8") == ""
    assert "fp8" in cpu.refuses("fp8")
    assert "tf32" in cpu.refuses("tf32")


@pytest.mark.parametrize(("seconds", "refused"), [(3.0, True), (0.6, False)])
def test_sixteen_bits_are_refused_where_they_are_slower(
    monkeypatch: pytest.MonkeyPatch, seconds: float, refused: bool
) -> None:
    """A convolution in bfloat16 takes so many times what one in float32 does."""
    clock = {"now": 0.0}

    def convolve(x: torch.Tensor, *_: Any, **__: Any) -> None:
        clock["now"] += 1.0 if x.dtype == torch.float32 else seconds

    monkeypatch.setattr(cpu.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(cpu.functional, "conv2d", convolve)
    cpu._slow.cache_clear()
    try:
        why = cpu.refuses("bf16")
    finally:
        cpu._slow.cache_clear()

    assert ("3.0 times as long" in why) is refused
    assert bool(why) is refused


def test_sixteen_bits_without_an_operator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def convolve(x: torch.Tensor, *_: Any, **__: Any) -> None:
        if x.dtype != torch.float32:
            raise RuntimeError("not implemented for 'Half'\nat some place")

    monkeypatch.setattr(cpu.functional, "conv2d", convolve)
    cpu._slow.cache_clear()
    try:
        why = cpu.refuses("fp16")
    finally:
        cpu._slow.cache_clear()

    assert why.endswith("not implemented for 'Half'")
