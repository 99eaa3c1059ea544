"""`narrowgauge placement solve`. Thin: the planner does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import Json, Project, Results, Run, checkout_of, note, results_root

if TYPE_CHECKING:
    from narrowgauge.planner.report import Report
    from narrowgauge.planner.search import Asked

__all__ = ["solve"]


def solve(
    run: Run = "latest:hetero-plan",
    elsewhere: Annotated[
        str,
        typer.Option(
            "--network-elsewhere",
            metavar="cpu|accelerator|free",
            help="Where all but the layers' products lives; free: wherever it is faster.",
        ),
    ] = "cpu",
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="NAME[,NAME]",
            help="What passes may compute in. Tensors travel in fp32 or as these have them.",
        ),
    ] = "fp32",
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GB", help="The most of the accelerator's memory."),
    ] = None,
    what_if: Annotated[
        str,
        typer.Option(
            "--what-if",
            metavar="CHANGE[,CHANGE]",
            help="Another machine: bus=64GB/s (or 2x), coherent=yes, accelerator=4x, cpu=2x, "
            "latency=2us; each alone, and all together.",
        ),
    ] = "",
    row: Annotated[
        int | None,
        typer.Option("--row", min=0, help="Which row's costs; of all rows together by default."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the plan here, as TOML.")
    ] = None,
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Find the fastest placement plan by what a run of hetero-plan measured; predict its step."""
    from narrowgauge.planner.report import make_report, print_report, report_json
    from narrowgauge.planner.source import costs_of
    from narrowgauge.planner.whatif import changes_of
    from narrowgauge.store import Store

    asked = _asked(elsewhere, precision, memory)
    changes = changes_of(what_if)
    root = results.absolute() if results else results_root(None, checkout_of(project))
    costs, _ = costs_of(Store(root).find(run), row)
    report = make_report(costs, asked, changes, _plan_name(out))
    if out is not None:
        _write(out, report.plan)
    if as_json:
        print(json.dumps(report_json(report), indent=2, sort_keys=True))
    else:
        from narrowgauge.screen import Screen

        print_report(report, Screen(highlight=False))
    if out is not None:
        note(_next(out, report))


def _asked(elsewhere: str, precision: str, memory: float | None) -> Asked:
    from narrowgauge.errors import BadValueError
    from narrowgauge.planner.search import ELSEWHERE, Asked, precisions_of
    from narrowgauge_contract.errors import UnknownNameError

    if elsewhere not in ELSEWHERE:
        raise UnknownNameError("place", elsewhere, ELSEWHERE, where="in --network-elsewhere")
    if memory is not None and not memory > 0:
        raise BadValueError(f"--memory {memory:g} leaves no memory at all")
    return Asked(elsewhere, precisions_of(precision), None if memory is None else memory * 1e9)


def _plan_name(out: Path | None) -> str:
    """That of the file, where it can be a plan's."""
    from narrowgauge_contract.placement import BUILTIN, NO_PLAN

    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in out.stem
                   ).lstrip("._-") if out else ""  # fmt: skip
    return name if name and name not in (*BUILTIN, NO_PLAN) else "solved"


def _write(out: Path, plan: object) -> None:
    from narrowgauge.errors import UsageError
    from narrowgauge.placement_toml import plan_toml
    from narrowgauge_contract.codec import write_atomic

    try:
        write_atomic(out, plan_toml(plan).encode())  # type: ignore[arg-type]
    except OSError as error:
        raise UsageError(f"cannot write {out}", why=str(error)) from error


def _next(out: Path, report: Report) -> str:
    return (
        f"wrote {out}; to hold the prediction against a measurement:\n"
        f"narrowgauge run hetero-plan -p network={report.costs.network} "
        f"-p batch={report.costs.batch} -p plan={out} -p elsewhere={report.asked.elsewhere} "
        + " ".join(f"-p {option}" for option in report.options)
    )
