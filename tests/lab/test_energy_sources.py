"""Counters read at their steps, power integrated, and every way in which either can lie."""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path
from typing import Dict, List, Tuple

import pytest
from energy_cases import CPU, Device, FakeClock, FakeTicker, write_files
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge_contract.errors import UnknownNameError, UsageError
from narrowgauge_lab.measure.energy import Places, open_source
from narrowgauge_lab.measure.energy.counter import CounterSource, detect_period
from narrowgauge_lab.measure.energy.rapl import open_rapl, zones
from narrowgauge_lab.measure.energy.replay import load_recording
from narrowgauge_lab.measure.energy.sampled import (
    SampledSource,
    ThreadTicker,
    covered,
    integrate,
)
from narrowgauge_lab.measure.energy.source import (
    REAL_CLOCK,
    EnergyError,
    EnergyMissingError,
    NullSource,
    Rail,
    Sampling,
    Total,
)

BOARD = (Rail("board"),)
WHOLE = Total("rail", ("board",))


def counting(device: Device, period: float = 0.1) -> CounterSource:
    return CounterSource(
        "count", BOARD, WHOLE, lambda: {"board": device.counter(period)},
        clock=device.clock.clock, quantum_j=1e-3,
    )  # fmt: skip


def test_a_counters_period_is_found_by_watching_it() -> None:
    clock = FakeClock()
    for period in (0.1, 0.02, 0.001):
        device = Device(clock)
        found = detect_period(lambda d=device, p=period: d.counter(p), clock.clock, "x")  # type: ignore[misc]
        assert found == pytest.approx(period, abs=2.1e-4)


@pytest.mark.parametrize("offset", [0.0, 0.013, 0.05, 0.099])
def test_a_counters_window_has_what_was_drawn_wherever_its_steps_fall(offset: float) -> None:
    clock = FakeClock()
    device = Device(clock, idle=50, load=650)
    source = counting(device)
    clock.pass_time(offset)
    source.begin()
    began, before = clock.at, device.joules(clock.at)
    device.call(5.0 + offset)
    done, after = clock.at, device.joules(clock.at)
    energy = source.end()

    assert energy.tail_s <= 0.1 + 2.1e-4
    assert energy.seconds == pytest.approx(done - began + energy.tail_s, abs=2.1e-4)
    drawn = energy.joules["board"] - 50 * energy.tail_s
    assert drawn == pytest.approx(after - before, abs=energy.resolution_j)
    assert energy.resolution_j < 1e-4 * drawn, "without waiting for a step it is 100 times that"
    assert energy.coverage == 1.0


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([5.0, 5.0], "stood still|stands still"),
        ([5.0, 4.0], "ran backwards"),
        ([5.0, 1e9], "says what cannot be"),
    ],
)
def test_a_counter_that_lies_is_an_error_and_no_zero(values: List[float], why: str) -> None:
    clock = FakeClock()
    state = {"base": 0.0, "frozen": 0.0}
    device = Device(clock)

    def read() -> Dict[str, float]:
        if state["frozen"]:
            return {"board": state["frozen"]}
        return {"board": device.counter() + state["base"]}

    source = CounterSource("count", BOARD, WHOLE, read, clock=clock.clock, quantum_j=1e-3)
    source.begin()
    clock.pass_time(6)
    if values[1] == values[0]:
        state["frozen"] = device.counter()
    else:
        state["base"] = values[1] - values[0] if values[1] > values[0] else -1e4
    with pytest.raises(EnergyError, match=why):
        source.end()


def test_a_counter_that_never_steps_is_found_at_once() -> None:
    clock = FakeClock()
    with pytest.raises(EnergyError, match="stands still"):
        CounterSource("x", BOARD, WHOLE, lambda: {"board": 7.0}, clock=clock.clock, quantum_j=1e-3)
    assert clock.at - 100 < 3, "it is not waited for for ever"


