"""The tables of benchmarks/harness: they need neither a GPU nor torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "harness"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness_bench", FOLDER / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "harness_bench", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "figures", raising=False)
    return importlib.import_module("figures")


def kernel(name: str) -> dict[str, Any]:
    pair = {"ours": 2.02e-6, "nvbench": 2e-6}
    return {"name": name, "cold": pair, "batch": pair, "wall": {"ours": 0.5, "nvbench": 2.0}}


def test_the_page_has_the_tables_of_its_references(bench: ModuleType) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")

    assert bench.readme(page, FOLDER / "reference") == page


def test_figures_survive_their_file_and_reach_the_page(bench: ModuleType, tmp_path: Path) -> None:
    figures = [
        bench.Figure("added GPU time per call", "us", 0.3, (0.1, 0.2, 0.6), "1 per sample"),
        bench.Figure("power", "%", 95, (99.0,), at_least=True),
        bench.Figure("A/A false alarms", "%", 5, (6.0,)),
        bench.Figure("chance", "", None, (0.2,)),
    ]
    bench.write(str(tmp_path / "a.json"), figures, [kernel("copy 2 us")], {"GPU": "a card"})

    assert bench.load(tmp_path / "a.json") == figures
    page = bench.readme(f"before\n{bench.BEGIN}\nwhat was there\n{bench.END}\nafter\n", tmp_path)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "what was there" not in page
    assert "`a.json`: GPU a card." in page
    assert "| added GPU time per call (1 per sample) | 0.2 us | 3 | <= 0.3 us | yes |" in page
    assert "| power | 99 % | 1 | >= 95 % | yes |" in page
    assert "| A/A false alarms | 6 % | 1 | <= 5 % | no |" in page
    assert "| chance | 0.2 | 1 |  |  |" in page
    assert bench.readme(page, tmp_path) == page


def test_a_page_without_references_says_so(bench: ModuleType, tmp_path: Path) -> None:
    assert bench.NOT_MEASURED in bench.readme(f"{bench.BEGIN}\n{bench.END}", tmp_path)


def test_kernels_are_listed_with_their_differences(bench: ModuleType) -> None:
    head, line = bench.kernel_table([kernel("copy 2 us")]).splitlines()

    assert line.split() == [
        "copy", "2", "us", "2.02", "2.00", "1.00", "2.02", "2.00", "1.00", "0.50", "2.00",
    ]  # fmt: skip
    assert len(line) == len(head)


def test_a_target_stands_where_the_bare_loop_holds_no_launch_latency(
    bench: ModuleType, figures: ModuleType
) -> None:
    one = figures.overhead(bench.Figure, 1, [0.1], [-1.7], [-2.0])
    many = figures.overhead(bench.Figure, 128, [0.1, 0.2, 0.9], [-1.8], [0.5])

    assert [each.target for each in one] == [None, None, None]
    assert [each.target for each in many] == [0.3, None, 2.0]
    assert [each.met for each in many] == [True, None, True]
    assert many[0].samples == (0.1, 0.2, 0.9)
    assert {each.note for each in many} == {"128 per sample"}


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (["interval"] * 20, "20 of 20 kernels"),
        (
            ["interval"] * 19 + ["time limit"],
            "19 of 20 kernels; 1 stopped at the time limit",
        ),
        (
            ["time limit", "sample limit", "time limit"],
            "0 of 3 kernels; 1 stopped at the sample limit; 2 stopped at the time limit",
        ),
    ],
)
def test_the_wall_time_says_whose_intervals_became_as_narrow(
    bench: ModuleType, figures: ModuleType, stopped: list[str], words: str
) -> None:
    kernels = [{**kernel("copy"), "stopped": why} for why in stopped]

    *differences, wall = figures.agreement(bench.Figure, kernels)

    assert [each.value for each in differences] == pytest.approx([1.0, 1.0])
    assert wall.value == pytest.approx(0.25)
    assert wall.note.endswith(f", intervals as wide for {words}")
    assert wall.note.startswith(f"{0.5 * len(stopped):.1f} s and {2.0 * len(stopped):.1f} s")
