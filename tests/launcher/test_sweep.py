"""A sweep as it is run: to its end, stopped and gone on with, after a killed launcher."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import FakeExecutor, Quiet, facts, tiny_spec, write_outcome, write_run
from rich.console import Console
from test_sweep_file import GRID, sweep_of

from narrowgauge.errors import (
    Busy,
    ClusterUnreachable,
    DamagedRecordError,
    Interrupted,
    NarrowgaugeError,
    ToolchainMissing,
    UsageError,
)
from narrowgauge.fleet.errors import BoardUnreachable
from narrowgauge.runner import Session, StopRequest, attach, run_job
from narrowgauge.store import RunFolder, Store
from narrowgauge.sweep import search as search_module
from narrowgauge.sweep.conduct import Conductor
from narrowgauge.sweep.file import SweepSpec
from narrowgauge.sweep.journal import Journal, sweep_folder
from narrowgauge.sweep.search import Search
from narrowgauge.sweep.table import plan_json, plan_lines, print_sweep, ranked, sweep_json
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import Record


class Bench:
    """A results folder and a starter whose lab is a function of the job's parameters."""

    most = 1
    target = "cpu"

    def __init__(self, tmp_path: Path, exit_code: Callable[[Job], int] = lambda job: 0) -> None:
        self.store = Store(tmp_path / "results")
        self.tmp_path = tmp_path
        self.exit_code = exit_code
        self.started: list[Job] = []
        self.attached: list[str] = []
        self.said: list[str] = []

    def __call__(self, jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]) -> None:
        for job in jobs:
            self.started.append(job)
            finished(*run_job(job, self.session()))

    def attach(self, folder: RunFolder) -> Record:
        self.attached.append(folder.name)
        return attach(folder, self.session(lambda out, job: 0))

    def session(self, lab: Callable[[Path, Job], int] | None = None) -> Session:
        return Session(
            executor=FakeExecutor(lab=lab or self._lab),
            store=self.store,
            experiments=self.tmp_path,
            data=self.tmp_path,
            start_facts=lambda engine: facts(),
            reporter=Quiet(),
            stop=StopRequest(),
        )

    def _lab(self, out: Path, job: Job) -> int:
        code = self.exit_code(job)
        write_run(out, job, end=code == 0, values=job.parameters["width"])
        if code == 0:
            write_outcome(out, job)
        elif code == 130:
            write_outcome(out, job, Status.INTERRUPTED, 130)
        return code

    def conductor(self, sweep: SweepSpec) -> Conductor:
        return Conductor(sweep, tiny_spec(), self.store, self.journal(sweep), self.said.append)

    def journal(self, sweep: SweepSpec) -> Journal:
        return Journal(sweep_folder(self.store.root, sweep.file.name))


def test_every_point_is_run_once_and_never_again(tmp_path: Path) -> None:
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)
    progress = bench.conductor(sweep).run(bench)
    again = bench.conductor(sweep).run(bench)

    assert (progress.points, progress.done, progress.stopped) == (6, 6, False)
    assert again == progress
    assert len(bench.started) == 6
    figures = [e.figures for e in bench.journal(sweep).entries().values()]
    assert sorted(f["accuracy"] for f in figures if f) == [91.5, 91.5, 93.5, 93.5, 97.5, 97.5]


def test_more_points_are_added_to_what_is_done(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.conductor(sweep_of(tmp_path, GRID)).run(bench)
    more = sweep_of(tmp_path, GRID.replace("[4, 8, 16]", "[4, 8, 16, 32]"))
    bench.conductor(more).run(bench)

    assert [job.parameters["width"] for job in bench.started[6:]] == [32, 32]


def test_a_stop_ends_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, GRID)
    bench = Bench(tmp_path, lambda job: 130 if len(bench.started) == 3 else 0)
    stopped = bench.conductor(sweep).run(bench)
    done = bench.conductor(sweep).run(bench)

    assert (stopped.stopped, stopped.done) == (True, 2)
    assert (done.stopped, done.done) == (False, 6)
    assert len(bench.started) == 3 + 4


