"""benchmarks/kernels/grouped_conv.py: its sides compute the same, and its table has them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

import pytest
import torch

from narrowgauge_lab.anytime.systems.iresnext_parts import across_groups

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels" / "grouped_conv.py"
pytestmark = pytest.mark.skipif(sys.version_info < (3, 10), reason="scripts of 3.10 and up")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grouped_conv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _whole(x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.nn.functional.conv2d(x, across_groups(weight, groups), padding=1)


@pytest.mark.parametrize(("branch", "groups"), [(4, 1), (4, 3), (8, 7), (16, 2)])
def test_the_sides_compute_the_same(script: ModuleType, branch: int, groups: int) -> None:
    tensors = script._tensors("float64", branch, groups, 2, torch.device("cpu"))

    def gradients(way: Callable[..., Any]) -> Any:
        return script._call(way, tensors, groups)()

    expected = gradients(script.grouped)
    for way in (script.filled, _whole):
        for one, other in zip(gradients(way), expected):
            assert torch.allclose(one, other, atol=1e-10)


def test_a_file_is_shown(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"dtype": "bfloat16", "branch": 4, "groups": 3}
    row = {**row, "seconds": [1e-5, 2e-5, 4e-5], "grouped": [3.0, 5.0], "filled": [2.0]}
    (tmp_path / "samples.json").write_text(json.dumps({"rows": [row]}))
    monkeypatch.setattr(sys, "argv", ["it", "--show", str(tmp_path / "samples.json")])

    assert script.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| bfloat16 | 3 of 4 | 20.0 | 4.00 | 2.00 |"
