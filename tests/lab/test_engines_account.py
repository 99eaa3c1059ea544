"""What a row says that its layers ran as, and when that is not what was asked for."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
import torch

from narrowgauge_lab.engines import LayerFact
from narrowgauge_lab.engines.account import check_precision, record_layers
from narrowgauge_lab.measure.probe import Observation


class _Said:
    """What a row's context is told."""

    def __init__(self, repeat: int = 0) -> None:
        self.repeat, self.device = repeat, torch.device("cpu")
        self.reasons: List[str] = []
        self.facts: Dict[str, Any] = {}

    def invalid(self, reason: str) -> None:
        self.reasons.append(reason)

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value


def _layers(*told: Tuple[str, str]) -> Tuple[LayerFact, ...]:
    return tuple(
        LayerFact(f"l{number}", operator, "someone", "k" * 200, precision)
        for number, (operator, precision) in enumerate(told)
    )


@pytest.mark.parametrize(
    ("asked", "layers", "ran", "wrong"),
    [
        ("fp16", [("Conv", "fp16"), ("Gemm", "fp16"), ("Softmax", "fp32")], "fp16", ""),
        ("int8", [("QLinearConv", "int8"), ("QuantizeLinear", "fp32")], "int8", ""),
        ("int8", [("CaskConvolution", "int8"), ("gemm", "fp16")], "fp16+int8", ""),
        ("int8", [("Conv", "fp32")], "fp32", "by its own account the engine ran fp32"),
        ("fp32", [("Conv", "tf32"), ("Gemm", "fp32")], "fp32+tf32", "the engine ran layers in tf"),
        ("fp32", [("fusion", "fp32"), ("pool", "")], "fp32", ""),
    ],
)
def test_layers_tell_the_precision_where_no_probe_saw_it(
    asked: str, layers: List[Tuple[str, str]], ran: str, wrong: str
) -> None:
    said = _Said()

    assert check_precision(said, asked, None, {"the engine": _layers(*layers)}) == ran  # type: ignore[arg-type]
    assert said.facts["precision_ran"] == ran
    assert [wrong in reason for reason in said.reasons] == ([True] if wrong else [])


def test_each_of_several_is_held_against_what_was_asked_for() -> None:
    said = _Said()
    told = {
        "dla-0": _layers(("Conv", "int8"), ("Conv", "fp16")),
        "dla-1": _layers(("Conv", "")),
        "gpu-0": _layers(("Conv", "fp16")),
    }

    assert check_precision(said, "int8", None, told) == "fp16+int8"  # type: ignore[arg-type]
    assert said.facts["precision_ran"] == "fp16+int8"
    assert said.reasons == ["asked for precision int8; by its own account gpu-0 ran fp16"]


def test_an_engine_that_tells_nothing_is_recorded_as_such() -> None:
    said = _Said()

    told = {"the engine": _layers(("Conv", ""))}
    assert check_precision(said, "fp16", None, told) == "fp16"  # type: ignore[arg-type]
    assert said.facts["precision_ran"] == "not told by the engine"
    assert said.reasons == []


def test_what_the_probe_saw_decides_before_what_layers_say() -> None:
    said = _Said()
    seen = (Observation("conv2d", "float32", "float32", "float32", 1),)

    told = {"the engine": _layers(("Conv", "fp16"))}
    check_precision(said, "fp16", seen, told)  # type: ignore[arg-type]
    assert said.facts["precision_ran"] == "fp32"
    assert said.reasons[0].startswith("asked for precision fp16, ran fp32")


def test_layers_are_told_in_the_first_repeat_and_never_without_bound() -> None:
    layers = _layers(*[("Conv", "fp16")] * 700)
    first, later = _Said(), _Said(repeat=1)
    for said in (first, later):
        record_layers(said, layers)  # type: ignore[arg-type]

    assert len(first.facts["layers"]) == 250
    assert first.facts["layers_left_out"] == 450
    assert len(first.facts["layers"][0]["kernel"]) == 60
    groups = [{"provider": "someone", "operator": "Conv", "precision": "fp16", "layers": 700}]
    assert first.facts["providers"] == later.facts["providers"] == groups
    assert "layers" not in later.facts
