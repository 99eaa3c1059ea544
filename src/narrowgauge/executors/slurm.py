"""The slurm executor: runs as jobs of a cluster, several as one array, through submitit.

The run's folder is on a file system that the nodes share; what happens there is read from its
files, and Slurm is asked only whether a job still waits or runs.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import Busy, ClusterUnreachable, ToolchainMissing, UsageError
from narrowgauge.executors.base import (
    ENDING_FILE,
    HANDLE_FORMAT,
    STOP_TIMEOUT_S,
    Ending,
    ExecutorFacts,
    Handle,
    save,
)
from narrowgauge.executors.ending import ending_from, vanished
from narrowgauge.executors.native import tail
from narrowgauge.plan import Places, lab_arguments
from narrowgauge.slurm.asking import SlurmAsk
from narrowgauge.slurm.image import Converted, container_command
from narrowgauge.slurm.node import LOG_FILE, NodeExit, NodeTask, load_exit
from narrowgauge.slurm.queue import JobState, Queue, refused
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.events import EVENTS_FILE, Event, EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import ErrorInfo, Status
from narrowgauge_contract.record import GitFacts, SchedulerFacts

__all__ = ["JOB_NAME", "Site", "SlurmExecutor"]

JOB_NAME = "narrowgauge"
#: How often the files are looked at, and how often Slurm is asked: the controller is everybody's.
_LOOK_S, _ASK_S = 0.25, 2.0
#: How long after a job's end its last file may take to be seen through the shared file system: NFS
#: keeps what it knows of a folder for up to 60 s. A job that Slurm ended may never write it.
# unverified: the end of a run seen over NFS or Lustre | one machine's disk only | run on a cluster
_SEEN_S, _ENDED_SEEN_S = 90.0, 5.0
#: How long a controller may be away: an upgrade restarts it, and jobs go on without it.
_LOST_S = 300.0


@dataclass(frozen=True)
class Site:
    """What every job of a launch needs: our source, the folder of submissions (shared with the
    nodes), the lab's Python or the image, the commit, and the lab's source where it is another."""

    source: Path
    submissions: Path
    python: Path | None
    image: Converted | None
    git: GitFacts | None
    lab: Path | None = None


class SlurmExecutor:
    """Runs jobs on a cluster. Without a `site` it only watches and collects (`attach`)."""

    name = "slurm"

    def __init__(
        self,
        ask: SlurmAsk,
        env: Mapping[str, str],
        say: Callable[[str], None],
        *,
        site: Site | None = None,
        queue: Queue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._env = env
        self._say = say
        self._site = site
        self._queue = queue or Queue(env)
        self._clock = clock
        self._version = ""

    def probe(self) -> ExecutorFacts:
        if not self._version:
            self._version = self._queue.version()
        return ExecutorFacts(self.name, self._version)

    def prepare(self) -> None:
        """Refuse what the cluster could never run, before anything is sent."""
        self.probe()
        self._queue.require(self._ask)

    def start(self, job: Job, places: Places) -> Handle:
        return self.start_all([(job, places)])[0]

    def start_all(self, runs: Sequence[tuple[Job, Places]]) -> list[Handle]:
        """Submit runs as one array. Raises ClusterRefused, ClusterUnreachable; nothing is left in
        the queue where a handle could not be kept."""
        assert self._site is not None, "this executor only watches"
        tasks = [self._task(places) for _, places in runs]
        jobs = self._submit(tasks)
        handles = []
        try:
            for (job, places), number in zip(runs, jobs, strict=True):
                handle = Handle(
                    format=HANDLE_FORMAT,
                    executor=self.name,
                    run_id=job.run_id,
                    identity={"job": number, "folder": str(places.folder)},
                    image=self._site.image.facts if self._site.image else None,
                    engine=f"Slurm {self._version}",
                    exceptions=self._exceptions(),
                )
                save(places.folder / "handle.json", handle)
                handles.append(handle)
        except BaseException:
            self._queue.cancel(jobs, at_once=True)
            raise
        return handles

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        events = EventTail(out / EVENTS_FILE)
        folder, job = out.parent, handle.identity["job"]
        began = asked = heard = self._clock() - _ASK_S
        said = ""
        while load_exit(folder) is None:
            yield from events.poll()
            yield None
            if self._clock() - asked >= _ASK_S:
                asked = self._clock()
                try:
                    state = self._queue.state(job)
                except ClusterUnreachable as error:
                    said = self._bear(error, asked - heard, said)
                    continue
                heard = asked
                if state.over:
                    self._wait_for_exit(folder, state)
                    break
                said = self._tell(job, state, said)
                self._give_up(job, state, asked - began)
            time.sleep(_LOOK_S)
        yield from events.poll()

    def alive(self, handle: Handle) -> bool:
        if _look(Path(handle.identity["folder"])) is not None:
            return False
        return not self._queue.state(handle.identity["job"]).over

    def cancel(self, handle: Handle, timeout_s: int = STOP_TIMEOUT_S) -> None:
        """`scancel`: the lab gets SIGTERM, and SIGKILL after the site's KillWait."""
        self.cancel_all([handle], timeout_s)

    def cancel_all(self, handles: Sequence[Handle], timeout_s: int = STOP_TIMEOUT_S) -> None:
        """Cancel runs by one command."""
        self._queue.cancel([each.identity["job"] for each in handles], at_once=timeout_s == 0)

    def collect(self, handle: Handle, dest: Path) -> Ending:
        log_tail = tail(dest / LOG_FILE)
        ended = _look(dest)
        state = self._queue.state(handle.identity["job"]) if _needs_state(ended) else None
        ending = _ending(ended, state, log_tail)
        save(dest / ENDING_FILE, ending)
        self.discard(handle)
        return ending

    def discard(self, handle: Handle) -> None:
        """Slurm forgets jobs by itself; one that is still there after its end is cancelled."""
        if _look(Path(handle.identity["folder"])) is None:
            self._queue.cancel([handle.identity["job"]], at_once=True)

    def running(self) -> tuple[str, ...]:
        """Nodes are given out by Slurm: nobody's runs are in the way here."""
        return ()

    def _task(self, places: Places) -> NodeTask:
        assert self._site is not None
        site, image = self._site, self._site.image
        environment: tuple[tuple[str, str], ...] = ()
        if image is not None:
            cache = site.submissions / f"cache-{image.digest.rpartition(':')[2][:12]}"
            cache.mkdir(parents=True, exist_ok=True)
            command = container_command(image, places, cache, "gpu" in self._ask.gres)
        else:
            data = None if places.data is None else str(places.data)
            arguments = lab_arguments(str(places.job), "OUT", str(places.experiments), data)
            command = (str(site.python), "-m", "narrowgauge_lab", *arguments)
            environment = (("PYTHONPATH", str(site.lab or site.source)), ("PYTHONUNBUFFERED", "1"))
        facts = SchedulerFacts(
            name=self.name, version=self._version, job="", partition=self._ask.partition,
            nodes=(), indicative="",
            converter=image.tool_version if image else None,
            archive_sha256=image.archive_sha256 if image else None,
            converted_sha256=image.sha256 if image else None,
        )  # fmt: skip
        return NodeTask(command, environment, places.folder, site.git, facts)

    def _submit(self, tasks: Sequence[NodeTask]) -> list[str]:
        """The tasks' job numbers. submitit writes the batch file and the tasks beside it."""
        # unverified: --gres of GPUs, preemption, real nodes | one machine only | run on a cluster
        assert self._site is not None
        submitit = _import_submitit()
        ask = self._ask
        cluster = submitit.SlurmExecutor(self._site.submissions, max_num_timeout=ask.requeues)
        wanted = {
            "partition": ask.partition, "gres": ask.gres, "cpus_per_task": ask.cpus,
            "mem": ask.mem, "account": ask.account, "qos": ask.qos, "constraint": ask.constraint,
        }  # fmt: skip
        cluster.update_parameters(
            job_name=JOB_NAME,
            time=ask.time,
            nodes=ask.nodes,
            ntasks_per_node=1,
            signal_delay_s=ask.grace,
            array_parallelism=ask.parallel,
            stderr_to_stdout=True,
            setup=[f"export PYTHONPATH={shlex.quote(str(self._site.source))}"],
            additional_parameters={"requeue": True},
            **({"exclusive": True} if ask.exclusive else {}),
            **{name: value for name, value in wanted.items() if value},
        )
        try:
            with cluster.batch():
                jobs = [cluster.submit(task) for task in tasks]
        except submitit.core.utils.FailedJobError as error:
            raise refused(str(error)) from error
        return [str(job.job_id) for job in jobs]

    def _exceptions(self) -> tuple[str, ...]:
        assert self._site is not None
        return (
            () if self._site.image is None else ("network of the node: the site's tool gives it",)
        )

    def _tell(self, job: str, state: JobState, said: str) -> str:
        """Say once per change why a job waits, or where it runs."""
        waits = f"{state.word.lower()}: {state.reason}".removesuffix(": ")
        words = waits if state.waiting else f"on {state.nodes}"
        if words != said:
            self._say(f"Slurm job {job}: {words}")
        return words

    def _bear(self, error: ClusterUnreachable, lost_s: float, said: str) -> str:
        """Say once that the controller is away; raise where it is for good."""
        if lost_s >= _LOST_S or isinstance(error.__cause__, FileNotFoundError):
            raise error
        words = f"Slurm does not answer, and is asked for {_LOST_S / 60:.0f} minutes: {error.why}"
        if not said.startswith("Slurm does not answer"):
            self._say(words)
        time.sleep(_LOOK_S)
        return words

    def _give_up(self, job: str, state: JobState, waited_s: float) -> None:
        if not state.waiting or not self._ask.patience or waited_s < 60 * self._ask.patience:
            return
        self._queue.cancel([job])
        raise Busy(
            f"the partition {state.partition} is full: the run waited {waited_s / 60:.0f} minutes",
            why=f"Slurm's reason: {state.reason}",
            next_step="wait longer (--slurm patience=MINUTES; 0: any time), ask for less, or"
            " another partition; `squeue --start` says when Slurm thinks there is room",
        )

    def _wait_for_exit(self, folder: Path, state: JobState) -> None:
        seen_s = _SEEN_S if state.word == "COMPLETED" else _ENDED_SEEN_S
        deadline = self._clock() + seen_s
        while _look(folder) is None and self._clock() < deadline:
            time.sleep(_LOOK_S)


