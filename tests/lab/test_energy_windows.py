"""Energy of a call: idle taken off, nothing counted twice, and nothing blank."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict, Iterator, List

import pytest
import torch
from energy_cases import CPU, Case, Device, FakeClock, FakeTicker, write_board

from narrowgauge_lab.measure.energy import (
    EnergyPlan,
    Meter,
    Places,
    Window,
    measure_energy,
    open_source,
    source_or_invalid,
)
from narrowgauge_lab.measure.energy.counter import CounterSource
from narrowgauge_lab.measure.energy.ina3221 import open_ina3221
from narrowgauge_lab.measure.energy.sampled import SampledSource
from narrowgauge_lab.measure.energy.source import Energy, EnergyError, Rail, Source, Total
from narrowgauge_lab.measure.state import HostState

CARD = (Rail("card", ("board",)),)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path / "out")
    yield made
    made.close()


def counted(device: Device) -> CounterSource:
    return CounterSource(
        "nvml-counter", CARD, Total("rail", ("card",)), lambda: {"card": device.counter()},
        clock=device.clock.clock, quantum_j=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("seconds_a_call", [0.003, 0.05, 0.73])
def test_gross_and_net_are_what_was_drawn(case: Case, seconds_a_call: float) -> None:
    clock = FakeClock()
    device = Device(clock, idle=80, load=680)
    plan = EnergyPlan(seconds=10, windows=3)
    result = measure_energy(
        case.ctx, lambda: device.call(seconds_a_call), CPU, counted(device), plan, clock=clock.clock
    )

    assert result is not None
    assert case.values("energy_gross") == result.gross
    assert case.values("energy_gross") == pytest.approx([680 * seconds_a_call] * 3, rel=2e-3)
    assert case.values("energy_net") == pytest.approx([600 * seconds_a_call] * 3, rel=2e-3)
    assert case.values("energy_idle_power") == pytest.approx([80], rel=1e-3)
    assert case.source("energy_gross") == "nvml-counter"
    facts = case.facts
    assert facts["energy_source"] == "nvml-counter"
    assert facts["energy_total"]["rails"] == ["card"]
    assert facts["energy_period"] == pytest.approx(0.1, abs=1e-3)
    assert facts["energy_coverage"] == 1.0
    assert 0 < facts["energy_resolution"] < 1.0
    assert facts["energy_idle"]["seconds"] >= 5
    assert [w["calls"] * seconds_a_call >= 10 for w in facts["energy_windows"]] == [True] * 3
    assert all(w["tail_s"] <= 0.11 for w in facts["energy_windows"])
    assert case.reasons == ()
    assert "energy_gross_card" not in {m.name for m in case.row().metrics}, "one rail is the total"


def test_what_a_counters_last_step_holds_beyond_the_window_is_taken_off_at_idle_power() -> None:
    """300 J in 10 s, of which 1 s lay after the end; 20 W idle; 5 calls."""
    window = Window(5, Energy({"a": 300.0}, 10.0, 1.0, 1.0, 0.0))
    assert window.seconds == 9.0
    assert window.gross("a", 20.0) == pytest.approx((300 - 20) / 5)
    assert window.net("a", 20.0) == pytest.approx((300 - 200) / 5)


def test_twice_the_calls_are_twice_the_energy() -> None:
    clock = FakeClock()
    device = Device(clock, idle=80, load=400)
    source = counted(device)
    meter = Meter(source, CPU, clock.clock)
    idle = meter.idle(5)
    watts = idle.joules["card"] / idle.seconds
    once, twice = (meter.run(lambda: device.call(0.0137), n) for n in (400, 800))

    assert 2 * once.gross("card", watts) * 400 == pytest.approx(
        twice.gross("card", watts) * 800, rel=1e-3
    )


def test_windows_hold_fifty_periods_of_a_slow_source(case: Case) -> None:
    clock = FakeClock()
    device = Device(clock)
    source = counted(device)
    source.period_s = 0.3
    measure_energy(
        case.ctx, lambda: device.call(0.1), CPU, source, EnergyPlan(seconds=5), clock=clock.clock
    )
    facts = case.facts
    assert facts["energy_idle"]["seconds"] >= 15
    assert facts["energy_windows"][0]["seconds"] >= 15


def test_no_window_is_shorter_than_five_seconds_however_little_is_asked(case: Case) -> None:
    clock = FakeClock()
    device = Device(clock)
    plan = EnergyPlan(seconds=0.1, idle_seconds=0.1)
    measure_energy(
        case.ctx, lambda: device.call(0.1), CPU, counted(device), plan, clock=clock.clock
    )
    facts = case.facts
    assert facts["energy_windows"][0]["seconds"] >= 5
    assert facts["energy_idle"]["seconds"] >= 5


def test_calls_that_become_quicker_still_fill_a_window(case: Case) -> None:
    clock = FakeClock()
    device = Device(clock)

    def call() -> None:
        device.call(0.1 if clock.at < 112 else 0.04)

    measure_energy(case.ctx, call, CPU, counted(device), EnergyPlan(seconds=5), clock=clock.clock)
    (window,) = case.facts["energy_windows"]
    assert window["seconds"] >= 5
    assert case.values("energy_gross") == pytest.approx([250 * 0.04], rel=2e-3)


def test_calls_that_never_fill_one_are_invalid(case: Case) -> None:
    clock = FakeClock()
    device = Device(clock)
    cost = [0.2]

    def call() -> None:
        cost[0] *= 0.9
        device.call(cost[0])

    meter_plan = EnergyPlan(seconds=5, warm_up_seconds=0)
    measure_energy(case.ctx, call, CPU, counted(device), meter_plan, clock=clock.clock)
    (reason,) = case.reasons
    assert "do not fill a window of 5 s" in reason


@pytest.mark.parametrize(("hot", "discarded", "valid"), [(1, 1, True), (9, 2, False)])
def test_energy_is_measured_again_where_heat_held_the_device_back(
    case: Case, hot: int, discarded: int, valid: bool
) -> None:
    """Its own looks at the device; those of the row's other windows stay as they are."""
    clock = FakeClock()
    device = Device(clock, idle=80, load=400)
    looks: List[float] = []

    def read(_: torch.device) -> HostState:
        looks.append(clock.at)
        ended = len(looks) % 2 == 0
        slow = ("hw_thermal_slowdown",) if ended and len(looks) <= 2 * hot else ()
        return HostState(at=clock.at, throttle=slow)

    case.ctx.fact("state_before", {"at": 1.0})
    result = measure_energy(
        case.ctx, lambda: device.call(0.1), CPU, counted(device), EnergyPlan(seconds=5),
        clock=clock.clock, read=read,
    )  # fmt: skip

    assert result is not None
    facts = case.facts
    assert facts["energy_windows_discarded"] == discarded
    assert len(looks) == 2 * (discarded + 1)
    assert facts["energy_state_before"]["at"] == looks[-2]
    assert looks[-1] - looks[-2] >= 10, "idle and the window lie between"
    assert ("throttle" in facts["energy_state_after"]) is not valid
    assert facts["state_before"] == {"at": 1.0}
    assert "windows_discarded" not in facts
    assert len(facts["energy_windows"]) == 1, "what heat spoilt is not recorded"
    assert len(case.values("energy_gross")) == 1
    if valid:
        assert case.reasons == ()
    else:
        (reason,) = case.reasons
        assert "hw_thermal_slowdown" in reason


