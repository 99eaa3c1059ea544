"""Records of runs that are yet to come, and claims on them, load today and survive the trip.

The files under tests/data/records were written by hand. They may never be changed: a program that
cannot read them any more has lost somebody's measurements.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from pathlib import Path

import pytest

from narrowgauge_contract.agreement import disagreements
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import Record, load_record
from narrowgauge_contract.spec import parse_spec

FOLDER = Path(__file__).parents[1] / "data" / "records"
RECORDS = sorted(FOLDER.glob("*.json"))


def test_the_fixtures_are_there() -> None:
    assert [path.stem for path in RECORDS] == [
        "anytime-logits", "sparse-energy-jetson", "sparse-energy-nvml", "tensor-cores",
    ]  # fmt: skip


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_survives_the_trip_byte_for_byte(path: Path) -> None:
    record = load_record(path)

    assert dumps(record) == path.read_text(encoding="utf-8")
    assert parse_spec(record.spec).id == record.experiment
    assert disagreements(record, record) == []


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_packed_record_is_the_same_record(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "r.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))

    assert dumps(load_record(packed)) == path.read_text(encoding="utf-8")

    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(DamagedRecordError, match="truncated"):
        load_record(packed)


def test_a_tensor_core_run_has_a_row_per_precision_and_says_what_ran() -> None:
    record = load_record(FOLDER / "tensor-cores.json")

    assert [row.parameters["precision"] for row in record.rows[:5]] == [
        "fp32", "tf32", "fp16", "bf16", "int8",
    ]  # fmt: skip
    [bad] = [row for row in record.rows if not row.validity.valid]
    assert (bad.facts["precision_asked"], bad.facts["precision_ran"]) == ("fp32", "tf32")
    assert "fp32 was asked for" in bad.validity.reasons[0]
    assert bad.status is Status.COMPLETE
    assert len(record.valid_rows()) == 9


def test_energy_keeps_its_source_and_rows_without_it_are_invalid() -> None:
    nvml = load_record(FOLDER / "sparse-energy-nvml.json")
    jetson = load_record(FOLDER / "sparse-energy-jetson.json")

    assert {m.source for r in nvml.rows for m in r.metrics if m.unit == "J"} == {"nvml-counter"}
    assert {m.source for r in jetson.rows for m in r.metrics if m.unit == "J"} == {
        "ina3221:VDD_CPU", "ina3221:VDD_GPU", "ina3221:VDD_SOC",
    }  # fmt: skip
    for row in nvml.rows:
        assert row.validity.valid == (row.metric("energy") is not None)
    named = [line.partition(":")[0] for line in disagreements(nvml, jetson)]
    assert {"target", "device", "power_mode", "energy_source"} <= set(named)
    assert nvml.host is not None
    assert nvml.host.weights[0].name == "resnet20-90"


def test_records_of_other_threads_are_not_put_together() -> None:
    one = load_record(FOLDER / "sparse-energy-nvml.json")
    assert one.inside is not None

    def by(**environment: str) -> Record:
        assert one.inside is not None
        inside = dataclasses.replace(one.inside, environment=environment)
        return dataclasses.replace(one, inside=inside)

    eight = by(OMP_NUM_THREADS="8", CUDA_VISIBLE_DEVICES="0")
    assert disagreements(eight, by(OMP_NUM_THREADS="8", CUDA_VISIBLE_DEVICES="3")) == []
    spinning = by(OMP_NUM_THREADS="8", GOMP_SPINCOUNT="100000")
    (said,) = disagreements(eight, spinning)
    assert said.startswith("threads: {'OMP_NUM_THREADS': '8'} / ")


def test_an_anytime_run_keeps_its_plan_its_logits_and_what_is_not_finite() -> None:
    record = load_record(FOLDER / "anytime-logits.json")

    assert record.plan is not None
    assert [side.path for side in record.side_files] == [f"row-{i}/logits.npz" for i in range(3)]
    losses = [row.metric("loss") for row in record.rows]
    assert math.isnan(losses[1].values[2])  # type: ignore[union-attr]
    assert math.isinf(losses[2].values[3])  # type: ignore[union-attr]
    assert record.status is Status.UNFINISHED
    assert record.error is not None


@pytest.mark.parametrize("keep", [0, 1, 100, 4000])
def test_a_truncated_record_is_damage_and_names_its_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "record.json"
    path.write_text((FOLDER / "tensor-cores.json").read_text()[:keep])

    with pytest.raises(DamagedRecordError, match=r"record\.json"):
        load_record(path)


@pytest.mark.parametrize("document", [[], {}, {"run_id": "x"}, {"format": 1}, {"format": "one"}])
def test_a_foreign_document_is_no_record(tmp_path: Path, document: object) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(document))

    with pytest.raises(DamagedRecordError):
        load_record(path)


def test_a_record_from_the_future_asks_for_an_update(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"format": 99}')

    with pytest.raises(DamagedRecordError, match="record format 99") as caught:
        load_record(path)

    assert "update" in caught.value.next_step
