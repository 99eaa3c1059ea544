"""`hosts` and `run --host` as users type them, on two real boards."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from board_lab import ROOT, checkout, left_on
from boards import IMAGE, TOOLS, LabBoard, boards, make_image
from harness import Program, wait_until
from tiny_image import archive

from narrowgauge.images.content import content_tag, image_name
from narrowgauge.targets import TARGETS_FILE, load_targets
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.record import Record, load_record


@dataclass(frozen=True)
class Lab:
    """Two boards; the first one's engine is this host's too, and alone has the image at first."""

    boards: list[LabBoard]
    program: Program
    hosts: Path
    image: str

    def records(self) -> list[Record]:
        found = sorted(self.program.results.glob("*/*/record.json"))
        return [load_record(path) for path in found]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    root = Path(tempfile.mkdtemp(prefix="ng-", dir="/tmp"))
    project = checkout(root / "project", "sleep 0.2")
    name = image_name(
        load_targets(project / TARGETS_FILE)["cpu"],
        content_tag(project, load_targets(project / TARGETS_FILE)["cpu"]),
    )
    with boards(root, ("a", "b")) as made:
        make_image(made[0], archive(TOOLS))
        made[0].docker("tag", IMAGE, name)
        hosts = root / "hosts.toml"
        hosts.write_text("".join(board.toml(more='labels = ["bench"]') for board in made))
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "NARROWGAUGE_HOSTS": str(hosts),
            "XDG_RUNTIME_DIR": str(root),
            "DOCKER_HOST": made[0].docker_host,
            "COLUMNS": "120",
        }
        yield Lab(made, Program(project, root / "results", env), hosts, name)
    shutil.rmtree(root, ignore_errors=True)


def test_the_image_is_sent_once_and_all_boards_run(lab: Lab) -> None:
    words = ["--profile", "smoke", "--all", "--results", str(lab.program.results)]

    first = lab.program.call("run", "tiny", *words)
    second = lab.program.call("run", "tiny", *words)

    assert "b: sending the image" in first.stderr
    assert "sending" not in second.stderr
    records = lab.records()
    assert [record.exit_code for record in records] == [0] * 4
    named = [record.host.board.name for record in records if record.host and record.host.board]
    assert sorted(named) == ["a", "a", "b", "b"]
    assert len({record.hashes.image for record in records}) == 1
    plot = lab.program.results / "boards.svg"
    runs = [record.run_id for record in records[:3]]
    words = ["--results", str(lab.program.results), "--plot", str(plot)]
    compared = lab.program.call("compare", *runs, *words)
    assert "accuracy" in compared.stdout
    assert plot.is_file()
    for board in lab.boards:
        wait_until(lambda board=board: not left_on(board)["folders"], "an empty board", 60)


def test_a_list_of_runs_is_spread_over_the_boards(lab: Lab, tmp_path: Path) -> None:
    words = ["--profile", "smoke", "--label", "bench", "--spread", "-p", "width=1,2,3,4"]

    done = lab.program.call("run", "tiny", *words, "--results", str(tmp_path), "--json")

    runs = [load_record(path) for path in tmp_path.glob("*/*/record.json")]
    assert len(json.loads(done.stdout)["runs"]) == len(runs) == 4
    assert sorted(run.parameters["width"] for run in runs) == [1, 2, 3, 4]
    assert {run.host.board.name for run in runs if run.host and run.host.board} == {"a", "b"}


SWEEP = """
[sweep]
experiment = "tiny"
profile = "smoke"
metric = "accuracy"
direction = "maximize"

