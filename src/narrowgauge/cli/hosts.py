"""`narrowgauge hosts`: the boards of a lab. Thin: each calls the module that does it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import Json, Project, checkout_of, note

if TYPE_CHECKING:
    from narrowgauge.cli.options import BoardChoice
    from narrowgauge.fleet.hosts import Board
    from narrowgauge.launch import World
    from narrowgauge.launch_fleet import Finished
    from narrowgauge.plan import JobRequest
    from narrowgauge.progress import Reporter
    from narrowgauge.store import Store

__all__ = ["boards_here", "chosen_boards", "register", "run_on_boards"]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    hosts = typer.Typer(no_args_is_help=True, help="The boards that runs can be sent to by ssh.")
    hosts.command("add")(add)
    hosts.command("list")(list_hosts)
    hosts.command("doctor")(doctor)
    app.add_typer(hosts, name="hosts")


def add(
    name: Annotated[str, typer.Argument(help="What the board is called here.")],
    address: Annotated[str, typer.Argument(help="Its address, or a name of your ssh config.")],
    user: Annotated[str | None, typer.Option("--user", help="Who to log in as.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, help="Where sshd listens.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Its target; what fits it by default.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="all, gpu0, cpu0-3: leased alone. Repeatable."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="The folder there for runs and data sets.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", help="For run --label. Repeatable.")
    ] = None,
    project: Project = None,
) -> None:
    """Ask a board what it is, and add it to hosts.toml."""
    from narrowgauge.fleet.facts import ask_board, require_devices, require_tools, target_of
    from narrowgauge.fleet.hosts import append_board, parse_boards
    from narrowgauge.fleet.link import Link
    from narrowgauge.targets import load_targets

    given: dict[str, object] = {
        "name": name,
        "address": address,
        "user": user,
        "port": port,
        "target": target,
    }
    given |= {"devices": device, "data": data, "labels": label}
    said = {key: value for key, value in given.items() if value}
    (board,) = parse_boards({"host": [said]}, "hosts add")
    state = ask_board(Link(board, os.environ))
    require_tools(board, state)
    found = target_of(load_targets(checkout_of(project).targets_file), board, state)
    require_devices(board, state, found)
    append_board(_file(), board)
    note(f"{name}: {state.host.describe()}, Docker {state.executor.version}, target {found.name}")
    print(_file())


def list_hosts(project: Project = None, as_json: Json = False) -> None:
    """Show the boards of hosts.toml. Asks none of them."""
    from narrowgauge.fleet.show import boards_json, print_boards

    del project  # no checkout is needed, but every command takes one
    boards = boards_here()
    if as_json:
        print(json.dumps(boards_json(boards), indent=2))
        return
    from narrowgauge.screen import Screen

    print_boards(boards, _file(), Screen())


def doctor(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; all by default.")
    ] = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Ask every board whether a run could go there, and say what is in the way."""
    from narrowgauge.fleet.doctor import examine, failing
    from narrowgauge.fleet.hosts import select
    from narrowgauge.fleet.show import findings_json, print_findings
    from narrowgauge.targets import load_targets

    boards = select(boards_here(), names or (), every=not names, label=None)
    found = examine(boards, os.environ, load_targets(checkout_of(project).targets_file))
    if as_json:
        print(json.dumps(findings_json(found), indent=2))
    else:
        from narrowgauge.screen import Screen

        print_findings(found, Screen())
    problem = failing(found)
    if problem is not None:
        raise typer.Exit(int(problem.exit_code))


def run_on_boards(
    world: World,
    request: JobRequest,
    boards: BoardChoice,
    store: Store,
    data: Path,
    *,
    wait: bool,
    reporter: Reporter,
) -> tuple[int, Finished]:
    """What `run --host`, `--label` and `--all` do: how many runs were asked for, and what came."""
    from narrowgauge.fleet.ready import prepare_fleet
    from narrowgauge.launch_fleet import run_fleet

    chosen = chosen_boards(boards)
    fleet = prepare_fleet(world, request, chosen, store.root, data, spread=boards.spread)
    done = run_fleet(
        world, fleet, store=store, data=data, wait=wait, errors=sys.stderr, reporter=reporter
    )
    return fleet.asked, done


def chosen_boards(boards: BoardChoice) -> tuple[Board, ...]:
    """The boards that a command line names. Raises UnknownNameError, UsageError for none."""
    from narrowgauge.fleet.hosts import select

    return select(boards_here(), boards.names, every=boards.every, label=boards.label)


def boards_here() -> tuple[Board, ...]:
    """The boards of this user's hosts.toml."""
    from narrowgauge.fleet.hosts import load_boards

    return load_boards(_file())


def _file() -> Path:
    from narrowgauge.fleet.hosts import hosts_file

    return hosts_file(os.environ, Path.home())
