"""The experiment `approx-mac` on a GPU: every kernel is right, and timed beside its peers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_row import Rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROWS = Rows("approx-mac", ("shapes=64-64-3x3s1-56", "batch=2", "pairs=2", "limit_s=0.01"))


@pytest.mark.parametrize(
    ("policy", "kernel"),
    [
        ("exact_fp32", "functor"),
        ("axfpm", "functor"),
        ("exact_int8", "exact"),
        ("lut8x8:bam-3-6-signed", "structured"),
        ("lut8x8:drum-6", "factored"),
        ("lut8x8:mitchell", "table"),
    ],
)
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_a_row_of_every_kernel(tmp_path: Path, policy: str, kernel: str, layout: str) -> None:
    row = ROWS.run(
        tmp_path, f"policy={policy}", f"kernel={kernel}", f"layout={layout}",
        device=torch.device("cuda"),
    )  # fmt: skip

    assert row.validity.valid, row.validity.reasons
    (layer,) = row.facts["layers"]
    codes = kernel != "functor"
    assert (layer["error"] == 0.0) is codes
    expected = {"times_torch", "times_lowered"}
    if hasattr(torch.cuda, "_compile_kernel"):
        expected.add("times_untiled")
    if codes and hasattr(torch, "_int_mm"):
        expected.add("times_int_mm")
    assert expected <= set(row.facts["layers_beside"])
    assert ("times_torch_direct" in row.facts["layers_beside"]) is not layer["torch_by_winograd"]


def test_lenets_linear_layers_and_a_product(tmp_path: Path) -> None:
    for number, words in enumerate((("shapes=lenet",), ("shapes=product", "side=256"))):
        for policy in ("mitchell", "exact_int8"):
            row = ROWS.run(
                tmp_path / f"{number}-{policy}", f"policy={policy}", *words,
                device=torch.device("cuda"),
            )  # fmt: skip
            assert row.validity.valid, row.validity.reasons