[vary]
width = [1, 2, 3, 4]
data = ["synthetic"]
"""


def _points(results: Path) -> list[tuple[int, str, int]]:
    """Width, board and exit code of each record."""
    runs = [load_record(path) for path in results.glob("*/*/record.json")]
    found = []
    for run in runs:
        assert run.host is not None
        assert run.host.board is not None
        found.append((int(run.parameters["width"]), run.host.board.name, run.exit_code))
    return sorted(found)


def test_a_sweep_is_spread_over_boards_and_goes_on(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "wide.toml"
    file.write_text(SWEEP)
    words = ["sweep", str(file), "--all", "--results", str(tmp_path / "results")]

    lab.program.call(*words)
    first = _points(tmp_path / "results")
    again = lab.program.call(*words)
    file.write_text(SWEEP.replace("4]", "4, 5]"))
    more = json.loads(lab.program.call(*words, "--json").stdout)

    assert [(width, code) for width, _, code in first] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert {board for _, board, _ in first} == {"a", "b"}
    assert "4 of 4 points are done" in again.stderr
    assert [width for width, _, _ in _points(tmp_path / "results")] == [1, 2, 3, 4, 5]
    assert len(more["runs"]) == 5


def test_a_busy_board_leaves_its_points_to_the_other(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "wide.toml"
    file.write_text(SWEEP)
    lock = lab.boards[1].folder / "narrowgauge.lock"
    with open(lock, "a", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        done = lab.program.call("sweep", str(file), "--all", "--results", str(tmp_path / "results"))
        spread = ["--all", "--spread", "-p", "width=7,8", "--results", str(tmp_path / "spread")]
        run = lab.program.call("run", "tiny", "--profile", "smoke", *spread)

    assert "b: no more runs here: the board b is measuring" in done.stderr
    assert [(width, board) for width, board, _ in _points(tmp_path / "results")] == [
        (1, "a"), (2, "a"), (3, "a"), (4, "a"),
    ]  # fmt: skip
    # All that was asked for is there, so the busy board is no error.
    assert [(width, board) for width, board, _ in _points(tmp_path / "spread")] == [
        (7, "a"), (8, "a"),
    ]  # fmt: skip
    assert "b: no more runs here" in run.stderr
    assert "board a" in run.stdout


def test_where_every_board_is_busy_nothing_is_done_and_that_is_said(
    lab: Lab, tmp_path: Path
) -> None:
    file = tmp_path / "wide.toml"
    file.write_text(SWEEP)
    lock = lab.boards[1].folder / "narrowgauge.lock"
    words = ["sweep", str(file), "--host", "b", "--results", str(tmp_path / "results")]
    with open(lock, "a", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        done = lab.program.call(*words, expect=int(ExitCode.BUSY))

    assert "the board b is measuring" in done.stderr
    assert not _points(tmp_path / "results")


def test_a_sweep_whose_launcher_was_killed_is_taken_over(lab: Lab, tmp_path: Path) -> None:
    file, results = tmp_path / "wide.toml", tmp_path / "results"
    file.write_text(SWEEP)
    words = ["sweep", str(file), "--all", "--results", str(results)]
    launcher = lab.program.start(lab.program.words(*words))

    def going() -> list[Path]:
        events = results.glob("*/*/out/events.jsonl")
        return [path for path in events if not (path.parents[1] / "record.json").exists()]

    wait_until(going, "a run", 60)
    launcher.kill()
    launcher.communicate()
    begun = {path.parent.name for path in results.glob("tiny/*/handle.json")}

    done = lab.program.call(*words)

    assert "taking over" in done.stderr
    # One may have been killed as it was about to begin: that is recorded as a failure, and its
    # point is run again.
    assert [width for width, _, code in _points(results) if code == 0] == [1, 2, 3, 4]
    assert begun <= {path.parent.name for path in results.glob("tiny/*/record.json")}
    for board in lab.boards:
        wait_until(lambda board=board: not left_on(board)["folders"], "an empty board", 60)


@pytest.mark.slow
def test_a_search_asks_for_as_many_points_as_there_are_boards(lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    file = tmp_path / "seek.toml"
    search = SWEEP.replace("[sweep]", '[sweep]\nmethod = "optuna"\nruns = 3')
    file.write_text(search.replace("[1, 2, 3, 4]", "{ low = 1, high = 64 }"))
    results = tmp_path / "results"

    lab.program.call("sweep", str(file), "--label", "bench", "--results", str(results))

    assert [code for _, _, code in _points(results)] == [0, 0, 0]


def test_a_sweep_over_boards_takes_no_words_that_mean_nothing_there(
    lab: Lab, tmp_path: Path
) -> None:
    file = tmp_path / "wide.toml"
    file.write_text(SWEEP)
    for words, said in (
        (["--host", "a", "--on", "cpu"], "--executor and --on are for a run on this host"),
        (["--host", "a", "--lab-python", "python3"], "--lab-python means nothing"),
        (["--all", "--host", "a"], "--all is every board"),
        (["--host", "a", "--slurm", "nodes=2"], "--slurm is for --executor slurm"),
    ):
        done = lab.program.call("sweep", str(file), *words, expect=int(ExitCode.USAGE))
        assert said in done.stderr


def test_an_image_of_another_content_stops_the_run(lab: Lab, tmp_path: Path) -> None:
    board = lab.boards[1]
    make_image(board, archive((*TOOLS, "ls")))
    before = board.docker("image", "inspect", "--format", "{{.Id}}", lab.image)
    board.docker("tag", IMAGE, lab.image)
    words = ["--profile", "smoke", "--host", "b", "--results", str(tmp_path)]
    try:
        done = lab.program.call("run", "tiny", *words, expect=int(ExitCode.CONTAINER_REFUSED))
    finally:
        board.docker("tag", before, lab.image)

    assert "the board b has another image than this run is of" in done.stderr
    assert f"docker image rm {lab.image}" in done.stderr
    assert not list(tmp_path.glob("*/*"))


def test_hosts_are_listed_looked_at_and_unknown_ones_named(lab: Lab, tmp_path: Path) -> None:
    listed = json.loads(lab.program.call("hosts", "list", "--json").stdout)
    looked = json.loads(lab.program.call("hosts", "doctor", "--json").stdout)
    text = lab.program.call("hosts", "doctor", "a").stdout
    unknown = lab.program.call("run", "tiny", "--host", "c", expect=int(ExitCode.USAGE))

    assert [each["name"] for each in listed] == ["a", "b"]
    assert [each["target"] for each in looked] == ["cpu", "cpu"]
    assert all(abs(each["clock_skew_s"]) <= each["clock_bound_s"] for each in looked)
    assert "✔ a" in text
    assert "unknown host 'c'" in unknown.stderr


def test_a_board_that_does_not_answer_is_a_finding(lab: Lab) -> None:
    lab.boards[1].stop_sshd()
    try:
        # The kept connection's process still listens for the board.
        control = {**lab.program.env, "XDG_RUNTIME_DIR": "/tmp"}
        program = Program(lab.program.project, lab.program.results, control)
        done = program.call("hosts", "doctor", expect=int(ExitCode.BOARD_UNREACHABLE))
    finally:
        lab.boards[1].start_sshd()

    assert "✔ a" in done.stdout
    assert "the board b does not answer by ssh" in done.stdout


def test_a_board_is_added_once_it_answers(lab: Lab, tmp_path: Path) -> None:
    board = lab.boards[0]
    env = {**lab.program.env, "NARROWGAUGE_HOSTS": str(tmp_path / "hosts.toml")}
    program = Program(lab.program.project, lab.program.results, env)
    words = ["hosts", "add", "again", "127.0.0.1", "--port", str(board.port)]

    # Its key is not in this user's own known hosts, and is not taken on trust.
    done = program.call(*words, expect=int(ExitCode.HOST_KEY_REFUSED))

    assert "compare the fingerprint" in done.stderr
    assert not (tmp_path / "hosts.toml").exists()
