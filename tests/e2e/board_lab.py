"""What the tests of boards share: a lab that is a shell script, and an executor on a real board."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "fleet"))
sys.path.insert(0, str(ROOT / "tests" / "launcher"))

from boards import IMAGE, LabBoard  # noqa: E402
from harness import wait_until  # noqa: E402
from launching import TINY_TOML, Quiet, tiny_job, write_outcome, write_run  # noqa: E402

from narrowgauge.executors.ssh import SshExecutor  # noqa: E402
from narrowgauge.fleet.facts import ask_board  # noqa: E402
from narrowgauge.fleet.hosts import load_boards  # noqa: E402
from narrowgauge.fleet.link import Link, Patience  # noqa: E402
from narrowgauge.fleet.seat import Seat  # noqa: E402
from narrowgauge.plan import Places  # noqa: E402
from narrowgauge.recording import StartFacts  # noqa: E402
from narrowgauge.runner import Session, StopRequest  # noqa: E402
from narrowgauge.store import RunFolder, Store  # noqa: E402
from narrowgauge.targets import load_targets  # noqa: E402
from narrowgauge_contract.events import EVENTS_FILE  # noqa: E402
from narrowgauge_contract.job import Job  # noqa: E402
from narrowgauge_contract.record import ImageFacts  # noqa: E402

#: A lab in five lines of shell: events, then what the test adds, then the others and an outcome.
SCRIPT = r"""
run=$(sed -n 's/.*"run_id": "\([^"]*\)".*/\1/p' /job.json)
cat /experiments/tiny/before.txt >>/out/events.jsonl
echo "the lab speaks as $(id -u)"
@MIDDLE@
cat /experiments/tiny/after.txt >>/out/events.jsonl
sed "s/RUN_ID/$run/" /experiments/tiny/outcome.txt >/out/outcome.json
"""

PATIENCE = Patience(connect=5, alive=1, kept=30, away=20.0, pulse=0.2)


@dataclasses.dataclass
class OnBoard:
    """A session on one device of a board, and what it told."""

    session: Session
    executor: SshExecutor
    link: Link
    reporter: Quiet
    project: Path

    def job(self, run_id: str) -> Job:
        return tiny_job(run_id=run_id)


def write_lab(experiments: Path, middle: str = "") -> None:
    """Put the shell lab into an experiments folder, with what it does in the middle."""
    folder = experiments / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(TINY_TOML, encoding="utf-8")
    (folder / "lab.sh").write_text(SCRIPT.replace("@MIDDLE@", middle), encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        job = tiny_job(run_id="RUN_ID")
        write_run(scratch, job)
        write_outcome(scratch, job)
        lines = (scratch / EVENTS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
        outcome = (scratch / "outcome.json").read_text(encoding="utf-8")
    begun = 2  # the run and its row
    (folder / "before.txt").write_text("".join(lines[:begun]), encoding="utf-8")
    (folder / "after.txt").write_text("".join(lines[begun:]), encoding="utf-8")
    (folder / "outcome.txt").write_text(outcome, encoding="utf-8")


def on_board(
    board: LabBoard,
    root: Path,
    *,
    port: int | None = None,
    middle: str = "",
    wait: bool = False,
    patience: Patience = PATIENCE,
    image: str | None = None,
    more: str = "",
) -> OnBoard:
    """An executor on the board, whose lab does `middle`."""
    if port is not None:
        board.know(port)
    file = root / "hosts.toml"
    root.mkdir(parents=True, exist_ok=True)
    file.write_text(board.toml(port=port, more=more), encoding="utf-8")
    write_lab(root / "experiments", middle)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(board.folder)}
    link = Link(load_boards(file)[0], env, patience)
    state = ask_board(link)
    found = image or board.docker("image", "inspect", "--format", "{{.Id}}", IMAGE)
    facts = ImageFacts(IMAGE, found, "made here", None, "c" * 16, stand_in=True)
    target = load_targets(ROOT / "docker" / "targets.toml")["cpu"]
    seat = Seat(link.board, link.board.devices[0], state, target, facts, found)
    reporter = Quiet()
    executor = SshExecutor(
        link.env, link=link, seat=seat, patience=patience, wait=wait, say=reporter.note
    )
    session = Session(
        executor=executor,
        store=Store(root / "results"),
        experiments=root / "experiments",
        data=root / "data",
        start_facts=lambda engine: StartFacts(state.machine, None),
        reporter=reporter,
        stop=StopRequest(),
    )
    return OnBoard(session, executor, link, reporter, root)


def die(there: OnBoard, run_id: str) -> None:
    """What the end of a killed launcher is for the board: its connection is gone at once."""
    watching = there.executor._watching.pop(run_id)
    watching._channel._process.kill()
    watching.close()
    there.executor._guards.release(run_id)


def begin(there: OnBoard, run_id: str) -> RunFolder:
    """Start a run and do not follow it."""
    job = there.job(run_id)
    folder = there.session.store.new_run(job)
    there.executor.start(job, Places(folder.path, there.session.experiments, None))
    return folder


def left_on(board: LabBoard) -> dict[str, Any]:
    """What of runs is on the board: containers, and folders."""
    names = board.docker("ps", "--all", "--quiet").split()
    runs = board.data / "runs"
    return {"containers": names, "folders": sorted(os.listdir(runs)) if runs.exists() else []}


def wait_until_empty(board: LabBoard, seconds: float = 60.0) -> None:
    """Nothing of a run is there any more. The launcher says `remove` and does not wait, so whoever
    ends the line to the board waits for this first."""
    left: dict[str, Any] = {}

    def is_empty() -> bool:
        left.update(left_on(board))
        return not any(left.values())

    try:
        wait_until(is_empty, "an empty board", seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {left} is left") from None


def checkout(root: Path, middle: str = "") -> Path:
    """A folder that counts as a checkout, whose one experiment is the shell lab."""
    for name in ("docker", "images"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("contract", "data", "kernels", "lab"):
        (root / "src" / f"narrowgauge_{name}").mkdir(parents=True)
    write_lab(root / "experiments", middle)
    return root