def test_one_of_several_counters_that_stands_still_spoils_the_total() -> None:
    clock = FakeClock()
    device = Device(clock)
    rails, total = (Rail("a"), Rail("b"), Rail("c")), Total("sum", ("a", "b"))
    for still, fails in (("b", True), ("c", False)):
        source = CounterSource(
            "x", rails, total,
            lambda s=still: {n: 3.0 if n == s else device.counter() for n in "abc"},  # type: ignore[misc]
            clock=clock.clock, quantum_j=1e-3,
        )  # fmt: skip
        source.begin()
        clock.pass_time(5)
        if fails:
            with pytest.raises(EnergyError, match="b stood still"):
                source.end()
        else:
            assert source.end().joules["c"] == 0.0


def test_a_window_that_was_not_begun_is_not_ended() -> None:
    clock = FakeClock()
    source = counting(Device(clock))
    source.begin()
    source.abandon()
    with pytest.raises(EnergyError, match="not begun"):
        source.end()
    with pytest.raises(EnergyError, match="none"):
        NullSource().begin()
    with pytest.raises(EnergyError, match="none"):
        NullSource().end()


@given(
    power=st.lists(st.floats(0, 1000), min_size=2, max_size=20),
    edges=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_trapezoids_add_up(power: List[float], edges: Tuple[float, float]) -> None:
    """Any cut of the window gives the same sum, and none is more than the largest power."""
    times = [float(index) for index in range(len(power))]
    end = times[-1]
    begin, middle = sorted(edge * end for edge in edges)
    whole = integrate(times, power, begin, end)
    parts = integrate(times, power, begin, middle) + integrate(times, power, middle, end)

    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert min(power) * (end - begin) - 1e-6 <= whole <= max(power) * (end - begin) + 1e-6


def test_a_line_is_integrated_exactly() -> None:
    times = [0.0, 0.3, 1.0, 2.5, 4.0]
    assert integrate(times, [3 + 2 * t for t in times], 0.5, 3.5) == pytest.approx(3 * 3 + 12)
    assert integrate(times, [1.0] * 5, 3.0, 3.0) == 0.0


def test_coverage_is_what_lies_between_near_readings() -> None:
    times = [0.0, 0.1, 0.2, 0.7, 0.8, 1.0]
    assert covered(times, 0.0, 1.0, 0.25) == pytest.approx(0.5)
    assert covered(times, 0.1, 0.2, 0.25) == pytest.approx(1.0)
    assert covered([0.0], 0.0, 1.0, 9) == 0.0


def sampling(device: Device, ticker: FakeTicker, interval: float = 0.01) -> SampledSource:
    def read() -> Dict[str, float]:
        device.clock.at += 0.0004  # what a reading takes
        return {"board": device.watts()}

    return SampledSource(
        "power", BOARD, WHOLE, read, clock=device.clock.clock, interval_s=interval,
        quanta_w={"board": 0.1}, ticker=ticker,  # type: ignore[arg-type]
    )  # fmt: skip


def test_sampled_power_becomes_energy_and_says_how_it_was_sampled() -> None:
    clock = FakeClock()
    device = Device(clock)
    source = sampling(device, FakeTicker(clock))
    source.begin()
    before = device.joules(clock.at)
    for _ in range(100):  # 53 ms, which no multiple of the interval keeps pace with
        device.call(0.037)
        clock.pass_time(0.016)
    after, at = device.joules(clock.at), clock.at
    energy = source.end()

    assert energy.joules["board"] == pytest.approx(after - before, rel=0.01)
    assert energy.coverage == pytest.approx(1.0)
    assert energy.seconds == pytest.approx(at - 100, abs=0.02)
    assert energy.resolution_j == pytest.approx(0.1 * energy.seconds)
    assert energy.sampling is not None
    fact = energy.sampling.to_fact()
    assert fact["rate_hz"] == pytest.approx(100, rel=0.02)
    assert fact["seconds_per_reading"] == pytest.approx(0.0004, rel=1e-3)
    assert fact["busy_share"] == pytest.approx(0.04, rel=0.05)
    assert clock.tickers == [], "nothing samples after the window"


def test_a_sampler_that_is_held_up_covers_too_little() -> None:
    """Every fiftieth reading comes 1.5 s late: a quarter is left."""
    clock = FakeClock()
    turns = itertools.count(1)
    late = FakeTicker(clock, late=lambda: 0.0 if next(turns) % 50 else 1.5)
    source = sampling(Device(clock), late)
    source.begin()
    clock.pass_time(8)
    with pytest.raises(EnergyError, match="24% of the energy window was observed") as caught:
        source.end()
    assert "processor core" in caught.value.next_step


def test_a_sensor_that_is_always_slow_leaves_no_hole() -> None:
    """A bus that takes ten times the interval, and a sensor that steps so often at most."""
    clock = FakeClock()
    source = sampling(Device(clock), FakeTicker(clock, late=lambda: 0.09))
    source.begin()
    clock.pass_time(6)
    energy = source.end()
    assert energy.coverage == pytest.approx(1.0)
    assert energy.joules["board"] == pytest.approx(50 * energy.seconds)
    assert energy.sampling is not None
    assert energy.sampling.to_fact()["rate_hz"] == pytest.approx(10, rel=0.05)

    # Readings in bursts of eight, 0.1 s apart; the sensor's own period of 50 ms explains that.
    turns = itertools.count(1)
    bursts = FakeTicker(clock, late=lambda: 0.0 if next(turns) % 8 else 0.1)
    slow = SampledSource(
        "power", BOARD, WHOLE, lambda: {"board": 2.0}, clock=clock.clock, interval_s=0.01,
        quanta_w={"board": 0.1}, period_s=0.05, ticker=bursts,  # type: ignore[arg-type]
    )  # fmt: skip
    slow.begin()
    clock.pass_time(6)
    assert slow.end().coverage == pytest.approx(1.0)


def test_a_reading_that_fails_ends_the_window() -> None:
    clock = FakeClock()
    reads = []

    def read() -> Dict[str, float]:
        reads.append(1)
        if len(reads) == 20:
            raise EnergyError("the rail went away")
        return {"board": 1.0}

    source = SampledSource(
        "power", BOARD, WHOLE, read, clock=clock.clock, interval_s=0.01, quanta_w={"board": 0.1},
        ticker=FakeTicker(clock),  # type: ignore[arg-type]
    )  # fmt: skip
    source.begin()
    clock.pass_time(5)
    with pytest.raises(EnergyError, match="went away"):
        source.end()
    assert len(reads) == 20
    assert clock.tickers == []


def test_a_thread_samples_by_itself_and_ends() -> None:
    source = SampledSource(
        "power", BOARD, WHOLE, lambda: {"board": 3.0}, clock=REAL_CLOCK, interval_s=0.002,
        quanta_w={"board": 0.1}, ticker=ThreadTicker(REAL_CLOCK),
    )  # fmt: skip
    before = set(threading.enumerate())
    with source:
        source.begin()
        (thread,) = set(threading.enumerate()) - before
        # How densely it reads on a busy machine is not the question here.
        source._wait(lambda: len(source._samples) >= 3)
        assert thread.is_alive()
    assert not thread.is_alive()
    times = [at for at, _ in source._samples]
    assert times == sorted(times)


def rapl(root: Path, energies: Dict[str, float], span: float = 262143.0) -> Path:
    names = {"0": "package-0", "0:0": "core", "0:1": "uncore", "0:2": "dram", "1": "psys"}
    for zone, joules in energies.items():
        write_files(root / "sys/class/powercap" / f"intel-rapl:{zone}", {
            "name": f"{names[zone]}\n",
            "energy_uj": f"{joules * 1e6:.0f}\n",
            "max_energy_range_uj": f"{span * 1e6:.0f}\n",
        })  # fmt: skip
    return root


class Processor:
    """RAPL's files, rewritten as a FakeClock passes: W by zone, and where they go on from 0."""

    def __init__(self, root: Path, watts: Dict[str, float], first: float = 0.0) -> None:
        self.root = root
        self.fake = FakeClock()
        self.watts = watts
        self.first = first
        self.span = 5000.0
        self.write()

    def write(self) -> None:
        at = self.fake.at // 0.001 * 0.001 - 99
        joules = {z: (self.first + w * at) % self.span for z, w in self.watts.items()}
        rapl(self.root, joules, self.span)

    def pass_time(self, seconds: float) -> None:
        self.fake.pass_time(seconds)
        self.write()


def _open(processor: Processor) -> CounterSource:
    from narrowgauge_lab.measure.energy.source import Clock

    return open_rapl(processor.root, Clock(lambda: processor.fake.at, processor.pass_time))


def test_rapl_adds_packages_and_memory_and_nothing_twice(tmp_path: Path) -> None:
    watts = {"0": 40.0, "0:0": 25.0, "0:1": 0.0, "0:2": 5.0, "1": 90.0}
    processor = Processor(tmp_path, watts)
    source = _open(processor)
    source.begin()
    processor.pass_time(5)
    energy = source.end()

    assert source.total.rails == ("package-0", "package-0/dram")
    assert [rail.name for rail in source.rails] == [
        "package-0", "package-0/core", "package-0/uncore", "package-0/dram", "psys",
    ]  # fmt: skip
    assert source.total.of(energy.joules) == pytest.approx(45 * energy.seconds, rel=1e-3)
    assert energy.joules["psys"] == pytest.approx(90 * energy.seconds, rel=1e-3)
    assert source.label(source.total.rails) == "rapl:package-0+package-0/dram"


def test_rapl_goes_on_from_nought_once_and_not_unseen_twice(tmp_path: Path) -> None:
    processor = Processor(tmp_path, {"0": 40.0}, first=4850.0)
    source = _open(processor)
    source.begin()
    before = (processor.first + 40 * (processor.fake.at - 99)) % 5000
    processor.pass_time(4)
    energy = source.end()
    assert before > (processor.first + 40 * (processor.fake.at - 99)) % 5000, "it did wrap"
    assert energy.joules["package-0"] == pytest.approx(40 * energy.seconds, rel=1e-3)

    source.begin()
    processor.pass_time(30)
    with pytest.raises(EnergyError, match="begun anew unseen"):
        source.end()


def test_what_hides_rapl_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnergyMissingError, match="no energy counter") as absent:
        zones(tmp_path)
    assert "virtual machines" in absent.value.why

    root = rapl(tmp_path / "denied", {"0": 1.0})

    def refuse(path: Path, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(EnergyMissingError, match="cannot be read") as denied:
            zones(root)
    assert "chmod a+r" in denied.value.next_step

    masked = tmp_path / "masked/sys/class/powercap"
    masked.mkdir(parents=True)
    (masked / "intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl:0")
    with pytest.raises(EnergyMissingError, match="container engine hides") as hidden:
        zones(tmp_path / "masked")
    assert "--executor native" in hidden.value.next_step

    (root / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("12x\n")
    with pytest.raises(EnergyMissingError, match="not a number"):
        zones(root)


def test_a_recording_is_played_by_the_clock(tmp_path: Path) -> None:
    clock = FakeClock()
    power = tmp_path / "power.csv"
    power.write_text("t_s,VDD_IN_W,VDD_CPU_GPU_CV_W,VDD_SOC_W\n"
                     + "".join(f"{t},{10 + t},{t},1\n" for t in range(21)))  # fmt: skip
    source = open_source(f"replay:{power}", CPU, clock=clock.clock)
    clock.pass_time(100)
    source.begin()  # now it begins, however long after it was opened
    clock.pass_time(2)
    source.abandon()
    source.begin()
    clock.pass_time(6)
    energy = source.end()
    assert energy.joules == {"VDD_IN": pytest.approx(90), "VDD_CPU_GPU_CV": pytest.approx(30),
                             "VDD_SOC": pytest.approx(6)}  # fmt: skip
    assert source.total.rails == ("VDD_IN",)
    clock.pass_time(10)
    source.begin()
    clock.pass_time(6)
    with pytest.raises(EnergyError, match="recording is from 0 to 20 s"):
        source.end()

    counter = tmp_path / "counter.csv"
    counter.write_text("t_s,card_J\n0,5\n10,105\n20,205\n")
    source = open_source(f"replay:{counter}", CPU, clock=clock.clock)
    source.begin()
    clock.pass_time(15)
    assert source.end().joules == {"card": pytest.approx(150)}
    assert source.label(("card",)) == "replay"


def test_a_recording_with_a_hole_is_no_measurement(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "power.csv"
    times = [t / 10 for t in range(101) if not 30 < t < 60]
    path.write_text("t_s,card_W\n" + "".join(f"{t},7\n" for t in times))
    source = open_source(f"replay:{path}", CPU, clock=clock.clock)
    source.begin()
    clock.pass_time(2)
    assert source.end().coverage == pytest.approx(1.0)
    source.begin()
    clock.pass_time(6)
    with pytest.raises(EnergyError, match="50% of the energy window was observed") as caught:
        source.end()
    assert "without holes" in caught.value.next_step


@pytest.mark.parametrize(
    "text",
    [
        "", "t_s\n0\n1\n", "t_s,a_W\n", "t_s,a_W\n0,1\n", "t_s,a_W\n0,1\n0,2\n",
        "t_s,a_W\n1,1\n0,2\n", "t_s,a_W\n0,1\n1,x\n", "t_s,a_W\n0,1\n1,nan\n",
        "t_s,a_W\n0,1\n1\n", "t_s,a_W,b_J\n0,1,2\n1,2,3\n", "t_s,a_V\n0,1\n1,2\n",
        "t_s,_W\n0,1\n1,2\n", "t_s,a_W,a_W\n0,1,1\n1,2,2\n", "time,a_W\n0,1\n1,2\n",
    ],
)  # fmt: skip
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a recording"):
        load_recording(path)


def test_a_recording_that_is_not_there_or_runs_backwards(tmp_path: Path) -> None:
    with pytest.raises(EnergyMissingError, match="no recorded energy"):
        open_source(f"replay:{tmp_path / 'none.csv'}", CPU)
    path = tmp_path / "back.csv"
    path.write_text("t_s,a_J\n0,5\n1,4\n2,9\n")
    with pytest.raises(EnergyError, match="backwards"):
        load_recording(path).joules("a", 0, 2)


def test_an_unknown_source_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown energy source 'nvlm'"):
        open_source("nvlm", CPU)


def test_auto_takes_rails_before_anything_else(tmp_path: Path) -> None:
    from energy_cases import write_board

    write_board(tmp_path, "Nano", "iio")
    rapl(tmp_path, {"0": 1.0})
    assert open_source("auto", CPU, Places(tmp_path)).name == "ina3221"
    processor = Processor(tmp_path / "pc", {"0": 40.0})
    assert _open(processor).name == "rapl"
    with pytest.raises(EnergyMissingError, match="no energy counter"):
        open_source("auto", CPU, Places(tmp_path / "empty"))


def test_a_rate_of_nothing_is_nought_and_not_infinite() -> None:
    assert Sampling(0.01, (1.0,), {"a": (1.0,)}, 0.0).rate_hz == 0.0
    assert math.isclose(Sampling(0.01, (1.0, 1.5, 2.0), {}, 0.1).rate_hz, 2.0)
