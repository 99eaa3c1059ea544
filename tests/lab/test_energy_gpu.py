"""NVML on a real card: the right one, a counter that steps, and energy that can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from energy_cases import Case

from narrowgauge_lab.measure.energy import EnergyPlan, measure_energy, open_source
from narrowgauge_lab.measure.nvml import Nvml, bus_id
from narrowgauge_lab.measure.state import faults_between, read_state

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _needs_counter() -> None:
    with Nvml() as nvml:
        card = nvml.card(bus_id(CUDA))
        if card.mig():
            pytest.skip("the card is split by MIG")
        card.energy_mj()


def test_nvmls_card_is_torchs() -> None:
    with Nvml() as nvml:
        assert nvml.card(bus_id(CUDA)).name() == torch.cuda.get_device_name(CUDA)


def test_the_state_of_the_card_is_known() -> None:
    torch.ones(8, device=CUDA).sum().item()
    state = read_state(CUDA)
    for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "power_limit_w"):
        assert getattr(state, name) > 0, (name, state.unread)
    assert faults_between(state, read_state(CUDA), CUDA) == ()


def test_a_products_energy_is_between_idle_and_the_cards_limit(tmp_path: Path) -> None:
    _needs_counter()
    case = Case(tmp_path)
    matrix = torch.randn(4096, 4096, device=CUDA, dtype=torch.float16)

    def call() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    plan = EnergyPlan(seconds=5, warm_up_seconds=1)
    result = measure_energy(case.ctx, call, CUDA, "nvml", plan)
    assert case.reasons == ()
    assert case.facts["energy_state_after"]["sm_clock_mhz"] > 0
    assert result is not None
    assert result.gross is not None
    (window,) = result.windows
    (rail,) = result.idle_watts
    watts = result.gross[0] * window.calls / window.seconds
    limit = read_state(CUDA).power_limit_w
    assert limit is not None
    assert 1.5 * result.idle_watts[rail] < watts < 1.05 * limit
    assert window.seconds >= 5
    assert window.energy.resolution_j < 0.01 * window.energy.joules[rail]
    assert 0.002 < case.facts["energy_period"] < 1.0
    assert window.energy.tail_s < 1.0
    case.close()


def test_auto_takes_what_the_card_has() -> None:
    with open_source("auto", CUDA) as source:
        assert source.name in ("nvml-counter", "nvml-power", "ina3221")