def test_a_window_that_came_out_far_shorter_than_asked_is_measured_again(case: Case) -> None:
    clock = FakeClock()
    device = Device(clock)

    def call() -> None:
        device.call(0.1 if clock.at < 109 else 0.06)

    measure_energy(case.ctx, call, CPU, counted(device), EnergyPlan(seconds=10), clock=clock.clock)
    (window,) = case.facts["energy_windows"]
    assert window["seconds"] >= 9, "the first came out at 6.3 s, which is more than the least"


def test_what_only_the_first_call_does_is_no_part_of_the_estimate() -> None:
    clock = FakeClock()
    device = Device(clock)
    meter = Meter(counted(device), CPU, clock.clock)

    def call() -> None:
        device.call(0.05 if device.calls else 30.0)  # it compiles

    assert meter.warm_up(call, 0.0) == pytest.approx(0.05)


def test_a_window_with_a_handful_of_readings_is_none(case: Case) -> None:
    """A bus that always takes 0.2 s leaves no hole, and says too little all the same."""
    clock = FakeClock()
    device = Device(clock)
    source = SampledSource(
        "power", CARD, Total("rail", ("card",)), lambda: {"card": device.watts()},
        clock=clock.clock, interval_s=0.01, quanta_w={"card": 0.1},
        ticker=FakeTicker(clock, late=lambda: 0.2),  # type: ignore[arg-type]
    )  # fmt: skip
    measure_energy(case.ctx, lambda: device.call(0.1), CPU, source, clock=clock.clock)
    (reason,) = case.reasons
    assert "times only in 5.0 s (a window needs 50 readings)" in reason
    assert case.row().metrics == ()


