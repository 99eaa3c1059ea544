"""What submitit starts on a cluster's node: the lab, notes for the record, and its last moments.

It runs with the launcher's Python and source, from the shared file system. Slurm signals a run
before its time is up, or when it has to make room; it then saves itself, and is queued again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import ClusterUnreachable
from narrowgauge.machine import machine_facts
from narrowgauge.recording import SCHEDULER_FILE, StartFacts
from narrowgauge.rendezvous import Rendezvous, port_of
from narrowgauge.slurm.queue import JobState, Queue
from narrowgauge_contract.codec import decode, read_json, write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError, ExitCode
from narrowgauge_contract.events import EVENTS_FILE
from narrowgauge_contract.record import GitFacts, SchedulerFacts

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

__all__ = ["EXIT_FILE", "LOG_FILE", "NodeExit", "NodeTask", "load_exit"]

EXIT_FILE = "exit.json"
LOG_FILE = "lab.log"
_POLL_S = 0.1
#: From SIGTERM to SIGKILL, at most; the site's KillWait may be shorter.
_GRACE_S = 25.0


@dataclass(frozen=True)
class NodeExit:
    """How the lab ended on its node: its exit status, or why it was ended."""

    status: int
    why: str = ""


@dataclass(frozen=True)
class NodeTask:
    """One run. `command` starts the lab (in a container, where there is one), with `OUT` where the
    folder goes that it writes to; `folder` is the run's, on the shared file system.

    Called once on every node of the run; node 0 keeps the notes. `facts`: what the launcher knew.
    """

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    folder: Path
    git: GitFacts | None
    facts: SchedulerFacts

    def __call__(self) -> int:
        """Run the lab to its end; its exit status. SystemExit where it is queued again."""
        from submitit import JobEnvironment

        job = JobEnvironment()
        first = job.global_rank == 0
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if first:
            self._keep_notes(job.job_id, tuple(job.hostnames), restarts)
        child = self._start(job, restarts)
        status, why = int(ExitCode.KILLED), ""
        try:
            while child.poll() is None:
                time.sleep(_POLL_S)
            status = child.returncode if child.returncode >= 0 else 128 - child.returncode
        except SystemExit:
            _end(child.pid)
            raise  # it was put back into the queue, and is not over
        except BaseException as error:
            why = str(error)
            _end(child.pid)
        if first:
            write_json_atomic(self.folder / EXIT_FILE, NodeExit(status, why))
        return status

    def checkpoint(self) -> DelayedSubmission:
        """Called in the midst of `__call__` when Slurm says that the time is up: the lab saves what
        it has, and this is what the next start does."""
        from submitit.helpers import DelayedSubmission

        _end(int((self.folder / _pid_file(0)).read_text(encoding="ascii")))
        return DelayedSubmission(self)

    def _start(self, job: Any, restarts: int) -> subprocess.Popen[bytes]:
        alone = job.num_nodes == 1
        address = "" if alone else Queue(os.environ).address(job.hostnames[0])
        nodes = Rendezvous(job.node, job.num_nodes, address, port_of(job.job_id))
        out = self.folder / "out"
        words = [str(out) if word == "OUT" else word for word in self.command]
        mine = out if job.node == 0 else out / f"node-{job.node}"
        if restarts and (mine / EVENTS_FILE).is_file():
            words.append("--resume")
        log_name = LOG_FILE if job.node == 0 else f"lab-{job.node}.log"
        met = nodes.environment()
        # Apptainer gives a container only what has its prefix; enroot gives it all.
        inside = {f"APPTAINERENV_{name}": value for name, value in met.items()}
        environment = {**os.environ, **dict(self.environment), **met, **inside}
        with open(self.folder / log_name, "ab") as log:
            child = subprocess.Popen(
                words,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        (self.folder / _pid_file(job.node)).write_text(str(child.pid), encoding="ascii")
        return child

    def _keep_notes(self, job: str, nodes: tuple[str, ...], restarts: int) -> None:
        """What the record says of the machine is of this one, not of where the launcher is."""
        try:
            state = Queue(os.environ).state(job)
            indicative = "" if state.exclusive else "other jobs may have been on its nodes"
        except ClusterUnreachable:  # no reason to lose the run
            state, indicative = JobState(""), "Slurm did not say whether it had its nodes alone"
        facts = replace(
            self.facts, job=job, nodes=nodes, restarts=restarts, indicative=indicative,
            partition=state.partition or self.facts.partition,
        )  # fmt: skip
        write_json_atomic(self.folder / SCHEDULER_FILE, facts)
        write_json_atomic(self.folder / "host.json", StartFacts(machine_facts(), self.git))


def load_exit(folder: Path) -> NodeExit | None:
    """How the lab ended on its node; None where it has not, or could not say."""
    try:
        return decode(NodeExit, read_json(folder / EXIT_FILE), EXIT_FILE)
    except (OSError, DamagedRecordError):
        return None


def _pid_file(node: int) -> str:
    return f".lab-{node}-{socket.gethostname()}.pid" if node else ".lab.pid"


def _end(pid: int) -> None:
    """SIGTERM, and SIGKILL where that is not enough. Reaps nothing, so that it may be called from a
    signal handler while `Popen.poll` holds its lock."""
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, flags) is not None:
                return
            time.sleep(_POLL_S / 2)
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, ChildProcessError):
        return  # it ended by itself