def test_a_point_that_failed_is_run_again_and_ends_nothing(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, GRID)
    bench = Bench(tmp_path, lambda job: 30 if job.parameters["width"] == 8 else 0)
    failed = bench.conductor(sweep).run(bench)
    bench.exit_code = lambda job: 0
    mended = bench.conductor(sweep).run(bench)

    assert (failed.done, failed.stopped) == (4, False)
    assert mended.done == 6
    assert [job.parameters["width"] for job in bench.started[6:]] == [8, 8]


def test_what_a_killed_launcher_left_is_taken_over_or_run_again(tmp_path: Path) -> None:
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)

    def die(jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]) -> None:
        del finished
        if len(bench.started) == 0:  # killed while its run went on
            bench.started.append(jobs[0])
            session = bench.session()
            folder = session.store.new_run(jobs[0])
            bench._lab(folder.out, jobs[0])
            session.executor.start(jobs[0], _places(folder, tmp_path))
        elif len(bench.started) == 1:  # killed after the record, before it was written down
            bench.started.append(jobs[0])
            run_job(jobs[0], bench.session())
        else:  # killed before the run began
            raise KeyboardInterrupt

    killed = _Starter(die)
    with pytest.raises(KeyboardInterrupt):
        bench.conductor(sweep).run(killed)
    progress = bench.conductor(sweep).run(bench)

    assert progress.done == 6
    assert bench.attached == [bench.started[0].run_id]
    assert len(bench.started) == 2 + 4


def test_a_run_on_a_board_that_is_away_is_left_and_said(tmp_path: Path) -> None:
    """It may go on, so its point waits; the others are run."""
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)

    def die(jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]) -> None:
        del finished
        folder = bench.store.new_run(jobs[0])
        bench.session().executor.start(jobs[0], _places(folder, tmp_path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.conductor(sweep).run(_Starter(die))
    (left,) = bench.store.root.glob("tiny/*")
    back = bench.attach

    def away(folder: RunFolder) -> Record:
        raise BoardUnreachable("the board orin does not answer by ssh")

    bench.attach = away  # type: ignore[method-assign]
    progress = bench.conductor(sweep).run(bench)

    assert (progress.done, progress.points, progress.stopped) == (5, 6, False)
    (problem,) = progress.problems
    assert str(left) in problem.next_step
    assert any(line.startswith(f"{left.name} is left as it is") for line in bench.said)
    bench.attach = back  # type: ignore[method-assign]
    bench._lab(left / "out", RunFolder(left).job())
    assert bench.conductor(sweep).run(bench).done == 6
    assert bench.attached == [left.name]
    assert len(bench.started) == 5


def test_a_point_whose_board_will_not_be_back_is_run_again_without_its_folder(
    tmp_path: Path,
) -> None:
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)

    def die(jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]) -> None:
        del finished
        bench.store.new_run(jobs[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.conductor(sweep).run(_Starter(die))
    (left,) = bench.store.root.glob("tiny/*")
    shutil.rmtree(left)

    assert bench.conductor(sweep).run(bench).done == 6


@pytest.mark.parametrize("file", ["GRID", "SEARCH"])
def test_where_no_more_can_be_started_the_sweep_ends(tmp_path: Path, file: str) -> None:
    """A starter over boards has lost the last of them; what it said of that is handed on."""
    sweep, bench = sweep_of(tmp_path, {"GRID": GRID, "SEARCH": SEARCH}[file]), Bench(tmp_path)

    def start(
        jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]
    ) -> list[NarrowgaugeError]:
        bench(jobs[:1], finished)
        starter.most = 0
        return [Busy("the board orin is measuring another run")]

    starter = _Starter(start)
    starter.most = 2
    progress = bench.conductor(sweep).run(starter)

    assert (progress.done, progress.stopped) == (1, False)
    assert [problem.what for problem in progress.problems] == [
        "the board orin is measuring another run"
    ]
    assert bench.conductor(sweep).run(bench).done == progress.points


@pytest.mark.parametrize("file", ["GRID", "SEARCH"])
def test_a_starter_that_is_stopped_ends_the_sweep_in_order(tmp_path: Path, file: str) -> None:
    sweep, bench = sweep_of(tmp_path, {"GRID": GRID, "SEARCH": SEARCH}[file]), Bench(tmp_path)

    def start(jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]) -> None:
        bench(jobs, finished)
        raise Interrupted("stopped")

    progress = bench.conductor(sweep).run(_Starter(start))

    assert (progress.done, progress.stopped, progress.problems) == (1, True, ())


