"""What a run of noise-floor says of itself: its comparisons, and what is kept beside its record."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from ratio_cases import bench_run, noise_run

from narrowgauge import statistics
from narrowgauge.draw import draw_run
from narrowgauge.noise import MEANING, Floors, floor_of, percent, trials_of
from narrowgauge.reference import reduce_record
from narrowgauge_contract.outcome import Metric


class TestTrials:
    def test_alarms_and_finds_are_counted_apart(self, tmp_path: Path) -> None:
        found = trials_of(noise_run(tmp_path, planted=(0.0, 2.0)).record())

        assert [(t.planted, t.total) for t in found] == [(0.0, 20), (2.0, 20), (0.0, 20), (2.0, 20)]
        for trials in found:
            if trials.planted:
                assert trials.slower == trials.alarms == 20
            else:
                assert trials.alarms <= 3

    def test_what_is_faster_alarms_and_finds_no_slowdown(self, tmp_path: Path) -> None:
        record = noise_run(tmp_path, planted=(2.0,)).record()
        upside_down = tuple(
            dataclasses.replace(
                row,
                metrics=tuple(
                    dataclasses.replace(m, values=tuple(1 / v for v in m.values))
                    if m.name == "ratio" else m
                    for m in row.metrics
                ),
            )
            for row in record.rows
        )  # fmt: skip

        for trials in trials_of(dataclasses.replace(record, rows=upside_down)):
            assert (trials.alarm_rate, trials.slower_rate) == (1.0, 0.0)

    @pytest.mark.parametrize("pairs", [20, 39])
    def test_they_are_judged_by_the_rule_of_all_pairs(self, tmp_path: Path, pairs: int) -> None:
        record = noise_run(tmp_path, repeats=1).record()
        chance = np.random.default_rng(pairs)
        count = 400
        firsts = np.exp(chance.normal(0.0, 0.05, (count, pairs)))
        seconds = firsts * np.exp(chance.normal(0.0, 0.01, (count, pairs)))
        ratios = Metric("ratio", "1", "monotonic", tuple((seconds / firsts).ravel().tolist()))
        row = dataclasses.replace(
            record.rows[0], metrics=(ratios,), facts={"pairs": [pairs] * count}
        )

        (trials,) = trials_of(dataclasses.replace(record, rows=(row,)))

        verdicts = [
            statistics.log_ratio_interval(b, a, paired=True)
            for a, b in zip(firsts.tolist(), seconds.tolist(), strict=True)
        ]
        alarms = [each for each in verdicts if each.holds_one is False]
        assert trials.total == count
        assert trials.alarms == len(alarms)
        assert trials.slower == sum(each.ratio > 1 for each in alarms)
        assert trials.alarm_rate <= 0.06

    def test_comparisons_that_a_coarse_clock_made_equal_are_counted(self, tmp_path: Path) -> None:
        record = noise_run(tmp_path, repeats=1).record()
        same = Metric("ratio", "1", "monotonic", (1.0,) * 78)
        rows = tuple(dataclasses.replace(row, metrics=(same,)) for row in record.rows)

        found = trials_of(dataclasses.replace(record, rows=rows))

        assert [(t.total, t.alarms) for t in found] == [(2, 0), (2, 0)]

    def test_what_was_reduced_cannot_be_told_apart(self, tmp_path: Path) -> None:
        record = noise_run(tmp_path).record()
        many = Metric("ratio", "1", "monotonic", tuple([1.0, 1.01] * 150))
        rows = tuple(
            dataclasses.replace(row, metrics=(many,), facts={"pairs": [150, 150]})
            for row in record.rows
        )
        whole = dataclasses.replace(record, rows=rows)

        assert sum(trials.total for trials in trials_of(whole)) == 40
        assert trials_of(reduce_record(whole)) == ()

    def test_as_the_experiment_is_set_up_a_reference_keeps_all(self, tmp_path: Path) -> None:
        record = noise_run(tmp_path).record()

        assert trials_of(reduce_record(record)) == trials_of(record)


class TestStored:
    def test_the_least_effect_is_kept_beside_the_record(self, tmp_path: Path) -> None:
        folder = noise_run(tmp_path, planted=(0.0, 2.0))
        floor = floor_of(folder.record())
        assert floor is not None

        made = {path.name: path for path in draw_run(folder, Floors.none())}

        with made["noise-floor.csv"].open(encoding="utf-8", newline="") as stream:
            lines = list(csv.DictReader(stream))
        sizes = {(line["workload"], line["above"]) for line in lines}
        assert len(sizes) == len(lines) == 2 * 5
        for size in (3, 10):
            effect, workload = floor.effect(size, size)
            (line,) = [
                x for x in lines
                if (x["workload"], x["above"], x["below"]) == (workload, str(size), str(size))
            ]  # fmt: skip
            assert float(line["least_detectable"]) == effect.least
            assert float(line["threshold"]) == effect.threshold
            assert (line["processes"], line["note"]) == ("10", "")
        page = made["noise-floor.md"].read_text(encoding="utf-8")
        assert page.startswith(f"# {folder.record().run_id}\n")
        assert f"| {percent(floor.effect(10, 10)[0].least or 0)} |" in page
        assert MEANING in page

    def test_too_few_processes_are_stored_as_such(self, tmp_path: Path) -> None:
        folder = noise_run(tmp_path, repeats=2)

        draw_run(folder, Floors.none())

        text = (folder.derived / "noise-floor.csv").read_text(encoding="utf-8")
        line = text.splitlines()[1]
        assert line == 'workload=copy,2,1,1,,,"2 processes, and fewer than 6 do not tell"'
        page = (folder.derived / "noise-floor.md").read_text(encoding="utf-8")
        assert "| workload=copy | 2 | – | – | – | – | – |" in page
        assert page.count("2 processes, and fewer than 6 do not tell") == 2

    def test_other_experiments_have_none(self, tmp_path: Path) -> None:
        names = {path.name for path in draw_run(bench_run(tmp_path, repeats=1), Floors.none())}

        assert "noise-floor.csv" not in names
