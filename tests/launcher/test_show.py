"""One run on one screen: everything a reader must know is on it, whatever state the run is in."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from result_cases import host, job, record_of, recorded, with_row
from rich.console import Console

from narrowgauge.draw import draw_run
from narrowgauge.noise import Floors
from narrowgauge.show import print_results, show_run
from narrowgauge.store import RunFolder, Store
from narrowgauge.tables import markdown_table
from narrowgauge.units import format_value, number
from narrowgauge.view import load_view, spark, to_json, warnings_of
from narrowgauge_contract.events import EventKind, EventLog
from narrowgauge_contract.outcome import ErrorInfo, Status, Validity
from narrowgauge_contract.record import (
    BoardFacts,
    GitFacts,
    ImageFacts,
    Record,
    SchedulerFacts,
)


def _screen(folder: RunFolder, width: int = 120) -> str:
    stream = io.StringIO()
    show_run(folder, Console(file=stream, width=width), Floors.none())
    return stream.getvalue()


def _changed(tmp_path: Path, record_change: dict[str, object]) -> tuple[RunFolder, Record]:
    folder = Store(tmp_path).new_run(job())
    record = dataclasses.replace(record_of(folder), **record_change)
    folder.write_record(record)
    return folder, record


def test_a_good_run_shows_what_it_measured_and_where(tmp_path: Path) -> None:
    screen = _screen(recorded(tmp_path))

    for part in (
        "A toy", "complete in 3 min 10 s", "docker on cpu", "seed 0", "epochs=3",
        "99.10 %", "98.10 %", "99.00–99.20", "3/3", "8 102 images/s", "▁▅█",
        "accuracy: last epoch", "images_per_second: median without the first epoch",
        "EPYC", "torch", "2.13.0", "Debian 12", "16 GiB", "dddddddddddd", "0123456789ab",
        "narrowgauge compare",
    ):  # fmt: skip
        assert part in screen, part
    assert "⚠" not in screen
    assert "INVALID" not in screen
    assert "\x1b" not in screen


@pytest.mark.parametrize(("device", "shown"), [("all", "board orin · "), ("gpu0", "orin/gpu0")])
def test_where_a_run_elsewhere_was_is_shown(tmp_path: Path, device: str, shown: str) -> None:
    board = BoardFacts("orin", "orin.lab", device, 0.1861, 0.19)
    scheduler = SchedulerFacts("slurm", "23.02", "7_1", "main", ("n1", "n2"), "")
    on_board = _screen(_changed(tmp_path, {"host": dataclasses.replace(host(), board=board)})[0])
    facts = dataclasses.replace(host(), scheduler=scheduler)
    on_nodes = _screen(_changed(tmp_path / "nodes", {"host": facts})[0])

    assert shown in on_board
    assert "+0.19 s ± 0.19 s" in on_board
    assert "job 7_1 on n1 n2" in on_nodes


def test_a_terminal_gets_colour_and_fits_eighty_columns(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system="standard")

    show_run(recorded(tmp_path), console, Floors.none())

    assert "\x1b[" in stream.getvalue()
    plain = Console(width=80).render_str(stream.getvalue())
    assert "images_per_second" in stream.getvalue()  # not folded in the middle
    assert plain


def test_an_invalid_row_says_why_and_is_left_out_of_the_figure(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    reason = "ran at fp32, bf16 was asked for"
    folder.write_record(with_row(record_of(folder), 1, validity=Validity(False, (reason,))))

    screen = _screen(folder)

    assert "INVALID" in screen
    assert f"row 1: {reason}" in screen
    assert "2/3" in screen
    assert "98.10–98.20" in screen


def test_without_any_valid_row_there_is_no_figure(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job(precision=["fp32"]))
    record = record_of(folder)
    rows = [dataclasses.replace(r, validity=Validity(False, ("too hot",))) for r in record.rows]
    folder.write_record(dataclasses.replace(record, rows=tuple(rows)))

    screen = _screen(folder)

    assert "0/3" in screen
    assert "rows 0, 1, 2: too hot" in screen


def test_everything_to_distrust_is_said(tmp_path: Path) -> None:
    facts = host(
        image=ImageFacts("n", "sha256:aa", "debian", None, "tag", stand_in=True),
        git=GitFacts("f" * 40, True),
        exceptions=("writable root: the base needs it",),
    )
    folder = Store(tmp_path).new_run(job())
    record = record_of(folder, facts=facts)
    folder.write_record(dataclasses.replace(record, synthetic=True, events_damaged=2))

    screen = _screen(folder)

    for part in (
        "made-up data", "stand-in base image", "differed from its commit ffffffffffff",
        "2 event lines", "writable root",
    ):  # fmt: skip
        assert part in screen, part


def test_a_run_without_the_launcher_says_so(tmp_path: Path) -> None:
    folder, _ = _changed(tmp_path, {"host": None})

    assert "started without the launcher" in _screen(folder)


def test_a_failed_run_shows_why_and_the_end_of_its_log(tmp_path: Path) -> None:
    error = ErrorInfo("out-of-memory", "the run was killed for memory", next_step="smaller batches")
    log = "\n".join(f"line {i}" for i in range(40))
    folder, _ = _changed(
        tmp_path,
        {
            "status": Status.FAILED, "exit_code": 31, "error": error,
            "host": host(status=Status.FAILED, exit_code=31, log_tail=log),
        },
    )  # fmt: skip

    screen = _screen(folder)

    assert "failed in 3 min 10 s, exit code 31" in screen
    assert "killed for memory" in screen
    assert "smaller batches" in screen
    assert "line 39" in screen
    assert "line 10" not in screen


def test_a_run_without_a_record_shows_its_events(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    with EventLog(folder.events_path) as log:
        planned = folder.job().rows[0]
        log.emit(EventKind.ROW_START, 0, repeat=0, seed=0, parameters=dict(planned.parameters))
        log.emit(
            EventKind.METRIC, 0, name="accuracy", unit="%", source="count", values=[50.0, 75.0],
            index="epoch", conditions={},
        )  # fmt: skip

    screen = _screen(folder)

    assert "no record yet" in screen
    assert f"narrowgauge attach {folder.name}" in screen
    assert "75.00" in screen
    assert "unfinished" in screen


def test_a_run_of_which_nothing_is_left_still_shows(tmp_path: Path) -> None:
    assert "no row was started" in _screen(Store(tmp_path).new_run(job()))


def test_a_damaged_record_shows_its_problem_and_what_the_outcome_still_says(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    folder.record_path.chmod(0o644)
    folder.record_path.write_text('{"format": 1,')

    screen = _screen(folder)

    assert "truncated or not JSON" in " ".join(screen.split())
    assert "A toy" in screen


def test_a_damaged_job_too_is_no_crash(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    folder.job_path.write_text("]")

    assert "damaged" in _screen(folder)


def test_many_rows_do_not_push_the_results_away(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job(precision=["fp32", "bf16", "fp16"]))
    record = record_of(folder)
    rows = [dataclasses.replace(r, index=i) for i, r in enumerate(record.rows * 5)]
    folder.write_record(dataclasses.replace(record, rows=tuple(rows)))

    assert "and 33 more rows" in _screen(folder)


def test_the_list_shows_every_state_newest_first(tmp_path: Path) -> None:
    recorded(tmp_path, "20261121T100000Z-toy-aaaaaa")
    Store(tmp_path).new_run(job("20261122T100000Z-toy-bbbbbb"))
    bad = Store(tmp_path).new_run(job("20261123T100000Z-toy-cccccc"))
    bad.record_path.write_text("{")
    stream = io.StringIO()

    print_results(list(Store(tmp_path).entries()), Console(file=stream, width=80))

    lines = [line for line in stream.getvalue().splitlines() if "Z-toy-" in line]
    assert [line.split()[0][-6:] for line in lines] == ["cccccc", "bbbbbb", "aaaaaa"]
    assert "damaged" in lines[0]
    assert "no record yet" in lines[1]
    assert "6/6" in lines[2]
    assert "accuracy 98.60 %" in lines[2]


@pytest.mark.parametrize("spec", [{}, {"experiment": ["toy"]}, {"experiment": {"headline": 5}}])
def test_a_declaration_that_cannot_be_read_hides_no_figures(
    tmp_path: Path, spec: dict[str, object]
) -> None:
    folder, record = _changed(tmp_path, {"spec": spec})
    stream = io.StringIO()

    print_results(list(Store(tmp_path).entries()), Console(file=stream, width=80))

    assert "6/6" in stream.getvalue()
    assert "99.10 %" in _screen(folder)
    assert "| 3/3 |" in markdown_table(record, Floors.none())


def test_no_runs_says_how_to_make_one() -> None:
    stream = io.StringIO()

    print_results([], Console(file=stream))

    assert "narrowgauge run" in stream.getvalue()


def test_json_has_the_figures_of_the_screen(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    folder.write_record(with_row(record_of(folder), 1, validity=Validity(False, ("hot",))))

    body = json.loads(json.dumps(to_json(load_view(folder)), allow_nan=False))

    assert (body["rows"], body["valid_rows"], body["status"]) == (6, 5, "complete")
    fp32, bf16 = body["configurations"]
    assert fp32["parameters"] == {"precision": "fp32", "epochs": 3}
    assert fp32["metrics"]["accuracy"]["median"] == pytest.approx(99.1)
    assert fp32["metrics"]["accuracy"]["figure"] == "last epoch"
    assert (bf16["valid"], bf16["invalid_because"]) == (2, ["hot"])


def test_json_of_a_damaged_run_says_so(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    folder.job_path.write_text("]")

    body = to_json(load_view(folder))

    assert body["state"] == "damaged"
    assert "job.json" in body["problem"]


def test_a_good_run_has_no_warnings(tmp_path: Path) -> None:
    assert warnings_of(load_view(recorded(tmp_path))) == ()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (99.2, "%", "99.20 %"), (8123.4, "images/s", "8 123 images/s"), (3.0, "", "3"),
        (0.0123456, "nat", "0.01235 nat"), (5.2e-7, "1", "5.2e-07"), (float("nan"), "%", "nan %"),
        (-0.0, "s", "0 s"), (1234567.0, "", "1 234 567"), (3.14159, "s", "3.142 s"),
        (0.00029712, "s", "0.2971 ms"), (0.0123, "s", "12.3 ms"), (0.3158, "s", "0.3158 s"),
        (9.984e-5, "s", "99.84 µs"), (-2e-9, "s", "-2 ns"),
        (3e-11, "s", "0.03 ns"), (float("inf"), "s", "inf s"), (float("nan"), "s", "nan s"),
        (0.5, "J", "0.5 J"), (0.0123, "ms", "0.0123 ms"),
    ],
)  # fmt: skip
def test_numbers_have_as_many_figures_as_a_reader_can_use(
    value: float, unit: str, text: str
) -> None:
    assert format_value(value, unit) == text


def test_percentages_line_up() -> None:
    assert [number(v, "%") for v in (9.0, 99.125)] == ["9.00", "99.12"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""), ([1.0], "▁"), ([1.0, 1.0], "▁▁"), ([0.0, 1.0], "▁█"),
        ([0.0, float("nan"), 1.0], "▁×█"), ([float("inf")], "×"),
    ],
)  # fmt: skip
def test_a_curve_in_one_line(values: list[float], text: str) -> None:
    assert spark(values) == text


def test_a_long_curve_keeps_its_ends() -> None:
    line = spark([float(i) for i in range(1000)], 16)

    assert len(line) == 16
    assert (line[0], line[-1]) == ("▁", "█")


FIXTURES = sorted((Path(__file__).parents[1] / "data" / "records").glob("*.json"))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_records_of_other_experiments_show_and_draw(tmp_path: Path, path: Path) -> None:
    """A run of an experiment that this checkout does not have: the record alone is enough."""
    folder = RunFolder(tmp_path / "x" / path.stem)
    folder.path.mkdir(parents=True)
    (folder.path / "record.json").write_bytes(path.read_bytes())

    screen = _screen(folder)
    made = draw_run(folder, Floors.none())

    assert folder.record().run_id in screen
    assert "Results" in screen
    assert {"rows.csv", "summary.md"} <= {each.name for each in made}