def _places(folder: RunFolder, tmp_path: Path):
    from narrowgauge.plan import Places

    return Places(folder.path, tmp_path, None)


class _Starter:
    most, target = 1, "cpu"

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, jobs, finished):
        return self._call(jobs, finished)

    def attach(self, folder: RunFolder) -> Record:
        raise AssertionError("nothing was left behind")


def test_two_launchers_do_not_run_one_grid(tmp_path: Path) -> None:
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)
    with bench.journal(sweep).alone(), pytest.raises(Busy, match="another launcher") as caught:
        bench.conductor(sweep).run(bench)
    assert "optuna" in caught.value.next_step


def test_a_torn_line_of_the_journal_costs_that_line_only(tmp_path: Path) -> None:
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)
    bench.conductor(sweep).run(bench)
    path = bench.journal(sweep).folder / "journal.jsonl"
    text = path.read_text()
    path.write_text(text[: len(text) - 40])  # the last run's end
    before = len(bench.started)
    progress = bench.conductor(sweep).run(bench)

    assert progress.done == 6
    assert len(bench.started) == before  # its record was there
    assert all(json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))


_LINES = [
    '{"run": "a", "key": "k", "values": {}}',
    '{"run": "a", "exit_code": 0, "figures": {}}',
    '{"run": 3}',
    '{"run": "a", "values": 3, "key": "k"}',
    "[]",
    "null",
]


@settings(max_examples=30)
@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(_LINES)), max_size=8))
def test_any_journal_is_read(tmp_path_factory, lines: list[str]) -> None:
    folder = tmp_path_factory.mktemp("journal")
    (folder / "journal.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for entry in Journal(folder).entries().values():
        assert isinstance(entry.run_id, str)


SEARCH = """
[sweep]
experiment = "tiny"
method = "optuna"
runs = 8
profile = "smoke"
metric = "accuracy"

[vary]
width = { low = 1, high = 64, log = true }
precision = ["fp32", "bf16"]
"""


def test_optuna_seeks_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, SEARCH)
    bench = Bench(tmp_path, lambda job: 130 if len(bench.started) == 3 else 0)
    stopped = bench.conductor(sweep).run(bench)
    done = bench.conductor(sweep).run(bench)
    study = Search(sweep, bench.journal(sweep).folder).study

    assert (stopped.done, stopped.stopped) == (2, True)
    assert (done.done, done.stopped) == (8, False)
    assert len(bench.started) == 9
    best = max(bench.started, key=lambda job: job.parameters["width"])
    assert study.best_params["width"] == best.parameters["width"]
    values = [t.value for t in study.trials if t.value is not None]
    assert len(values) == 8


def test_two_launchers_share_one_search(tmp_path: Path) -> None:
    """Turn by turn, as two processes would: neither repeats the other's trials."""
    sweep = sweep_of(tmp_path, SEARCH)
    folder = tmp_path / "shared"
    one, other = Search(sweep, folder), Search(sweep, folder)
    numbers = []
    while one.left:
        for search in (one, other):
            trial, values = search.next()
            numbers.append(trial)
            search.tell(trial, {"accuracy": float(values["width"])}, True)

    assert sorted(numbers) == list(range(8))
    assert (one.left, other.left) == (0, 0)


