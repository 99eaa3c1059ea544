"""What only a GPU can show of `throughput`: several streams of one process at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from throughput_cases import run_row

pytestmark = pytest.mark.gpu

WORDS = ("model=resnet18", "precision=fp16", "batch=4", "workers=3", "seconds=1", "threads=0")


@pytest.mark.parametrize("engine", ["eager", "cuda-graph", "narrowgauge"])
def test_streams_work_at_once_and_compute_the_right_thing(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    row, folder = run_row(tmp_path, *WORDS, f"engine={engine}", device=torch.device("cuda"))

    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == "fp16"
    workers = row.facts["window"]["workers"]
    assert [each["worker"] for each in workers] == ["gpu-0", "gpu-1", "gpu-2"]
    assert all(each["calls_in_window"] > 1 for each in workers)
    assert {path.name for path in folder.iterdir()} == {
        f"calls-gpu-{number}.npy" for number in range(3)
    }
    rate, counted = row.metric("images_per_second"), row.metric("images_counted_per_second")
    assert rate is not None
    assert counted is not None
    assert counted.values[0] == pytest.approx(rate.values[0], rel=0.2)
