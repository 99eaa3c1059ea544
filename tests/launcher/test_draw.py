"""Pictures and tables: drawn from the record alone, always the same, never from damaged files."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from pathlib import Path

import pytest
from PIL import Image
from result_cases import SPEC, job, record_of, recorded, with_row

from narrowgauge import draw, draw_curves
from narrowgauge.draw import draw_run
from narrowgauge.draw_confusion import read_matrix
from narrowgauge.noise import Floors
from narrowgauge.store import RunFolder, Store
from narrowgauge.tables import markdown_table, write_tables
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.outcome import Metric, Validity
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import parse_spec

FLOORS = Floors.none()
TABLES = {"rows.csv", "summary.csv", "summary.md"}


def _with(tmp_path: Path, change: object) -> RunFolder:
    folder = Store(tmp_path).new_run(job())
    record = change(record_of(folder))  # type: ignore[operator]
    folder.write_record(record)
    return folder


def _names(paths: list[Path]) -> set[str]:
    return {path.name for path in paths}


def _digests(folder: RunFolder) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.derived.iterdir()
    }


def test_everything_is_drawn_and_drawn_again_the_same(tmp_path: Path) -> None:
    folder = recorded(tmp_path)

    made = draw_run(folder, FLOORS)

    pictures = ("loss", "speed", "confusion-precision-fp32", "confusion-precision-bf16")
    assert _names(made) == TABLES | {f"{p}.{s}" for p in pictures for s in ("svg", "png")}
    first = _digests(folder)
    draw_run(folder, FLOORS)
    assert _digests(folder) == first


def test_pictures_hold_something_and_name_their_axes(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    draw_run(folder, FLOORS)

    for path in folder.derived.glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 300
            colours = picture.convert("RGB").getcolors(1 << 24)
            assert colours is not None
            assert len(colours) > 20
    svg = (folder.derived / "loss.svg").read_text(encoding="utf-8")
    assert "accuracy (%)" in svg
    assert "loss (nat)" in svg
    assert "precision=bf16" in svg
    assert "2026" not in svg.partition("<svg")[0]


def test_bars_have_the_interval_of_their_median_where_there_is_one(tmp_path: Path) -> None:
    few = recorded(tmp_path / "few")
    many = Store(tmp_path / "many").new_run(job())
    record = record_of(many)
    record = dataclasses.replace(record, rows=record.rows * 3)
    many.write_record(record)

    lines = [len(_bar_lines(folder.record())) for folder in (few, many)]

    # per configuration the dots of its repeats, and with nine of them the interval and its two ends
    assert lines == [2, 8]


def _bar_lines(record: Record) -> list[object]:
    drawing = parse_spec(record.spec).drawings[1]
    ((_, picture),) = draw._bars(drawing, record)
    return [line for panel in picture.axes for line in panel.get_lines()]


@pytest.mark.parametrize(
    ("unit", "factor", "axis", "label"),
    [
        ("MAC/s", 1e8, "speed (GMAC/s)", "116.2"),
        ("s", 1e-6, "speed (ms)", "1.162"),
        ("image/s", 1.0, "how fast", "1 162"),
    ],
)
def test_bars_are_in_the_unit_that_the_longest_reads_well_in(
    tmp_path: Path, unit: str, factor: float, axis: str, label: str
) -> None:
    """Of that of the record the experiment may have words of its own."""

    def scaled(record: Record) -> Record:
        drawing = {"name": "speed", "kind": "bar", "title": "S", "metrics": ["speed"],
                   "y": "how fast"}  # fmt: skip
        rows = [
            dataclasses.replace(
                row, metrics=(Metric("speed", unit, "monotonic", (1162 * factor,)),)
            )
            for row in record.rows
        ]
        spec = {**record.spec, "draw": [drawing]}
        return dataclasses.replace(record, spec=spec, rows=tuple(rows))

    folder = _with(tmp_path, scaled)
    draw_run(folder, FLOORS)

    svg = (folder.derived / "speed.svg").read_text(encoding="utf-8")
    assert f"<!-- {axis} -->" in svg
    assert f"<!-- {label} -->" in svg


def test_panels_of_one_unit_have_one_axis_unless_nothing_would_be_seen_of_one(
    tmp_path: Path,
) -> None:
    figures = {"step": ("s", 0.020), "predicted": ("s", 0.023), "launch": ("s", 1e-5),
               "speed": ("image/s", 0.021)}  # fmt: skip

    def measured(record: Record) -> Record:
        metrics = tuple(Metric(n, unit, "monotonic", (v,)) for n, (unit, v) in figures.items())
        rows = tuple(dataclasses.replace(row, metrics=metrics) for row in record.rows)
        return dataclasses.replace(record, rows=rows)

    def axes_of(*metrics: str) -> list[tuple[float, str]]:
        drawing = {"name": "d", "kind": "bar", "title": "D", "metrics": list(metrics)}
        spec = parse_spec({**record.spec, "draw": [drawing]})
        ((_, picture),) = draw._bars(spec.drawings[0], record)
        return [(panel.get_xlim()[1], panel.get_xlabel()) for panel in picture.axes]

    record = _with(tmp_path, measured).record()

    (step, its), (predicted, others) = axes_of("step", "predicted")
    assert step == predicted > 23
    assert (its, others) == ("step (ms)", "predicted (ms)")
    (step, _), (launch, label) = axes_of("step", "launch")
    assert step > 20
    assert (9 < launch < 20, label) == (True, "launch (µs)")
    (step, _), (speed, label) = axes_of("step", "speed")
    assert (speed < 1 < step, label) == (True, "speed (image/s)")


def test_curves_of_one_unit_have_one_axis_unless_one_would_be_flat_on_it(tmp_path: Path) -> None:
    figures = {"first": ("%", (50.0, 90.0)), "last": ("%", (45.0, 92.0)),
               "flat": ("%", (60.0, 61.0)), "loss": ("nat", (2.0, 0.5))}  # fmt: skip

    def measured(record: Record) -> Record:
        metrics = tuple(Metric(n, u, "count", v, "epoch") for n, (u, v) in figures.items())
        rows = tuple(dataclasses.replace(row, metrics=metrics) for row in record.rows)
        return dataclasses.replace(record, rows=rows)

    def limits_of(*metrics: str) -> list[tuple[float, float]]:
        drawing = {"name": "d", "kind": "curve", "title": "D", "metrics": list(metrics)}
        spec = parse_spec({**record.spec, "draw": [drawing]})
        ((_, picture),) = draw._curves(spec.drawings[0], record)
        return [panel.get_ylim() for panel in picture.axes]

    record = _with(tmp_path, measured).record()

    first, last, loss = limits_of("first", "last", "loss")
    assert first == last
    assert (first[0] < 45.0, first[1] > 92.0, loss[1] < 3.0) == (True, True, True)
    first, flat = limits_of("first", "flat")
    assert flat[1] < 62.0 < first[1]


def test_a_matrix_sums_the_valid_repeats(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    draw_run(folder, FLOORS)

    # repeats 0, 1, 2 hold 9+9+9 cats called cats, 0+1+2 called dogs, 2+2+2 dogs called cats
    svg = (folder.derived / "confusion-precision-fp32.svg").read_text(encoding="utf-8")
    for count in ("27", "3", "6", "24"):
        assert f"<!-- {count} -->" in svg


def test_invalid_rows_are_not_drawn(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "a")
    part = Store(tmp_path / "b").new_run(job())
    record = record_of(part)
    for index in (0, 2, 4):
        record = with_row(record, index, validity=Validity(False, ("hot",)))
    part.write_record(record)

    draw_run(whole, FLOORS)
    made = draw_run(part, FLOORS)

    assert "confusion.svg" in _names(made)  # one configuration is left, so no name of its own
    assert "precision=fp32" not in (part.derived / "loss.svg").read_text(encoding="utf-8")


def test_without_a_valid_row_there_are_tables_only(tmp_path: Path) -> None:
    def spoil(record: Record) -> Record:
        for row in record.rows:
            record = with_row(record, row.index, validity=Validity(False, ("hot",)))
        return record

    assert _names(draw_run(_with(tmp_path, spoil), FLOORS)) == TABLES


def test_made_up_data_is_written_on_the_picture(tmp_path: Path) -> None:
    folder = _with(tmp_path, lambda record: dataclasses.replace(record, synthetic=True))

    draw_run(folder, FLOORS)

    assert "made-up data" in (folder.derived / "loss.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("change", ["altered", "missing"])
def test_a_changed_side_file_is_not_drawn_but_all_else_is(tmp_path: Path, change: str) -> None:
    folder = recorded(tmp_path)
    side = folder.out / "row-0" / "confusion.json"
    if change == "missing":
        side.unlink()
    else:
        side.write_text('{"labels": ["cat", "dog"], "counts": [[1, 2], [3, 4]]}')

    with pytest.raises(DamagedRecordError, match=r"row-0/confusion\.json is missing or was"):
        draw_run(folder, FLOORS)

    names = {path.name for path in folder.derived.iterdir()}
    assert {"loss.png", "speed.png", *TABLES} <= names
    assert "confusion-precision-fp32.png" not in names


def test_a_diverged_loss_is_drawn_without_a_crash(tmp_path: Path) -> None:
    def diverge(record: Record) -> Record:
        losses = Metric("loss", "nat", "x", (2.0, float("nan"), float("inf")), "epoch")
        speed = Metric("images_per_second", "images/s", "x", (1.0, float("nan")), "epoch")
        for row in record.rows:
            record = with_row(record, row.index, metrics=(losses, speed))
        return record

    assert "loss.png" in _names(draw_run(_with(tmp_path, diverge), FLOORS))


def test_a_drawing_whose_metric_nobody_measured_is_left_out(tmp_path: Path) -> None:
    spec = {**SPEC, "draw": [{"name": "x", "kind": "curve", "title": "X", "metrics": ["power"]}]}
    folder = _with(tmp_path, lambda record: dataclasses.replace(record, spec=spec))

    assert _names(draw_run(folder, FLOORS)) == TABLES


def test_a_curve_is_of_the_rows_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    monkeypatch.setattr(draw_curves, "_curve", lambda panel, *given: labels.append(given[-1]))
    curve = {"name": "x", "kind": "curve", "title": "X", "metrics": ["loss"]}
    chosen = {**curve, "name": "y", "parameter": "precision", "values": ["bf16", "fp16"]}
    unmeasured = {**chosen, "name": "z", "values": ["fp16"]}
    spec = {**SPEC, "draw": [curve, chosen, unmeasured]}
    folder = _with(tmp_path, lambda record: dataclasses.replace(record, spec=spec))

    names = _names(draw_run(folder, FLOORS))

    assert {"x.png", "y.png"} <= names
    assert "z.png" not in names
    # Two lines, which a name tells apart, and one that needs none.
    assert labels == ["precision=fp32", "precision=bf16", ""]


def test_rows_of_unlike_length_are_drawn(tmp_path: Path) -> None:
    def shorten(record: Record) -> Record:
        return with_row(record, 0, metrics=(Metric("loss", "nat", "monotonic", (1.0,), "epoch"),))

    assert "loss.png" in _names(draw_run(_with(tmp_path, shorten), FLOORS))


class TestTables:
    def test_every_row_is_in_the_csv_with_its_reasons(self, tmp_path: Path) -> None:
        folder = _with(
            tmp_path,
            lambda record: with_row(record, 1, validity=Validity(False, ("too, hot", "slow"))),
        )
        write_tables(folder.record(), tmp_path, FLOORS)

        with open(tmp_path / "rows.csv", encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))

        assert [row["row"] for row in rows] == list("012345")
        assert (rows[1]["valid"], rows[1]["reasons"]) == ("no", "too, hot; slow")
        assert float(rows[0]["accuracy (%)"]) == pytest.approx(99.0)

    def test_the_summary_is_over_valid_rows(self, tmp_path: Path) -> None:
        folder = _with(
            tmp_path, lambda record: with_row(record, 1, validity=Validity(False, ("hot",)))
        )
        write_tables(folder.record(), tmp_path, FLOORS)

        with open(tmp_path / "summary.csv", encoding="utf-8", newline="") as stream:
            lines = list(csv.DictReader(stream))

        bf16 = next(ln for ln in lines if (ln["precision"], ln["metric"]) == ("bf16", "accuracy"))
        assert (bf16["valid"], bf16["repeats"], bf16["low95"]) == ("2", "3", "")
        assert float(bf16["median"]) == pytest.approx(98.15)

    def test_markdown_has_a_line_per_configuration(self, tmp_path: Path) -> None:
        text = markdown_table(recorded(tmp_path).record(), FLOORS, ["accuracy"])

        assert text.splitlines() == [
            "| precision | accuracy (%) | valid repeats |",
            "| --- | --- | --- |",
            "| fp32 | 99.10 (99.00 to 99.20) | 3/3 |",
            "| bf16 | 98.10 (98.00 to 98.20) | 3/3 |",
        ]


@pytest.mark.parametrize("content", ["[]", "{", '{"labels": ["a"]}', '{"labels": 1, "counts": []}'])
def test_a_side_file_that_is_no_matrix_is_named(tmp_path: Path, content: str) -> None:
    folder = recorded(tmp_path)
    record = folder.record()
    side = record.rows[0].side_files[0]
    path = folder.out / side.path
    path.write_text(content)
    changed = dataclasses.replace(side, sha256=sha256_file(path))
    row = dataclasses.replace(record.rows[0], side_files=(changed,))

    with pytest.raises(DamagedRecordError, match="holds no square matrix"):
        read_matrix(row, "confusion.json", folder)


def _many(tmp_path: Path, epochs: int) -> RunFolder:
    """A run whose configurations differ in precision and, `epochs` times, in epochs."""
    folder = Store(tmp_path).new_run(job())
    record = record_of(folder)
    rows = [
        dataclasses.replace(
            row, index=place, parameters={"epochs": each, "precision": row.parameters["precision"]}
        )
        for place, (each, row) in enumerate(
            (each, row) for each in range(epochs) for row in (record.rows[0], record.rows[1])
        )
    ]  # fmt: skip
    folder.write_record(dataclasses.replace(record, rows=tuple(rows)))
    return folder


def test_more_bars_than_one_can_look_at_are_several_pictures(tmp_path: Path) -> None:
    few = _names(draw_run(_many(tmp_path / "few", 12), FLOORS))
    many = _names(draw_run(_many(tmp_path / "many", 13), FLOORS))

    assert "speed.png" in few
    assert {name for name in many if name.startswith("speed") and name.endswith(".png")} == {
        f"speed-epochs-{each}.png" for each in range(13)
    }


def test_panels_side_by_side_say_whose_they_are(tmp_path: Path) -> None:
    def both(record: Record) -> Record:
        drawings = [
            {"name": "both", "kind": "bar", "title": "Both", "y": "images per second",
             "metrics": ["images_per_second", "accuracy"]},
        ]  # fmt: skip
        return dataclasses.replace(record, spec={**record.spec, "draw": drawings})

    folder = _with(tmp_path, both)
    draw_run(folder, FLOORS)

    svg = (folder.derived / "both.svg").read_text(encoding="utf-8")
    assert svg.count("<!-- accuracy -->") == 1
    assert svg.count("<!-- images per second -->") == 3  # both axes, and the first panel's name
