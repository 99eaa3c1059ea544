"""apex's mechanism, and the protocol that shows what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
import torch
from tensor_cores_cases import CPU, QUICK, functions, half, module, run_row
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.measure.probe import observe

_ = functions  # a fixture, used by name
pytestmark = pytest.mark.usefixtures("functions")
HAS_FP16 = torch.float16 in torch_compat.autocast_dtypes(CPU)
HALF = half()
HALF_NAME = str(HALF).replace("torch.", "")


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


def _ran(model: nn.Module, images: torch.Tensor) -> List[str]:
    """The dtypes that convolution and product really get."""

    def call() -> None:
        with torch.no_grad():
            model(images)

    seen = observe(call)
    assert sum(each.calls for each in seen) == 2
    return sorted({dtype for each in seen for dtype in (each.inputs, each.weight)})


IMAGES = torch.rand(2, 3, 8, 8)


def test_a_process_without_o1_is_clean() -> None:
    apex = module("apex")
    amp = apex.Amp(HALF)
    amp.initialize(_network(), "O3")
    amp.initialize(_network(), "O2")
    amp.initialize(_network(), "O0")

    assert apex.patched_functions() == []
    assert _ran(_network(), IMAGES) == ["float32"]


@pytest.mark.parametrize("later", ["O0", "O2", "O3", "none"])
def test_o1_stays_for_models_that_apex_never_saw(later: str) -> None:
    apex = module("apex")
    amp = apex.Amp(HALF)
    amp.initialize(_network(), "O1")
    if later != "none":
        amp.initialize(_network(), later)

    stranger = _network()
    assert apex.patched_functions() == ["conv2d", "linear"]
    assert {p.dtype for p in stranger.parameters()} == {torch.float32}
    assert _ran(stranger, IMAGES) == [HALF_NAME]


def test_even_o0_runs_in_half_after_o1() -> None:
    amp = module("apex").Amp(HALF)
    amp.initialize(_network(), "O1")
    model = _network()
    forward = amp.initialize(model, "O0")

    assert {p.dtype for p in model.parameters()} == {torch.float32}
    seen = observe(lambda: forward(IMAGES.to(HALF)))
    assert {each.inputs for each in seen} == {HALF_NAME}
    assert forward(IMAGES).dtype == torch.float32, "cast back, as apex did"


def test_o1_patches_once_and_casts_each_parameter_once() -> None:
    amp = module("apex").Amp(HALF)
    amp.initialize(_network(), "O1")
    wrapper = nn.functional.conv2d
    amp.initialize(_network(), "O1")
    model = _network()
    with torch.no_grad():
        model(IMAGES)
        first = dict(amp._casts)
        model(IMAGES)

    assert nn.functional.conv2d is wrapper
    assert set(first) == set(model.parameters())
    assert all(amp._casts[parameter] is cast for parameter, cast in first.items())
    amp.clear_casts()
    assert amp._casts == {}


def test_a_cast_made_without_gradients_is_not_used_with_them() -> None:
    amp = module("apex").Amp(HALF)
    layer = nn.Linear(3, 2)
    forward = amp.initialize(layer, "O1")
    with torch.no_grad():
        forward(torch.ones(1, 3))
    forward(torch.ones(1, 3)).float().sum().backward()

    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_o2_keeps_batch_normalisation_in_float32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    module("apex").Amp(HALF).initialize(model, "O2")

    assert model[0].weight.dtype == HALF
    assert model[1].weight.dtype == model[1].running_mean.dtype == torch.float32


def test_what_the_mechanism_predicts() -> None:
    contaminated = module("contaminated")
    inference, training = contaminated.INFERENCE_ORDER, contaminated.TRAINING_ORDER

    assert {level: contaminated.predicted(inference, level) for level in inference} == {
        "O3": "fp16", "O2": "fp16", "O1": "fp16", "O0": "fp16", "fp32": "fp16",
    }  # fmt: skip
    assert {level: contaminated.predicted(training, level) for level in training} == {
        "fp32": "fp32", "O0": "fp32", "O1": "fp16", "O2": "fp16", "O3": "fp16",
    }  # fmt: skip


@pytest.mark.skipif(HAS_FP16, reason="here it works")
def test_without_float16_the_protocol_does_not_apply(tmp_path: Path) -> None:
    with pytest.raises(NotApplicableError, match="fp16 does not work on cpu"):
        run_row(tmp_path, *QUICK, "mode=fp32", "protocol=contaminated")


@pytest.mark.skipif(not HAS_FP16, reason="this torch has no float16 on a CPU")
def test_float32_at_the_end_of_the_originals_order_ran_in_half(tmp_path: Path) -> None:
    row = run_row(tmp_path, *QUICK, "mode=fp32", "protocol=contaminated")

    assert row.validity.valid, row.validity.reasons
    facts = row.facts
    assert facts["precision_ran"] == "fp16"
    assert [each["level"] for each in facts["history"]] == [
        "AMP O3", "AMP O2", "AMP O1", "AMP O0", "Float32",
    ]  # fmt: skip
    assert [each["patched"] for each in facts["history"]] == [[], []] + [["conv2d", "linear"]] * 3
    assert {each["ran"] for each in facts["history"]} == {"fp16"}
    assert all("float16" in text for each in facts["history"] for text in each["operators"])
    assert row.metric("seconds").values[0] > 0
    assert row.metric("seconds_unsynchronised").values[0] > 0
    assert row.metric("relative_error").values[0] > 1e-5, "half's error, not float32's"


@pytest.mark.skipif(not HAS_FP16, reason="this torch has no float16 on a CPU")
def test_a_mechanism_that_does_not_work_makes_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if somebody took the functions back after O1, which apex's issues advise."""
    amp, functional = module("apex").Amp, torch.nn.functional
    initialize, whole = amp.initialize, (functional.conv2d, functional.linear)

    def tidy(self: Any, model: nn.Module, level: str) -> Any:
        if level == "O0":
            functional.conv2d, functional.linear = whole
        return initialize(self, model, level)

    monkeypatch.setattr(amp, "initialize", tidy)
    row = run_row(tmp_path, *QUICK, "mode=O0", "protocol=contaminated", "images=0")

    assert any(
        "AMP O0 ran in fp32 where the mechanism to show says fp16" in reason
        for reason in row.validity.reasons
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_FP16, reason="this torch has no float16 on a CPU")
def test_the_benches_begin_with_float32_so_it_is_clean_there(tmp_path: Path) -> None:
    words = ("workload=linear-tiny", "limit_s=0.05", "protocol=contaminated", "mode=O1")
    row = run_row(tmp_path, *words)

    assert row.validity.valid, row.validity.reasons
    ran = [(each["level"], each["ran"]) for each in row.facts["history"]]
    assert ran == [("Float32", "fp32"), ("AMP O0", "fp32"), ("AMP O1", "fp16")]
