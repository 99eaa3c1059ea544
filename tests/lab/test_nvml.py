"""NVML by ctypes, against a library that is really there: compiled here, of the same functions."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from energy_cases import CPU, Case, FakeClock, FakeTicker

from narrowgauge_lab.errors import DeviceLostError, known_error
from narrowgauge_lab.measure.energy import EnergyPlan, Places, measure_energy, open_source
from narrowgauge_lab.measure.energy.source import EnergyError, EnergyMissingError
from narrowgauge_lab.measure.nvml import FAULT_REASONS, Nvml, NvmlError, bus_id, reason_names
from narrowgauge_lab.measure.state import Roots, read_state

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
SOURCE = Path(__file__).with_name("fake_nvml.cpp")


class Fake:
    """The compiled library, and what it is to answer."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)

    def set(self, name: str, number: int) -> None:
        """Of both cards, or of NVML's first (`0:power`); or a call's error (`error:power`)."""
        self._library.fake_set(name.encode(), ctypes.c_longlong(number))

    def process(self, pid: int) -> None:
        self._library.fake_process(ctypes.c_uint(pid))

    def reset(self) -> None:
        self._library.fake_reset()

    @property
    def initialised(self) -> int:
        return int(self._library.fake_initialised())

    def shut_down(self) -> None:
        self._library.nvmlShutdown()

    def open(self, clock: FakeClock, device: torch.device = FIRST) -> Any:
        places = Places(Path("/nowhere"), nvml=self.path, cuda=self.path)
        return open_source("nvml", device, places, clock.clock)