def _look(folder: Path) -> NodeExit | None:
    """The node's word on the run's end. Listing a folder makes NFS ask its server again: else it
    remembers that the file is not there."""
    if folder.is_dir():
        os.listdir(folder)
    return load_exit(folder)


def _needs_state(ended: NodeExit | None) -> bool:
    return ended is None or bool(ended.why) or ended.status > 128


def _ending(ended: NodeExit | None, state: JobState | None, log_tail: str) -> Ending:
    """Judge by what the node wrote down, and where it could not, by Slurm's word. Pure."""
    word = state.word if state else ""
    if word == "OUT_OF_MEMORY":
        return ending_from(137, out_of_memory=True, log_tail=log_tail, what="job")
    if (ended is None or ended.status != 0) and word == "CANCELLED":
        return ending_from(
            int(ExitCode.INTERRUPTED), out_of_memory=False, log_tail=log_tail, what=""
        )
    if ended is not None and not ended.why:
        return ending_from(ended.status, out_of_memory=False, log_tail=log_tail, what="job")
    if word == "TIMEOUT" or (ended is not None and "timed-out" in ended.why):
        error = ErrorInfo(
            "killed",
            "the time limit ended the run",
            f"Slurm: {word or 'TIMEOUT'}; it had been queued again as often as it may be",
            "more of it: --slurm time=MINUTES, or --slurm requeues=N",
        )
        return Ending(int(ExitCode.KILLED), Status.UNFINISHED, log_tail, error)
    why = f"Slurm's word: {word.lower()}" + (f" ({state.reason})" if state else "")
    return vanished("job", ended.why if ended else why, log_tail)


def _import_submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ToolchainMissing(
            "the slurm executor needs submitit, which is not installed",
            next_step=f"{sys.executable} -m pip install 'narrowgauge[slurm]'",
        ) from error
    if submitit.SlurmExecutor.affinity() <= 0:
        raise UsageError("there is no srun on this host", next_step="log in to a login node")
    return submitit
