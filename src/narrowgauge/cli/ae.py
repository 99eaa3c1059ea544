"""`narrowgauge ae check`. Thin: calls the module that does it."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowgauge.cli.options import Json, Project, Results, checkout_of, results_root

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the `ae` commands to the program."""
    ae = typer.Typer(
        no_args_is_help=True, help="Artifact evaluation: what its chairs ask for, checked."
    )
    ae.callback()(_group)
    ae.command("check")(check)
    app.add_typer(ae, name="ae")


def _group() -> None:
    """Artifact evaluation: what its chairs ask for, checked."""


def _ids(incomplete: str) -> list[str]:
    from narrowgauge.ae.report import CRITERIA

    return [each.id for each in CRITERIA if each.id.startswith(incomplete)]


def check(
    criterion: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CRITERION]...", help="Only these, by id: A1, F1 to F8, R1 to R9.",
            autocompletion=_ids,
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain", metavar="ID", help="Say what a criterion asks, and who asks it.",
            autocompletion=_ids,
        ),
    ] = None,
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check this checkout against the criteria of artifact evaluation. Exit 34 where one lacks."""
    from narrowgauge.ae import report

    if explain is not None:
        print(report.explain(explain))
        return
    from narrowgauge.ae.artifact import gather
    from narrowgauge.cli.app import MODULES
    from narrowgauge.store import Store

    checkout = checkout_of(project)
    commands = frozenset(name for names in MODULES.values() for name in names)
    artifact = gather(checkout, Store(results_root(results, checkout)), commands)
    answers = report.examine(artifact, criterion or ())
    print(report.json_text(answers) if as_json else report.table(answers))
    raise typer.Exit(int(report.exit_code(answers)))