def test_a_trial_whose_launcher_died_is_told_by_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, bench = sweep_of(tmp_path, SEARCH), Bench(tmp_path)
    journal = bench.journal(sweep)
    search = Search(sweep, journal.folder)
    trial, values = search.next()
    from narrowgauge.sweep.points import job_of, point_of

    job = job_of(sweep, tiny_spec(), point_of(sweep, values), "cpu")
    search.started(trial, job.run_id)
    journal.started("k", job.run_id, values)
    run_job(job, bench.session())
    lost, _ = search.next()
    assert search.orphans() == []  # this process lives
    monkeypatch.setattr(search_module, "_lives", lambda pid: False)
    bench.conductor(sweep).run(bench)
    trials = Search(sweep, journal.folder).study.trials

    assert trials[trial].value == journal.entries()["k"].figures["accuracy"]  # type: ignore[index]
    assert trials[lost].state is optuna.trial.TrialState.FAIL
    assert len(bench.started) == 7


def leave_running(bench: Bench, sweep: SweepSpec) -> Job:
    """A run that its killed launcher had started and written down, with its handle."""
    from narrowgauge.sweep.points import job_of, points_of

    point = points_of(sweep)[0]
    job = job_of(sweep, tiny_spec(), point, "cpu")
    bench.journal(sweep).started(point.key, job.run_id, {"width": 4})
    folder = bench.store.new_run(job)
    bench.session().executor.start(job, _places(folder, bench.tmp_path))
    return job


@pytest.mark.parametrize("error", [ClusterUnreachable("away"), Busy("taken")])
def test_a_run_that_may_still_go_on_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: NarrowgaugeError
) -> None:
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)
    job = leave_running(bench, sweep)

    def attach(folder: RunFolder) -> Record:
        raise error

    monkeypatch.setattr(bench, "attach", attach)
    with pytest.raises(type(error)):
        bench.conductor(sweep).run(bench)
    assert bench.started == []
    monkeypatch.undo()
    assert bench.conductor(sweep).run(bench).done == 6
    assert bench.attached == [job.run_id]


@pytest.mark.parametrize("error", [UsageError("never started"), DamagedRecordError("torn")])
def test_a_run_that_is_lost_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: NarrowgaugeError
) -> None:
    sweep, bench = sweep_of(tmp_path, GRID), Bench(tmp_path)
    leave_running(bench, sweep)

    def attach(folder: RunFolder) -> Record:
        raise error

    monkeypatch.setattr(bench, "attach", attach)
    assert bench.conductor(sweep).run(bench).done == 6
    assert any("its point is run again" in line for line in bench.said)


