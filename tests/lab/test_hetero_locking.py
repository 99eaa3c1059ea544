"""Which plans page-lock a process's CPU tensors; the locking itself is tested with the kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_kernels import pinned
from narrowgauge_lab.layers.hetero.locking import lock_pages, locks_pages

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_plans_that_send_host_tensors_to_products_of_torchs(name: str) -> None:
    plan = parse_plan(BUILTIN[name], name)
    assert locks_pages(plan, CUDA) == name.startswith("hetero-")
    assert not locks_pages(plan, CPU), "nothing is sent anywhere"


def test_a_pageable_plan_stays_pageable() -> None:
    plan = parse_plan(BUILTIN["hetero-fp32"], "test")
    pageable = dataclasses.replace(
        plan, transfers=dataclasses.replace(plan.transfers, policy="pageable")
    )
    assert not locks_pages(pageable, CUDA)


def test_a_stand_in_installs_nothing() -> None:
    assert not lock_pages(parse_plan(BUILTIN["hetero-fp32"], "test"), CPU)
    assert not pinned.is_installed()
