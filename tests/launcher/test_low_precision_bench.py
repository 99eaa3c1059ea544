"""The tables and verdicts of two GPU benchmarks: they need neither a GPU nor torch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "layers"))
    monkeypatch.delitem(sys.modules, "low_precision_passes", raising=False)
    return importlib.import_module("low_precision_passes")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "kernels"))
    monkeypatch.delitem(sys.modules, "wire", raising=False)
    return importlib.import_module("wire")


def step(layer: str, gain: float, product: str = "triton", **more: Any) -> dict[str, Any]:
    return {
        "layer": layer, "batch": 256, "pass_": "step", "precision": "int8", "product": product,
        "quantisation": "with", "flops": 10**9, "bytes": 10**6, "extra_bytes": 10**6,
        "distance": None, "bf16": [gain * 1e-4] * 3, "ours": [1e-4] * 3, **more,
    }  # fmt: skip


def shown(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    rates = {"per_second": 1e12}
    return {"rows": rows, "ceilings": {"copy": rates, "int8": rates}, **more}


def test_a_layer_counts_by_the_faster_way_to_multiply_it(passes: ModuleType) -> None:
    rows = [step("a", 0.5), step("a", 2.0, "torch._int_mm"), step("b", 1.125)]

    lines, met = passes.targets(shown([*rows, step("c", 9.0, quantisation="without")]))

    assert met
    assert lines == [
        "int8, batch 256: 1.50 times bf16's speed in the geometric mean of 2 layers (1.2 asked),"
        " 1 of them at 1.2 or more, the least 1.12."
    ]


@pytest.mark.parametrize("rows", [[], [step("a", 1.19)], [step("a", 2.0), step("a", 1.0, batch=8)]])
def test_a_mean_below_the_target_is_a_miss(
    passes: ModuleType, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "samples.json"
    file.write_text(json.dumps(shown(rows)))
    for words, code in (([], 0), (["--check"], 1)):
        monkeypatch.setattr(sys, "argv", ["passes", "--show", str(file), *words])
        assert passes.main() == code


def test_a_plan_takes_only_the_passes_that_gain(passes: ModuleType) -> None:
    rows = [
        step("a", 0.5, pass_="forward"),
        step("a", 3.0, pass_="input_grad"),
        step("a", 0.25, pass_="weight_grad"),
        # By another way to multiply it a pass counts where that is the faster one.
        step("a", 0.75, "torch._int_mm", pass_="forward"),
        step("a", 9.0, pass_="forward", quantisation="without"),
    ]

    lines = importlib.import_module("low_precision_table").chosen(shown(rows))

    # In bf16 0.75 + 3 + 0.25 of 1e-4 s; the input gradient in 1 of them.
    assert lines == [
        "int8, batch 256, by pass: forward 0.75, input_grad 3.00, weight_grad 0.25; where only"
        " passes that gain are in it, 2.00 times bf16's speed over all three, 1 of 1 layers at 1.2"
        " or more."
    ]


def test_a_layer_in_a_line_has_each_pass_and_the_roofline_of_all(
    passes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    # 1e9 FLOP at 1e12 MAC/s are 500 us, more than its bytes; all three take 1 ms.
    rows = [step("a", 2.0, pass_="input_grad"), step("a", 0.5, ours=[1e-3] * 3, bf16=[5e-4] * 3)]
    file = tmp_path / "samples.json"
    file.write_text(json.dumps(shown([*rows, step("a", 9.0, "torch._int_mm")])))
    monkeypatch.setattr(sys, "argv", ["passes", "--show", str(file), "--brief"])

    passes.main()

    shown_row = capsys.readouterr().out.splitlines()[2]
    assert shown_row == "| a | 256 | int8 |  | 2.00 |  | 0.50 | 50 % |"


def mapped(size: int, ratio: float, against: str = "copy and kernel") -> dict[str, Any]:
    return {
        "case": f"{size} B", "dtype": "uint8", "bytes": size, "seconds": [1e-5] * 3,
        "operation": f"to the device: mapped beside {against}", "ratios": [ratio] * 3,
    }  # fmt: skip


def choice(maps: bool, ratio: float) -> dict[str, Any]:
    return {"direction": "up", "bytes": 1024, "maps": maps, "ratio": ratio}


def test_the_least_gain_of_small_sizes_and_the_share_of_right_choices(
    wire: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [mapped(1024, 1.6), mapped(4096, 2.0), mapped(1 << 20, 0.5)]
    rows.append(mapped(2048, 0.9, "copy alone"))
    choices = [choice(True, 2.0)] * 97 + [choice(False, 1.5), choice(True, 0.5), choice(False, 0.5)]

    lines, met = wire.targets(shown(rows, choices=choices))

    assert met
    assert "at least 1.60 times" in lines[1]
    assert "98 of 100 sizes (98.0%, 95% asked), elsewhere at most 2.00 times as slow" in lines[2]


@pytest.mark.parametrize(
    ("rows", "choices"),
    [
        ([mapped(1024, 1.4), mapped(4096, 9.0)], [choice(True, 2.0)]),
        ([mapped(1024, 1.6)], [choice(True, 2.0)] * 9 + [choice(True, 0.9)]),
    ],
)
def test_either_is_missed_alone(
    wire: ModuleType, rows: list[dict[str, Any]], choices: list[dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = tmp_path / "samples.json"
    file.write_text(json.dumps(shown(rows, choices=choices)))
    for words, code in (([], 0), (["--check"], 1)):
        monkeypatch.setattr(sys, "argv", ["wire", "--show", str(file), *words])
        assert wire.main() == code
