"""What is asked of Slurm and what it says, without one: a queue whose words are given."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launching import Quiet, facts, tiny_job

from narrowgauge.checkout import Checkout
from narrowgauge.errors import (
    BadValueError,
    Busy,
    ClusterRefused,
    ClusterUnreachable,
    DataCorrupt,
    ExitCode,
    NarrowgaugeError,
    ToolchainMissing,
    UnknownNameError,
    UsageError,
)
from narrowgauge.executors.base import HANDLE_FORMAT, Handle
from narrowgauge.executors.slurm import SlurmExecutor, _ending
from narrowgauge.images.archive import ARCHIVE_FORMAT, Archive, manifest_path
from narrowgauge.launch import World
from narrowgauge.launch_slurm import target_of
from narrowgauge.machine import Host
from narrowgauge.plan import Places
from narrowgauge.recording import SCHEDULER_FILE
from narrowgauge.runner import Session, StopRequest, run_array
from narrowgauge.slurm import node
from narrowgauge.slurm.asking import SlurmAsk, add_words, parse_ask, parse_minutes
from narrowgauge.slurm.image import container_command, convert, pick_tool
from narrowgauge.slurm.node import EXIT_FILE, NodeExit
from narrowgauge.slurm.queue import JobState, Queue, refused
from narrowgauge.store import Store
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import SchedulerFacts


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30:00", 90), ("30:00", 30), ("0:30", 1), ("2-12:00", 3600), ("1-0:0:1", 1441),
     ("0", None), ("", None), ("infinite", None), ("1:2:3:4", None), ("-5", None)],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_reads_them(text: str, minutes: int | None) -> None:
    assert parse_minutes(text) == minutes


def test_words_make_one_request_and_overrule_a_file() -> None:
    ask = parse_ask(["partition=gpu", "time=2:00:00", "gres=gpu:2", "exclusive=no", "nodes=2"])
    more = add_words(ask, ["time=10", "requeues=0"])

    assert ask == SlurmAsk("gpu", 120, 2, "gpu:2", exclusive=False)
    assert more == dataclasses.replace(ask, time=10, requeues=0)
    assert parse_ask(["exclusive"]).exclusive


@pytest.mark.parametrize(
    ("word", "kind", "said"),
    [
        ("partitoin=gpu", UnknownNameError, "did you mean 'partition'"),
        ("time=soon", BadValueError, "no time limit"),
        ("nodes=0", BadValueError, "at least 1"),
        ("exclusive=perhaps", BadValueError, "neither yes nor no"),
        ("container=docker", UnknownNameError, "apptainer"),
        ("gres", BadValueError, "no value"),
        ("account=a\nb", BadValueError, "no value"),
    ],
)
def test_each_slip_is_named(word: str, kind: type[NarrowgaugeError], said: str) -> None:
    with pytest.raises(kind) as caught:
        parse_ask([word])
    assert said in str(caught.value)
    with pytest.raises(UsageError, match="twice"):
        parse_ask(["time=1", "time=2"])


class Words:
    """Slurm's commands as a table: the first words that fit, and what they give."""

    def __init__(self, *table: tuple[str, int, str, str]) -> None:
        self.table = table
        self.asked: list[str] = []

    def __call__(self, words: Sequence[str]) -> tuple[int, str, str]:
        line = " ".join(words)
        self.asked.append(line)
        for start, *answer in self.table:
            if line.startswith(start):
                return answer[0], answer[1], answer[2]  # type: ignore[return-value]
        return 0, "", ""


def test_a_cluster_without_a_default_partition_names_those_it_has() -> None:
    said = Words(("sinfo", 0, "gpu|up|1:00:00|4|idle\ncpu|up|infinite|2|mixed\n", ""))
    with pytest.raises(ClusterRefused, match="no default partition") as caught:
        Queue({}, said).require(SlurmAsk())
    assert "cpu, gpu" in caught.value.next_step
    Queue({}, said).require(SlurmAsk(partition="cpu", time=100_000, nodes=2))


