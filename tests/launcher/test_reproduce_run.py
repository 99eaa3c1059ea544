"""Carrying a plan out by the real launcher and a stand-in lab: interrupted, killed, run twice."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fake_lab
import pytest
from judge_cases import SLOW, both

from narrowgauge import environment
from narrowgauge.cli.app import run_program
from narrowgauge.judge.gather import load_judged
from narrowgauge.judge.model import Judged
from narrowgauge.reproduce.conclude import _newest_of_each
from narrowgauge.reproduce.journal import Journal, Note, new_journal, unfinished_journal
from narrowgauge.reproduce.planning import PLAN_FORMAT, ReproducePlan, Step
from narrowgauge.store import Store
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import Record

CLAIM = """
[[claim]]
id = "{name}"
text = "It loses one."
paper = "Table 1"
kind = "value"
metric = {{ operator = "value", of = ["loss{{width={width}}}"] }}
expected = {{ any = {{ figure = {figure}, tolerance = 0.1 }} }}
minimum_repeats = 1
profile = "smoke"
minutes = 0.1
disk_gb = 0.001
"""


class Reproduce:
    """Runs command lines in this process, on the tiny checkout with three claims."""

    def __init__(self, root: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capture = capture
        self.out = ""

    def __call__(self, *words: str) -> tuple[int, str]:
        errors = io.StringIO()
        self._capture.readouterr()
        code = run_program([*words, "--project", str(self.root)], os.environ, errors)
        captured = self._capture.readouterr()
        self.out = captured.out
        return code, captured.err + errors.getvalue()

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def judged(self) -> Judged:
        return load_judged(self.results / "judged" / "latest.json")

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return {each.claim.id: each.verdict for each in self.judged.judgements}


@pytest.fixture
def ng(
    tiny_checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Reproduce:
    """The stand-in lab does what `width` asks for: 0 is well, 1 takes for ever, 2 fails."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setenv("NARROWGAUGE_LOCK", str(tmp_path / "lock"))
    fake_lab.install(tmp_path / "fake")
    for name in ("lab", "contract"):
        target = tiny_checkout / "src" / f"narrowgauge_{name}"
        target.rmdir()
        target.symlink_to(tmp_path / "fake" / f"narrowgauge_{name}")
    monkeypatch.setattr(environment, "ensure_lab_python", lambda *a, **k: Path(sys.executable))
    claims = [("good", 0, 1.0), ("bad", 0, 9.0), ("fails", 2, 1.0)]
    text = "".join(CLAIM.format(name=n, width=w, figure=f) for n, w, f in claims)
    (tiny_checkout / "experiments" / "tiny" / "claims.toml").write_text(text)
    return Reproduce(tiny_checkout, capsys)


def _quick(*words: str) -> tuple[str, ...]:
    return ("reproduce", *words, "--cooldown", "0", "--executor", "native")


def test_claims_come_to_verdicts(ng: Reproduce) -> None:
    code, told = ng(*_quick("--all", "--order-seed", "7"))

    assert code == ExitCode.OK, told
    assert ng.verdicts == {
        "good": Verdict.REPRODUCED, "bad": Verdict.NOT_REPRODUCED, "fails": Verdict.INVALID,
    }  # fmt: skip
    assert "3 claims, 2 runs: about 12 s" in told
    assert ng.judged.occasion.order_seed == 7
    assert not ng.judged.occasion.replay
    assert ng.judged.occasion.seconds is not None
    assert len(list(Store(ng.results).all())) == 2  # two claims shared one
    assert "REPRODUCED" in ng.out
    assert "3 claims: 1 REPRODUCED, 1 NOT-REPRODUCED, 1 INVALID" in ng.out


def test_a_dry_run_runs_nothing(ng: Reproduce) -> None:
    code, told = ng(*_quick("good", "--dry-run"))

    assert code == ExitCode.OK
    assert "narrowgauge run tiny --profile smoke -p width=0" in told
    assert not ng.results.exists()


def test_twice_is_two_occasions_that_do_not_mix(ng: Reproduce) -> None:
    ng(*_quick("good"))
    first = ng.judged.run_ids
    ng(*_quick("good"))

    assert ng.judged.run_ids != first
    assert len(ng.judged.run_ids) == 1
    assert len(list((ng.results / "judged").glob("2*.json"))) == 2