@pytest.mark.parametrize(("seconds", "enough"), [(19, True), (15, False)])
def test_a_recording_that_lasts_for_all_that_is_measured(
    case: Case, tmp_path: Path, seconds: int, enough: bool
) -> None:
    """Idle for 5 s, then busy. It may have been opened long before."""
    clock = FakeClock()
    path = tmp_path / "power.csv"
    lines = [f"{t / 20},{10 if t <= 100 else 40}\n" for t in range(20 * seconds + 1)]
    path.write_text("t_s,card_W\n" + "".join(lines))
    source = open_source(f"replay:{path}", CPU, clock=clock.clock)
    clock.pass_time(60)

    measure_energy(case.ctx, lambda: clock.pass_time(0.1), CPU, source, clock=clock.clock)

    if enough:
        assert case.reasons == ()
        assert case.values("energy_gross") == pytest.approx([4.0])
        assert case.values("energy_net") == pytest.approx([3.0])
    else:
        (reason,) = case.reasons
        assert "lasts for all that is measured" in reason


def test_energy_that_is_not_there_makes_the_row_invalid_and_none_does_not(
    case: Case, tmp_path: Path
) -> None:
    places = Places(tmp_path, nvml=str(tmp_path / "no-nvml.so"), cuda=str(tmp_path / "no-cuda.so"))
    called: List[int] = []
    assert measure_energy(case.ctx, lambda: called.append(1), CPU, "none", places=places) is None
    assert case.reasons == ()
    assert case.facts["energy_source"] == "none"

    assert measure_energy(case.ctx, lambda: called.append(1), CPU, "auto", places=places) is None
    (reason,) = case.reasons
    assert "energy was asked for (auto) and is not here: no energy counter (RAPL)" in reason
    assert source_or_invalid(case.ctx, "ina3221", CPU, places) is None
    assert source_or_invalid(case.ctx, "nvml", torch.device("cuda", 0), places) is None
    assert len(case.reasons) == 3
    assert measure_energy(case.ctx, lambda: called.append(1), CPU, None) is None
    assert called == [], "what cannot be measured is not run for long"
    assert case.row().metrics == ()


def test_a_source_that_fails_on_the_way_makes_the_row_invalid(case: Case) -> None:
    clock = FakeClock()
    device = Device(clock)

    def read() -> Dict[str, float]:
        return {"card": device.counter() if clock.at < 115 else 1.0}

    source = CounterSource(
        "nvml-counter", CARD, Total("rail", ("card",)), read, clock=clock.clock, quantum_j=1e-3
    )
    measure_energy(case.ctx, lambda: device.call(0.1), CPU, source, clock=clock.clock)
    (reason,) = case.reasons
    assert "ran backwards" in reason or "stands still" in reason
    assert case.row().metrics == ()


def test_energy_that_cannot_be_told_from_idle_is_invalid(case: Case) -> None:
    clock = FakeClock()
    device = Device(clock, idle=80, load=79)
    measure_energy(case.ctx, lambda: device.call(0.1), CPU, counted(device), clock=clock.clock)
    (reason,) = case.reasons
    assert "cannot be told from that of an idle device" in reason


def test_a_call_that_raises_leaves_nothing_behind(case: Case, tmp_path: Path) -> None:
    write_board(tmp_path, "Nano", "iio")
    clock = FakeClock()
    source = open_ina3221(tmp_path, clock.clock, ticker=lambda: FakeTicker(clock))  # type: ignore[arg-type, return-value]

    def call() -> None:
        clock.pass_time(0.1)
        if clock.at > 112:
            raise ValueError("the call's own")

    with pytest.raises(ValueError, match="the call's own"):
        measure_energy(case.ctx, call, CPU, source, clock=clock.clock)
    assert clock.tickers == []


def _rails(tmp_path: Path, board: str, clock: FakeClock) -> Source:
    write_board(tmp_path, board, "hwmon")
    return open_ina3221(tmp_path, clock.clock, ticker=lambda: FakeTicker(clock))  # type: ignore[arg-type, return-value]


