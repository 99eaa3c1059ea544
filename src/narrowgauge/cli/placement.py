"""`narrowgauge placement list`, `show`, `solve`. Thin: each calls the module that does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli import complete
from narrowgauge.cli.options import Json
from narrowgauge.cli.placement_solve import solve

if TYPE_CHECKING:
    from narrowgauge_contract.placement import PlacementPlan

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the `placement` commands to the program."""
    placement = typer.Typer(
        no_args_is_help=True,
        help="Placement plans: where each pass of a layer runs, and how tensors get there.",
    )
    placement.command("list")(list_)
    placement.command("show")(show)
    placement.command("solve")(solve)
    app.add_typer(placement, name="placement")


def list_(as_json: Json = False) -> None:
    """List the placement plans that are built in."""
    from narrowgauge_contract.placement import BUILTIN, parse_plan

    plans = [parse_plan(document, name) for name, document in BUILTIN.items()]
    if as_json:
        _print_json(list(BUILTIN.values()))
        return
    from narrowgauge.placement_show import print_plans
    from narrowgauge.screen import Screen

    print_plans(plans, Screen(highlight=False))


def show(
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN",
            help="A built-in plan's name, or a TOML file.",
            autocompletion=complete.placements,
        ),
    ],
    as_toml: Annotated[
        bool, typer.Option("--toml", help="As the TOML of a plan, to begin one's own from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a placement plan: device, precision and backend of every pass, and the transfers."""
    from narrowgauge.errors import UsageError
    from narrowgauge_contract.placement import plan_document
    from narrowgauge_contract.placement_files import find_plan

    if as_toml and as_json:
        raise UsageError("--toml and --json do not go together")
    found = find_plan(plan, Path())
    if as_json:
        _print_json({"value": _value(plan, found), "document": plan_document(found)})
    elif as_toml:
        from narrowgauge.placement_toml import plan_toml

        print(plan_toml(found), end="")
    else:
        from narrowgauge.placement_show import print_plan
        from narrowgauge.screen import Screen

        print_plan(found, _value(plan, found), Screen(highlight=False))


def _value(given: str, plan: PlacementPlan) -> str:
    """What a row says of it."""
    from narrowgauge_contract.placement import BUILTIN, plan_value

    return given if given in BUILTIN else plan_value(plan)


def _print_json(body: object) -> None:
    print(json.dumps(body, indent=2, sort_keys=True))
