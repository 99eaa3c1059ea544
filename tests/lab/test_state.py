"""The host's state, from trees of files; and windows that a fault has spoilt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Iterator, List

import pytest
import torch
from energy_cases import CPU, Case, write_files

from narrowgauge_lab.measure.state import HostState, Roots, faults_between, read_state, steadily

CUDA = torch.device("cuda", 0)
CPUS = "sys/devices/system/cpu"
PC = {
    f"{CPUS}/cpu0/cpufreq/scaling_governor": "powersave\n",
    f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": "3400000\n",
    f"{CPUS}/cpu1/cpufreq/scaling_governor": "powersave\n",
    f"{CPUS}/cpu1/cpufreq/scaling_cur_freq": "800000\n",
    f"{CPUS}/cpufreq/policy0/scaling_governor": "ondemand\n",
    f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": "3\n",
    f"{CPUS}/cpu0/thermal_throttle/package_throttle_count": "40\n",
    f"{CPUS}/cpu1/thermal_throttle/core_throttle_count": "2\n",
    "proc/loadavg": "1.25 0.80 0.50 2/300 12345\n",
}
JETSON = {
    f"{CPUS}/cpu0/cpufreq/scaling_governor": "schedutil\n",
    f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": "2188800\n",
    "sys/class/devfreq/15340000.vic/cur_freq": "115200000\n",
    "sys/class/devfreq/17000000.ga10b/cur_freq": "1020000000\n",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone0/temp": "51000\n",
    "sys/class/thermal/thermal_zone1/type": "gpu-thermal\n",
    "sys/class/thermal/thermal_zone1/temp": "48250\n",
    "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
    "sys/class/thermal/cooling_device0/cur_state": "3\n",
    "sys/class/thermal/cooling_device1/type": "gpu-throttle-alert\n",
    "sys/class/thermal/cooling_device1/cur_state": "0\n",
    "sys/class/thermal/cooling_device2/type": "cpufreq-cpu4\n",
    "sys/class/thermal/cooling_device2/cur_state": "2\n",
    "sys/class/thermal/cooling_device3/type": "devfreq-17000000.ga10b\n",
    "sys/class/hwmon/hwmon3/oc1_event_cnt": "0\n",
    "sys/class/hwmon/hwmon3/oc2_event_cnt": "15\n",
    "sys/class/hwmon/hwmon3/oc3_event_cnt": "37\n",
    "sys/kernel/debug/bpmp/debug/clk/emc/rate": "3199000000\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\nCPU_ONLINE CORE_0 1\n"
    "< POWER_MODEL ID=2 NAME=MODE_30W >\n",
}


def roots(root: Path, nvpmodel: str = "no-such-nvpmodel") -> Roots:
    return Roots(root, str(root / "no-nvml.so"), str(root / "no-cuda.so"), nvpmodel)


def test_a_processors_clocks_and_governor(tmp_path: Path) -> None:
    state = read_state(CPU, roots(write_files(tmp_path, PC)))
    assert state.governor == "powersave"
    assert state.cpu_mhz == (3400.0, 800.0)
    assert state.cpu_throttles == 45
    assert state.load_average == 1.25
    assert state.sm_clock_mhz is None
    assert state.unread == ()
    (tmp_path / CPUS / "cpu1/cpufreq/scaling_governor").write_text("performance\n")
    assert read_state(CPU, roots(tmp_path)).governor == "performance, powersave"


def test_what_is_not_there_is_not_in_the_fact(tmp_path: Path) -> None:
    state = read_state(CPU, roots(tmp_path))
    assert set(state.to_fact()) == {"at", "unread"}
    assert state.unread == ("throttle counters",)
    (tmp_path / CPUS / "cpu0/cpufreq").mkdir(parents=True)
    (tmp_path / CPUS / "cpu0/cpufreq/scaling_cur_freq").write_text("fast\n")
    assert set(read_state(CPU, roots(tmp_path)).to_fact()) == {"at", "unread"}
    on_gpu = read_state(CUDA, roots(tmp_path))
    assert "cannot be loaded" in on_gpu.to_fact()["unread"][0]
    assert on_gpu.to_fact()["unread"][1] == "throttle counters"
    # A processor's counters say nothing of a card.
    write_files(tmp_path, PC)
    assert read_state(CUDA, roots(tmp_path)).unread[-1] == "throttle counters"


def test_a_jetson_is_read_from_its_files_and_never_from_nvml(tmp_path: Path) -> None:
    write_files(tmp_path, JETSON)
    state = read_state(CUDA, roots(tmp_path))
    assert state.sm_clock_mhz == 1020.0
    assert state.memory_clock_mhz == 3199.0
    assert state.temperature_c == 48.25
    assert state.supply_events == 52
    assert state.cooling == {
        "cooling_device1 gpu-throttle-alert": 0, "cooling_device2 cpufreq-cpu4": 2,
    }, "no fan, and nothing that says nothing"  # fmt: skip
    assert state.to_fact()["cooling"]["cooling_device2 cpufreq-cpu4"] == 2
    assert state.power_mode == "NV Power Mode: MODE_30W 2"
    assert state.governor == "schedutil"
    assert state.unread == ()

    (tmp_path / "etc/nvpmodel.conf").unlink()
    assert read_state(CUDA, roots(tmp_path)).power_mode == "NV Power Mode: 2"
    (tmp_path / "var/lib/nvpmodel/status").unlink()
    assert read_state(CUDA, roots(tmp_path)).power_mode is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'NV Power Mode: MAXN'; echo 0", "NV Power Mode: MAXN 0"),
        ("echo 'NV Power Mode: MAXN'; exit 1", "NV Power Mode: MODE_30W 2"),
        ("true", "NV Power Mode: MODE_30W 2"),
    ],
)
def test_nvpmodel_is_asked_first(tmp_path: Path, body: str, said: str) -> None:
    write_files(tmp_path, JETSON)
    command = tmp_path / "nvpmodel"
    command.write_text(f'#!/bin/sh\n[ "$1" = -q ] || exit 9\n{body}\n')
    command.chmod(0o755)
    assert read_state(CUDA, roots(tmp_path, str(command))).power_mode == said


CALM = HostState(at=0.0, thermal_seconds=5.0, supply_events=1, cpu_throttles=9, cooling={"gpu": 1})
AFTER = replace(CALM, at=10.0)


@pytest.mark.parametrize(
    ("after", "device", "why"),
    [
        (AFTER, CUDA, None),
        (replace(AFTER, throttle=("sw_power_cap", "gpu_idle", "sync_boost")), CUDA, None),
        (replace(AFTER, throttle=("hw_thermal_slowdown",)), CUDA, "hw_thermal_slowdown"),
        (replace(AFTER, throttle=("hw_power_brake_slowdown",)), CUDA, "hw_power_brake_slowdown"),
        (replace(AFTER, thermal_seconds=5.05), CUDA, None),
        (replace(AFTER, thermal_seconds=5.2), CUDA, "heat held the clocks down for 0.2 s"),
        (replace(AFTER, thermal_seconds=None), CUDA, None),
        (replace(AFTER, supply_events=4), CUDA, "the supply gave in 3 times"),
        (replace(AFTER, cooling={"gpu": 4}), CUDA, "cooling held the clocks down (gpu from 1"),
        (replace(AFTER, cooling={"gpu": 0}), CUDA, None),
        (replace(AFTER, cooling={}), CUDA, None),
        (replace(AFTER, cpu_throttles=11), CPU, "throttled 2 times"),
        (replace(AFTER, cpu_throttles=11), CUDA, None),
    ],
)
def test_which_reasons_are_faults(after: HostState, device: torch.device, why: str) -> None:
    faults = faults_between(CALM, after, device)
    if why is None:
        assert faults == ()
    else:
        (fault,) = faults
        assert why in fault
    was = replace(CALM, throttle=("hw_slowdown",))
    assert "hw_slowdown" in faults_between(was, AFTER, device), "hot from before is hot"


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path / "out")
    yield made
    made.close()


class Script:
    """States in the order in which they are looked at, and windows that are counted."""

    def __init__(self, *throttles: str) -> None:
        self._states: List[HostState] = []
        for index, name in enumerate(throttles):
            self._states.append(HostState(at=10.0 * index))
            named = (name,) if name else ()
            self._states.append(HostState(at=10.0 * index + 5, throttle=named))
        self.measured = 0

    def read(self, device: torch.device) -> HostState:
        return self._states.pop(0)

    def measure(self) -> int:
        self.measured += 1
        return self.measured


def test_a_quiet_window_is_taken_as_it_is(case: Case) -> None:
    script = Script("sw_power_cap")
    assert steadily(case.ctx, script.measure, CUDA, read=script.read) == 1
    assert case.facts["windows_discarded"] == 0
    assert case.facts["state_after"] == {"at": 5.0, "throttle": ["sw_power_cap"]}
    assert case.reasons == ()


def test_a_throttled_window_is_discarded_and_measured_again(case: Case) -> None:
    script = Script("hw_slowdown", "sw_thermal_slowdown", "")
    assert steadily(case.ctx, script.measure, CUDA, read=script.read) == 3
    assert case.facts["windows_discarded"] == 2
    assert case.facts["state_before"] == {"at": 20.0}
    assert case.reasons == ()


def test_a_device_that_stays_hot_makes_the_row_invalid(case: Case) -> None:
    script = Script(*["hw_thermal_slowdown"] * 3)
    assert steadily(case.ctx, script.measure, CUDA, attempts=3, read=script.read) == 3
    (reason,) = case.reasons
    assert "held back in each of 3 windows: hw_thermal_slowdown" in reason
    assert case.facts["windows_discarded"] == 2
    assert case.facts["state_after"]["throttle"] == ["hw_thermal_slowdown"]


def test_cooling_that_goes_on_from_a_discarded_window_is_no_calm(case: Case) -> None:
    steps = iter([0, 2, 2, 2, 2, 1])

    def read(_: torch.device) -> HostState:
        return HostState(at=1.0, cooling={"cpufreq-cpu0": next(steps)})

    steadily(case.ctx, lambda: None, CUDA, read=read)
    (reason,) = case.reasons
    assert "cpufreq-cpu0 from 0 to 1" in reason
    assert case.facts["state_before"]["cooling"] == {"cpufreq-cpu0": 2}


def test_facts_of_another_measurement_have_names_of_their_own(case: Case) -> None:
    steadily(case.ctx, lambda: 1, CUDA, read=Script("").read)
    steadily(case.ctx, lambda: 2, CUDA, read=Script("hw_slowdown", "").read, prefix="energy_")
    assert (case.facts["windows_discarded"], case.facts["energy_windows_discarded"]) == (0, 1)
    assert case.facts["state_before"] == {"at": 0.0}
    assert case.facts["energy_state_before"] == {"at": 10.0}
    assert case.facts["energy_state_after"] == {"at": 15.0}


def test_this_machine_can_be_looked_at() -> None:
    state = read_state(CPU)
    assert state.load_average is not None
    assert state.to_fact()["at"] == state.at
