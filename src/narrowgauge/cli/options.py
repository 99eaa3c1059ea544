"""The options that several commands share, each declared once."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli import complete
from narrowgauge_contract.placement_builtins import BUILTIN

if TYPE_CHECKING:
    from narrowgauge.checkout import Checkout
    from narrowgauge.errors import NarrowgaugeError
    from narrowgauge.launch import World
    from narrowgauge.progress import Reporter

__all__ = [
    "BoardChoice",
    "Data",
    "Every",
    "ExecutorName",
    "Experiment",
    "HostNames",
    "Json",
    "Kubernetes",
    "LabPython",
    "Label",
    "Node",
    "On",
    "Parameters",
    "ProfileName",
    "Project",
    "Results",
    "Run",
    "Seed",
    "Slurm",
    "Spread",
    "checkout_of",
    "data_root",
    "note",
    "note_error",
    "reporter_of",
    "results_root",
    "world_of",
]

Experiment = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT",
        help="Which experiment; `narrowgauge list` shows them.",
        autocompletion=complete.experiments,
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run id, its beginning or its end, or `latest`.",
        autocompletion=complete.runs,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="The target; this host's by default.",
        autocompletion=complete.targets,
    ),
]
ExecutorName = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="auto|docker|native|slurm|kubernetes",
        help="What starts the run. `docker` never falls back to `native`.",
    ),
]
Slurm = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="NAME=VALUE",
        help="For --executor slurm: partition, time, nodes, gres, exclusive, … Repeatable.",
    ),
]
Kubernetes = Annotated[
    list[str] | None,
    typer.Option(
        "--kubernetes",
        metavar="NAME=VALUE",
        help="For --executor kubernetes: image (by digest), results, data, nodes, … Repeatable.",
    ),
]
Node = Annotated[
    str | None,
    typer.Option(
        "--node",
        metavar="RANK/NODES@ADDRESS[:PORT]",
        help="Train with other machines: the same command on each, with its own RANK from 0;"
        " ADDRESS is machine 0's.",
    ),
]
ProfileName = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="smoke|short|paper",
        help="How much to do.",
        autocompletion=complete.profiles,
    ),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--parameter",
        metavar="NAME=VALUE[,VALUE]",
        help="Set a parameter; a list makes rows, or runs. Repeatable. Every experiment takes"
        " profile=cprofile|torch|nsys; a placement plan is a TOML file, none, or one of "
        f"{', '.join(BUILTIN)}.",
        autocompletion=complete.parameters,
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The first repeat's seed.")]
Results = Annotated[
    Path | None,
    typer.Option("--results", metavar="DIR", help="Where runs are kept; the checkout's results/."),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where data sets lie; the user's data folder."),
]
Project = Annotated[
    Path | None, typer.Option("--project", metavar="DIR", help="The checkout to work on.")
]
LabPython = Annotated[
    Path | None,
    typer.Option(
        "--lab-python",
        metavar="PYTHON",
        help="For native runs: a Python that has torch, instead of an environment of our own.",
    ),
]
HostNames = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME",
        help="Run on this board of hosts.toml, by ssh. Repeatable.",
        autocompletion=complete.hosts,
    ),
]
Every = Annotated[bool, typer.Option("--all", help="Run on every board of hosts.toml.")]
Label = Annotated[
    str | None, typer.Option("--label", metavar="LABEL", help="Run on the boards that have it.")
]
Spread = Annotated[
    bool,
    typer.Option("--spread", help="Spread the runs over the boards; else each board runs all."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@dataclass(frozen=True)
class BoardChoice:
    """Which boards a command line names, and whether they share the runs."""

    names: tuple[str, ...]
    every: bool
    label: str | None
    spread: bool

    def asked(self, executor: str, on: str | None) -> bool:
        """Whether this is a run on boards. Raises UsageError where the words do not fit."""
        from narrowgauge.errors import UsageError

        named = bool(self.names) or self.every or self.label is not None
        if self.every and (self.names or self.label is not None):
            raise UsageError(
                "--all is every board, and --host and --label are some",
                next_step="leave one of them out",
            )
        if not named and (self.spread or executor == "ssh"):
            raise UsageError("on which boards?", next_step="--host NAME, --label LABEL or --all")
        if named and (executor not in ("auto", "ssh") or on is not None):
            raise UsageError(
                "--executor and --on are for a run on this host",
                next_step="leave them out; a board's target stands in hosts.toml",
            )
        return named


def checkout_of(project: Path | None) -> Checkout:
    """The checkout a command works on."""
    from narrowgauge.checkout import find_checkout

    return find_checkout(Path.cwd(), project)


def world_of(project: Path | None) -> World:
    """The checkout, the environment and the host of this process."""
    from narrowgauge.launch import World
    from narrowgauge.machine import probe_host

    return World(checkout_of(project), dict(os.environ), probe_host(), note)


def results_root(given: Path | None, checkout: Checkout) -> Path:
    return (given or checkout.results).absolute()


def data_root(given: Path | None) -> Path:
    """`--data`, or narrowgauge/data in the user's data folder (XDG)."""
    if given is not None:
        return given.absolute()
    from narrowgauge_data import default_root

    return default_root(os.environ, Path.home())


def reporter_of(as_json: bool) -> Reporter:
    """What tells the user how a run gets on."""
    from narrowgauge.progress import LineReporter, LiveReporter, SilentReporter

    if as_json:
        return SilentReporter(sys.stderr)
    return LiveReporter(sys.stderr) if sys.stderr.isatty() else LineReporter(sys.stderr)


def note_error(error: NarrowgaugeError) -> None:
    """Tell of an error that does not end the command, as of one that does."""
    note("error: " + str(error).replace("\n", "\n  "))


def note(text: str) -> None:
    """Tell the user something on the way; standard output is for results."""
    print(text, file=sys.stderr, flush=True)
