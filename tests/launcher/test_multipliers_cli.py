"""`narrowgauge multipliers`: which run it asks for, what it prints of it, and heat maps."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from result_cases import SPEC, job, record_of

from narrowgauge import launch
from narrowgauge.cli.app import run_program
from narrowgauge.draw import draw_run
from narrowgauge.draw_heat import heat_size, read_heat
from narrowgauge.noise import Floors
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.errors import DamagedRecordError, ExitCode
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.outcome import SideFile
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "multipliers"
_HEAT = {"rows": ["0", "8"], "columns": ["0", "4", "8"], "values": [[0, 1, 2], [3, 4, 5.5]],
         "label": "mean"}  # fmt: skip


def _with_files(folder: RunFolder, files: dict[str, str], **spec: Any) -> Record:
    """A record whose first row has these side files and some facts."""
    record = record_of(folder)
    row = record.rows[0]
    sides = []
    for name, text in files.items():
        path = folder.out / f"row-{row.index}" / name
        path.write_text(text, encoding="utf-8")
        relative = f"row-{row.index}/{name}"
        sides.append(SideFile(relative, sha256_file(path), path.stat().st_size))
    facts = {"multiplier": {"name": "ama5", "a_signed": False, "b_signed": True},
             "statistics": {"er": 1}, "structure": {"kind": "x"}, "against": {}}  # fmt: skip
    changed = dataclasses.replace(row, side_files=tuple(sides), facts={**row.facts, **facts})
    rows = (changed, *record.rows[1:])
    return dataclasses.replace(record, rows=rows, spec={**record.spec, **spec})


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str, list[Any]]]:
    """Runs a command line whose run is a recorded one; gives what was asked for, too."""
    folder = Store(tmp_path / "results").new_run(job())
    files = {"analysis.txt": "proved\n", "show.txt": "MRED\n", "list.txt": "ama5\n",
             "structure.json": '{"kind": "bilinear"}\n', "list.json": "[]\n",
             "comparison.txt": "both\n", "table.npy": "a table\n"}  # fmt: skip
    record = _with_files(folder, files)
    asked: list[Any] = []

    def prepare(world: Any, request: Any, root: Path, **how: Any) -> Any:
        asked.append((request, how["executor"]))
        return launch

    def run_all(world: Any, prepared: Any, **how: Any) -> list[tuple[RunFolder, Record]]:
        return [(folder, record)]

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch, "run_all", run_all)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str, list[Any]]:
        errors = io.StringIO()
        given = ["multipliers", *words, "--project", str(ROOT), "--results", str(tmp_path / "r")]
        code = run_program(given, os.environ, errors)
        said = capsys.readouterr()
        return code, said.out, said.err + errors.getvalue(), asked

    return call


@pytest.mark.parametrize(
    ("words", "table", "printed"),
    [
        (("list",), "all", "ama5\n"),
        (("list", "--json"), "all", "[]\n"),
        (("analyse", "bam-2-4-signed"), "bam-2-4-signed", "proved\n"),
        (("show", "ama5"), "ama5", "MRED\n"),
        (("analyse", "ama5", "--json"), "ama5", '{"kind": "bilinear"}\n'),
    ],
)
def test_a_command_is_a_run_and_prints_its_side_file(
    cli: Callable[..., Any], words: tuple[str, ...], table: str, printed: str
) -> None:
    code, out, err, [(request, executor)] = cli(*words)

    assert (code, out, executor) == (0, printed, "auto")
    assert (request.experiment, request.profile) == ("multipliers", "smoke")
    assert request.parameters == (f"table={table}", "signed=auto")
    assert "recorded: " in err


def test_show_as_json_has_the_facts(cli: Callable[..., Any]) -> None:
    _, out, _, _ = cli("show", "ama5", "--json")

    assert set(json.loads(out)) == {"multiplier", "statistics", "structure"}


def test_two_are_one_run_of_both(cli: Callable[..., Any]) -> None:
    code, out, _, [(request, executor)] = cli("compare", "ama5", "mitchell")

    assert (code, out, executor) == (0, "both\n", "auto")
    assert request.parameters == ("table=ama5", "signed=auto", "against=mitchell")


def test_both_as_json_have_the_facts_of_both(cli: Callable[..., Any]) -> None:
    _, out, _, _ = cli("compare", "ama5", "mitchell", "--json")

    assert set(json.loads(out)) == {"multiplier", "statistics", "structure", "against"}


def test_one_file_of_two_makes_the_run_native(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine.npy").write_bytes(b"")
    _, _, _, [(request, executor)] = cli("compare", "ama5", "mine.npy", "--signed", "true")

    assert executor == "native"
    assert request.parameters == (
        "table=ama5", "signed=true", f"against={tmp_path / 'mine.npy'}",
    )  # fmt: skip


def test_a_table_is_exported_as_it_was_recorded(cli: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err, [(request, _)] = cli("export", "ama5", "mine.npy")

    assert (code, out) == (0, "")
    assert request.parameters == ("table=ama5", "signed=auto", "keep_table=true")
    assert (tmp_path / "mine.npy").read_text() == "a table\n"
    assert "written: mine.npy, ama5, unsigned × signed" in err


def test_an_export_writes_over_nothing_unless_told(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine.npy").write_bytes(b"precious")

    code, _, err, asked = cli("export", "ama5", "mine.npy")
    assert (code, asked) == (ExitCode.USAGE, [])
    assert "is there already" in err
    assert (tmp_path / "mine.npy").read_bytes() == b"precious"

    assert cli("export", "ama5", "mine.npy", "--force")[0] == 0
    assert (tmp_path / "mine.npy").read_text() == "a table\n"


def test_a_file_is_read_natively(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine.c").write_text("int f(int a, int b) { return a * b; }\n")
    code, _, _, [(request, executor)] = cli("analyse", "mine.c:f", "--signed", "true")

    assert (code, executor) == (0, "native")
    assert request.parameters == (f"table={tmp_path / 'mine.c'}:f", "signed=true")


def test_a_file_of_the_experiment_is_seen_by_containers(cli: Callable[..., Any]) -> None:
    code, _, _, [(request, executor)] = cli(
        "analyse", f"{FOLDER / 'run.py'}:run", "--executor", "docker"
    )

    assert (code, executor) == (0, "docker")
    assert request.parameters[0] == "table=run.py:run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("analyse", "none.npy"), "none.npy is not there"),
        (("analyse", "ama5,exact"), "more than one"),
        (("analyse", "mine.npy", "--executor", "docker"), "a container does not see mine.npy"),
        (("analyse", "all"), "'all' is no multiplier"),
        (("compare", "ama5", "none"), "'none' is no multiplier"),
        (("compare", "ama5", "none.py:f"), "none.py is not there"),
        (("export", "ama5", "mine.txt"), "mine.txt is no name of a .npy file"),
        (("export", "ama5", "nowhere/mine.npy"), "is no folder to write to"),
    ],
)
def test_what_cannot_be_run_is_said_before(
    cli: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "mine.npy").write_bytes(b"")
    code, _, err, asked = cli(*words)

    assert code == ExitCode.USAGE
    assert said in err
    assert asked == []


def test_the_experiment_declares_what_the_command_asks_for() -> None:
    spec = load_spec(FOLDER / "experiment.toml")

    assert spec.parameters["signed"].choices == ("auto", "true", "false")
    assert spec.parameter("table").parse("all") == "all"
    assert spec.profiles["smoke"].repeats == 1


def test_a_heat_map_is_drawn_and_drawn_again_the_same(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    draw = [{"name": "heat", "kind": "heat", "title": "Heat", "side_file": "heat.json"}]
    spec = {**SPEC, "draw": draw}
    folder.write_record(_with_files(folder, {"heat.json": json.dumps(_HEAT)}, **spec))

    made = [path for path in draw_run(folder, Floors.none()) if path.name.startswith("heat")]

    assert {path.suffix for path in made} == {".svg", ".png"}
    first = {path: path.read_bytes() for path in made}
    draw_run(folder, Floors.none())
    assert {path: path.read_bytes() for path in made} == first


@pytest.mark.parametrize(
    "change",
    [{"values": [[1, 2, 3]]}, {"values": [[1, 2], [3, 4]]}, {"rows": 3}, {"label": None, "values":
     "x"}, {"values": [[1, 2, 3], [4, 5, float("nan")]]}, {"rows": [], "values": []}],
)  # fmt: skip
def test_a_damaged_heat_map_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = Store(tmp_path).new_run(job())
    record = _with_files(folder, {"heat.json": json.dumps({**_HEAT, **change})})

    with pytest.raises(DamagedRecordError, match="holds no heat map"):
        read_heat(record.rows[0], "heat.json", folder)


def test_a_heat_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    record = _with_files(folder, {"heat.json": json.dumps(_HEAT)})
    heat = read_heat(record.rows[0], "heat.json", folder)

    assert heat is not None
    assert heat.values == ((0.0, 1.0, 2.0), (3.0, 4.0, 5.5))
    assert heat_size(heat)[0] > 2.8
    assert read_heat(record.rows[0], "other.json", folder) is None
