"""The experiment `manual-layers` on a GPU: rows are valid, and see what those of a CPU see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_row import CPU, Rows

from narrowgauge_lab.networks.manual_mnist import ManualNet

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]

ROWS = Rows("manual-layers", ("data=synthetic", "train_limit=200", "limit_s=0.01", "batch=20"))
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "policy", ["exact_fp32", "exact_int8", "axfpm", "mitchell", "lut8x8:ama5", "lut8x8:mitchell"]
)
def test_a_row_sees_what_it_sees_on_a_cpu(policy: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = tmp_path / "net.pth"
    torch.save(ManualNet().state_dict(), str(path))
    words = (f"policy={policy}", f"weights={path}")

    there = ROWS.run(tmp_path / "cuda", *words, device=CUDA)
    here = ROWS.run(tmp_path / "cpu", *words, device=CPU)

    assert there.validity.valid, there.validity.reasons
    # Where two logits are all but equal, another order of summation may swap them.
    for name in ("accuracy", "agreement"):
        assert there.metric(name).values[0] == pytest.approx(here.metric(name).values[0], abs=1.0)
    assert there.metric("logit_scale").values[0] == pytest.approx(
        here.metric("logit_scale").values[0], rel=1e-2
    )


def test_training_on_a_gpu_leaves_weights_for_the_next_row(tmp_path: Path) -> None:
    first = ROWS.run(tmp_path, "policy=exact_fp32", device=CUDA)
    second = ROWS.run(tmp_path, "policy=mitchell", device=CUDA)

    assert first.validity.valid
    assert second.validity.valid
    assert second.facts["weights_from"] == "an earlier row of this run"