def test_trials_of_runs_that_go_on_are_not_told_they_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that were asked for, one was started when the controller went away."""
    sweep, bench = sweep_of(tmp_path, SEARCH), Bench(tmp_path)

    def start(jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]) -> None:
        del finished
        folder = bench.store.new_run(jobs[0])
        bench.session().executor.start(jobs[0], _places(folder, tmp_path))
        raise ClusterUnreachable("away")

    starter = _Starter(start)
    starter.most = 2
    with pytest.raises(ClusterUnreachable):
        bench.conductor(sweep).run(starter)
    search = Search(sweep, bench.journal(sweep).folder)
    states = [trial.state.name for trial in search.study.trials]
    assert states == ["RUNNING", "FAIL"]
    monkeypatch.setattr(search_module, "_lives", lambda pid: False)
    assert [number for number, _ in search.orphans()] == [0]


def test_trials_on_other_hosts_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, bench = sweep_of(tmp_path, SEARCH), Bench(tmp_path)
    with monkeypatch.context() as there:
        there.setattr(search_module.socket, "gethostname", lambda: "node9")
        Search(sweep, bench.journal(sweep).folder).next()
    bench.conductor(sweep).run(bench)

    assert len(bench.started) == 7  # the eighth is theirs
    assert any(line.startswith("1 trials belong to launchers on node9") for line in bench.said)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ('metric = "accuracy"', 'metric = "loss"', "metric"),
        ("runs = 8", 'runs = 8\ndirection = "minimize"', "direction"),
        ("high = 64", "high = 32", "vary"),
        ("[vary]", "[fixed]\nepochs = 2\n[vary]", "fixed"),
    ],
)
def test_a_study_that_was_edited_is_another(
    tmp_path: Path, before: str, after: str, changed: str
) -> None:
    Search(sweep_of(tmp_path, SEARCH), tmp_path / "study")
    assert before in SEARCH
    Search(sweep_of(tmp_path, SEARCH.replace("runs = 8", "runs = 9")), tmp_path / "study")
    with pytest.raises(UsageError, match="seeks something else") as caught:
        Search(sweep_of(tmp_path, SEARCH.replace(before, after)), tmp_path / "study")
    assert caught.value.why.endswith(f": {changed}")
    assert "rename the file" in caught.value.next_step


def test_a_metric_that_no_run_has_is_named(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, SEARCH.replace('metric = "accuracy"', 'metric = "acuracy"'))
    bench = Bench(tmp_path)
    with pytest.raises(UsageError, match="no metric 'acuracy'") as caught:
        bench.conductor(sweep).run(bench)
    assert "accuracy" in caught.value.why


def test_without_optuna_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ToolchainMissing, match="optuna") as caught:
        Search(sweep_of(tmp_path, SEARCH), tmp_path)
    assert "narrowgauge[sweep]" in caught.value.next_step


def test_a_storage_that_does_not_answer(tmp_path: Path) -> None:
    text = SEARCH.replace("runs = 8", 'runs = 8\nstorage = "nosuchdb://there"')
    with pytest.raises(UsageError, match="does not answer"):
        Search(sweep_of(tmp_path, text), tmp_path)


@pytest.mark.parametrize(
    "url",
    ["nosuchdb://me:hush@there/db", "nosuchdb://me:hu@hush@there/db", "nosuchdb://t?password=hush"],
)
def test_a_storages_password_is_not_told(tmp_path: Path, url: str) -> None:
    text = SEARCH.replace("runs = 8", f'runs = 8\nstorage = "{url}"')
    with pytest.raises(UsageError, match="does not answer") as caught:
        Search(sweep_of(tmp_path, text), tmp_path)
    assert "hush" not in str(caught.value)
    assert "nosuchdb://" in str(caught.value)


def test_the_table_has_the_best_first(tmp_path: Path) -> None:
    text = GRID.replace("seed = 3", 'seed = 3\nmetric = "accuracy"')
    sweep = sweep_of(tmp_path, text)
    bench = Bench(tmp_path, lambda job: 30 if job.parameters["width"] == 16 else 0)
    bench.conductor(sweep).run(bench)
    entries = list(bench.journal(sweep).entries().values())
    order = [entry.values["width"] for entry in ranked(entries, sweep)]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    print_sweep(entries, sweep, tiny_spec(), console)
    shown = console.export_text()
    body = json.loads(sweep_json(entries, sweep))
    least = dataclasses.replace(sweep, file=dataclasses.replace(sweep.file, direction="minimize"))
    console.file.close()

    assert order == [8, 8, 4, 4, 16, 16]
    assert [e.values["width"] for e in ranked(entries, least)][:2] == [4, 4]
    assert "accuracy" in shown
    assert "exit 30" in shown
    assert [run["values"]["width"] for run in body["runs"]] == order


def test_a_plan_lists_points_and_starts_nothing(tmp_path: Path) -> None:
    from narrowgauge.sweep.points import points_of

    sweep = sweep_of(tmp_path, GRID)
    lines = plan_lines(points_of(sweep), sweep)
    body = json.loads(plan_json(points_of(sweep), sweep))

    assert lines[0] == "6 runs of tiny, grid"
    assert len(lines) == 7
    assert len(body["points"]) == 6
    assert body["points"][0]["values"].keys() == {"width", "precision"}


def test_starting_may_fail_and_the_point_stays_open(tmp_path: Path) -> None:
    sweep, bench = sweep_of(tmp_path, SEARCH), Bench(tmp_path)

    def refuse(jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]) -> None:
        del jobs, finished
        raise NarrowgaugeError("no engine")

    with pytest.raises(NarrowgaugeError, match="no engine"):
        bench.conductor(sweep).run(_Starter(refuse))
    assert Search(sweep, bench.journal(sweep).folder).left == 8
    assert bench.conductor(sweep).run(bench).done == 8