def test_nodes_that_are_down_do_not_count() -> None:
    said = Words(("sinfo", 0, "gpu*|up|infinite|3|drained\ngpu*|up|infinite|1|allocated\n", ""))
    Queue({}, said).require(SlurmAsk(nodes=1))
    with pytest.raises(ClusterRefused, match="full for good") as caught:
        Queue({}, said).require(SlurmAsk(nodes=2))
    assert "3 drained" in caught.value.why
    assert caught.value.exit_code == ExitCode.CLUSTER_REFUSED


def test_a_host_without_slurm_says_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ClusterUnreachable, match="no sinfo on this host") as caught:
        Queue({"PATH": str(tmp_path)}).version()
    assert "login" in caught.value.why


def test_a_state_is_read_and_a_forgotten_job_is_gone() -> None:
    line = (
        "JobId=7 JobName=x JobState=RUNNING Reason=None Restarts=2 Partition=gpu"
        " NodeList=n[1-2] OverSubscribe=NO"
    )
    said = Words(
        ("scontrol --oneliner show job 7", 0, line, ""),
        ("scontrol", 1, "", "slurm_load_jobs error: Invalid job id specified"),
    )
    state = Queue({}, said).state("7")

    assert state == JobState("RUNNING", "", "n[1-2]", "gpu", True, 2)
    assert not state.over
    assert Queue({}, said).state("8").over


def test_a_job_that_has_ended_is_cancelled_without_a_word_and_a_lost_controller_is_not() -> None:
    over = "scancel: error: Kill job error on job id 7: Invalid job id specified"
    words = Words(("scancel", 1, "", over))
    Queue({}, words).cancel(["7", "8"], at_once=True)
    assert words.asked == ["scancel --signal=KILL --full 7 8", "scancel 7 8"]

    lost = Words(("scancel", 1, "", "Kill job error on job id 7: Unable to contact slurm"))
    with pytest.raises(ClusterUnreachable):
        Queue({}, lost).cancel(["7"])


@pytest.mark.parametrize(
    ("complaint", "kind", "hint"),
    [
        ("sbatch: error: Requested node configuration is not available", ClusterRefused, "sinfo"),
        ("sbatch: error: Invalid account or account/partition", ClusterRefused, "sacctmgr"),
        (
            "sbatch: error: Job violates QOS policy (job submit limit, time limits)",
            ClusterRefused,
            "wait until",
        ),
        ("sbatch: error: Unable to contact slurm controller", ClusterUnreachable, "scontrol ping"),
        ("sbatch: error: something new", ClusterRefused, ""),
    ],
)
def test_what_sbatch_says_has_a_next_step(
    complaint: str, kind: type[NarrowgaugeError], hint: str
) -> None:
    error = refused(complaint)
    assert type(error) is kind
    assert hint in error.next_step
    assert "sbatch:" not in error.why


def handle(tmp_path: Path) -> Handle:
    identity = {"job": "7", "folder": str(tmp_path)}
    return Handle(HANDLE_FORMAT, "slurm", "r", identity)


