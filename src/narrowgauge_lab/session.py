"""One run from the command line's words to its outcome."""

from __future__ import annotations

import dataclasses
import functools
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Iterator, Mapping, Optional, Tuple

from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError, ExitCode, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventLog, EventTail
from narrowgauge_contract.job import (
    Job,
    load_job,
    new_run_id,
    parse_overrides,
    resolve,
    shard_rows,
)
from narrowgauge_contract.outcome import OUTCOME_FILE, ErrorInfo, Outcome, Status, load_outcome
from narrowgauge_contract.placement_files import read_plans
from narrowgauge_contract.record import RECORD_FILE, HostNote, Record, compose, write_record
from narrowgauge_lab import experiments
from narrowgauge_lab.errors import ResumeRefusedError, describe
from narrowgauge_lab.folder import hold, last_words
from narrowgauge_lab.nodes import ALONE, Company, Nodes, nodes_of, own_folder
from narrowgauge_lab.stopping import StopRequest

__all__ = ["JOB_FILE", "Request", "record_killed", "run"]

JOB_FILE = "job.json"
#: Whoever gives a plan's file to `docker compose run` sees it lie there; the container does not.
_PLAN_HINT = (
    "in a container only what is mounted is there: "
    "docker compose run -v $PWD/my.toml:/plan.toml:ro … -p plan=/plan.toml; "
    "the launcher reads the file itself: narrowgauge run … -p plan=my.toml"
)


@dataclass(frozen=True)
class Request:
    """What was asked for. Either `job`, a resolved job.json that somebody else records, or
    `experiment` and how to resolve it; then this makes job.json and record.json too.

    `out`: the run's folder; where `new_folder`, the results folder that it is made in, as
    <experiment>/<run-id>. `device`: auto, cpu or cuda; `shard`: (i, n); `start`: where the search
    for experiments begins; `env`: the process's environment; `note`: what is known of the host.
    """

    out: Path
    start: Path
    env: Mapping[str, str]
    job: Optional[Path] = None
    experiment: str = ""
    parameters: Tuple[str, ...] = ()
    profile: str = "short"
    seed: int = 0
    target: str = "native"
    data: Optional[Path] = None
    experiments: Optional[Path] = None
    shard: Optional[Tuple[int, int]] = None
    resume: bool = False
    device: str = "auto"
    new_folder: bool = False
    note: Optional[HostNote] = None


def run(request: Request) -> Outcome:
    """Run what is asked, and give its outcome, which is in the run's folder by then.

    Raises NarrowgaugeError where there was nothing to run or no row could begin, and OSError where
    the outcome itself found no room.
    """
    nodes = nodes_of(request.env)
    stop = StopRequest()
    with stop.listening():
        folder = experiments.find_experiments(request.experiments, request.start)
        job = _decide(request, folder)
        experiments.find_run(folder, job.experiment)
        if not nodes.leads:
            return _follow(request, job, folder, stop, nodes)
        if request.new_folder:
            place = request.out / job.experiment / job.run_id
            request = dataclasses.replace(request, out=place, new_folder=False)
        with hold(request.out, resume=request.resume):
            if request.job is None:
                write_json_atomic(request.out / JOB_FILE, job)
            return _run_held(request, job, folder, stop, nodes)


def _follow(request: Request, job: Job, folder: Path, stop: StopRequest, nodes: Nodes) -> Outcome:
    """A machine's part of a job that another one records: its own events stay for whoever looks
    for a failure, where it has a folder; with `--results` only node 0 makes one."""
    with TemporaryDirectory(prefix="narrowgauge-node-") as name:
        out = Path(name) if request.new_folder else own_folder(request.out, nodes)
        request = dataclasses.replace(request, out=out, new_folder=False, resume=False)
        with hold(out, resume=False):
            return _run_held(request, job, folder, stop, nodes)


def _run_held(
    request: Request, job: Job, folder: Path, stop: StopRequest, nodes: Nodes = ALONE
) -> Outcome:
    # Not before: these import torch, and a mistyped name should not have to wait for that.
    from narrowgauge_lab import facts

    facts.require_torch()
    from narrowgauge_lab.data import check_data
    from narrowgauge_lab.profiling import require_profiler
    from narrowgauge_lab.requirements import as_used, choose_device, preload, require_applicable
    from narrowgauge_lab.rows import Setting
    from narrowgauge_lab.supervisor import Supervisor

    with EventLog(request.out / EVENTS_FILE) as log, TemporaryFile(dir=request.out) as crash:
        load = functools.partial(experiments.load_run, folder, job.experiment)
        setting = Setting(request.out, request.data, load, resume=request.resume)
        supervisor = Supervisor(job, log, setting, stop, crash)
        try:
            inside = facts.gather(request.env)
            hashes = (facts.source_hash(), facts.experiment_hash(folder / job.experiment))
            device = choose_device(request.device, inside)
            supervisor.begin(as_used(inside, device), *hashes)
            _set_record_aside(request)
            require_applicable(job.experiment_spec(), inside, request.device)
            require_profiler(job, device, request.env)
            check_data(job.data_sets, request.data)
            preload(job)
            with _company(nodes, job, hashes, inside.torch) as company:
                supervisor.run_rows(device, company)
        except ResumeRefusedError:
            raise  # the run that is there stays as it was
        except Exception as error:
            info, code = describe(error, request.out, otherwise=ExitCode.INTERNAL)
            outcome = supervisor.end(info, code)
            if nodes.leads:
                _record(request, job, outcome)
            raise
        outcome = supervisor.end()
        if nodes.leads:
            _record(request, job, outcome)
        return outcome


