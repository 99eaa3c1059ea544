"""`narrowgauge placement solve`: from a recorded run to a plan's file."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from planner_cases import LAYERS, Rates, costs, recorded, with_steps

from narrowgauge.cli.app import run_program
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.placement_files import load_plan

_RUN = ("placement", "solve", "latest:hetero-plan", "--results", "results")


class Cli:
    """Runs command lines in this process; gives the exit code and what was printed where."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: str) -> tuple[int, str, str]:
        errors = io.StringIO()
        self._capture.readouterr()
        code = run_program(words, os.environ, errors)
        shown = self._capture.readouterr()
        return code, shown.out, shown.err + errors.getvalue()


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """In a folder of its own, with one run of hetero-plan in `results`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    recorded(tmp_path / "results", with_steps(costs(Rates(bus=1e12)), cpu=0.01, hetero_fp32=0.005))
    return Cli(capsys)


def test_the_page_says_where_what_runs_and_what_would_help(cli: Cli) -> None:
    code, out, _ = cli(*_RUN, "--what-if", "bus=2x,coherent=yes")

    assert code == 0
    assert "predicted step:" in out
    assert "bound by:" in out
    for layer in LAYERS:
        assert layer.name in out
    assert "What if" in out
    assert "bus=2x,coherent=yes" in out
    assert "What would help most" in out
    assert "latency=0us" in out
    assert "hetero-fp32" in out
    assert "do not add up" in out  # the steps of this made-up machine are made up apart
    assert "stands in" not in out


def test_eighty_columns_show_every_number_whole(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = cli(*_RUN)[1]
    monkeypatch.setenv("COLUMNS", "80")
    code, narrow, _ = cli(*_RUN)

    assert code == 0
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80

    def cells(text: str, layer: str) -> list[str]:
        lines = [line.split()[1:] for line in text.splitlines() if line.startswith(f"{layer} ")]
        return sorted(word for line in lines for word in line)

    for layer in LAYERS:
        assert cells(narrow, layer.name) == cells(wide, layer.name) != []


def test_the_plan_is_written_and_the_next_command_is_said(cli: Cli) -> None:
    code, out, err = cli(*_RUN, "--out", "fast.toml", "--json")

    document = json.loads(out)
    plan = load_plan(Path("fast.toml"))
    assert code == 0
    assert plan.name == document["plan"]["plan"]["name"] == "fast"
    assert (
        f"-p plan=fast.toml -p elsewhere=cpu -p predicted={document['predicted_step']:.6g} "
        f"-p bound={document['bound']:.6g} "
        f"-p accelerator_step={document['accelerator_step']:.6g}" in err
    )
    assert document["variant"]["elsewhere"] == "cpu"
    assert document["measured"][0]["plan"] == "cpu"


def test_a_stand_in_says_so(cli: Cli, tmp_path: Path) -> None:
    recorded(tmp_path / "other", costs(stand_in=True, shared_memory=True))
    _, out, _ = cli(*_RUN[:3], "--results", "other")

    assert "the CPU stands in for the accelerator" in out
    assert "share one memory" in out
    found = re.search(r"read in place a step would take (.+?), ([0-9.]+) times as fast", out)
    assert found is not None
    line = next(each for each in out.splitlines() if each.startswith("coherent=yes"))
    assert line.split() == ["coherent=yes", *found[1].split(), found[2]]
    assert float(found[2]) > 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--network-elsewhere", "gpu"), ExitCode.USAGE, "did you mean 'accelerator'"),
        (("--precision", "int9"), ExitCode.USAGE, "did you mean 'int8'"),
        (("--precision", "bf16"), ExitCode.NOT_APPLICABLE, "leaves no place"),
        (("--memory", "0"), ExitCode.USAGE, "no memory at all"),
        (("--memory", "0.001", "--network-elsewhere", "accelerator"), ExitCode.NOT_APPLICABLE,
         "too little"),
        (("--what-if", "bus=quick"), ExitCode.USAGE, "says nothing"),
        (("--row", "3"), ExitCode.USAGE, "no costs in row 3"),
        (("--out", "no/such/folder/x.toml"), ExitCode.USAGE, "cannot write"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_an_error_that_says_why(
    cli: Cli, words: tuple[str, ...], code: ExitCode, message: str
) -> None:
    found, _, err = cli(*_RUN, *words)

    assert found == code
    assert message in err


@pytest.mark.parametrize(("file", "name"), [("none.toml", "solved"), ("a b.toml", "a-b")])
def test_a_file_whose_name_is_no_plans_gets_another(cli: Cli, file: str, name: str) -> None:
    assert cli(*_RUN, "--out", file)[0] == 0

    assert load_plan(Path(file)).name == name
