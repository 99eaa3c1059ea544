"""`narrowgauge doctor`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from narrowgauge.cli.options import Json, On, Project, checkout_of, data_root

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("doctor")(doctor)


def _ids(incomplete: str) -> list[str]:
    from narrowgauge.doctor.report import CHECKS

    return [check.id for check in CHECKS if check.id.startswith(incomplete)]


def doctor(
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="ID",
            help="Say what one check asks, why, and how to mend it.",
            autocompletion=_ids,
        ),
    ] = None,
    on: On = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Check this host, its Docker and this checkout. Exit 4 where a run would fail."""
    from narrowgauge.doctor import report

    if explain is not None:
        print(report.explain(explain))
        return
    from narrowgauge.doctor.probe import Surroundings, gather

    where = Surroundings(checkout_of(project), dict(os.environ), data_root(None))
    situation = gather(where, on)
    answers = report.examine(situation)
    tell = report.json_text if as_json else report.table
    print(tell(situation, answers))
    raise typer.Exit(int(report.exit_code(answers)))
