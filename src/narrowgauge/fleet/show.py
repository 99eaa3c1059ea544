"""Boards and findings, for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.fleet.doctor import Examined
from narrowgauge.fleet.hosts import Board
from narrowgauge_contract.codec import encode

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["boards_json", "findings_json", "print_boards", "print_findings"]


def boards_json(boards: Sequence[Board]) -> Any:
    """The boards as hosts.toml has them, with the defaults filled in."""
    return [encode(board) for board in boards]


def print_boards(boards: Sequence[Board], file: Path, console: Console) -> None:
    """A line for each board."""
    from rich import box
    from rich.table import Table

    if not boards:
        console.print(f"no boards in {file}; narrowgauge hosts add NAME ADDRESS", markup=False)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("name", "address", "target", "devices", "labels", "data"):
        table.add_column(name, overflow="fold")
    for each in boards:
        address = each.login + (f":{each.port}" if each.port else "")
        cells = (each.name, address, each.target or "what fits", " ".join(each.devices))
        table.add_row(*cells, " ".join(each.labels), each.data)
    console.print(table)


def findings_json(found: Sequence[Examined]) -> Any:
    """What each board answered and what is wrong with it."""
    return [
        {
            "name": each.board.name,
            "target": each.target,
            "machine": encode(each.state.machine) if each.state else None,
            "clock_skew_s": each.state.clock.skew_s if each.state else None,
            "clock_bound_s": each.state.clock.bound_s if each.state else None,
            "free_bytes": each.state.free_bytes if each.state else None,
            "runs": [{"run": run, "state": state} for run, state in each.runs],
            "problems": [
                {
                    "what": problem.what,
                    "why": problem.why,
                    "next": problem.next_step,
                    "exit_code": int(problem.exit_code),
                }
                for problem in each.problems
            ],
        }
        for each in found
    ]


def print_findings(found: Sequence[Examined], console: Console) -> None:
    """A paragraph for each board."""
    from rich.text import Text

    for each in found:
        good = not each.problems
        mark = ("✔", "green") if good else ("✘", "red")
        console.print(Text.assemble(mark, f" {each.board.name}"))
        state = each.state
        if state is not None:
            lines = [
                f"{state.host.describe()}, {state.machine.system}",
                f"Docker {state.executor.version or 'none'}, target {each.target or 'none'},"
                f" {state.free_bytes / 1e9:.0f} GB free",
                f"clock {state.clock.skew_s:+.3f} s ± {state.clock.bound_s:.3f} s",
            ]
            lines += [_line_of(run, how) for run, how in each.runs]
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False)
        for problem in each.problems:
            for line in str(problem).splitlines():
                console.print(f"  {line}", markup=False, highlight=False)


def _line_of(run: str, how: str) -> str:
    """What is known of a run on a board; one that has ended waits for somebody to take it."""
    if how != "exited":
        return f"{run} is {how} there"
    return f"{run} has ended there: narrowgauge attach {run} collects it, and removes it there"
