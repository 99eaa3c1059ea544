"""Stacked bars: parts of a whole from a record, and what others published beside them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from result_cases import SPEC, job, record_of, with_row

from narrowgauge import draw
from narrowgauge.draw import draw_run
from narrowgauge.noise import Floors
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.errors import BadValueError, ExperimentFileError
from narrowgauge_contract.outcome import Metric, Validity
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import parse_spec

FLOORS = Floors.none()
BESIDE: dict[str, Any] = {
    "name": "published",
    "scale": 0.01,
    "metrics": ["copy", "sum", "copy"],
    "values": {"bf16": [10, 40, 30.0]},
}
STACKED: dict[str, Any] = {
    "name": "parts",
    "kind": "stacked",
    "title": "Parts",
    "parameter": "precision",
    "metrics": ["copy", "sum", "never"],
    "names": {"copy": "copies"},
    "x": "per step",
    "beside": [BESIDE],
}


def spec(**changes: Any) -> dict[str, Any]:
    drawing = {**copy.deepcopy(STACKED), **changes}
    return {**SPEC, "draw": [drawing]}


def beside(**changes: Any) -> list[dict[str, Any]]:
    return [{**copy.deepcopy(BESIDE), **changes}]


def record(folder: RunFolder, declared: dict[str, Any]) -> Record:
    """Every row with 0.2 s of copies and 0.1 s of sums."""
    metrics = (
        Metric("copy", "s", "ledger", (0.2, 0.1, 0.3), ""),
        Metric("sum", "s", "ledger", (0.1,), ""),
    )
    plain = dataclasses.replace(record_of(folder), spec=declared)
    rows = tuple(dataclasses.replace(row, metrics=metrics) for row in plain.rows)
    return dataclasses.replace(plain, rows=rows)


def folder(root: Path, declared: dict[str, Any] | None = None) -> RunFolder:
    made = Store(root).new_run(job())
    made.write_record(record(made, declared or spec()))
    return made


def panels(made: RunFolder) -> Any:
    read = made.record()
    ((_, picture),) = draw._stacks(parse_spec(read.spec).drawings[0], read)
    return picture


def test_bars_stand_on_each_other_and_beside_them_what_was_published(tmp_path: Path) -> None:
    ours, published = panels(folder(tmp_path)).axes

    bars = [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in ours.patches]
    widths = [round(width, 6) for _, width, _ in bars]
    assert widths == [0.2, 0.1, 0.0] * 2, "per configuration its metrics, and nothing for a third"
    assert [round(x, 6) for x, _, _ in bars] == [0.0, 0.2, 0.3] * 2
    assert [text.get_text() for text in ours.texts] == ["0.3 s", "0.3 s"]
    # 10 and 30 hundredths of copies add up; it stands beside the bar of bf16, the second one.
    assert [round(bar.get_width(), 6) for bar in published.patches] == [0.4, 0.4, 0.0]
    assert published.patches[0].get_y() == pytest.approx(bars[3][2])
    assert published.get_title(loc="left") == "published"


def test_what_was_published_stands_beside_bars_of_the_same_settings_alone(tmp_path: Path) -> None:
    """Of another batch it would be compared with what it is not."""
    same = spec(beside=beside(where={"precision": "bf16"}))
    other = spec(beside=beside(where={"precision": "fp32"}))

    assert len(panels(folder(tmp_path / "same", same)).axes) == 2
    assert len(panels(folder(tmp_path / "other", other)).axes) == 1


def test_the_files_are_drawn_the_same_again_and_name_what_they_show(tmp_path: Path) -> None:
    made = folder(tmp_path)
    draw_run(made, FLOORS)
    first = (made.derived / "parts.svg").read_text(encoding="utf-8")
    draw_run(made, FLOORS)

    assert (made.derived / "parts.svg").read_text(encoding="utf-8") == first
    for word in ("copies", "per step (s)", "precision=bf16", "published"):
        assert word in first
    assert "never" not in first
    assert (made.derived / "parts.png").is_file()


def test_invalid_rows_and_values_that_are_not_here_have_no_bars(tmp_path: Path) -> None:
    made = Store(tmp_path).new_run(job())
    changed = record(made, spec())
    for row in changed.rows:
        if row.parameters["precision"] == "bf16":
            changed = with_row(changed, row.index, validity=Validity(False, ("hot",)))
    made.write_record(changed)

    (ours,) = panels(made).axes
    assert len(ours.patches) == 3


def test_a_published_bar_is_as_high_as_ours_of_its_value(tmp_path: Path) -> None:
    made = Store(tmp_path).new_run(job(epochs=(3,)))
    whole = record(made, spec())
    rows = [
        dataclasses.replace(row, parameters={**row.parameters, "epochs": epochs})
        for epochs in (3, 4)
        for row in whole.rows
        if row.parameters["precision"] == "bf16"
    ]
    made.write_record(dataclasses.replace(whole, rows=tuple(rows)))

    ours, published = panels(made).axes
    assert len(ours.patches) == 6
    low, high = ours.patches[0], ours.patches[-1]
    bar = published.patches[0]
    assert bar.get_y() == pytest.approx(low.get_y())
    assert bar.get_y() + bar.get_height() == pytest.approx(high.get_y() + high.get_height())


def test_who_stands_in_is_said(tmp_path: Path) -> None:
    plain = folder(tmp_path).record()
    stood_in = with_row(plain, 0, facts={"accelerator": "cpu (stand-in)"})
    for each, said in ((plain, False), (stood_in, True)):
        ((_, picture),) = draw._stacks(parse_spec(each.spec).drawings[0], each)
        title = picture.get_suptitle()
        assert ("stands in" in title) is said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metrics": ["copy"]}, "two or more"),
        ({"metrics": ["copy", "copy"]}, "two or more"),
        ({"names": {"coppy": "copies"}}, "coppy"),
        ({"names": {"copy": 3}}, "names"),
        ({"parameter": "epochs"}, "makes runs"),
        ({"beside": {"name": "x"}}, "list of tables"),
        ({"beside": beside(metrics=["copy", "sum", "other"])}, "other"),
        ({"beside": beside(values={"bf16": [1, 2]})}, "3 figures"),
        ({"beside": beside(values={"bf16": [1, 2, -3]})}, "3 figures"),
        ({"beside": beside(values={"bf16": [1, 2, True]})}, "3 figures"),
        ({"beside": beside(scale="x")}, "scale"),
        ({"beside": beside(extra=1)}, "extra"),
        ({"beside": beside(name="")}, "name"),
        ({"beside": beside(where=["precision"])}, "table from parameters"),
        ({"beside": beside(where={"precison": "bf16"})}, "precison"),
        ({"beside": beside(where={"epochs": 3})}, "epochs"),  # of the run, which bars do not have
        ({"y": "seconds"}, "y"),
    ],
)
def test_what_is_declared_wrongly_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentFileError, match=says):
        parse_spec(spec(**changes))


def test_a_published_value_that_the_parameter_does_not_take_is_refused() -> None:
    with pytest.raises(BadValueError, match="bf61"):
        parse_spec(spec(beside=beside(values={"bf61": [1, 2, 3]})))