def build(folder: Path, name: str, *flags: str) -> Path:
    path = folder / name
    command = ["g++", "-shared", "-fPIC", "-O0", *flags, "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(build(tmp_path_factory.mktemp("nvml"), "libfake-nvml.so"))


@pytest.fixture
def fake(built: Fake) -> Iterator[Fake]:
    built.reset()
    yield built
    assert built.initialised <= 0, "NVML was left open"


def test_the_card_is_the_one_that_torch_counts_and_not_nvml(fake: Fake) -> None:
    assert bus_id(FIRST, fake.path) == "0000:3B:00.0"
    with Nvml(fake.path) as nvml:
        assert nvml.card(bus_id(FIRST, fake.path)).name() == "Fake card B"
        assert nvml.card(bus_id(SECOND, fake.path)).name() == "Fake card A"


def test_every_answer_arrives_whole(fake: Fake) -> None:
    fake.set("energy", 0x1_2345_6789_ABCD)
    fake.set("power", 3_000_000_000)
    fake.set("hot", 7_000_000_000)
    for name, number in (("limit", 700_000), ("temperature", 61), ("sm", 1980), ("memory", 3201)):
        fake.set(name, number)
    fake.set("persistence", 1)
    fake.set("reasons", 0x104)
    fake.set("1:sm", 1410)
    with Nvml(fake.path) as nvml:
        card, other = nvml.card("0000:18:00.0"), nvml.card("0000:3B:00.0")
        assert card.energy_mj() == 0x1_2345_6789_ABCD
        assert card.power_mw() == 3_000_000_000
        assert card.thermal_violation_ns() == 7_000_000_000
        assert (card.power_limit_mw(), card.temperature_c()) == (700_000, 61)
        assert (card.sm_clock_mhz(), card.memory_clock_mhz()) == (1980, 3201)
        assert other.sm_clock_mhz() == 1410
        assert card.persistence() is True
        assert reason_names(card.event_reasons()) == ("sw_power_cap", "display_clock_setting")
        assert card.mig() is False
        assert card.processes() == []
        for pid in range(100, 140):
            fake.process(pid)
        assert card.processes() == list(range(100, 140))


def test_an_older_driver_has_the_older_names(tmp_path: Path) -> None:
    old = Fake(build(tmp_path, "libold-nvml.so", "-DOLD"))
    old.set("reasons", 0x48)
    old.process(5)
    with Nvml(old.path) as nvml:
        card = nvml.card("0000:18:00.0")
        assert set(reason_names(card.event_reasons())) == {"hw_slowdown", "hw_thermal_slowdown"}
        assert card.processes() == [5]
        assert card.mig() is False


def test_refusals_keep_nvmls_words_and_codes(fake: Fake) -> None:
    fake.set("error:power", 3)
    with Nvml(fake.path) as nvml:
        with pytest.raises(NvmlError, match="nvmlDeviceGetPowerUsage: Not Supported") as refused:
            nvml.card("0000:18:00.0").power_mw()
        assert refused.value.code == 3
        with pytest.raises(NvmlError, match="Not Found"):
            nvml.card("0000:99:00.0")
        fake.set("error:processes", 15)
        with pytest.raises(NvmlError, match="error 15"):
            nvml.card("0000:18:00.0").processes()
    with pytest.raises(NvmlError, match="cannot be loaded"):
        Nvml("libnvidia-ml-that-is-not.so.1")
    fake.set("error:cuInit", 100)
    with pytest.raises(NvmlError, match="cuInit gave error 100"):
        bus_id(FIRST, fake.path)
    with pytest.raises(NvmlError, match="has no cuInit"):
        bus_id(FIRST, "libc.so.6")


def test_bits_have_names_and_faults_are_heat_and_brakes() -> None:
    assert reason_names(0) == ()
    assert reason_names(0x1FF)[:3] == ("gpu_idle", "applications_clocks_setting", "sw_power_cap")
    assert reason_names(0x8000_0001) == ("gpu_idle", "0x80000000")
    everything = set(reason_names(0x1FF))
    assert len(everything) == 9
    assert everything - FAULT_REASONS == {
        "gpu_idle", "applications_clocks_setting", "sw_power_cap", "sync_boost",
        "display_clock_setting",
    }  # fmt: skip


class Drawing:
    """The fake card draws W for as long as a FakeClock passes."""

    def __init__(self, fake: Fake, watts: float) -> None:
        self.fake = fake
        self.watts = watts
        self.clock = FakeClock()
        self._pass = self.clock.pass_time
        self.clock.pass_time = self.pass_time  # type: ignore[method-assign]
        self.pass_time(0.0)

    def pass_time(self, seconds: float) -> None:
        self._pass(seconds)
        stepped = self.clock.at // 0.1 * 0.1
        self.fake.set("energy", int(self.watts * stepped * 1e3))
        self.fake.set("power", int(self.watts * 1e3))


def test_the_counter_measures_a_row(fake: Fake, tmp_path: Path) -> None:
    drawing, case = Drawing(fake, 300.0), Case(tmp_path)

    def call() -> None:
        drawing.pass_time(0.1)

    with drawing.fake.open(drawing.clock) as source:
        assert source.name == "nvml-counter"
        assert fake.initialised == 1
        source.begin()
        drawing.pass_time(6)
        energy = source.end()
        assert energy.joules["Fake card B"] == pytest.approx(300 * energy.seconds, rel=1e-3)
        # Refused in the middle of a row.
        fake.set("error:energy", 4)
        measure_energy(case.ctx, call, CPU, source, clock=drawing.clock.clock)
    (reason,) = case.reasons
    assert "stopped saying its energy" in reason
    assert fake.initialised == 0
    case.close()


@pytest.mark.parametrize("code", [15, 16])
@pytest.mark.parametrize("counts", [True, False], ids=["counter", "power"])
def test_a_card_that_is_lost_ends_the_row_and_not_only_its_energy(
    fake: Fake, tmp_path: Path, code: int, counts: bool
) -> None:
    drawing, case = Drawing(fake, 300.0), Case(tmp_path)
    fake.set("error:energy", 0 if counts else 3)

    def call() -> None:
        drawing.pass_time(0.1)
        fake.set("error:energy" if counts else "error:power", code)
        fake.set("error:nvmlShutdown", code)

    plan = EnergyPlan(seconds=5, idle_seconds=5)

    def measure() -> None:
        with drawing.fake.open(drawing.clock) as source:
            if not counts:
                source._ticker = FakeTicker(drawing.clock)
            measure_energy(case.ctx, call, CPU, source, plan, clock=drawing.clock.clock)

    with pytest.raises(DeviceLostError) as lost:
        measure()
    assert ("GPU is lost" if code == 15 else "GPU requires reset") in lost.value.why
    assert "nvidia-smi" in lost.value.next_step
    assert case.reasons == (), "the row failed; it did not end without energy"
    case.close()
    fake.set("error:nvmlShutdown", 0)
    fake.shut_down()


@pytest.mark.parametrize("code", [15, 16])
def test_a_card_that_is_lost_when_its_energy_is_looked_for(fake: Fake, code: int) -> None:
    fake.set("error:energy", code)
    with pytest.raises(DeviceLostError):
        fake.open(FakeClock())
    assert fake.initialised == 0


def test_a_refusal_of_nvmls_own_is_known_for_a_loss(fake: Fake, tmp_path: Path) -> None:
    fake.set("error:sm", 15)
    with Nvml(fake.path) as nvml, pytest.raises(NvmlError) as refused:
        nvml.card("0000:18:00.0").sm_clock_mhz()
    assert isinstance(known_error(refused.value, tmp_path), DeviceLostError)
    assert known_error(NvmlError("nvmlDeviceGetPowerUsage: Not Supported", 3), tmp_path) is None


def test_shutting_down_hides_no_error(fake: Fake) -> None:
    nvml = Nvml(fake.path)
    fake.set("error:nvmlShutdown", 15)
    nvml.close()
    fake.set("error:nvmlShutdown", 0)
    fake.shut_down()


def test_a_card_without_a_counter_is_sampled_and_called_so(fake: Fake) -> None:
    drawing = Drawing(fake, 100.0)
    fake.set("error:energy", 3)
    with fake.open(drawing.clock) as source:
        assert source.name == "nvml-power"
        assert "averag" in source.caveat
        assert source._read() == {"Fake card B": 100.0}
        fake.set("error:power", 4)
        with pytest.raises(EnergyError, match="stopped saying"):
            source._read()
    assert fake.initialised == 0


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("error:nvmlInit_v2", 9, "Driver Not Loaded"),
        ("error:nvmlDeviceGetHandleByPciBusId_v2", 6, "Not Found"),
        ("error:energy", 4, "Unknown Error"),
        ("mig", 1, "other slices"),
    ],
)
def test_what_nvml_cannot_say_is_missing_with_the_reason(
    fake: Fake, name: str, code: int, why: str
) -> None:
    fake.set(name, code)
    with pytest.raises(EnergyMissingError) as missing:
        fake.open(FakeClock())
    assert why in missing.value.why
    assert fake.initialised == 0


