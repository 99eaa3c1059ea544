"""What a board is: the same facts that the launcher reads of its own host, from the same files.

The board sends the files; they are put below a folder, and `machine` reads them there.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.errors import NotApplicableError
from narrowgauge.executors.base import ExecutorFacts
from narrowgauge.executors.docker_errors import LEAST_API, too_old_error
from narrowgauge.fitting import refusals
from narrowgauge.fleet.clock import Clock
from narrowgauge.fleet.errors import BoardUnfit, board_said
from narrowgauge.fleet.hosts import ALL, Board
from narrowgauge.fleet.link import Link
from narrowgauge.fleet.protocol import Answer
from narrowgauge.machine import Gpu, Host, machine_facts, probe_host
from narrowgauge.selection import pick_target
from narrowgauge.targets import Accelerator, Target, version_tuple
from narrowgauge_contract.record import MachineFacts

__all__ = [
    "BoardState",
    "Questions",
    "ask_board",
    "have_of",
    "read_state",
    "require_devices",
    "require_tools",
    "target_of",
]

_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Questions:
    """What else is asked by the way: which of these images (names or ids) the board's engine has,
    and how much of these files, which are named from its folder of data sets on."""

    images: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class BoardState:
    """A board as it answered. `home` is the user's there; `free_bytes` where its data lies.

    `images`: what its engine says of each image that was asked for, None where it is not there;
    `files`: of each file the size, `-` where it is not there, and the size of its part.
    """

    host: Host
    machine: MachineFacts
    clock: Clock
    uid: int
    gid: int
    home: str
    executor: ExecutorFacts
    engine_problem: str
    missing: tuple[str, ...]
    free_bytes: int
    gpu_count: int
    images: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def folder(self, path: str) -> str:
        """A path of hosts.toml as the board's own absolute one."""
        return f"{self.home}/{path[2:]}" if path.startswith("~/") else path


def ask_board(link: Link, questions: Questions | None = None) -> BoardState:
    """One command; with `questions`, of which its connection stays open for the next (see
    Link.ask). Raises BoardUnreachable, HostKeyRefused."""
    asked = questions or Questions()
    words = [link.board.data, " ".join(asked.images), *asked.files]
    answers = link.call("facts", words) if questions is None else link.ask(words)
    assert link.clock is not None, "every command begins with the clock"
    return read_state(answers, link.clock, asked)


def read_state(
    answers: Sequence[tuple[Answer, bytes]], clock: Clock, questions: Questions | None = None
) -> BoardState:
    """The facts in the answers to `facts`."""
    asked = questions or Questions()
    single = {answer.word: answer for answer, _ in answers}
    uid, gid, home = single["user"].fields(3)
    machine, kernel, count = single["machine"].fields(3)
    gpus, driver = _gpus([a.text for a, _ in answers if a.word == "gpu"])
    groups = {a.text for a, _ in answers if a.word == "group"} - {"0"}
    power = single["power"].text.strip() if "power" in single else ""
    version, api = single["engine"].fields(2) if "engine" in single else ("", "")
    with tempfile.TemporaryDirectory(prefix="narrowgauge-board-") as name:
        root = Path(name)
        for answer, body in answers:
            if answer.word == "file":
                _put(root, answer.text, body)
        host = probe_host(root, machine, nvml=False)
        facts = machine_facts(root, docker=version or None, power_mode=power)
    host = dataclasses.replace(
        host, gpus=gpus, driver=driver, device_groups=tuple(sorted(groups)), driver_problem=None
    )
    facts = dataclasses.replace(
        facts,
        kernel=kernel,
        machine=machine,
        cpu_count=int(count),
        driver=driver,
        power_mode=power or None,
        gpus=tuple(
            {"name": g.name, "capability": g.capability, "memory_bytes": g.memory_bytes}
            for g in gpus
        ),
    )
    runtimes = single["runtimes"].text.split() if "runtimes" in single else []
    problem = single["no-engine"].text if "no-engine" in single else ""
    if api and version_tuple(api) < version_tuple(LEAST_API):
        problem = too_old_error(version, api).what
    return BoardState(
        host=host,
        machine=facts,
        clock=clock,
        uid=int(uid),
        gid=int(gid),
        home=home,
        executor=ExecutorFacts("ssh", version, tuple(sorted(runtimes))),
        engine_problem=problem,
        missing=tuple(a.text for a, _ in answers if a.word == "missing"),
        free_bytes=int(single["free"].text or 0) if "free" in single else 0,
        gpu_count=len(gpus),
        images=_images(asked.images, [a.text for a, _ in answers if a.word == "image"]),
        files=dict(zip(asked.files, have_of(answers), strict=bool(asked.files))),
    )


