"""`narrowgauge notebook`: an experiment as a notebook, in JupyterLab or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.cli import complete
from narrowgauge.cli.options import Data, On, Project, Results, data_root, results_root, world_of

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("notebook")(notebook)


def notebook(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="[EXPERIMENT]",
            help="Which experiment; all by default.",
            autocompletion=complete.experiments,
        ),
    ] = None,
    on: On = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="The port, on this host's loopback.")
    ] = 8888,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write the notebook here and start nothing."),
    ] = None,
    results: Results = None,
    data: Data = None,
    project: Project = None,
) -> None:
    """Open an experiment as a notebook: JupyterLab in the target's container, until Ctrl-C."""
    from narrowgauge.errors import UsageError
    from narrowgauge.jupyter import open_notebook, write_notebook

    if write is not None and experiment is None:
        raise UsageError("--write wants an experiment", next_step="narrowgauge list names them")
    world = world_of(project)
    if write is not None:
        write_notebook(world, str(experiment), write)
        print(write)
        return
    open_notebook(
        world,
        experiment=experiment,
        on=on,
        port=port,
        results=results_root(results, world.checkout),
        data=data_root(data),
    )
