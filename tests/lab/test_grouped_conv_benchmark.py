"""benchmarks/kernels/grouped_conv.py: its sides compute the same, and its table has them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator

import pytest
import torch

from narrowgauge_lab.anytime.systems.iresnext_parts import one_product

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "kernels"
pytestmark = pytest.mark.skipif(sys.version_info < (3, 10), reason="scripts of 3.10 and up")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("grouped_conv")
    sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(
    ("branch", "groups", "after", "size"),
    [(4, 1, 4, 3), (4, 3, 4, 3), (8, 7, 8, 3), (16, 2, 16, 3), (4, 8, 8, 1)],
)
def test_the_sides_compute_the_same(
    script: ModuleType, branch: int, groups: int, after: int, size: int
) -> None:
    case = script.Case("float64", branch, groups, after, size)
    tensors = case.tensors(2, torch.device("cpu"))

    def gradients(way: Callable[..., Any]) -> Any:
        return script._call(way, tensors, groups)()

    expected = gradients(script.grouped)
    for way in (script.OTHERS["filled"], one_product):
        for one, other in zip(gradients(way), expected):
            assert torch.allclose(one, other, atol=1e-10)


def test_a_file_is_shown(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"dtype": "bfloat16", "branch": 4, "groups": 3, "after": 4, "size": 3}
    row = {**row, "seconds": [1e-5, 2e-5, 4e-5], "grouped": [3.0, 5.0], "filled": [2.0]}
    (tmp_path / "samples.json").write_text(json.dumps({"rows": [row]}))
    monkeypatch.setattr(sys, "argv", ["it", "--show", str(tmp_path / "samples.json")])

    assert script.main() == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "| bfloat16 | 3 of 4 to 4, 3x3 | 20.0 | 2.00 | 4.00 |"
    )
