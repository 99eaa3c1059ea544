"""benchmarks/reference/lent.py: what runs behind the commands of a host that is lent in slices."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = """
[[job]]
name = "first"
command = ["sh", "-c", "echo 2 > $XDG_CACHE_HOME/found.json"]

[[job]]
name = "second"
data = ["digits"]
command = ["sh", "-c", "cat $XDG_CACHE_HOME/*.json"]

[[job]]
name = "endless"
command = ["sleep", "600"]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One with a list of its own."""
    made = tmp_path / "checkout"
    shutil.copytree(ROOT / "benchmarks" / "reference", made / "benchmarks" / "reference")
    (made / "benchmarks" / "reference" / "lists" / "tiny.toml").write_text(LIST)
    (made / ".test").mkdir()
    (made / "src").symlink_to(ROOT / "src")
    return made


def lent(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = checkout / "benchmarks" / "reference" / "lent.py"
    return subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def members(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return set(opened.getnames())


def test_jobs_go_on_behind_commands_and_wait_for_their_data(checkout: Path, tmp_path: Path) -> None:
    work, into = tmp_path / "work", tmp_path / "into"
    begun = lent(checkout, "begin", str(work), "tiny=first", "tiny=second")
    assert (begun.returncode, begun.stderr) == (0, "")

    early = lent(checkout, "wait", str(work), "2", "--into", str(into))
    assert early.returncode == 3
    assert "second/ended.json" not in members(into / "records.tar.gz")

    shutil.rmtree(checkout)  # what runs has its own
    (work / "data" / "digits").mkdir(parents=True)
    done = lent(work / "tree", "wait", str(work), "30", "--into", str(into))

    assert done.returncode == 0, done.stdout
    assert "== tiny=second" in done.stdout
    assert {"first/ended.json", "second/log.txt"} <= members(into / "records.tar.gz")
    assert members(into / "caches.tar.gz") == {"found.json"}
    assert (work / "runs" / "second" / "log.txt").read_text() == "2\n"
    assert not (work / "tree" / ".test").exists()


def test_two_lists_run_as_one(checkout: Path, tmp_path: Path) -> None:
    work, into = tmp_path / "work", tmp_path / "into"
    other = checkout / "benchmarks" / "reference" / "lists" / "other.toml"
    other.write_text('[[job]]\nname = "third"\ncommand = ["true"]\n')

    lent(checkout, "begin", str(work), "tiny+other=first,third", "--gpus", "0,1")
    done = lent(checkout, "wait", str(work), "30", "--into", str(into))

    assert done.returncode == 0, done.stdout
    assert "2 of 2 jobs to do" in done.stdout
    assert {"first/ended.json", "third/ended.json"} <= members(into / "records.tar.gz")


def test_a_list_may_have_lanes_of_its_own(checkout: Path, tmp_path: Path) -> None:
    work, into = tmp_path / "work", tmp_path / "into"
    lanes = checkout / "benchmarks" / "reference" / "lists" / "lanes.toml"
    show = """command = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]"""
    lanes.write_text("".join(f'[[job]]\nname = "{name}"\n{show}\n' for name in ("here", "there")))

    lent(checkout, "begin", str(work), "lanes=here", "lanes=there@3", "--gpus", "1")
    done = lent(checkout, "wait", str(work), "30", "--into", str(into))

    assert done.returncode == 0, done.stdout
    shown = {name: (work / "runs" / name / "log.txt").read_text() for name in ("here", "there")}
    assert shown == {"here": "1\n", "there": "3\n"}


def test_what_is_begun_later_is_of_the_tree_that_was_copied(checkout: Path, tmp_path: Path) -> None:
    """A list of the checkout that the copy lacks would run as no job at all, and end well."""
    work, into = tmp_path / "work", tmp_path / "into"
    lent(checkout, "begin", str(work), "tiny=first")
    lent(checkout, "wait", str(work), "30", "--into", str(into))
    later = checkout / "benchmarks" / "reference" / "lists" / "later.toml"
    later.write_text('[[job]]\nname = "third"\ncommand = ["true"]\n')

    refused = lent(checkout, "begin", str(work), "later")
    known = lent(checkout, "begin", str(work), "tiny=first")

    assert refused.returncode == 2
    assert f"{work}/tree" in refused.stderr
    assert known.returncode == 0, known.stderr
    assert lent(checkout, "wait", str(work), "30", "--into", str(into)).returncode == 0


def test_nothing_is_copied_into_itself(checkout: Path) -> None:
    refused = lent(checkout, "begin", str(checkout / "work"), "tiny=first")

    assert refused.returncode == 2
    assert "in the checkout" in refused.stderr


def test_an_end_by_an_error_is_an_end(checkout: Path, tmp_path: Path) -> None:
    """Nobody waits for what has failed to begin."""
    work, into = tmp_path / "work", tmp_path / "into"
    lent(checkout, "begin", str(work), "tiny=first")
    lent(checkout, "wait", str(work), "30", "--into", str(into))
    (work / "tree" / "benchmarks" / "reference" / "take.py").unlink()
    (work / "tree" / "benchmarks" / "reference" / "lists" / "tiny.toml").unlink()

    done = lent(work / "tree", "run", str(work), "tiny")

    assert done.returncode == 2
    assert (work / "ended").read_text() == "2\n"
    assert lent(work / "tree", "wait", str(work), "30", "--into", str(into)).returncode == 0


def test_on_a_host_where_nothing_has_begun_nobody_waits(checkout: Path, tmp_path: Path) -> None:
    """As after a lease that was over too early; `lent` gives up sooner than this would wait."""
    (tmp_path / "work").mkdir()

    done = lent(checkout, "wait", str(tmp_path / "work"), "600", "--into", str(tmp_path / "got"))

    assert done.returncode == 2
    assert "nothing has begun in" in done.stderr
    assert not (tmp_path / "got").exists()


def test_caches_come_back(checkout: Path, tmp_path: Path) -> None:
    caches = tmp_path / "caches.tar.gz"
    with tarfile.open(caches, "w:gz") as archive:
        member = tarfile.TarInfo("tiles/known.json")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"1"))
    work, into = tmp_path / "work", tmp_path / "into"

    lent(checkout, "begin", str(work), "tiny=first", "--caches", str(caches))
    done = lent(checkout, "wait", str(work), "30", "--into", str(into))

    assert done.returncode == 0
    assert members(into / "caches.tar.gz") == {"found.json", "tiles/known.json"}


def test_what_is_dropped_ends_in_order_and_the_next_one_begins(
    checkout: Path, tmp_path: Path
) -> None:
    work, into = tmp_path / "work", tmp_path / "into"
    lists = checkout / "benchmarks" / "reference" / "lists" / "tiny.toml"
    code = "trap 'touch $OUT/in-order; exit 1' INT; while true; do sleep 0.05; done"
    lists.write_text(
        f'[[job]]\nname = "long"\ncommand = ["bash", "-c", {json.dumps(code)}]\n'
        '[[job]]\nname = "next"\ncommand = ["true"]\n'
    )
    assert lent(checkout, "begin", str(work), "tiny").returncode == 0
    _until((work / "runs" / "long" / "running").is_file)
    refused = lent(checkout, "drop", str(work), "long", "next")
    assert (refused.returncode, "'next' does not run" in refused.stderr) == (2, True)

    assert lent(checkout, "drop", str(work), "long").returncode == 0
    done = lent(checkout, "wait", str(work), "30", "--into", str(into))

    assert done.returncode == 0, done.stdout
    assert (work / "runs" / "long" / "in-order").is_file()
    assert not (work / "runs" / "long" / "ended.json").is_file()
    assert "next/ended.json" in members(into / "records.tar.gz")
    assert (work / "ended").read_text() == "3\n", "the same command goes on with it"
    again = lent(checkout, "drop", str(work), "long")
    assert "'long' does not run" in again.stderr


@pytest.mark.parametrize("way", ["stop", "signal", "signal to all"])
def test_what_is_stopped_ends_in_order_and_nothing_stays_behind(
    checkout: Path, tmp_path: Path, way: str
) -> None:
    work = tmp_path / "work"
    lists = checkout / "benchmarks" / "reference" / "lists" / "tiny.toml"
    code = "trap 'touch $OUT/in-order; exit 1' INT; echo $$ > $OUT/pid; "
    code += "while true; do sleep 0.05; done"
    lists.write_text(
        f'[[job]]\nname = "long"\ncommand = ["bash", "-c", {json.dumps(code)}]\n'
        '[[job]]\nname = "next"\ncommand = ["true"]\n'
    )
    assert lent(checkout, "begin", str(work), "tiny=long", "tiny=next").returncode == 0
    _until((work / "runs" / "long" / "pid").is_file)
    pid = int((work / "runs" / "long" / "pid").read_text())

    if way == "stop":
        assert lent(checkout, "stop", str(work)).returncode == 0
    else:
        above = int(Path(f"/proc/{pid}/stat").read_text().split()[3])  # take.py
        if way == "signal to all":  # what `begin` started
            above = int(Path(f"/proc/{above}/stat").read_text().split()[3])
        os.kill(above, signal.SIGTERM)
        _until((work / "ended").is_file)

    assert (work / "runs" / "long" / "in-order").is_file()
    assert not Path(f"/proc/{pid}").exists()
    assert not (work / "runs" / "long" / "ended.json").is_file()
    if way != "signal":
        assert (work / "ended").read_text() == "3\n"
        assert not (work / "runs" / "next").exists()
        refused = lent(checkout, "stop", str(work))
        assert (refused.returncode, "nothing runs in" in refused.stderr) == (2, True)


def test_what_is_gone_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where it was killed, and has written down no end."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "reference"))
    spec = importlib.util.spec_from_file_location(
        "reference_lent", ROOT / "benchmarks" / "reference" / "lent.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STOP_S", 0.0)
    (tmp_path / "log.txt").touch()

    assert module.main(["stop", str(tmp_path)]) == 2
    assert "may be gone" in capsys.readouterr().err


def test_a_list_that_waits_for_data_can_be_stopped(checkout: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert lent(checkout, "begin", str(work), "tiny=second").returncode == 0

    assert lent(checkout, "stop", str(work)).returncode == 0
    assert not (work / "runs" / "second").exists()
    assert lent(checkout, "begin", str(work), "tiny=first").returncode == 0
    _until((work / "ended").is_file)
    assert (work / "ended").read_text() == "0\n"


def test_how_far_jobs_are_is_said(checkout: Path, tmp_path: Path) -> None:
    work, into = tmp_path / "work", tmp_path / "into"

    def folder(name: str, *events: tuple[float, int, float], **files: str) -> None:
        made = work / "runs" / name
        made.mkdir(parents=True)
        (made / "begun.json").write_text("{}")
        for file in files.get("files", "running").split():
            (made / file).write_text("{}")
        lines = [
            {"kind": "progress", "t": t, "row": row,
             "data": {"done": done, "total": 400, "unit": "image", "phase": f"epoch {done:.0f}"}}
            for t, row, done in events
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (made / "events.jsonl").write_text(text + '{"kind": "prog')

    # 100 in the last 100 s; what came before was faster.
    folder("a", (0, 0, 0), (10, 0, 200), (60, 0, 220), (160, 0, 320))
    folder("b", (50, 0, 399), (100, 1, 10), (110, 1, 20))
    folder("stage", (50, 0, 400), (60, 0, 30), (70, 0, 40))
    folder("through", (50, 0, 399), files="ended.json")
    folder("dropped", (50, 0, 399), files="running dropped")
    folder("cut-off", (50, 0, 399), files="begun.json")
    folder("new")
    said = lent(checkout, "wait", str(work), "0", "--into", str(into)).stdout.splitlines()
    assert [" ".join(line.split()) for line in said if line.strip()] == [
        "a row 0, epoch 320, 80%; at this pace 80 s more",
        "b row 1, epoch 20, 5%; at this pace 380 s more",
        "new no progress yet",
        "stage row 0, epoch 40, 10%; at this pace 360 s more",
    ]


def test_a_training_goes_on_in_another_place(checkout: Path, tmp_path: Path) -> None:
    """What is begun again finds its job and its checkpoint, and nothing else."""
    work, there, into = tmp_path / "work", tmp_path / "there", tmp_path / "into"
    tiny = checkout / "experiments" / "tiny"
    tiny.mkdir(parents=True)
    (tiny / "run.py").write_text("")
    lists = checkout / "benchmarks" / "reference" / "lists" / "tiny.toml"
    code = (
        "cd $OUT; ls -R job.json events.jsonl checkpoints > found 2> missing;"
        "mkdir -p checkpoints/row-0;"
        """echo '{"run_id": "first", "experiment": "tiny"}' > job.json;"""
        "echo 7 > checkpoints/row-0/checkpoint-000007.pt; sleep 600"
    )
    lists.write_text(
        f'[[job]]\nname = "long"\nshares = true\ncommand = ["bash", "-c", {json.dumps(code)}]\n'
    )
    lent(checkout, "begin", str(work), "tiny")
    _until((work / "runs/long/checkpoints/row-0/checkpoint-000007.pt").is_file)
    said = lent(checkout, "wait", str(work), "0", "--into", str(into), "--unfinished", "1").stdout
    assert "kept: long, 0.0 MB" in said
    lent(checkout, "drop", str(work), "long")
    [piece] = into.glob("unfinished.*")

    again = lent(checkout, "begin", str(there), "tiny", "--unfinished", str(piece))

    assert again.returncode == 0, again.stderr
    assert "go on: long" in again.stdout
    found = there / "runs" / "long" / "found"
    _until(lambda: found.is_file() and "checkpoint-000007.pt" in found.read_text())
    assert "job.json" in found.read_text()
    assert "events.jsonl" in (found.parent / "missing").read_text()
    lent(checkout, "drop", str(there), "long")
    assert lent(checkout, "wait", str(there), "30", "--into", str(into)).returncode == 0
    # What is refused leaves an end an end, or nobody would ever see one again.
    refused = lent(checkout, "begin", str(there), "tiny", "--unfinished", str(piece))
    assert (refused.returncode, "begun in" in refused.stderr) == (2, True)
    assert lent(checkout, "wait", str(there), "0", "--into", str(into)).returncode == 0
    assert lent(checkout, "wait", str(work), "30", "--into", str(into)).returncode == 0


@pytest.mark.slow
def test_what_runs_too_long_is_stopped(checkout: Path, tmp_path: Path) -> None:
    work, into = tmp_path / "work", tmp_path / "into"

    lent(checkout, "begin", str(work), "tiny=endless", "--seconds", "31")
    done = lent(checkout, "wait", str(work), "55", "--into", str(into))

    assert done.returncode == 0
    assert "cut off" in done.stdout
    assert (work / "ended").read_text() == "3\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiny=nothing",), "'tiny=nothing' names no job"),
        (("lost",), "lost.toml"),
        (("tiny", "--caches", "CACHES"), "no file of a cache"),
    ],
)
def test_what_cannot_begin_is_said(
    checkout: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    caches = tmp_path / "caches.tar.gz"
    with tarfile.open(caches, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside.json"))
    given = [str(caches) if word == "CACHES" else word for word in words]

    done = lent(checkout, "begin", str(tmp_path / "work"), *given)

    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "outside.json").exists()
    assert not (tmp_path / "work" / "ended").exists()
