"""Reference records: true, small, reproducible; and tables that are generated from them."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from ratio_cases import bench_run
from result_cases import host, recorded, with_row

from narrowgauge.errors import UsageError
from narrowgauge.reference import MOST_SAMPLES, export, reduce_record, render_tables, update_page
from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_contract.outcome import Metric, Validity
from narrowgauge_contract.record import Hashes, ImageFacts, Record, load_record


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return recorded(tmp_path).record()


def _long(record: Record, count: int) -> Record:
    chance = random.Random(3)
    metric = Metric(
        "t", "s", "x", tuple(chance.random() for _ in range(count)), "", {"cache": "hot"}
    )
    return with_row(record, 0, metrics=(metric,))


def test_what_is_small_stays_as_it_was_recorded(record: Record) -> None:
    assert reduce_record(record) == record
    assert reduce_record(_long(record, MOST_SAMPLES)) == _long(record, MOST_SAMPLES)


def test_long_samples_are_thinned_evenly_and_say_so(record: Record) -> None:
    values = _long(record, 5000).rows[0].metrics[0].values

    metric = reduce_record(_long(record, 5000)).rows[0].metrics[0]

    assert len(metric.values) == MOST_SAMPLES
    assert (metric.values[0], metric.values[-1]) == (values[0], values[-1])
    places = [values.index(value) for value in metric.values]
    steps = [b - a for a, b in itertools.pairwise(places)]
    assert max(steps) - min(steps) <= 1
    assert metric.conditions == {
        "cache": "hot",
        "samples": "200 of 5000, evenly spaced, first and last included",
    }


def test_an_export_loads_and_is_the_same_twice(record: Record, tmp_path: Path) -> None:
    path = export(record, tmp_path / "experiments")
    first = path.read_bytes()

    assert path == tmp_path / f"experiments/toy/reference/epyc/{record.run_id}.json.gz"
    assert load_record(path) == record
    assert export(record, tmp_path / "experiments").read_bytes() == first


def test_an_export_names_no_place_of_the_machine_that_it_is_of(
    record: Record, tmp_path: Path
) -> None:
    (tmp_path / "experiments").mkdir()
    row = record.rows[0]
    facts = {**row.facts, "policy": f"custom:{tmp_path}/experiments/toy/mine.h"}
    placed = dataclasses.replace(record, rows=(dataclasses.replace(row, facts=facts),))

    path = export(placed, tmp_path / "experiments")

    assert str(tmp_path) not in gzip.decompress(path.read_bytes()).decode()
    assert load_record(path).rows[0].facts["policy"] == "custom:experiments/toy/mine.h"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"synthetic": True}, "made up"),
        ({"inside": None}, "which device"),
        (
            {"host": host(image=ImageFacts("n", "sha256:a", "b", None, "t", stand_in=True))},
            "stand-in",
        ),
    ],
)
def test_what_proves_nothing_is_no_reference(
    record: Record, tmp_path: Path, change: dict[str, object], why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        export(dataclasses.replace(record, **change), tmp_path)  # type: ignore[arg-type]

    assert why in caught.value.why


def test_energy_that_was_played_is_no_reference(record: Record, tmp_path: Path) -> None:
    for source in ("rapl", "none"):
        facts = {**record.rows[1].facts, "energy_source": source}
        assert export(with_row(record, 1, facts=facts), tmp_path).is_file()
    with pytest.raises(UsageError) as caught:
        export(with_row(record, 1, facts={"energy_source": "replay"}), tmp_path)

    assert "from a recording" in caught.value.why


def test_a_run_without_a_valid_row_is_no_reference(record: Record, tmp_path: Path) -> None:
    rows = tuple(dataclasses.replace(r, validity=Validity(False, ("x",))) for r in record.rows)

    with pytest.raises(UsageError) as caught:
        export(dataclasses.replace(record, rows=rows), tmp_path)

    assert "no valid row" in caught.value.why


_HASHES = Hashes(image=None, experiment="other", source="other")


class TestTables:
    @pytest.fixture
    def folder(self, record: Record, tmp_path: Path) -> Path:
        export(record, tmp_path)
        folder = tmp_path / "toy"
        marker = f"<!-- table: epyc/{record.run_id} accuracy -->"
        (folder / "README.md").write_text(f"# Toy\n\n{marker}\n<!-- /table -->\n\nEnd.\n")
        return folder

    def test_the_table_is_put_between_its_marks(self, folder: Path) -> None:
        update_page(folder, check=False, say=lambda _: None)

        text = (folder / "README.md").read_text()
        assert "| fp32 | 99.10 (99.00 to 99.20) | 3/3 |" in text
        assert "short on EPYC, torch 2.13.0" in text
        assert text.endswith("<!-- /table -->\n\nEnd.\n")

    def test_check_fails_before_and_passes_after(self, folder: Path) -> None:
        before = (folder / "README.md").read_bytes()
        with pytest.raises(UsageError, match="out of date"):
            update_page(folder, check=True, say=lambda _: None)
        assert (folder / "README.md").read_bytes() == before

        update_page(folder, check=False, say=lambda _: None)
        update_page(folder, check=True, say=lambda _: None)

    def test_a_ladder_is_put_between_its_marks(self, tmp_path: Path) -> None:
        record = bench_run(tmp_path / "results").record()
        folder = tmp_path / "experiments" / "bench"
        stored = export(record, folder.parent)
        marker = f"<!-- ladder: {stored.parent.name}/{record.run_id} ladder -->"

        page = render_tables(f"{marker}\n<!-- /ladder -->\n", folder)

        assert "times as fast as the rung before" in page
        assert "% of the end-to-end log ratio" in page
        assert page.endswith(f"record `{record.run_id}`.\n\n<!-- /ladder -->\n")
        with pytest.raises(UsageError, match="no ladder 'stairs'"):
            render_tables(
                marker.replace(" ladder -->", " stairs -->") + "\n<!-- /ladder -->", folder
            )

    def test_shards_of_a_run_stand_in_one_table(self, record: Record, tmp_path: Path) -> None:
        half = dataclasses.replace(record, rows=record.rows[:1])
        rest = dataclasses.replace(record, run_id=f"{record.run_id}-b", rows=record.rows[1:])
        for each in (half, rest):
            export(each, tmp_path)
        marker = f"<!-- table: epyc/{half.run_id}+{rest.run_id} accuracy -->"

        page = render_tables(f"{marker}\n<!-- /table -->\n", tmp_path / "toy")

        assert "| fp32 | 99.10 (99.00 to 99.20) | 3/3 |" in page
        assert f"records `{half.run_id}`, `{rest.run_id}`." in page

    @pytest.mark.parametrize(
        ("changed", "named"),
        [({"profile": "paper"}, "the profile"), ({"hashes": _HASHES}, "the hash")],
    )
    def test_what_was_measured_otherwise_does_not(
        self, record: Record, tmp_path: Path, changed: dict[str, Any], named: str
    ) -> None:
        other = dataclasses.replace(record, run_id=f"{record.run_id}-b", **changed)
        for each in (record, other):
            export(each, tmp_path)
        page = f"<!-- table: epyc/{record.run_id}+{other.run_id} -->\n<!-- /table -->\n"

        with pytest.raises(UsageError, match="not of one table") as caught:
            render_tables(page, tmp_path / "toy")

        assert named in caught.value.why

    def test_a_metric_that_no_row_has_is_an_error_and_no_column_less(self, folder: Path) -> None:
        page = (folder / "README.md").read_text().replace("accuracy -->", "acuracy -->")

        with pytest.raises(UnknownNameError, match="'acuracy'") as caught:
            render_tables(page, folder)
        assert caught.value.nearest == "accuracy"

    def test_a_marker_without_its_record_is_an_error(self, tmp_path: Path) -> None:
        page = "<!-- table: h200/none -->\n<!-- /table -->\n"

        with pytest.raises(UsageError, match="has no record"):
            render_tables(page, tmp_path)