def waiting(seconds: float) -> tuple[Words, SlurmExecutor, list[str]]:
    """A job that waits, and a clock that goes so many seconds at each look."""
    line = "JobState=PENDING Reason=Resources Partition=gpu"
    words, told, now = Words(("scontrol", 0, line, "")), [], [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    executor = SlurmExecutor(
        SlurmAsk(patience=5), {}, told.append, queue=Queue({}, words), clock=clock
    )
    return words, executor, told


def test_a_full_partition_is_waited_for_and_given_up(tmp_path: Path) -> None:
    words, executor, told = waiting(60.0)
    with pytest.raises(Busy, match="the partition gpu is full") as caught:
        list(executor.stream(handle(tmp_path), tmp_path / "out"))

    assert caught.value.why == "Slurm's reason: Resources"
    assert "patience" in caught.value.next_step
    assert words.asked[-1] == "scancel 7"
    assert told == ["Slurm job 7: pending: Resources"]


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that goes so many seconds at each look."""
    ticks = itertools.count()
    return lambda: seconds * next(ticks)


def test_a_controller_that_stays_away_leaves_the_run_to_attach(tmp_path: Path) -> None:
    words, told = Words(("scontrol", 1, "", "Unable to contact slurm controller")), []
    executor = SlurmExecutor(
        SlurmAsk(), {}, told.append, queue=Queue({}, words), clock=ticking(60.0)
    )
    with pytest.raises(ClusterUnreachable) as caught:
        list(executor.stream(handle(tmp_path), tmp_path / "out"))
    assert "narrowgauge attach" in caught.value.next_step
    assert 2 <= len(words.asked) <= 6
    assert len(told) == 1
    assert "Unable to contact" in told[0]


def test_a_controller_that_comes_back_costs_nothing(tmp_path: Path) -> None:
    lost = (1, "", "Unable to contact slurm controller")
    answers = iter([lost, lost, (0, "JobState=RUNNING NodeList=n1", ""), lost])

    def run(words: Sequence[str]) -> tuple[int, str, str]:
        del words
        answer = next(answers, None)
        if answer is None:
            write_json_atomic(tmp_path / EXIT_FILE, NodeExit(0))
        return answer or lost

    told: list[str] = []
    executor = SlurmExecutor(SlurmAsk(), {}, told.append, queue=Queue({}, run), clock=ticking(40.0))
    assert list(filter(None, executor.stream(handle(tmp_path), tmp_path / "out"))) == []
    assert [words.startswith("Slurm does not answer") for words in told] == [True, False, True]


def test_a_host_that_lost_slurms_commands_is_not_waited_for(tmp_path: Path) -> None:
    executor = SlurmExecutor(SlurmAsk(), {}, print, queue=Queue({"PATH": str(tmp_path)}))
    with pytest.raises(ClusterUnreachable, match="no scontrol on this host"):
        list(executor.stream(handle(tmp_path), tmp_path / "out"))


@pytest.mark.parametrize(("word", "least"), [("COMPLETED", 90.0), ("CANCELLED", 5.0)])
def test_a_late_file_is_waited_for_as_long_as_nfs_may_take(
    tmp_path: Path, word: str, least: float
) -> None:
    """A run that Slurm calls complete wrote its end, however late that is seen."""
    words, now = Words(("scontrol", 0, f"JobState={word}", "")), [0.0]

    def clock() -> float:
        now[0] += least / 2
        return now[0]

    executor = SlurmExecutor(SlurmAsk(), {}, print, queue=Queue({}, words), clock=clock)
    for _ in executor.stream(handle(tmp_path), tmp_path / "out"):
        pass
    assert least <= now[0] <= least * 4


class Started(SlurmExecutor):
    """Its jobs are said to be submitted already, as 7_0, 7_1 and so on."""

    def start_all(self, runs: Sequence[tuple[Job, Places]]) -> list[Handle]:
        return [
            Handle(HANDLE_FORMAT, "slurm", "r", {"job": f"7_{each}", "folder": str(p.folder)})
            for each, (_, p) in enumerate(runs)
        ]


def test_patience_that_is_over_cancels_the_whole_array(tmp_path: Path) -> None:
    line = "JobState=PENDING Reason=Resources Partition=gpu"
    words = Words(("scontrol", 0, line, ""))
    jobs = [tiny_job(run_id=f"20261121T101500Z-tiny-abc12{each}") for each in range(3)]
    quiet = Quiet()

    array = Started(SlurmAsk(patience=5), {}, print, queue=Queue({}, words), clock=ticking(60.0))
    session = Session(
        executor=array, store=Store(tmp_path), experiments=tmp_path, data=tmp_path,
        start_facts=lambda engine: facts(), reporter=quiet, stop=StopRequest(), elsewhere=True,
    )  # fmt: skip
    with pytest.raises(Busy) as caught:
        list(run_array(jobs, array, session))
    assert caught.value.exit_code == ExitCode.BUSY
    assert [each for each in words.asked if each.startswith("scancel")] == [
        "scancel 7_0", "scancel 7_1 7_2",
    ]  # fmt: skip
    assert quiet.notes == ["2 runs behind it are cancelled too"]


def test_a_stop_cancels_what_waits_before_what_runs(tmp_path: Path) -> None:
    """Else the end of one lets the next begin, before it is its turn to be cancelled."""
    line = "JobState=RUNNING Reason=None NodeList=n1 Partition=debug"
    words = Words(("scontrol", 0, line, ""))
    jobs = [tiny_job(run_id=f"20261121T101500Z-tiny-abc12{each}") for each in range(3)]

    class Cancelled(Started):
        def cancel_all(self, handles: Sequence[Handle], timeout_s: int = 10) -> None:
            super().cancel_all(handles, timeout_s)
            raise Busy("enough")  # of this test

    array = Cancelled(SlurmAsk(patience=5), {}, print, queue=Queue({}, words), clock=ticking(60.0))
    stop = StopRequest()
    stop.requested = True
    session = Session(
        executor=array, store=Store(tmp_path), experiments=tmp_path, data=tmp_path,
        start_facts=lambda engine: facts(), reporter=Quiet(), stop=stop, elsewhere=True,
    )  # fmt: skip
    with pytest.raises(Busy):
        list(run_array(jobs, array, session))
    assert next(each for each in words.asked if "scancel" in each) == "scancel 7_2 7_1 7_0"


def test_nothing_to_cancel_asks_nothing() -> None:
    words = Words()
    Queue({}, words).cancel([])
    assert words.asked == []


def test_a_target_needs_an_image_of_it() -> None:
    world = World(Checkout(Path(__file__).parents[2]), {}, Host("amd64"), print)
    assert target_of(world, SlurmAsk(), None) is None
    found = target_of(world, SlurmAsk(image="cpu.tar"), "cpu")
    assert found is not None
    assert found.name == "cpu"
    for ask in (SlurmAsk(), SlurmAsk(image="cpu.tar", container="none")):
        with pytest.raises(UsageError, match="without an image") as caught:
            target_of(world, ask, "cpu")
        assert "--slurm image=FILE" in caught.value.next_step
    with pytest.raises(UnknownNameError, match="'cup'"):
        target_of(world, SlurmAsk(image="cpu.tar"), "cup")


def test_what_the_node_wrote_ends_the_watch_without_asking(tmp_path: Path) -> None:
    words = Words()
    executor = SlurmExecutor(SlurmAsk(), {}, print, queue=Queue({}, words))
    write_json_atomic(tmp_path / EXIT_FILE, NodeExit(0))

    assert list(executor.stream(handle(tmp_path), tmp_path / "out")) == []
    assert not executor.alive(handle(tmp_path))
    assert executor.collect(handle(tmp_path), tmp_path).exit_code == 0
    assert words.asked == []


@pytest.mark.parametrize(
    ("ended", "word", "code", "status", "said"),
    [
        (NodeExit(0), "", 0, Status.COMPLETE, ""),
        (NodeExit(30), "", 30, Status.FAILED, "at least one row"),
        (NodeExit(137), "OUT_OF_MEMORY", 31, Status.UNFINISHED, "out of memory"),
        (NodeExit(143), "CANCELLED", 130, Status.INTERRUPTED, "interrupted"),
        (None, "CANCELLED", 130, Status.INTERRUPTED, "interrupted"),
        (None, "TIMEOUT", 32, Status.UNFINISHED, "time limit"),
        (NodeExit(32, "Job not requeued because: timed-out too many times."), "FAILED", 32,
         Status.UNFINISHED, "time limit"),
        (None, "NODE_FAIL", 32, Status.UNFINISHED, "the job is gone"),
        (None, "GONE", 32, Status.UNFINISHED, "the job is gone"),
    ],
)  # fmt: skip
def test_how_a_run_ended(
    ended: NodeExit | None, word: str, code: int, status: Status, said: str
) -> None:
    ending = _ending(ended, JobState(word, "r") if word else None, "log")
    assert (ending.exit_code, ending.status) == (code, status)
    assert said in (ending.error.what if ending.error else "")


# --- the image -----------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """A path with programs called apptainer and enroot that write down how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("apptainer", "enroot"):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {folder}/{name}.log\n'
            '[ "$1" = --version ] && echo "stub version 1" && exit 0\n'
            '[ -e "$(dirname "$0")/broken" ] && echo "FATAL: no space" >&2 && exit 255\n'
            '[ "$1" = build ] && echo image > "$2"\nexit 0\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def archive(tmp_path: Path) -> Path:
    file = tmp_path / "cpu.tar"
    file.write_bytes(b"layers")
    write_json_atomic(
        manifest_path(file),
        Archive(ARCHIVE_FORMAT, "narrowgauge/cpu:1", "sha256:" + "a" * 64, "cpu", "content",
                "amd64", False, "", 6, sha256_file(file)),
    )  # fmt: skip
    return file


def test_an_archive_is_converted_once_and_both_digests_are_known(
    tmp_path: Path, site: dict[str, str]
) -> None:
    file = archive(tmp_path)
    said: list[str] = []
    first = convert(file, "apptainer", site, said.append)
    again = convert(file, "apptainer", site, said.append)
    log = (tmp_path / "bin" / "apptainer.log").read_text().splitlines()

    assert first == again
    assert [line.split()[0] for line in log] == ["build", "--version"]
    assert log[0].endswith(f"docker-archive:{file}")
    assert first.archive_sha256 == sha256_file(file)
    assert first.sha256 == sha256_file(Path(first.file))
    assert first.tool_version == "stub version 1"
    assert first.facts.digest == "sha256:" + "a" * 64
    assert convert(Path(first.file), "apptainer", site, said.append) == first
    assert len(said) == 1


def test_what_is_not_what_it_was_is_refused(tmp_path: Path, site: dict[str, str]) -> None:
    file = archive(tmp_path)
    made = convert(file, "apptainer", site, print)
    Path(made.file).write_bytes(b"other")
    with pytest.raises(DataCorrupt, match="not what was converted"):
        convert(file, "apptainer", site, print)
    Path(made.file).unlink()
    file.write_bytes(b"lost")
    with pytest.raises(DataCorrupt, match="not what was saved"):
        convert(file, "apptainer", site, print)
    with pytest.raises(UsageError, match="there is no"):
        convert(tmp_path / "none.tar", "apptainer", site, print)
    (tmp_path / "x.sif").write_bytes(b"x")
    with pytest.raises(UsageError, match="nothing says what image"):
        convert(tmp_path / "x.sif", "apptainer", site, print)


def test_a_conversion_that_fails_shows_its_words(tmp_path: Path, site: dict[str, str]) -> None:
    (tmp_path / "bin" / "broken").touch()
    with pytest.raises(NarrowgaugeError, match="could not convert") as caught:
        convert(archive(tmp_path), "apptainer", site, print)
    assert "FATAL: no space" in caught.value.why
    assert caught.value.exit_code == ExitCode.BUILD_FAILED


def test_enroot_takes_what_was_made_where_docker_is(tmp_path: Path, site: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="enroot converts no archives") as caught:
        convert(archive(tmp_path), "enroot", site, print)
    assert "enroot import" in caught.value.next_step


def test_which_tool_is_taken(tmp_path: Path, site: dict[str, str]) -> None:
    bare = {"PATH": str(tmp_path)}
    assert pick_tool("auto", "", site) is None
    assert pick_tool("none", "x.tar", site) is None
    assert pick_tool("auto", "x.tar", site) == "apptainer"
    assert pick_tool("auto", "x.sqsh", site) == "enroot"
    assert pick_tool("enroot", "x.sqsh", site) == "enroot"
    with pytest.raises(UsageError, match="needs an image"):
        pick_tool("apptainer", "", site)
    with pytest.raises(ToolchainMissing, match="no apptainer or enroot") as caught:
        pick_tool("auto", "x.tar", bare)
    assert "container=none" in caught.value.next_step


@pytest.mark.parametrize("tool", ["apptainer", "enroot"])
def test_the_container_gets_what_a_docker_container_gets(
    tmp_path: Path, site: dict[str, str], tool: str
) -> None:
    made = dataclasses.replace(convert(archive(tmp_path), "apptainer", site, print), tool=tool)
    places = Places(tmp_path / "run", tmp_path / "experiments", tmp_path / "data")
    words = container_command(made, places, tmp_path / "cache", gpu=True)
    text = " ".join(words)

    assert words[0] == tool
    assert words[words.index(made.file) + 1 :] == (
        "run", "--job", "/job.json", "--out", "/out", "--experiments", "/experiments",
        "--data", "/data",
    )  # fmt: skip
    for name in ("/job.json", "/out", "/experiments", "/data"):
        assert f":{name}:" in text
    home = f"--home {tmp_path / 'cache'}:/cache " if tool == "apptainer" else ":/cache:none:"
    assert home in text
    assert "OUT:/out:" in text
    assert ("--containall" in words) == (tool == "apptainer")
    assert json.loads(json.dumps(words)) == list(words)


@pytest.mark.parametrize(
    ("tool", "name"), [("apptainer", "a:b"), ("apptainer", "a,b"), ("enroot", "a b")]
)
def test_a_path_that_would_be_read_as_several_is_refused(
    tmp_path: Path, site: dict[str, str], tool: str, name: str
) -> None:
    made = dataclasses.replace(convert(archive(tmp_path), "apptainer", site, print), tool=tool)
    places = Places(tmp_path / name, tmp_path / "experiments", None)
    with pytest.raises(UsageError, match="cannot be given to a container") as caught:
        container_command(made, places, tmp_path / "cache", gpu=False)
    assert "--results" in caught.value.next_step
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_job_makes_one_task_for_its_node(tmp_path: Path) -> None:
    from narrowgauge.executors.slurm import Site

    site = Site(tmp_path / "src", tmp_path / "sub", Path("/python"), None, None)
    executor = SlurmExecutor(SlurmAsk(), {}, print, site=site, queue=Queue({}, Words()))
    task = executor._task(Places(tmp_path / "run", tmp_path / "experiments", None))

    assert task.command[:4] == ("/python", "-m", "narrowgauge_lab", "run")
    assert task.command[task.command.index("--out") + 1] == "OUT"
    assert dict(task.environment)["PYTHONPATH"] == str(tmp_path / "src")
    assert tiny_job().run_id


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((0, "JobState=RUNNING OverSubscribe=NO Partition=gpu", ""), ""),
        ((0, "JobState=RUNNING OverSubscribe=OK", ""), "other jobs may have been on its nodes"),
        ((1, "", "Unable to contact slurm controller"), "Slurm did not say"),
    ],
)
def test_a_node_whose_controller_is_away_keeps_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str], said: str
) -> None:
    monkeypatch.setattr(node, "Queue", lambda env: Queue({}, lambda words: answer))
    known = SchedulerFacts("slurm", "23", "", "asked", (), "")
    node.NodeTask(("true",), (), tmp_path, None, known)._keep_notes("7", ("n1",), 2)
    kept = json.loads((tmp_path / SCHEDULER_FILE).read_text())

    assert kept["indicative"].startswith(said)
    assert bool(kept["indicative"]) == bool(said)
    assert (kept["job"], kept["restarts"]) == ("7", 2)
    assert kept["partition"] == ("gpu" if not said else "asked")
