"""INA3221 rails of every board, in both layouts: by their names, with honest totals, whatever the
kernel's files say."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest
from energy_cases import (
    CPU,
    Case,
    FakeClock,
    FakeTicker,
    Line,
    boards,
    write_board,
    write_channel,
    write_files,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowgauge_lab.measure.energy import EnergyPlan, measure_energy
from narrowgauge_lab.measure.energy.boards import BOARDS, SECONDARY, board_with, total_of
from narrowgauge_lab.measure.energy.ina3221 import channels, open_ina3221
from narrowgauge_lab.measure.energy.sampled import SampledSource
from narrowgauge_lab.measure.energy.source import EnergyError, EnergyMissingError

TOTAL_RAIL = {
    "Xavier NX": "VDD_IN", "Orin NX": "VDD_IN", "Orin Nano": "VDD_IN", "TX2": "VDD_IN",
    "Nano": "POM_5V_IN",
}  # fmt: skip
INA = "sys/bus/i2c/drivers/ina3221"


def rails(lines: List[Line]) -> List[Line]:
    return [line for line in lines if line.label != "NC"]


def opened(root: Path, clock: FakeClock) -> SampledSource:
    return open_ina3221(root, clock.clock, ticker=lambda: FakeTicker(clock))  # type: ignore[arg-type, return-value]


def test_the_table_has_every_board_in_every_layout_that_it_had() -> None:
    mapped = {
        (name, layout) for board in BOARDS for name in board.names for layout in board.layouts
    }
    assert set(boards()) == mapped - {("Orin NX", "iio"), ("Orin Nano", "iio")}


@pytest.mark.parametrize(("board", "layout"), sorted(boards()))
def test_a_boards_rails_keep_their_names_and_their_power(
    tmp_path: Path, board: str, layout: str
) -> None:
    write_board(tmp_path, board, layout)
    lines = {line.label: line for line in rails(boards()[board, layout])}
    clock = FakeClock()
    source = opened(tmp_path, clock)
    assert {rail.name for rail in source.rails} == set(lines)
    assert all(board in rail.said_by for rail in source.rails)
    source.begin()
    clock.pass_time(5)
    energy = source.end()

    for name, line in lines.items():
        watts = line.millivolts * line.milliamperes / 1e6
        # JetPack 4's kernel gives whole mW.
        assert energy.joules[name] == pytest.approx(5 * watts, abs=5e-3), name
    if board in TOTAL_RAIL:
        assert (source.total.rule, source.total.rails) == ("rail", (TOTAL_RAIL[board],))
    elif board == "AGX Xavier":
        assert (source.total.rule, set(source.total.rails)) == ("sum", set(lines))
    else:
        assert (source.total.rule, source.total.rails) == ("none", ())
        assert source.total.of(energy.joules) is None
        assert "no rail for all" in source.total.why


def test_a_rail_that_feeds_several_parts_has_all_of_them() -> None:
    parts = {rail: set(fed) for board in BOARDS for rail, fed in board.rails}
    assert parts["VDD_CPU_GPU_CV"] == {"cpu", "gpu", "dla", "pva"}
    assert parts["VDD_GPU_SOC"] == {"gpu", "soc"}
    assert parts["VDD_CPU_CV"] == {"cpu", "dla", "pva"}
    assert parts["CV"] == {"dla", "pva"}


def test_what_only_secondary_sources_say_is_marked(tmp_path: Path) -> None:
    write_board(tmp_path / "nx", "Orin NX", "hwmon")
    write_board(tmp_path / "orin", "AGX Orin", "hwmon")
    clock = FakeClock()
    assert all(SECONDARY in rail.said_by for rail in opened(tmp_path / "nx", clock).rails)
    said = {rail.name: SECONDARY in rail.said_by for rail in opened(tmp_path / "orin", clock).rails}
    assert said == {
        "VDD_GPU_SOC": False, "VDD_CPU_CV": False, "VIN_SYS_5V0": False, "VDDQ_VDD2_1V8AO": True,
    }  # fmt: skip


def test_no_part_of_a_board_passes_for_its_total() -> None:
    for board in BOARDS:
        assert board_with(board.all_rails) is board
        for missing in board.needed:
            left = [name for name in board.all_rails if name != missing]
            assert total_of(left).rails == (), (board.names, missing)
            assert f"without {missing}" in total_of(left).why or not left
        assert "with VDD_NEW" in total_of([*board.all_rails, "VDD_NEW"]).why
    assert total_of(["VDD_FOO"]).why == "no board with the rails VDD_FOO is known"
    assert board_with(["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"]) is not None, "one monitor less"


def test_channels_that_are_no_rails_are_left_out(tmp_path: Path) -> None:
    monitor = tmp_path / INA / "1-0040"
    for number, label in ((1, "VDD_IN"), (2, "NC"), (3, "VDD_SOC")):
        write_channel(monitor, "hwmon", Line("ina3221", "1-0040", number, label, 5000, 100))
    write_files(monitor / "hwmon/hwmon2", {"in3_enable": "0\n"})
    assert [channel.rail for channel in channels(tmp_path)] == ["VDD_IN"]

    write_files(
        monitor / "hwmon/hwmon2", {"in3_enable": "1\n", "in1_label": "Sum of shunt voltages\n"}
    )
    assert [channel.rail for channel in channels(tmp_path)] == ["VDD_SOC"]


def test_two_rails_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for monitor in ("1-0040", "1-0041"):
        line = Line("ina3221", monitor, 1, "VDD_IN", 5000, 100)
        write_channel(tmp_path / INA / monitor, "hwmon", line)
    assert [c.rail for c in channels(tmp_path)] == ["VDD_IN@1-0040", "VDD_IN@1-0041"]
    assert opened(tmp_path, FakeClock()).total.rule == "none"


def test_the_chips_own_steps_are_the_resolution(tmp_path: Path) -> None:
    write_board(tmp_path, "Xavier NX", "hwmon")
    by_rail = {channel.rail: channel for channel in channels(tmp_path)}
    # 40 µV over 5 mΩ is 8 mA, at 5.024 V.
    assert by_rail["VDD_IN"].step_watts() == pytest.approx(0.008 * 5.024)
    write_files(tmp_path / INA / "7-0040/hwmon/hwmon2", {"update_interval": "35\n"})
    source = opened(tmp_path, FakeClock())
    assert source.period_s == 0.035
    write_board(tmp_path / "iio", "Xavier NX", "iio")
    assert channels(tmp_path / "iio")[0].step_watts() == 1e-3


def test_no_monitor_and_no_readable_one_are_missing_energy(tmp_path: Path) -> None:
    with pytest.raises(EnergyMissingError, match="no power monitor"):
        opened(tmp_path, FakeClock())
    write_board(tmp_path, "Nano", "iio")
    power = tmp_path / f"{INA}x/6-0040/iio:device0/in_power0_input"
    power.unlink()
    power.mkdir()  # root may read any file, so one that nobody can
    with pytest.raises(EnergyMissingError, match="cannot be read") as denied:
        opened(tmp_path, FakeClock())
    assert "chmod a+r" in denied.value.next_step


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_text(""), "is not a number"),
        (lambda path: path.write_text("7 mW\n"), "is not a number"),
        (lambda path: path.write_text("99999999\n"), "cannot show"),
        (lambda path: path.write_bytes(b"\xff\xfe\n"), "is not a number"),
    ],
)
def test_a_rail_that_fails_in_the_middle_makes_the_row_invalid(
    tmp_path: Path, happens: object, why: str
) -> None:
    write_board(tmp_path, "Nano", "iio")
    case, clock = Case(tmp_path / "out"), FakeClock()
    source = opened(tmp_path, clock)
    power = tmp_path / f"{INA}x/6-0040/iio:device0/in_power1_input"

    def call() -> None:
        clock.pass_time(0.1)
        if clock.at > 112 and power.exists():
            happens(power)  # type: ignore[operator]

    assert measure_energy(case.ctx, call, CPU, source, EnergyPlan(), clock=clock.clock) is None
    (reason,) = case.reasons
    assert why in reason
    assert str(power) in reason
    assert case.row().metrics == (), "half a measurement is none"
    assert clock.tickers == []
    case.close()


READABLE = st.integers(-164_000, 164_000).map(str)
GARBLED = st.one_of(READABLE, st.text(max_size=12), st.just("١٢"), st.just("1_000"), st.just("-0"))


FILES = (
    "in1_input", "curr1_input", "in1_label", "in1_enable", "shunt1_resistor", "update_interval",
)  # fmt: skip
FUZZ = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(deadline=None, max_examples=40, suppress_health_check=FUZZ)
@given(text=GARBLED, name=st.sampled_from(FILES))
def test_whatever_a_file_says_it_is_power_or_an_error(tmp_path: Path, text: str, name: str) -> None:
    root = tmp_path / name  # a tree for each, so that one file only is out of order
    path = root / INA / "1-0040/hwmon/hwmon2" / name
    if not root.exists():
        write_board(root, "Orin NX", "hwmon")
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        found = channels(root)
        watts = [channel.watts() for channel in found]
        source = opened(root, FakeClock())
    except EnergyError:
        return
    assert all(abs(value) <= 32.76 * 163.8 for value in watts)
    assert all(rail.name for rail in source.rails)
    if len(found) < 3 or {channel.rail for channel in found} != {
        "VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC",
    }:  # fmt: skip
        assert source.total.rule == "none", "a part, or a stranger, is no total"


@settings(deadline=None, max_examples=25, suppress_health_check=FUZZ)
@given(data=st.data())
def test_whatever_file_is_gone_it_is_power_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    board, layout = data.draw(st.sampled_from(sorted(boards())))
    root = tmp_path / f"{board}-{layout}"
    write_board(root, board, layout)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    gone = data.draw(st.lists(st.sampled_from(files), max_size=3, unique=True))
    for path in gone:
        path.unlink()
    try:
        clock = FakeClock()
        source = opened(root, clock)
        source.begin()
        clock.pass_time(0.1)
        energy = source.end()
    except EnergyError:
        assert gone
        return
    finally:
        write_board(root, board, layout)
    assert set(energy.joules) == {rail.name for rail in source.rails}
    assert set(source.total.rails) <= set(energy.joules)
