"""The noise floor: which run it comes from, what it says of a ratio, and when it is unknown."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ratio_cases import bench_run, noise_run
from result_cases import recorded
from rich.console import Console

from narrowgauge import noise, statistics
from narrowgauge.compare import compare, comparison_json, print_comparison
from narrowgauge.noise import UNKNOWN, Floors, floor_of, percent
from narrowgauge.reference import export
from narrowgauge.remarks import remarks, remarks_json, two_modes
from narrowgauge.store import Store
from narrowgauge.view import load_view
from narrowgauge_contract.outcome import Metric, Validity
from narrowgauge_contract.record import Record


def _beside(floors: Floors, ratio: float, *records: Record, unit: str = "s") -> noise.Detectable:
    return floors.beside(ratio, unit, (10, 10), records)


class TestWhich:
    def test_the_newest_of_the_same_place_counts(self, tmp_path: Path) -> None:
        noise_run(tmp_path, "20261120T090000Z-noise-floor-000001")
        noise_run(tmp_path, "20261121T090000Z-noise-floor-000002", spread=0.02)
        noise_run(tmp_path, "20261122T090000Z-noise-floor-000003", device="Xeon")
        noise_run(tmp_path, "20261122T090000Z-noise-floor-000004", executor="native")
        noise_run(tmp_path, "20261122T090000Z-noise-floor-000005", target="desktop")
        noise_run(tmp_path, "20261122T090000Z-noise-floor-000006", executor=None)
        record = bench_run(tmp_path).record()

        floor = Floors.in_store(Store(tmp_path)).of(record)

        assert floor is not None
        assert floor.run_id.endswith("000002")
        native = dataclasses.replace(record, host=None)
        found = Floors.in_store(Store(tmp_path)).of(native)
        assert found is not None
        assert found.run_id.endswith("000006")

    def test_one_with_too_few_processes_is_passed_over(self, tmp_path: Path) -> None:
        noise_run(tmp_path, "20261120T090000Z-noise-floor-000001")
        noise_run(tmp_path, "20261121T090000Z-noise-floor-000002", repeats=5)
        record = bench_run(tmp_path).record()

        floor = Floors.in_store(Store(tmp_path)).of(record)

        assert floor is not None
        assert floor.run_id.endswith("000001")

    def test_a_damaged_one_is_none_and_no_crash(self, tmp_path: Path) -> None:
        folder = noise_run(tmp_path)
        folder.record_path.chmod(0o644)
        folder.record_path.write_text("{")
        record = bench_run(tmp_path).record()

        assert Floors.in_store(Store(tmp_path)).of(record) is None

    def test_without_a_device_nothing_is_the_same(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        record = dataclasses.replace(bench_run(tmp_path).record(), inside=None)

        assert Floors.in_store(Store(tmp_path)).of(record) is None

    def test_what_was_planted_is_no_noise(self, tmp_path: Path) -> None:
        alone = floor_of(noise_run(tmp_path / "a").record())
        record = noise_run(tmp_path / "b", planted=(0.0, 50.0)).record()
        invalid = [
            dataclasses.replace(r, validity=Validity(False, ("hot",)))
            if r.parameters["workload"] == "copy" else r
            for r in record.rows
        ]  # fmt: skip

        floor = floor_of(record)

        assert alone is not None
        assert floor is not None
        assert [label for label, _ in floor.workloads] == ["workload=copy", "workload=matmul"]
        assert all(len(figures) == 10 for _, figures in floor.workloads)
        cold = floor_of(dataclasses.replace(record, rows=tuple(invalid)))
        assert cold is not None
        assert [label for label, _ in cold.workloads] == ["workload=matmul"]

    def test_references_are_read_for_tables_in_pages(self, tmp_path: Path) -> None:
        record = noise_run(tmp_path / "results").record()
        export(record, tmp_path / "experiments")

        floor = Floors.in_references(tmp_path / "experiments").of(record)

        assert floor is not None
        assert floor.run_id == record.run_id
        assert Floors.in_references(tmp_path / "nothing").of(record) is None

    def test_no_more_is_read_than_needed(self, tmp_path: Path) -> None:
        read = []
        new, old = (
            noise_run(tmp_path, f"2026112{i}T090000Z-noise-floor-00000{i}").record() for i in (2, 1)
        )

        def load() -> Iterator[Record]:
            for each in (new, old):
                read.append(each.run_id)
                yield each

        record = bench_run(tmp_path).record()
        floors = Floors(load)
        for _ in range(3):
            assert floors.of(record) is not None
            assert read == [new.run_id]

    def test_nothing_is_read_before_a_floor_is_asked_for(self) -> None:
        def load() -> list[Record]:
            raise AssertionError("read too early")

        assert Floors(load) is not None


class TestBeside:
    def test_a_ratio_within_it_is_marked(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        record = bench_run(tmp_path).record()
        floors = Floors.in_store(Store(tmp_path))

        large, small = _beside(floors, 1.5, record), _beside(floors, 1.001, record)

        # 2 % from process to process in the noisier workload: 3.6 * 0.02 * sqrt(2/10) * 1.17
        assert large.least == pytest.approx(0.038, rel=0.4)
        assert (large.within, small.within) == (False, True)
        assert large.workload == "workload=copy"
        assert large.text == percent(large.least or 0)
        assert small.text.endswith(", ratio within it")
        assert _beside(floors, 1 / 1.001, record).within is True

    def test_the_hosts_noise_is_left_out_where_the_device_binds(self, tmp_path: Path) -> None:
        """Only where every row says so: one that does not may be bound by its launches."""
        noise_run(tmp_path, spread=0.02, noisy="launch", workloads=("copy", "launch"), repeats=30)
        record = bench_run(tmp_path).record()
        bound = [dataclasses.replace(row, facts={"bound_by": "device"}) for row in record.rows]
        launches = dataclasses.replace(bound[0], facts={"bound_by": "launches"})
        floors = Floors.in_store(Store(tmp_path))

        device = _beside(floors, 1.0, dataclasses.replace(record, rows=tuple(bound)))
        mixed = _beside(floors, 1.0, dataclasses.replace(record, rows=(launches, *bound[1:])))

        assert (device.workload, mixed.workload) == ("workload=copy", "workload=launch")
        assert _beside(floors, 1.0, record).workload == "workload=launch"
        assert (device.least or 0) < (mixed.least or 0)

    def test_it_is_of_times_only(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        record = bench_run(tmp_path).record()
        floors = Floors.in_store(Store(tmp_path))

        assert _beside(floors, 1.0, record, unit="image/s").least is not None
        for unit in ("%", "nat", "J", ""):
            found = _beside(floors, 1.0, record, unit=unit)
            assert (found.least, found.within, found.text) == (None, None, "")
            assert found.reason

    def test_of_two_devices_the_noisier_counts_and_both_must_be_known(self, tmp_path: Path) -> None:
        noise_run(tmp_path, "20261120T090000Z-noise-floor-000001", spread=0.005)
        noise_run(tmp_path, "20261120T090000Z-noise-floor-000002", spread=0.05, device="Xeon")
        here = bench_run(tmp_path).record()
        there = bench_run(tmp_path, "20261121T100000Z-bench-cccccc", device="Xeon").record()
        elsewhere = bench_run(tmp_path, "20261121T100000Z-bench-dddddd", device="Arm").record()
        floors = Floors.in_store(Store(tmp_path))

        assert _beside(floors, 1.0, here, there).run_id.endswith("000002")
        assert _beside(floors, 1.0, here, elsewhere).reason == UNKNOWN

    def test_what_is_no_ratio_is_neither_within_nor_not(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        record = bench_run(tmp_path).record()
        floors = Floors.in_store(Store(tmp_path))

        found = [_beside(floors, ratio, record) for ratio in (math.nan, 0.0, -1.0, math.inf)]

        assert [each.within for each in found] == [None] * 4
        assert all(each.least is not None for each in found)

    def test_a_side_without_rows_says_why(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        record = bench_run(tmp_path).record()

        found = Floors.in_store(Store(tmp_path)).beside(1.0, "s", (0, 10), [record])

        assert found.least is None
        assert found.reason == "one side has no process"


@pytest.mark.parametrize(
    ("share", "text"), [(0.0123, "1.2 %"), (0.00045, "0.045 %"), (0.1249, "12 %"), (1.2, "120 %")]
)
def test_percentages_have_no_more_figures_than_are_known(share: float, text: str) -> None:
    assert percent(share) == text


class TestScreens:
    def test_compare_has_it_beside_every_ratio(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        left = bench_run(tmp_path).record()
        right = bench_run(tmp_path, "20261121T110000Z-bench-cccccc").record()

        found = compare(left, right, Floors.in_store(Store(tmp_path)))

        stream = io.StringIO()
        print_comparison(found, Console(file=stream, width=140))
        assert all(pair.detectable.within for pair in found.pairs)
        assert stream.getvalue().count("ratio within it") == len(found.pairs) == 7
        assert "20261121T090000Z-noise-floor-aaaaaa" in stream.getvalue()
        body = json.loads(json.dumps(comparison_json(found), allow_nan=False))
        assert body["pairs"][0]["detectable"]["within"] is True
        assert body["pairs"][0]["detectable"]["least"] > 0

    def test_a_metric_that_is_no_time_has_a_dash_and_no_call_to_measure_noise(
        self, tmp_path: Path
    ) -> None:
        record = recorded(tmp_path).record()
        only = tuple(
            dataclasses.replace(r, metrics=tuple(m for m in r.metrics if m.unit == "%"))
            for r in record.rows
        )
        record = dataclasses.replace(record, rows=only)

        stream = io.StringIO()
        print_comparison(compare(record, record, Floors.none()), Console(file=stream, width=140))

        assert UNKNOWN not in stream.getvalue()

    def test_closing_lines_are_marked_and_explained(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        latencies = {**_scaled(1.0), "fp16": 0.0799}
        view = load_view(bench_run(tmp_path, modes=("strict", "fp16"), latencies=latencies))

        lines = list(remarks(view, Floors.in_store(Store(tmp_path))))

        assert lines[1] == "Results summary (128 images)"
        assert lines[2].startswith("Half: 0.0")
        assert lines[2].endswith("x full precision speed)  [within the noise floor]")
        assert lines[3].endswith("(1.00 x full precision speed)")
        assert lines[4].startswith("detectable: the least effect")
        assert lines[4].endswith("(workload=copy, 20261121T090000Z-noise-floor-aaaaaa)")

    def test_closing_lines_without_a_floor_say_that_it_is_unknown(self, tmp_path: Path) -> None:
        view = load_view(bench_run(tmp_path, modes=("strict", "fp16")))

        lines = list(remarks(view, Floors.none()))

        assert lines[2].endswith("x full precision speed)")
        assert UNKNOWN in lines

    def test_json_carries_it(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        view = load_view(bench_run(tmp_path))

        body = json.loads(
            json.dumps(remarks_json(view, Floors.in_store(Store(tmp_path))), allow_nan=False)
        )

        (block,) = body["closing"]
        assert block["lines"][0]["ratio"] == pytest.approx(4.0, rel=0.05)
        assert block["lines"][0]["detectable"]["within"] is False
        (ladder,) = body["ladders"]
        assert ladder["rungs"][1]["detectable"]["least"] > 0
        assert ladder["explained"] == pytest.approx(1.0, abs=0.02)
        assert body["trials"] == []
        assert body["noise_floor"] is None

    def test_a_run_of_noise_floor_says_what_it_found(self, tmp_path: Path) -> None:
        view = load_view(noise_run(tmp_path, planted=(0.0, 2.0)))

        text = "\n".join(remarks(view, Floors.none()))

        assert "planted 2 % found in 20 of 20 (100 %)" in text
        assert "of 20 comparisons" in text
        assert "workload=matmul: detectable" in text
        assert "workload=matmul: second side / first 1 (0.99" in text
        assert text.count(", equivalent within 1 %") == 2
        assert "between 10 and 10 processes" in text
        body = remarks_json(view, Floors.none())
        assert len(body["trials"]) == 4
        assert len(body["noise_floor"]["workloads"]) == 2

    def test_too_few_processes_say_so(self, tmp_path: Path) -> None:
        view = load_view(noise_run(tmp_path, repeats=2))

        text = "\n".join(remarks(view, Floors.none()))

        assert "too few processes" in text
        assert "not known to be equivalent within 1 %" in text

    def test_two_modes_are_a_warning(self, tmp_path: Path) -> None:
        folder = bench_run(tmp_path, modes=("strict",), repeats=8)
        record = folder.record()
        two = Metric("latency", "s", "monotonic", tuple([0.10, 0.12, 0.1001, 0.1201] * 25))
        rows = tuple(dataclasses.replace(row, metrics=(two,)) for row in record.rows)
        folder.record_path.chmod(0o644)
        folder.record_path.unlink()
        folder.write_record(dataclasses.replace(record, rows=rows))
        view = load_view(folder)

        lines = list(two_modes(view))

        assert lines[0].startswith("latency of row 0 has two modes: 50 % near 0.1")
        assert ", 50 % near 0.12 s (" in lines[0]
        assert "(dip test, p < 0.001)" in lines[0]
        assert lines[-1] == "and 2 more figures have two modes"
        assert len(remarks_json(view, Floors.none())["two_modes"]) == 8

    def test_ratios_of_ticks_are_no_warning(self, tmp_path: Path) -> None:
        """195 pairs of a clock that ticks each half microsecond: neither side has two modes."""
        folder = noise_run(tmp_path, repeats=6)
        record = folder.record()
        chance = np.random.default_rng(9)
        rows, combs = [], 0
        for row in record.rows:
            ticks = np.round(chance.normal(200e-6, 1e-6, (2, 195)) / 0.5e-6) * 0.5e-6
            ratio = Metric("ratio", "1", "monotonic", tuple((ticks[1] / ticks[0]).tolist()))
            first = Metric("latency_first", "s", "monotonic", tuple(ticks[0].tolist()))
            combs += statistics.modes_of(ratio.values) is not None
            rows.append(dataclasses.replace(row, metrics=(ratio, first)))
        folder.record_path.chmod(0o644)
        folder.record_path.unlink()
        folder.write_record(dataclasses.replace(record, rows=tuple(rows)))
        view = load_view(folder)

        assert "ratio" in view.headline
        assert combs > 0  # which is why they are not asked
        assert list(two_modes(view)) == []
        assert remarks_json(view, Floors.none())["two_modes"] == []

    def test_one_mode_is_none(self, tmp_path: Path) -> None:
        assert list(two_modes(load_view(bench_run(tmp_path)))) == []


def _scaled(factor: float) -> dict[str, float]:
    modes = ("strict", "tf32", "fp16", "folded", "int8", "bottom", "top")
    return dict.fromkeys(modes, 0.08 * factor)