def test_a_board_whose_nvml_answers_not_supported_has_no_energy(fake: Fake) -> None:
    """It initialises on a Jetson, and then says neither energy nor power."""
    fake.set("error:energy", 3)
    fake.set("error:power", 3)
    with pytest.raises(EnergyMissingError) as missing:
        fake.open(FakeClock())
    assert "Not Supported" in missing.value.why
    assert "ina3221" in missing.value.next_step


def test_a_counter_that_stands_still_is_no_source(fake: Fake) -> None:
    fake.set("energy", 5)
    with pytest.raises(EnergyMissingError, match="stands still"):
        fake.open(FakeClock())
    assert fake.initialised == 0
    with pytest.raises(EnergyMissingError, match="says nothing of cpu"):
        fake.open(FakeClock(), CPU)


def test_the_state_of_a_card_is_read_and_what_it_refuses_is_told(
    fake: Fake, tmp_path: Path
) -> None:
    values = {"sm": 1755, "memory": 2619, "temperature": 70, "power": 655_500, "limit": 700_000}
    for name, number in {**values, "reasons": 0x24, "hot": 2_500_000_000}.items():
        fake.set(name, number)
    fake.set("error:persistence", 3)
    fake.process(1)
    fake.process(os.getpid())
    state = read_state(FIRST, Roots(tmp_path, fake.path, fake.path))

    assert (state.sm_clock_mhz, state.memory_clock_mhz, state.temperature_c) == (1755, 2619, 70)
    assert (state.power_w, state.power_limit_w, state.thermal_seconds) == (655.5, 700.0, 2.5)
    assert state.throttle == ("sw_power_cap", "sw_thermal_slowdown")
    assert (state.gpu_processes, state.persistence) == (1, None)
    assert state.unread == ("nvmlDeviceGetPersistenceMode: Not Supported",)
    fact = state.to_fact()
    assert fact["throttle"] == ["sw_power_cap", "sw_thermal_slowdown"]
    assert "persistence" not in fact

    fake.reset()
    fake.process(1)
    hidden = read_state(FIRST, Roots(tmp_path, fake.path, fake.path))
    assert hidden.gpu_processes is None, "ours is not among them, so nobody knows how many others"
    gone = read_state(FIRST, Roots(tmp_path, str(tmp_path / "no.so"), fake.path))
    assert gone.sm_clock_mhz is None
    assert "cannot be loaded" in gone.unread[0]