@contextmanager
def _company(
    nodes: Nodes, job: Job, hashes: Tuple[str, str], torch: Optional[str]
) -> Iterator[Optional[Company]]:
    """The other machines of the job, met before the first row; None for one that is alone."""
    if nodes.count == 1:
        yield None
        return
    same = {"the lab's source": hashes[0], "the experiment": hashes[1], "torch": str(torch)}
    with Company(nodes, job, same) as company:
        yield company


def _decide(request: Request, folder: Path) -> Job:
    """The job as it is given, or as the words ask; under --resume, the one begun before."""
    if request.job is not None:
        if not request.job.is_file():
            raise UsageError(f"there is no job file {request.job}")
        job = load_job(request.job)
        return job if request.shard is None else _shard(job, request.shard)
    spec = experiments.find_spec(folder, request.experiment)
    begun = request.out / JOB_FILE
    before = load_job(begun) if request.resume and begun.is_file() else None
    kept = (before.plan if before else None) or {}
    read = read_plans(spec, request.parameters, request.start, kept=kept, hint=_PLAN_HINT)
    job = resolve(
        spec,
        parse_overrides(spec, read.words),
        profile=request.profile,
        target=request.target,
        seed=request.seed,
        run_id=before.run_id if before else new_run_id(spec.id),
        plans={**kept, **read.documents},
    )
    job = job if request.shard is None else _shard(job, request.shard)
    if before is not None and job != before:
        raise UsageError(
            f"{request.out} holds another run",
            why="; ".join(_differences(before, job)),
            next_step="resume with the words it was begun with, or give another --out",
        )
    return job


def _shard(job: Job, shard: Tuple[int, int]) -> Job:
    rows = shard_rows(job.rows, shard)
    if not rows:
        raise UsageError(
            f"--shard {shard[0]}/{shard[1]} has no row", why=f"the job has {len(job.rows)}"
        )
    return dataclasses.replace(job, rows=rows)


def _differences(before: Job, now: Job) -> Tuple[str, ...]:
    names = [field.name for field in dataclasses.fields(Job)]
    return tuple(
        f"its {name} is {getattr(before, name)!r}, not {getattr(now, name)!r}"
        if name not in ("spec", "rows", "plan")
        else f"its {name} differ"
        for name in names
        if getattr(before, name) != getattr(now, name)
    )


def _record(request: Request, job: Job, outcome: Outcome) -> None:
    """Compose the record, unless somebody else does. One that is there (--resume) is kept aside."""
    if request.job is not None:
        return
    path = request.out / RECORD_FILE
    _set_record_aside(request)
    tail = EventTail(request.out / EVENTS_FILE)
    for _ in tail.poll():
        pass
    note = request.note
    host = note.host_facts(outcome.exit_code, outcome.status) if note else None
    record = compose(job, outcome, (), host, events_damaged=tail.damaged)
    last_words(request.out, lambda: write_record(path, record))


def _set_record_aside(request: Request) -> None:
    """A resumed run's record tells of what was before; beside new rows it would mislead."""
    path = request.out / RECORD_FILE
    if request.job is not None or not path.exists():
        return
    number = 1
    while (request.out / f"record.{number}.json").exists():
        number += 1
    os.replace(path, request.out / f"record.{number}.json")


def record_killed(out: Path, note: Optional[HostNote], *, out_of_memory: bool = False) -> Record:
    """Compose and write the record of a run of ours that was killed before it could.

    `out_of_memory`: the host saw that it was killed for memory.

    Raises UsageError where `out` is no such run or has a record, BusyError while the run goes on,
    DamagedRecordError, ResultsUnwritableError.
    """
    if not (out / JOB_FILE).is_file():
        raise UsageError(
            f"{out} holds no run that is to be recorded here",
            why=f"it has no {JOB_FILE}",
            next_step="--out is the run's own folder: RESULTS/EXPERIMENT/RUN-ID; "
            "a run of the launcher is recorded by: narrowgauge attach RUN-ID",
        )
    job = load_job(out / JOB_FILE)
    if (out / RECORD_FILE).exists():
        raise UsageError(f"{job.run_id} is recorded already", why="records are never changed")
    with hold(out, resume=True):
        outcome = _outcome_of(out, job)
        # Without an outcome nobody inside could say how it ended, and from outside nobody looked.
        error = None
        if outcome is not None:
            code, status = outcome.exit_code, outcome.status
        elif out_of_memory:
            code, status = int(ExitCode.OUT_OF_MEMORY), Status.UNFINISHED
            error = ErrorInfo(
                "out-of-memory",
                "the container ran out of memory",
                "killed by the kernel's OOM killer",
                "use less: a smaller batch or fewer rows at once; or give the host more memory",
            )
        else:
            code, status = int(ExitCode.KILLED), Status.UNFINISHED
        host = note.host_facts(code, status, error) if note else None
        tail = EventTail(out / EVENTS_FILE)
        record = compose(job, outcome, list(tail.poll()), host)
        record = dataclasses.replace(record, events_damaged=tail.damaged)
        last_words(out, lambda: write_record(out / RECORD_FILE, record))
        return record


def _outcome_of(out: Path, job: Job) -> Optional[Outcome]:
    """The outcome, unless it is damaged or of another run: the events say the same."""
    if not (out / OUTCOME_FILE).is_file():
        return None
    try:
        outcome = load_outcome(out / OUTCOME_FILE)
    except DamagedRecordError:
        return None
    return outcome if outcome.run_id == job.run_id else None
