"""`narrowgauge new`. Thin: calls the module that does it."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowgauge.cli.options import Project, checkout_of

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("new")(new)


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its id: small letters, digits and '-'.")
    ],
    title: Annotated[
        str | None, typer.Option("--title", metavar="TEXT", help="One line; else the name.")
    ] = None,
    project: Project = None,
) -> None:
    """Make an experiment of one's own, with claims, that runs at once."""
    from narrowgauge.scaffold.create import create_experiment

    said = title if title is not None else name.replace("-", " ").capitalize()
    folder = create_experiment(checkout_of(project), name, said)
    print(folder)
    for path in sorted(folder.iterdir()):
        print(f"  {path.name}")
    print(f"it runs as it is: narrowgauge run {name} --profile smoke")
    print(f"then change run.py to measure yours; its claims: narrowgauge reproduce {name}")