def test_resume_of_a_finished_one_runs_nothing_again(ng: Reproduce) -> None:
    ng(*_quick("good"))
    runs = ng.judged.run_ids

    (plan,) = ng.results.glob("reproduce/*/plan.json")
    seconds = ng.judged.occasion.seconds

    code, told = ng("reproduce", "--resume", plan.parent.name)

    assert code == ExitCode.OK, told
    assert ng.judged.run_ids == runs
    assert len(list(Store(ng.results).all())) == 1
    assert seconds is not None
    assert seconds <= (ng.judged.occasion.seconds or 0.0)  # of both together
    # Without a name, there is nothing that was cut short.
    code, told = ng("reproduce", "--resume")
    assert code == ExitCode.USAGE
    assert "nothing to resume" in told
    assert "the 1 that were begun there are finished" in told


def test_a_budget_that_was_spent_can_be_gone_on_from(ng: Reproduce) -> None:
    """And what is gone on with runs as it was begun: natively, here."""
    code, told = ng(*_quick("good", "fails", "--budget", "13s", "--order-seed", "7"))
    assert code == ExitCode.OK, told
    (journal,) = (Journal(path) for path in (ng.results / "reproduce").iterdir())
    assert (journal.plan().executor, journal.plan().on) == ("native", None)
    (journal.path / "judged").unlink()
    (journal.path / "journal.jsonl").write_text("")  # as if no time had been left for any

    code, told = ng("reproduce", "--resume", "--budget", "1m")

    assert code == ExitCode.OK, told
    assert ng.verdicts == {"good": Verdict.REPRODUCED, "fails": Verdict.INVALID}
    assert journal.finished


@pytest.mark.parametrize(
    "option",
    [
        ("--seed", "1"), ("--on", "cpu"), ("--executor", "native"), ("--data", "d"), ("--all",),
        ("--cooldown", "0"), ("--order-seed", "3"), ("--lab-python", "python3"),
    ],
)  # fmt: skip
def test_what_was_said_at_the_beginning_is_not_said_again(
    ng: Reproduce, option: tuple[str, ...]
) -> None:
    code, told = ng("reproduce", "--resume", *option)

    assert code == ExitCode.USAGE
    assert f"{option[0]} does not go with --resume" in told


def test_a_claim_that_is_gone_is_told_of_before_anything_runs(ng: Reproduce) -> None:
    ng(*_quick("good"))
    (journal,) = (Journal(path) for path in (ng.results / "reproduce").iterdir())
    (journal.path / "journal.jsonl").write_text("")
    path = ng.root / "experiments" / "tiny" / "claims.toml"
    path.write_text(path.read_text().replace('"good"', '"other"'))

    code, told = ng("reproduce", "--resume", journal.name)

    assert code == ExitCode.USAGE
    assert "tiny/good" in told
    assert len(list(Store(ng.results).all())) == 1


def test_json_is_what_was_judged(ng: Reproduce) -> None:
    code, _ = ng(*_quick("good", "--json"))

    assert code == ExitCode.OK
    assert json.loads(ng.out)["judgements"][0]["verdict"] == "REPRODUCED"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name the claims to reproduce, or say --all"),
        (("good", "--all"), "name the claims"),
        (("goood",), "did you mean 'good'"),
        (("good", "--budget", "soon"), "'soon' is no time"),
        (("good", "--budget", "0m"), "is no time"),
        (("good", "--on", "jetsn"), "did you mean 'jetson'"),
    ],
)
def test_what_a_user_got_wrong(ng: Reproduce, words: tuple[str, ...], said: str) -> None:
    code, told = ng(*_quick(*words))

    assert code == ExitCode.USAGE
    assert said in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("good",), "--resume takes the name of what was cut short, and 'good' is none"),
        (("a", "b"), "--resume takes one name"),
        ((), "nothing to resume"),
    ],
)
def test_what_a_user_got_wrong_in_going_on(
    ng: Reproduce, words: tuple[str, ...], said: str
) -> None:
    code, told = ng("reproduce", "--resume", *words)

    assert code == ExitCode.USAGE
    assert said in told


