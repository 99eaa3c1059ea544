"""A cluster of two nodes on this machine: Slurm's own daemons, with everything in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["SlurmSite"]

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=closed Nodes=n1 State=DOWN
"""


class SlurmSite:
    """munged, slurmctld and two slurmd, until `stop`. `environment` is for whoever asks them."""

    def __init__(self) -> None:
        # The path of a socket may not exceed 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="narrowgauge-slurm-", dir="/tmp"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._nodes = ("n1", "n2")

    def start(self) -> None:
        """Returns when both nodes are idle."""
        self._start_munge()
        for name in ("state", *(f"spool-{node}" for node in self._nodes)):
            (self.folder / name).mkdir()
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        text = _CONF.format(
            host=socket.gethostname(), ports=_free_ports(3), user=user, folder=self.folder
        )
        (self.folder / "slurm.conf").write_text(text)
        self._call("slurmctld", "-f", self.environment["SLURM_CONF"])
        for node in self._nodes:
            self._call("slurmd", "-N", node, "-f", self.environment["SLURM_CONF"])
        deadline = time.monotonic() + 30
        while self._states() != ["idle", "idle"]:
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.1)

    def stop(self) -> None:
        """End what `start` started, by the pids it left, and remove its folder."""
        jobs = ["scancel", "--me", "--signal=KILL", "--full"]
        subprocess.run(jobs, env=self.environment, check=False, capture_output=True)
        pid_files = [f"slurmd-{node}.pid" for node in self._nodes]
        paths = [self.folder / name for name in (*pid_files, "slurmctld.pid", "munge/pid")]
        pids = [int(path.read_text()) for path in paths if path.is_file()]
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        for pid in pids:
            _end(pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir()
        munge.chmod(0o711)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        self._call(
            "munged", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip

    def _call(self, program: str, *words: str) -> None:
        # Debian's daemons are not on every user's path.
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        found = shutil.which(program, path=path)
        assert found, f"{program} is not installed: ./scripts/test.sh --provision, or --no-cluster"
        done = subprocess.run(
            [found, *words], env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + self._logs()

    def _states(self) -> list[str]:
        words = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"]
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout.split()

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _end(pid: int) -> None:
    """Wait a little for a process that was asked to end, then kill it."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and _signal(pid, 0):
        time.sleep(0.05)
    _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> bool:
    """Whether the process was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
