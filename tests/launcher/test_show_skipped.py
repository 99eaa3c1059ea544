"""A run in which nothing could be measured is no failure, and one sentence says why."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from result_cases import job, record_of
from rich.console import Console

from narrowgauge.noise import Floors
from narrowgauge.recording import problem_of
from narrowgauge.show import print_results, show_run
from narrowgauge.store import RunFolder, Store, read_entry
from narrowgauge_contract.errors import ExitCode, NotApplicableError
from narrowgauge_contract.outcome import ErrorInfo, Row, Status, Validity

REASONS = ("no tensorrt: it is not installed", "no fp8: this GPU has none")
SENTENCE = f"nothing could be measured here: {REASONS[0]}; {REASONS[1]}"


def _skipped(row: Row) -> Row:
    what, _, why = REASONS[row.index % 2].partition(": ")
    return dataclasses.replace(
        row, status=Status.SKIPPED, metrics=(), side_files=(), error=ErrorInfo("x", what, why),
        validity=Validity(False, (f"skipped: {what}: {why}",)),
    )  # fmt: skip


def _run(root: Path, *, measured: int = 0, code: ExitCode = ExitCode.NOT_APPLICABLE) -> RunFolder:
    folder = Store(root).new_run(job())
    good = record_of(folder)
    rows = tuple(row if row.index < measured else _skipped(row) for row in good.rows)
    error = ErrorInfo("SkippedError", *SENTENCE.split(": ", 1))
    bad = code is not ExitCode.OK
    folder.write_record(
        dataclasses.replace(
            good, rows=rows, status=Status.FAILED if bad else Status.COMPLETE,
            exit_code=int(code), error=error if bad else None,
        )
    )  # fmt: skip
    return folder


def _screen(folder: RunFolder) -> str:
    screen = io.StringIO()
    show_run(folder, Console(file=screen, width=160), Floors.none())
    return screen.getvalue()


def test_the_screen_says_it_in_one_sentence(tmp_path: Path) -> None:
    screen = _screen(_run(tmp_path))

    assert screen.splitlines().count(SENTENCE) == 1
    assert "– skipped in 3 min 10 s, exit code 3" in screen
    assert "What went wrong" not in screen


def test_the_list_does_not_call_it_failed(tmp_path: Path) -> None:
    screen = io.StringIO()
    print_results([read_entry(_run(tmp_path))], Console(file=screen, width=160))

    assert "– skipped" in screen.getvalue()
    assert "0/0, 6 skipped" in screen.getvalue()
    assert "failed" not in screen.getvalue()


def test_the_command_ends_with_what_is_lacking(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    problem = problem_of(folder.record(), folder)

    assert isinstance(problem, NotApplicableError)
    assert problem.exit_code == ExitCode.NOT_APPLICABLE
    assert f"{problem.what}: {problem.why}" == SENTENCE


@pytest.mark.parametrize(
    ("measured", "code"), [(1, ExitCode.OK), (0, ExitCode.INTERRUPTED), (1, ExitCode.RUN_FAILED)]
)
def test_any_other_run_is_what_it_is(tmp_path: Path, measured: int, code: ExitCode) -> None:
    screen = _screen(_run(tmp_path, measured=measured, code=code))

    assert SENTENCE not in screen.splitlines()
    assert "– skipped in" not in screen
