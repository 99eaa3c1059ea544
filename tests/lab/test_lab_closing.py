"""The lab's last lines: an experiment's `[summary]`, with a job of its own and with another's."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest
from toys import METRIC, toy_job, write_toy

from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_lab import cli

CLOSING = """
[summary]
parameter = "x"
metric = "y"
order = [4, 2]
names = { 4 = "four", 2 = "two" }
baseline = 2
better = "more"
heading = "Results summary"
line = "{name}: {value:.1f} ({ratio:.2f} x two)"
"""
LINES = ["Results summary", "four: 8.0 (2.00 x two)", "two: 4.0 (1.00 x two)"]


def _printed(capsys: pytest.CaptureFixture[str], words: List[str]) -> List[str]:
    assert cli.main(words) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("quick_facts")
def test_they_follow_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC, extra=CLOSING)
    words = ["run", "--experiments", str(experiments)]
    alone = [*words, "toy", "-p", "x=2,4", "--profile", "smoke"]

    assert _printed(capsys, [*alone, "--out", str(tmp_path / "out")])[1:] == LINES
    assert _printed(capsys, [*alone, "--results", str(tmp_path / "results")])[1:-1] == LINES
    write_json_atomic(tmp_path / "job.json", toy_job(experiments, "x=2,4"))
    job = ["--job", str(tmp_path / "job.json"), "--out", str(tmp_path / "another")]
    assert _printed(capsys, [*words, *job])[1:] == LINES


@pytest.mark.usefixtures("quick_facts")
def test_a_profiler_is_named_before_figures_that_include_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC, extra=CLOSING)
    words = ["run", "toy", "--experiments", str(experiments), "-p", "x=2,4", "--profile", "smoke"]
    words += ["-p", "profile=cprofile", "--out", str(tmp_path / "out")]

    lines = _printed(capsys, words)[1:]

    assert lines == ["profiled (cprofile): timings include the profiler", *LINES]


@pytest.mark.usefixtures("quick_facts")
def test_without_the_table_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC)
    words = ["run", "toy", "--experiments", str(experiments), "--profile", "smoke"]

    assert len(_printed(capsys, [*words, "--out", str(tmp_path / "out")])) == 1