def test_every_rail_is_recorded_by_its_name_and_the_readings_kept(
    case: Case, tmp_path: Path
) -> None:
    clock = FakeClock()
    source = _rails(tmp_path, "AGX Xavier", clock)
    folder = tmp_path / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon2"

    def call() -> None:
        (folder / "curr1_input").write_text("1000\n")
        clock.pass_time(0.1)

    measure_energy(case.ctx, call, CPU, source, EnergyPlan(seconds=5), clock=clock.clock)
    case.ctx.finish()
    idle = {"GPU": 19.032 * 0.168, "CPU": 19.024 * 0.128, "SOC": 19.016 * 0.096,
            "CV": 19.04 * 0.008, "VDDRQ": 19.04 * 0.04, "SYS5V": 19.008 * 0.112}  # fmt: skip
    for name, watts in idle.items():
        assert case.values(f"energy_idle_power_{name}") == pytest.approx([watts], rel=1e-3)
        assert case.source(f"energy_gross_{name}") == f"ina3221:{name}"
    gpu = 19.032 * (1.0 - 0.168) * 0.1
    assert case.values("energy_net_GPU") == pytest.approx([gpu], rel=1e-2)
    assert case.values("energy_net_CPU") == pytest.approx([0], abs=1e-6)
    assert case.values("energy_net") == pytest.approx([gpu], rel=1e-2)
    assert case.source("energy_net") == "ina3221:GPU+CPU+SOC+CV+VDDRQ+SYS5V"
    assert case.facts["energy_rails"]["CV"]["parts"] == ["dla", "pva"]
    assert case.facts["energy_windows"][0]["sampler"]["rate_hz"] == pytest.approx(100, rel=0.05)
    assert case.facts["energy_coverage"] == pytest.approx(1.0)

    files = [file.path for file in case.row().side_files]
    assert files == ["row-0/energy-0.csv", "row-0/energy-1.csv"], "idle, and the window"
    again = FakeClock()
    with open_source(f"replay:{case.ctx.out / files[1]}", CPU, clock=again.clock) as replay:
        assert replay.total.rule == "sum"
        replay.begin()
        again.pass_time(5)
        assert replay.end().joules["GPU"] == pytest.approx(5 * 19.032, rel=0.01)


def test_without_a_total_the_rails_stand_alone(case: Case, tmp_path: Path) -> None:
    clock = FakeClock()
    source = _rails(tmp_path, "AGX Orin", clock)
    result = measure_energy(
        case.ctx,
        lambda: clock.pass_time(0.1),
        CPU,
        source,
        EnergyPlan(seconds=5),
        clock=clock.clock,
    )
    assert result is not None
    assert (result.gross, result.net) == (None, None)
    names = {metric.name for metric in case.row().metrics}
    assert "energy_gross" not in names
    assert "energy_gross_VDD_GPU_SOC" in names
    assert case.facts["energy_total"]["rule"] == "none"
    assert case.facts["energy_total"]["why"]


class Told(Source):
    """Tells when its windows begin and end."""

    name = "told"
    rails = CARD
    total = Total("rail", ("card",))
    period_s = 0.01

    def __init__(self, log: List[str]) -> None:
        self._log = log

    def begin(self) -> None:
        self._log.append("begin")

    def end(self) -> Energy:
        self._log.append("end")
        return Energy({"card": 1.0}, 6.0, 0.0, 1.0, 0.0)

    def close(self) -> None:
        self._log.append("close")


def test_a_window_lies_between_synchronised_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    log: List[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    meter = Meter(Told(log), torch.device("cuda", 0), FakeClock().clock)
    meter.run(lambda: log.append("call"), 2)
    assert log == ["synchronize", "begin", "call", "call", "synchronize", "end"]
    log.clear()
    meter.idle(5)
    assert log == ["synchronize", "begin", "end"]


def test_a_source_given_by_name_is_closed_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowgauge_lab.measure.energy import windows

    log: List[str] = []
    opener: Callable[..., Source] = lambda *_: Told(log)  # noqa: E731
    monkeypatch.setattr(windows, "source_or_invalid", opener)
    clock = FakeClock()
    measure_energy(case.ctx, lambda: clock.pass_time(0.1), CPU, "auto", clock=clock.clock)
    assert log[-1] == "close"


def test_an_error_in_words_has_its_reason_and_the_way_out() -> None:
    assert EnergyError("what", why="why").in_words() == "what (why)"
    assert EnergyError("what", next_step="do").in_words() == "what; do"
    assert EnergyError("what", why="why", next_step="do").in_words() == "what (why); do"
    assert EnergyError("what").in_words() == "what"


def test_a_rows_reason_says_what_to_do(case: Case, tmp_path: Path) -> None:
    masked = tmp_path / "sys/class/powercap"
    masked.mkdir(parents=True)
    (masked / "intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl:0")
    assert measure_energy(case.ctx, lambda: None, CPU, "rapl", places=Places(tmp_path)) is None
    (reason,) = case.reasons
    assert "--executor native" in reason
