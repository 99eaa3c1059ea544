"""`narrowgauge multipliers list`, `analyse`, `show`: runs of the experiment `multipliers`, as text.

The multipliers are the lab's, so a command is a Job like any other: recorded, in a container or
natively. What it prints is a side file of its row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import (
    ExecutorName,
    Json,
    LabPython,
    On,
    Project,
    Results,
    note,
    results_root,
    world_of,
)

if TYPE_CHECKING:
    from narrowgauge.launch import World
    from narrowgauge.store import RunFolder
    from narrowgauge_contract.record import Record

__all__ = ["register"]

_EXPERIMENT = "multipliers"
_FILES = (".npy", ".c", ".py")
_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="One that is listed, or with other numbers; FILE.npy, FILE.c[:function] or "
        "FILE.py:function.",
    ),
]
_Signed = Annotated[
    str,
    typer.Option(
        "--signed",
        metavar="auto|true|false",
        help="Of a file: whether operands are signed. auto: as the types say in C; else unsigned.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the `multipliers` commands to the program."""
    multipliers = typer.Typer(
        no_args_is_help=True,
        help="Approximate multipliers of 8-bit numbers: their errors, and what they consist of.",
    )
    multipliers.command("list")(list_)
    multipliers.command("analyse")(analyse)
    multipliers.command("show")(show)
    app.add_typer(multipliers, name="multipliers")


def list_(
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
) -> None:
    """List the multipliers that are built in, with their errors and their structure."""
    folder, record = _run(world_of(project), "all", "auto", on, executor, results, lab_python)
    print(_text(folder, record, "list.txt"), end="")


def analyse(
    name: _Name,
    signed: _Signed = "auto",
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
    as_json: Json = False,
) -> None:
    """Find the exact products that a multiplier consists of, and prove them over all pairs."""
    folder, record = _run(world_of(project), name, signed, on, executor, results, lab_python)
    print(_text(folder, record, "structure.json" if as_json else "analysis.txt"), end="")


def show(
    name: _Name,
    signed: _Signed = "auto",
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
    as_json: Json = False,
) -> None:
    """Show how wrong a multiplier is: the literature's measures, and a heat map."""
    folder, record = _run(world_of(project), name, signed, on, executor, results, lab_python)
    if as_json:
        facts = record.rows[0].facts
        body = {key: facts[key] for key in ("multiplier", "statistics", "structure")}
        print(json.dumps(body, indent=2, sort_keys=True))
        return
    print(_text(folder, record, "show.txt"), end="")
    for picture in sorted(folder.derived.glob("heat*.png")):
        note(f"drawn: {picture}")


def _run(
    world: World,
    name: str,
    signed: str,
    on: str | None,
    executor: str,
    results: Path | None,
    lab_python: Path | None,
) -> tuple[RunFolder, Record]:
    """One row of the experiment. Raises the error of a run that did not go well."""
    from narrowgauge.launch import prepare, run_all
    from narrowgauge.plan import JobRequest
    from narrowgauge.progress import SilentReporter
    from narrowgauge.recording import problem_of
    from narrowgauge.store import Store

    table, executor = _table(world, name, executor)
    words = (f"table={table}", f"signed={signed}")
    request = JobRequest(_EXPERIMENT, "smoke", words, 0)
    store = Store(results_root(results, world.checkout))
    launch = prepare(world, request, store.root, on=on, executor=executor, lab_python=lab_python)
    [(folder, record)] = run_all(
        world, launch, store=store, data=Path(), wait=True, reporter=SilentReporter(sys.stderr)
    )
    problem = problem_of(record, folder)
    if problem is not None:
        raise problem
    note(f"recorded: {folder.path}")
    return folder, record


def _table(world: World, name: str, executor: str) -> tuple[str, str]:
    """The table's name for the lab, and the executor that can see it.

    A container sees files of the experiment's own folder and no others.
    """
    from narrowgauge.errors import BadValueError, UsageError

    if "," in name:
        raise BadValueError(f"'{name}' is more than one multiplier, or a path with a comma")
    file, colon, function = name.rpartition(":")
    path = Path(file if colon and Path(file).suffix in _FILES else name)
    if path.suffix not in _FILES:
        return name, executor
    if not path.is_file():
        raise UsageError(f"{path} is not there", why=f"it was looked for in {Path.cwd()}")
    function = f":{function}" if colon and str(path) == file else ""
    folder = (world.checkout.experiments / _EXPERIMENT).resolve()
    if folder in path.resolve().parents:
        return f"{path.resolve().relative_to(folder)}{function}", executor
    if executor == "docker":
        raise UsageError(
            f"a container does not see {path}",
            why="of files, it sees those of the experiments",
            next_step=f"put it into {folder}, or add --executor native",
        )
    return f"{path.resolve()}{function}", "native"


def _text(folder: RunFolder, record: Record, name: str) -> str:
    """A side file of the row, as it was recorded. Raises DamagedRecordError where it is not."""
    from narrowgauge.side_files import side_file
    from narrowgauge_contract.errors import DamagedRecordError

    path = side_file(record.rows[0], name, folder)
    if path is None:
        raise DamagedRecordError(f"the run {record.run_id} left no {name}")
    return path.read_text(encoding="utf-8")
