"""The experiment `sparse-kernels`: its declaration, and rows from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, NotApplicableError, UsageError
from narrowgauge_kernels.sparse import tuning
from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.generate import generate
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant
from narrowgauge_kernels.sparse.tiles import NETWORKS, default_tile
from narrowgauge_lab.errors import describe

ROWS = Rows("sparse-kernels", ("shape=1x16x7x7x32", "arch=8.0"))


def source_of(out: Path) -> str:
    return (out / "row-0" / "source.cu").read_text(encoding="utf-8")


def test_a_row_writes_the_source_that_the_generator_gives(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path / "out", "tile=3x7x4/g2", "bias=true")

    wanted = generate(Shape(1, 16, 7, 7, 32), Tile(3, 7, 4, 0, 2), Variant(bias=True), "8.0")
    assert source_of(tmp_path / "out") == wanted
    assert row.facts["tile"] == "3x7x4/g2"
    assert row.facts["variant"] == "fp32 deterministic element nchw fused bias relu-in"
    lines = {each.name: each.values for each in row.metrics}["source_lines"]
    assert lines == (float(wanted.count("\n") + 1),)


def test_a_tile_is_chosen_where_none_is_named(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path / "out", "precision=fp16", "granularity=tensor-core")

    variant = Variant("fp16", granularity="tensor-core")
    assert row.facts["tile"] == default_tile(Shape(1, 16, 7, 7, 32), variant, "8.0").text()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("shape=1x2x3",), SparseArgumentError),
        (("shape=resnet50",), SparseArgumentError),
        (("tile=9",), SparseArgumentError),
        (("tile=40x40x2",), SparseArgumentError),
        (("precision=tf32",), SparseArgumentError),
        (("arch=nine",), SparseArgumentError),
        (("arch=auto",), UsageError),
        (("action=tune",), NotApplicableError),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, words: Tuple[str, ...], error: type) -> None:
    with pytest.raises(error) as caught:
        ROWS.run(tmp_path / "out", *words)
    _, code = describe(caught.value, tmp_path)
    wanted = ExitCode.NOT_APPLICABLE if error is NotApplicableError else ExitCode.USAGE
    assert code == wanted
    assert caught.value.next_step


def test_an_error_of_the_generator_keeps_its_words(tmp_path: Path) -> None:
    with pytest.raises(SparseArgumentError) as caught:
        ROWS.run(tmp_path / "out", "tile=40x40x2")
    info, _ = describe(caught.value, tmp_path)
    assert not isinstance(caught.value, NarrowgaugeError)
    assert "cannot be tiled by 40x40x2" in info.what
    assert "registers" in info.why


def test_tuning_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the search: no GPU is asked."""
    asked = []

    def tune(shape: Shape, variant: Variant, device: torch.device, seconds: float) -> tuning.Found:
        asked.append((shape.text(), seconds))
        best, other = tuning.Trial(Tile(4, 7, 8), 3.5), tuning.Trial(Tile(7, 7, 8), 4.0)
        return tuning.Found((best, other), 2, tmp_path)

    monkeypatch.setattr(ROWS.module("run"), "tune", tune)
    words = ("action=tune", "shape=densenet121", "batch=2", "seconds=1")
    row = ROWS.run(tmp_path / "out", *words, device=torch.device("cuda"))

    assert [shape for shape, _ in asked] == [
        f"2,{c},{h},{w},{n}" for c, h, w, n in NETWORKS["densenet121"]
    ]
    text = (tmp_path / "out" / "row-0" / "tune.txt").read_text(encoding="utf-8")
    assert "4x7x8" in text
    assert "2 tried, 2 not" in text
    assert row.facts["tiles"] == dict.fromkeys((shape for shape, _ in asked), "4x7x8")
    found = {each.name: each.values for each in row.metrics}
    assert found["microseconds"] == (14.0,)
    # 7x7x8 is published for the first shape alone.
    assert found["over_published"] == pytest.approx((4.0 / 3.5,))


def test_the_profiles_are_what_can_be_generated() -> None:
    spec = ROWS.spec()
    for profile in ("smoke", "short", "paper"):
        for row in ROWS.job(profile=profile).rows:
            assert Shape.parse(str(row.parameters["shape"]))
    (claim,) = load_claims(EXPERIMENTS / "sparse-kernels" / "claims.toml", spec)
    assert Shape.parse(str(claim.selections[0].where["shape"]))