def have_of(answers: Sequence[tuple[Answer, bytes]]) -> list[tuple[str, str]]:
    """What each `have` says: the size of a file and of its part."""
    fields = [answer.fields(2) for answer, _ in answers if answer.word == "have"]
    return [(size, part) for size, part in fields]


def _images(asked: Sequence[str], said: Sequence[str]) -> dict[str, Mapping[str, Any] | None]:
    """By what was asked for: an engine gives those that it has, and does not say for which word."""
    found: dict[str, Mapping[str, Any] | None] = dict.fromkeys(asked)
    for text in said:
        image = json.loads(text)
        for name in (image.get("Id"), *(image.get("RepoTags") or ())):
            if name in found:
                found[name] = image
    return found


def require_tools(board: Board, state: BoardState) -> None:
    """Raises BoardUnfit, DockerUnavailable."""
    if state.missing:
        raise BoardUnfit(
            f"the board {board.name} lacks {', '.join(state.missing)}",
            next_step="there: sudo apt-get install coreutils util-linux tar findutils docker.io",
        )
    if state.engine_problem:
        raise board_said(board.name, "engine", state.engine_problem)


def require_devices(board: Board, state: BoardState, target: Target) -> None:
    """Raises BoardUnfit for a device that the board, or its target, does not have."""
    for device in board.devices:
        kind, numbers = device[:3], device[3:].partition("-")
        last = int(numbers[2] or numbers[0]) if device != ALL else 0
        why = ""
        if kind == "gpu" and set(target.accelerators) <= {Accelerator.NONE}:
            why = f"its target '{target.name}' uses no GPU"
        # A Jetson's only GPU is seen by no nvidia-smi before JetPack 6.
        elif kind == "gpu" and last >= max(state.gpu_count, int(bool(state.host.l4t))):
            why = f"it has {state.gpu_count} GPUs, counted from 0"
        elif kind == "cpu" and last >= (state.machine.cpu_count or last + 1):
            why = f"it has {state.machine.cpu_count} processors, counted from 0"
        if why:
            raise BoardUnfit(
                f"the board {board.name} has no device '{device}' for a run",
                why=why,
                next_step=f"correct `devices` of '{board.name}' in hosts.toml",
            )


def target_of(targets: dict[str, Target], board: Board, state: BoardState) -> Target:
    """The target that hosts.toml names for the board, if the board is still one for it, or what
    fits. Raises NotApplicableError, naming architecture or L4T where those are another."""
    if board.target is None:
        return pick_target(targets, state.host, None)
    if board.target in targets:
        found = refusals(targets[board.target], state.host)
        if found:
            raise NotApplicableError(
                f"the board {board.name} is not one for target '{board.target}'",
                why="\n".join(
                    [f"it answers as {state.host.describe()}", *(each.reason for each in found)]
                ),
                next_step="is it the board you mean? if it was set up anew, correct `target` of"
                f" '{board.name}' in hosts.toml; narrowgauge hosts doctor {board.name}",
            )
    return pick_target(targets, state.host, board.target)


def _put(root: Path, name: str, body: bytes) -> None:
    path = root / name
    # The board's word is not to be written elsewhere.
    if ".." in Path(name).parts or not path.resolve().is_relative_to(root.resolve()):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def _gpus(lines: Sequence[str]) -> tuple[tuple[Gpu, ...], str | None]:
    """`8.6, 535.54, 24564, NVIDIA RTX A5000`; memory in MiB, or `[N/A]` where it is the host's."""
    gpus = []
    driver = None
    for line in lines:
        fields = [part.strip() for part in line.split(",", 3)]
        if len(fields) < 4:
            continue
        capability, driver, memory, name = fields
        size = int(memory) * _MEBIBYTE if memory.isdigit() else None
        gpus.append(Gpu(name, capability, size, {}))
    return tuple(gpus), driver
