"""The slurm executor against Slurm's own daemons: two nodes on this machine."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fake_lab
import pytest
from launching import Quiet, facts, tiny_job
from slurm_site import SlurmSite

from narrowgauge.errors import ClusterRefused, ClusterUnreachable, ExitCode, UnknownNameError
from narrowgauge.executors.base import load_handle
from narrowgauge.executors.slurm import Site, SlurmExecutor
from narrowgauge.plan import Places
from narrowgauge.runner import Session, StopRequest, attach, run_array, run_job
from narrowgauge.slurm.asking import SlurmAsk
from narrowgauge.slurm.queue import Queue
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import GitFacts, Record

SOURCE = Path(__file__).parents[2] / "src"
ASK = SlurmAsk(time=5)


class Bench:
    """An executor on the site, with a lab that does as it is told, and a results folder."""

    def __init__(self, site: SlurmSite, tmp_path: Path, ask: SlurmAsk = ASK) -> None:
        self.said: list[str] = []
        self.tmp_path = tmp_path
        lab = fake_lab.install(tmp_path / "lab")
        place = Site(SOURCE, tmp_path / ".slurm", Path(sys.executable), None, GitFacts("c0", False))
        self.executor = SlurmExecutor(
            ask, site.environment, self.said.append, site=dataclasses.replace(place, lab=lab)
        )
        self.executor.probe()
        self.store = Store(tmp_path / "results")
        self.stop = StopRequest()
        self.session = Session(
            executor=self.executor,
            store=self.store,
            experiments=tmp_path,
            data=tmp_path,
            start_facts=lambda engine: facts(),
            reporter=Quiet(),
            stop=self.stop,
            elsewhere=True,
        )


def job(width: int, number: int = 0) -> Job:
    return tiny_job(f"width={width}", run_id=f"20261121T101500Z-tiny-abc12{number}")


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_is_submitted_watched_and_recorded(slurm: SlurmSite, tmp_path: Path) -> None:
    bench = Bench(slurm, tmp_path)
    folder, record = run_job(job(fake_lab.FINE), bench.session)

    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)
    assert record.host is not None
    given = record.host.scheduler
    assert given is not None
    assert (given.name, given.partition, given.indicative) == ("slurm", "main", "")
    assert given.nodes in (("n1",), ("n2",))
    assert given.version.startswith("2")
    assert record.host.machine.cpu_count > 1  # the node's, and not that of whoever watched
    assert record.host.git == GitFacts("c0", False)
    assert "the lab speaks" in record.host.log_tail
    assert RunFolder(folder.path).record() == record


def test_an_array_runs_all_and_one_failure_is_its_own(slurm: SlurmSite, tmp_path: Path) -> None:
    bench = Bench(slurm, tmp_path, dataclasses.replace(ASK, exclusive=False, parallel=2))
    widths = (fake_lab.FINE, fake_lab.FAILS, fake_lab.SILENT, fake_lab.FINE)
    jobs = [job(width, number) for number, width in enumerate(widths)]
    done = [record for _, record in run_array(jobs, bench.executor, bench.session)]

    assert [record.run_id for record in done] == [each.run_id for each in jobs]
    assert [record.exit_code for record in done] == [0, 30, 30, 0]
    numbers = [_scheduler_job(record) for record in done]
    assert {number.partition("_")[0] for number in numbers} == {numbers[0].partition("_")[0]}
    assert [number.partition("_")[2] for number in numbers] == ["0", "1", "2", "3"]
    shared = [record.host.scheduler.indicative for record in done if record.host.scheduler]
    assert set(shared) == {"other jobs may have been on its nodes"}


def _scheduler_job(record: Record) -> str:
    assert record.host is not None
    assert record.host.scheduler is not None
    return record.host.scheduler.job


def test_a_stop_cancels_the_running_and_the_waiting(slurm: SlurmSite, tmp_path: Path) -> None:
    bench = Bench(slurm, tmp_path, dataclasses.replace(ASK, parallel=1))
    jobs = [job(fake_lab.SLOW, number) for number in range(2)]
    first = bench.store.root / "tiny" / jobs[0].run_id / "out" / "events.jsonl"

    def told() -> bool:
        return any(words.endswith((": on n1", ": on n2")) for words in bench.said)

    def ask() -> None:
        try:
            until(lambda: first.is_file() and "metric" in first.read_text() and told())
        finally:
            bench.stop.requested = True

    asking = threading.Thread(target=ask)
    asking.start()
    done = [record for _, record in run_array(jobs, bench.executor, bench.session)]
    asking.join()

    assert [record.status for record in done] == [Status.INTERRUPTED, Status.INTERRUPTED]
    assert [record.exit_code for record in done] == [130, 130]
    assert told()  # where it runs is said while it does
    assert done[0].rows[0].metric("loss") is not None
    assert done[1].rows == ()


def test_a_run_whose_launcher_is_gone_is_found_again(slurm: SlurmSite, tmp_path: Path) -> None:
    bench = Bench(slurm, tmp_path)
    folder = bench.store.new_run(job(fake_lab.SLOW))
    bench.executor.start(job(fake_lab.SLOW), Places(folder.path, tmp_path, None))
    until(lambda: folder.events_path.exists() and "metric" in folder.events_path.read_text())
    # Another launcher: nothing but the files, and Slurm.
    other = SlurmExecutor(SlurmAsk(), slurm.environment, bench.said.append)
    handle = load_handle(folder.handle_path)
    assert other.alive(handle)
    other.cancel(handle)
    record = attach(folder, dataclasses.replace(bench.session, executor=other))

    assert record.status is Status.INTERRUPTED
    assert not other.alive(handle)
    assert folder.recorded


def test_every_node_of_a_run_knows_where_to_meet(slurm: SlurmSite, tmp_path: Path) -> None:
    bench = Bench(slurm, tmp_path, dataclasses.replace(ASK, nodes=2))
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\nenv | grep -E "^(MASTER|RANK|WORLD|LOCAL_W)" > "'
        f'{tmp_path}/said-$RANK"\nexit 3\n'
    )
    program.chmod(0o755)
    place = Site(SOURCE, tmp_path / ".slurm", program, None, None)
    bench.session = dataclasses.replace(
        bench.session,
        executor=SlurmExecutor(
            dataclasses.replace(ASK, nodes=2), slurm.environment, bench.said.append, site=place
        ),
    )
    _, record = run_job(job(fake_lab.FINE), bench.session)

    assert record.exit_code == ExitCode.NOT_APPLICABLE
    assert record.host is not None
    assert record.host.scheduler is not None
    assert record.host.scheduler.nodes == ("n1", "n2")
    until(lambda: (tmp_path / "said-1").is_file())
    said = [
        dict(line.split("=", 1) for line in (tmp_path / f"said-{rank}").read_text().splitlines())
        for rank in range(2)
    ]
    assert [each.pop("RANK") for each in said] == ["0", "1"]
    assert said[0] == said[1]
    assert said[0]["MASTER_ADDR"] == "127.0.0.1"
    assert (said[0]["WORLD_SIZE"], said[0]["LOCAL_WORLD_SIZE"]) == ("2", "1")
    assert 20000 <= int(said[0]["MASTER_PORT"]) < 32000


@pytest.mark.parametrize(
    ("ask", "kind", "what", "way_out"),
    [
        (SlurmAsk(partition="mian"), UnknownNameError, "unknown partition", "did you mean 'main'"),
        (SlurmAsk(partition="closed"), ClusterRefused, "takes no jobs", "another partition: main"),
        (SlurmAsk(nodes=3), ClusterRefused, "full for good", "--slurm nodes=2"),
        (SlurmAsk(time=61), ClusterRefused, "more than the partition main", "time=60"),
    ],
)
def test_what_no_partition_could_run_is_refused_first(
    slurm: SlurmSite, ask: SlurmAsk, kind: type[Exception], what: str, way_out: str
) -> None:
    with pytest.raises(kind, match=what) as caught:
        SlurmExecutor(ask, slurm.environment, print).prepare()
    assert way_out in caught.value.next_step  # type: ignore[attr-defined]


def test_what_slurm_itself_refuses_leaves_nothing(slurm: SlurmSite, tmp_path: Path) -> None:
    bench = Bench(slurm, tmp_path, dataclasses.replace(ASK, gres="gpu:7"))
    with pytest.raises(ClusterRefused, match="did not take the job") as caught:
        list(run_array([job(0, 0), job(0, 1)], bench.executor, bench.session))

    assert caught.value.exit_code == ExitCode.CLUSTER_REFUSED
    assert "sinfo" in caught.value.next_step
    assert list((bench.store.root / "tiny").iterdir()) == []


def test_a_controller_that_does_not_answer(slurm: SlurmSite, tmp_path: Path) -> None:
    text = (slurm.folder / "slurm.conf").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("SlurmctldPort")]
    (tmp_path / "slurm.conf").write_text(
        "\n".join([*lines, "SlurmctldPort=9", "MessageTimeout=2", ""])
    )
    environment = {**slurm.environment, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    with pytest.raises(ClusterUnreachable, match="does not answer") as caught:
        Queue(environment).version()

    assert caught.value.exit_code == ExitCode.CLUSTER_UNREACHABLE
    assert "scontrol ping" in caught.value.next_step


@pytest.mark.slow
def test_a_run_that_is_out_of_time_is_queued_again_and_goes_on(
    slurm: SlurmSite, tmp_path: Path
) -> None:
    """The lab saves itself on SIGTERM; the second start gets --resume, and ends."""
    ask = dataclasses.replace(ASK, time=1, grace=45, requeues=1)
    bench = Bench(slurm, tmp_path, ask)
    main = tmp_path / "lab" / "narrowgauge_lab" / "__main__.py"
    resumed = 'width = 0 if "--resume" in sys.argv else job.parameters["width"]'
    text = main.read_text()
    assert 'width = job.parameters["width"]' in text
    main.write_text(text.replace('width = job.parameters["width"]', resumed))
    _, record = run_job(job(fake_lab.SLOW), bench.session)

    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)
    assert record.host is not None
    assert record.host.scheduler is not None
    assert record.host.scheduler.restarts == 1
    log = record.host.log_tail
    assert log.count("the lab speaks") == 2


@pytest.mark.slow
def test_a_run_that_may_not_be_queued_again_says_what_ended_it(
    slurm: SlurmSite, tmp_path: Path
) -> None:
    bench = Bench(slurm, tmp_path, dataclasses.replace(ASK, time=1, grace=45, requeues=0))
    folder, record = run_job(job(fake_lab.SLOW), bench.session)

    assert record.exit_code in (ExitCode.KILLED, ExitCode.INTERRUPTED)
    assert record.rows[0].metric("loss") is not None  # nothing measured is lost
    ending = json.loads((folder.path / "ending.json").read_text())
    assert "time limit" in ending["error"]["what"]
