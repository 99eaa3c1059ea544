"""Whether runs could go to a board, and what is in the way: each finding with its next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from narrowgauge.errors import DiskFull, NarrowgaugeError
from narrowgauge.fleet.clock import require_clock
from narrowgauge.fleet.facts import BoardState, ask_board, require_devices, require_tools, target_of
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.link import Link
from narrowgauge.targets import Target

__all__ = ["LEAST_FREE_BYTES", "Examined", "examine", "failing"]

#: Room for an image and some results; a run with less is not begun lightly.
LEAST_FREE_BYTES = 2 << 30


@dataclass(frozen=True)
class Examined:
    """A board with what it answered, its target, its runs (id and state), and what is wrong.
    `state` None: it did not answer."""

    board: Board
    state: BoardState | None
    target: str | None
    runs: tuple[tuple[str, str], ...]
    problems: tuple[NarrowgaugeError, ...]


def examine(
    boards: Sequence[Board], env: Mapping[str, str], targets: dict[str, Target]
) -> tuple[Examined, ...]:
    """Ask all at once; a board that does not answer is a finding like others."""
    with ThreadPoolExecutor(max_workers=max(1, len(boards))) as pool:
        return tuple(pool.map(lambda board: _examine(Link(board, env), targets), boards))


def failing(found: Sequence[Examined]) -> NarrowgaugeError | None:
    """The first problem of all."""
    return next((problem for each in found for problem in each.problems), None)


def _examine(link: Link, targets: dict[str, Target]) -> Examined:
    board = link.board
    try:
        state = ask_board(link)
    except NarrowgaugeError as error:
        return Examined(board, None, None, (), (error,))
    problems: list[NarrowgaugeError] = []
    target = None
    try:
        found = target_of(targets, board, state)
        target = found.name
        require_devices(board, state, found)
    except NarrowgaugeError as error:
        problems.append(error)
    try:
        require_tools(board, state)
    except NarrowgaugeError as error:
        problems.append(error)
    if state.free_bytes < LEAST_FREE_BYTES:
        problems.append(
            DiskFull(
                f"the board {board.name} has {state.free_bytes / 1e9:.1f} GB left",
                why=f"less than {LEAST_FREE_BYTES / 1e9:.1f} GB, for an image and results",
                next_step="there: docker image prune; or another folder: data in hosts.toml",
            )
        )
    runs: tuple[tuple[str, str], ...] = ()
    if not state.engine_problem and "docker" not in state.missing:
        try:
            answers = [answer.fields(2) for answer, _ in link.call("runs") if answer.word == "run"]
            runs = tuple(sorted((run, how) for run, how in answers))
        except NarrowgaugeError as error:
            problems.append(error)
    state = replace(state, clock=link.clock or state.clock)  # the surest reading of two
    try:
        require_clock(board.name, state.clock)
    except NarrowgaugeError as error:
        problems.append(error)
    return Examined(board, state, target, runs, tuple(problems))