def test_a_disk_that_is_too_small_is_told_of_first(
    ng: Reproduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    code, told = ng(*_quick("good"))

    assert code == ExitCode.DISK_FULL
    assert "0.001 GB needed" in told
    assert not ng.results.exists()


def _slow(ng: Reproduce) -> None:
    """`good` comes to a record at once, `slow` never."""
    text = CLAIM.format(name="good", width=0, figure=1.0)
    text += CLAIM.format(name="slow", width=1, figure=1.0)
    (ng.root / "experiments" / "tiny" / "claims.toml").write_text(text)


def test_a_budget_ends_what_takes_longer(ng: Reproduce) -> None:
    _slow(ng)
    begun = time.monotonic()

    code, told = ng(*_quick("slow", "--budget", "7s"))

    assert code == ExitCode.OK, told  # as the user asked
    assert 5 < time.monotonic() - begun < 40
    # What the run had measured until then is a valid record, or says that it is none.
    (folder,) = Store(ng.results).all()
    assert folder.record().status is Status.INTERRUPTED
    assert ng.verdicts["slow"] in (Verdict.SKIPPED, Verdict.INVALID)


def _start(ng: Reproduce, *words: str) -> subprocess.Popen[bytes]:
    """The same in a process of its own, which tests may kill."""
    program = (
        "import sys, os; from pathlib import Path; from narrowgauge import environment;"
        " from narrowgauge.cli.app import run_program;"
        " environment.ensure_lab_python = lambda *a, **k: Path(sys.executable);"
        " sys.exit(run_program(sys.argv[1:], os.environ, sys.stderr))"
    )
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.Popen(
        [sys.executable, "-c", program, *words, "--project", str(ng.root)],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def _measuring(ng: Reproduce) -> bool:
    """Whether the run that takes for ever has begun."""
    return any(
        "loss" in folder.events_path.read_text()
        for folder in Store(ng.results).all()
        if folder.events_path.is_file()
        and folder.handle_path.is_file()
        and folder.job().parameters["width"] == 1
    )


def test_an_interrupt_keeps_what_is_done_and_resume_goes_on(ng: Reproduce) -> None:
    _slow(ng)
    process = _start(ng, *_quick("--all", "--order-seed", "1"))
    try:
        _wait(lambda: _measuring(ng))
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == ExitCode.INTERRUPTED
    finally:
        process.kill()
    before = set(ng.judged.run_ids)
    _heal(ng)

    code, told = ng("reproduce", "--resume")

    assert code == ExitCode.OK, told
    assert set(ng.verdicts.values()) == {Verdict.REPRODUCED}
    assert before  # what had been measured was judged then already
    complete = [f for f in Store(ng.results).all() if f.record().status is Status.COMPLETE]
    assert len(complete) == 2  # nothing that was done was done again


def _heal(ng: Reproduce) -> None:
    """From now on, what took for ever ends at once."""
    main = next((ng.root / "src" / "narrowgauge_lab").resolve().glob("__main__.py"))
    main.write_text(main.read_text().replace("if width in (1, 4, 5):", "if False:"))


def test_a_kill_loses_no_finished_record_and_resume_goes_on(ng: Reproduce) -> None:
    _slow(ng)
    process = _start(ng, *_quick("--all", "--order-seed", "1"))
    try:
        _wait(lambda: _measuring(ng))
    finally:
        process.kill()
        process.wait()
    open_ = [f for f in Store(ng.results).all() if not f.recorded]
    assert len(open_) == 1
    # Its lab is killed too, or the run would be waited for.
    os.kill(json.loads(open_[0].handle_path.read_text())["identity"]["pid"], signal.SIGKILL)
    _heal(ng)

    code, told = ng("reproduce", "--resume")

    assert code == ExitCode.OK, told
    assert "taking over" in told
    assert set(ng.verdicts.values()) == {Verdict.REPRODUCED}
    assert all(folder.recorded for folder in Store(ng.results).all())


def test_two_at_once_take_turns_and_corrupt_nothing(ng: Reproduce) -> None:
    processes = [_start(ng, *_quick("good", "bad")) for _ in range(2)]
    try:
        assert [process.wait(60) for process in processes] == [ExitCode.OK, ExitCode.OK]
    finally:
        for process in processes:
            process.kill()
    kept = [load_judged(path) for path in (ng.results / "judged").glob("2*.json")]

    assert len(kept) == 2
    for judged in kept:
        assert [j.verdict for j in judged.judgements] == [
            Verdict.REPRODUCED, Verdict.NOT_REPRODUCED,
        ]  # fmt: skip
        assert judged.refused == ()
    assert kept[0].run_ids != kept[1].run_ids


# The journal.


def _journal(tmp_path: Path) -> Journal:
    step = Step("tiny", "smoke", (), ("tiny/good",), 1.0, 0.1)
    plan = ReproducePlan(PLAN_FORMAT, ("tiny/good",), (step,), (), 1, 0, 0.0, None)
    return new_journal(tmp_path, plan)


def test_the_journal_keeps_notes_in_order(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    for note in (Note(0, "a"), Note(1, "b"), Note(0, "a", seconds=1.0), Note(0, "c")):
        journal.add(note)

    assert unfinished_journal(tmp_path) == journal
    assert journal.runs_of(0) == ("a", "c")
    assert journal.plan().steps[0].experiment == "tiny"


@pytest.mark.parametrize("tail", [b'{"step": 1, "ru', b"\x00\xff\n", b'{"step": "x"}\n', b"[1]\n"])
def test_a_line_that_a_kill_cut_short_costs_no_other(tmp_path: Path, tail: bytes) -> None:
    journal = _journal(tmp_path)
    journal.add(Note(0, "a"))
    with open(journal.path / "journal.jsonl", "ab") as stream:
        stream.write(tail)
    journal.add(Note(1, "b"))

    assert journal.runs_of(0) == ("a",)
    assert journal.runs_of(1) == ("b",)


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = _journal(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))

    journal.add(Note(0, "a-run"))

    assert journal.notes() == (Note(0, "a-run"),)


def test_seconds_are_those_of_every_start(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    journal.add(Note(0, "a", seconds=3.0))
    journal.add_session(5.0)  # with its pauses
    journal.add(Note(1, "b", seconds=2.0))  # and then it was killed

    assert journal.seconds() == 7.0
    assert journal.runs_of(0) == ("a",)


def test_the_newest_that_is_not_finished_is_gone_on_with(tmp_path: Path) -> None:
    journals = sorted((_journal(tmp_path) for _ in range(3)), key=lambda each: each.name)
    journals[2].finish(Path("judged.json"))

    assert [each.finished for each in journals] == [False, False, True]
    assert unfinished_journal(tmp_path) == journals[1]
    assert unfinished_journal(tmp_path, journals[2].name) == journals[2]
    for each in journals[:2]:
        each.finish(Path("judged.json"))
    with pytest.raises(NarrowgaugeError, match="nothing to resume"):
        unfinished_journal(tmp_path)


def test_of_a_step_that_was_tried_twice_one_record_counts(tmp_path: Path) -> None:
    first, second = (
        both(run_id=f"2026112{day}T100000Z-race-aaaaaa", eager=tuple(v + day for v in SLOW))
        for day in (1, 2)
    )
    cut = dataclasses.replace(second, status=Status.INTERRUPTED)
    other = dataclasses.replace(first, run_id="x", parameters={"epochs": 9})

    def kept(*records: Record) -> list[Record]:
        return list(_newest_of_each(records, {each.run_id: 0 for each in records}))

    assert kept(first, second) == [second]
    assert kept(first, cut) == [first]  # the newest that is whole
    assert kept(dataclasses.replace(first, status=Status.FAILED), cut) == [cut]
    assert kept(first, other) == [first, other]  # a step of two runs


def test_many_writers_lose_no_line(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    writers = [
        threading.Thread(target=lambda n=n: [journal.add(Note(n, f"{n}-{i}")) for i in range(20)])
        for n in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert len(journal.notes()) == 80


def test_one_occasion_has_one_process(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    with (
        journal.held(),
        pytest.raises(NarrowgaugeError, match="another process") as raised,
        journal.held(),
    ):
        pass
    assert raised.value.exit_code is ExitCode.BUSY
    with journal.held():
        pass


def test_a_damaged_plan_is_refused_by_name(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    path = journal.path / "plan.json"
    for content in ("{", '{"format": 99}', '{"format": 1}'):
        path.write_text(content)
        with pytest.raises(NarrowgaugeError, match=r"plan\.json") as raised:
            journal.plan()
        assert raised.value.exit_code is ExitCode.RECORD_DAMAGED
