"""`narrowgauge multipliers list`, `analyse`, `show`, `compare`, `export`: runs of the experiment
`multipliers`, as text.

The multipliers are the lab's, so a command is a Job like any other: recorded, in a container or
natively. What it prints, or exports, is a side file of its row.
"""

from __future__ import annotations

import dataclasses
import json
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
    world_of,
)
from narrowgauge.cli.text_jobs import How, run_row, side_of, text_of

if TYPE_CHECKING:
    from narrowgauge.launch import World
    from narrowgauge.store import RunFolder
    from narrowgauge_contract.record import Record

__all__ = ["register"]

_EXPERIMENT = "multipliers"
_FILES = (".npy", ".c", ".py")
#: What the experiment's parameters take that is no multiplier.
_ALL, _NONE = "all", "none"
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
    multipliers.command("compare")(compare)
    multipliers.command("export")(export)
    app.add_typer(multipliers, name="multipliers")


def list_(
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
    as_json: Json = False,
) -> None:
    """List the built-in ones.

    With their errors, and of how many exact products they consist.
    """
    how = How(on, executor, results, lab_python)
    folder, record = _run(world_of(project), how, None)
    print(text_of(folder, record, "list.json" if as_json else "list.txt"), end="")


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
    """Find the exact products one consists of.

    They are proved over all pairs of operands: multiplied out and compared with the table.
    """
    how = How(on, executor, results, lab_python)
    folder, record = _run(world_of(project), how, name, signed)
    print(text_of(folder, record, "structure.json" if as_json else "analysis.txt"), end="")


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
    """Show one's errors, and a heat map of them.

    ER, MED, NMED, MRED, the worst case and the bias, as the literature defines them.
    """
    how = How(on, executor, results, lab_python)
    folder, record = _run(world_of(project), how, name, signed)
    if as_json:
        _print_facts(record, ("multiplier", "statistics", "structure"))
        return
    print(text_of(folder, record, "show.txt"), end="")
    _note_pictures(folder, "heat")


def compare(
    name: _Name,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another one, named likewise.")],
    signed: _Signed = "auto",
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
    as_json: Json = False,
) -> None:
    """Show two side by side.

    Their errors, structure and heat maps, and at how many pairs their products differ. Where one is
    a file and the other is built in, --signed is about the file.
    """
    how = How(on, executor, results, lab_python)
    folder, record = _run(world_of(project), how, name, signed, against=other)
    if as_json:
        _print_facts(record, ("multiplier", "statistics", "structure", "against"))
        return
    print(text_of(folder, record, "comparison.txt"), end="")
    _note_pictures(folder, "difference")


def export(
    name: _Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.npy", help="Where to write the table.")],
    signed: _Signed = "auto",
    force: Annotated[bool, typer.Option("--force", help="Write over FILE.npy.")] = False,
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
) -> None:
    """Write one's table to a .npy file.

    It is int32 [256, 256], with a row for each code of the activation and a column for each of the
    weight. A signed operand's codes begin at -128, an unsigned one's at 0. The file does not say
    which: who reads a signed one back says --signed true.
    """
    from narrowgauge.errors import UsageError
    from narrowgauge_contract.codec import write_atomic

    if file.suffix != ".npy":
        raise UsageError(f"{file} is no name of a .npy file", next_step=f"{file}.npy")
    if file.exists() and not force:
        raise UsageError(f"{file} is there already", next_step="another name, or --force")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{file.absolute().parent} is no folder to write to")
    how = How(on, executor, results, lab_python)
    folder, record = _run(world_of(project), how, name, signed, keep=True)
    write_atomic(file.absolute(), side_of(folder, record, "table.npy").read_bytes())
    about = record.rows[0].facts["multiplier"]
    sides = " × ".join("signed" if about[key] else "unsigned" for key in ("a_signed", "b_signed"))
    note(f"written: {file}, {about['name']}, {sides}")


def _run(
    world: World,
    how: How,
    name: str | None,
    signed: str = "auto",
    against: str | None = None,
    keep: bool = False,
) -> tuple[RunFolder, Record]:
    """One row of the experiment: of a table, or of all that are listed (None). Raises the error of
    a run that did not go well."""
    table, executor = (_ALL, how.executor) if name is None else _table(world, name, how.executor)
    words = [f"table={table}", f"signed={signed}"]
    if against is not None:
        other, executor = _table(world, against, executor)
        words.append(f"against={other}")
    if keep:
        words.append("keep_table=true")
    how = dataclasses.replace(how, executor=executor)
    return run_row(world, how, _EXPERIMENT, tuple(words))


def _table(world: World, name: str, executor: str) -> tuple[str, str]:
    """The table's name for the lab, and the executor that can see it.

    A container sees files of the experiment's own folder and no others.
    """
    from narrowgauge.errors import BadValueError, UsageError

    if "," in name:
        raise BadValueError(f"'{name}' is more than one multiplier, or a path with a comma")
    if name in (_ALL, _NONE):
        raise BadValueError(f"'{name}' is no multiplier", next_step="narrowgauge multipliers list")
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


def _print_facts(record: Record, names: tuple[str, ...]) -> None:
    facts = record.rows[0].facts
    print(json.dumps({key: facts[key] for key in names}, indent=2, sort_keys=True))


def _note_pictures(folder: RunFolder, name: str) -> None:
    for picture in sorted(folder.derived.glob(f"{name}*.png")):
        note(f"drawn: {picture}")
