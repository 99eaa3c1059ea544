"""The experiment `hetero-plan` on a GPU: its costs are of both sides, and a plan runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_row import Rows

from narrowgauge_contract.placement_costs import COSTS_FILE, parse_costs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROWS = Rows(
    "hetero-plan",
    ("network=small", "batch=4", "precisions=fp32+bf16", "seconds=0.002", "rounds=2"),
)


def test_costs_are_of_the_gpu_and_of_the_cpu(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, device=torch.device("cuda"))
    path = tmp_path / "row-0" / COSTS_FILE
    costs = parse_costs(path.read_text(encoding="utf-8"), str(path))

    assert row.facts["accelerator"] == costs.accelerator == torch.cuda.get_device_name(0)
    assert not costs.stand_in
    assert costs.accelerator_bytes is not None
    assert costs.accelerator_bytes > 4 * costs.parameters
    assert {each.device for each in costs.products} == {"cpu", "accelerator"}
    assert {each.device for each in costs.segments} == {"cpu", "accelerator"}
    assert {each.plan for each in costs.steps} >= {"cpu", "accelerator", "hetero-fp32"}
    mapped = any(each.policy == "mapped" for each in costs.copies)
    assert mapped or not costs.launches_hidden
    # Queued work ends no sooner than it is queued: only what the device itself takes may be less.
    assert all(s > 0 for each in costs.placed for s in each.seconds)


def test_a_plan_and_all_plans_run_on_it(tmp_path: Path) -> None:
    device = torch.device("cuda")
    one = ROWS.run(tmp_path / "one", "plan=hetero-bf16", device=device)
    every = ROWS.run(tmp_path / "every", "exhaustive=true", device=device)

    assert len(one.metric("step").values) == 2
    assert every.facts["plans"] == 16
