"""What Slurm's own commands say of partitions and jobs. Asks no accounting: sites may lack it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.errors import ClusterRefused, ClusterUnreachable, UnknownNameError
from narrowgauge.slurm.asking import SlurmAsk, parse_minutes

__all__ = ["GONE", "JobState", "Queue", "Run", "refused"]

_TIMEOUT_S = 60
#: A job that Slurm no longer keeps: it ended some minutes ago (MinJobAge), or never was.
GONE = "GONE"
_OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
    | {"OUT_OF_MEMORY", "REVOKED", "TIMEOUT", GONE}
)
_HINTS = (
    ("submit limit", "wait until some of your jobs have ended, or submit fewer at once"),
    ("time limit", "ask for less: --slurm time=MINUTES; `sinfo` shows each partition's limit"),
    ("node configuration", "no node there is like that: `sinfo -N -o '%N %c %m %G %f'` shows them"),
    ("gres", "no node there has that: `sinfo -o '%P %G'` shows what they have"),
    ("invalid partition", "`sinfo` lists the partitions: --slurm partition=NAME"),
    ("account", "`sacctmgr show associations user=$USER` lists yours: --slurm account=NAME"),
    ("qos", "`sacctmgr show qos` lists them: --slurm qos=NAME"),
)

#: Runs one command: its exit status, what it printed, and what it complained of.
Run = Callable[[Sequence[str]], tuple[int, str, str]]


@dataclass(frozen=True)
class JobState:
    """`word` is Slurm's own, such as RUNNING; `reason` why it waits or ended; `exclusive` whether
    no other job may be on its nodes; `restarts` how often it was queued again."""

    word: str
    reason: str = ""
    nodes: str = ""
    partition: str = ""
    exclusive: bool = False
    restarts: int = 0

    @property
    def over(self) -> bool:
        return self.word in _OVER

    @property
    def waiting(self) -> bool:
        return self.word in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


class Queue:
    """One cluster, by the commands on this host's path."""

    def __init__(self, env: Mapping[str, str], run: Run | None = None) -> None:
        self._env = dict(env)
        self._run = run or self._command

    def version(self) -> str:
        """Slurm's version, once its controller answers. Raises ClusterUnreachable."""
        said = self._ask(["sinfo", "--version"])
        self._ask(["scontrol", "ping"])
        self._ask(["squeue", "--noheader", "--jobs", "1"], missing="Invalid job id")
        return said.split()[-1] if said.split() else "unknown"

    def require(self, ask: SlurmAsk) -> None:
        """Refuse, before anything is sent, what this cluster's partitions could never run.

        Raises UnknownNameError for a partition, ClusterRefused for one that is down, has too few
        nodes, or a lower time limit; ClusterUnreachable.
        """
        lines = self._ask(["sinfo", "--noheader", "--format", "%P|%a|%l|%D|%T"]).splitlines()
        rows = [line.strip().split("|") for line in lines if line.count("|") == 4]
        names = {row[0].rstrip("*") for row in rows}
        name = ask.partition or next((r[0].rstrip("*") for r in rows if r[0].endswith("*")), "")
        if not name:
            raise ClusterRefused(
                "this cluster has no default partition",
                next_step=f"name one: --slurm partition=NAME; it has {', '.join(sorted(names))}",
            )
        if name not in names:
            raise UnknownNameError("partition", name, names, where="of this cluster")
        mine = [row for row in rows if row[0].rstrip("*") == name]
        others = ", ".join(sorted({r[0].rstrip("*") for r in rows if r[1] == "up"} - {name}))
        way_out = f"another partition: {others}" if others else "ask those who run the cluster"
        if mine[0][1] != "up":
            raise ClusterRefused(
                f"the partition {name} takes no jobs", why=f"it is {mine[0][1]}", next_step=way_out
            )
        count = sum(int(row[3]) for row in mine if not row[4].startswith(("down", "drain", "fail")))
        if count < ask.nodes:
            states = ", ".join(f"{row[3]} {row[4]}" for row in mine)
            raise ClusterRefused(
                f"the partition {name} is full for good: {ask.nodes} nodes are asked for,"
                f" {count} can work",
                why=f"its nodes: {states}",
                next_step=f"fewer: --slurm nodes={count}; or {way_out}" if count else way_out,
            )
        limit = parse_minutes(mine[0][2])
        if limit is not None and ask.time > limit:
            raise ClusterRefused(
                f"{ask.time} minutes are more than the partition {name} allows",
                why=f"its limit is {limit} minutes",
                next_step=f"--slurm time={limit}: what is not done by then is queued again, up to"
                f" --slurm requeues={ask.requeues} times",
            )

    def state(self, job: str) -> JobState:
        """How a job is; GONE where Slurm has forgotten it. Raises ClusterUnreachable."""
        text = self._ask(["scontrol", "--oneliner", "show", "job", job], missing="Invalid job id")
        words = dict(word.partition("=")[::2] for word in text.split())
        if "JobState" not in words:
            return JobState(GONE)
        return JobState(
            word=words["JobState"],
            reason="" if words.get("Reason") == "None" else words.get("Reason", ""),
            nodes=words.get("NodeList", "").replace("(null)", ""),
            partition=words.get("Partition", ""),
            exclusive=words.get("OverSubscribe", words.get("Shared", "")) in ("NO", "EXCLUSIVE"),
            restarts=int(words.get("Restarts", "0")),
        )

    def address(self, node: str) -> str:
        """Where a node is reached by the others; its name, where Slurm says no more."""
        text = self._ask(["scontrol", "--oneliner", "show", "node", node], missing="not found")
        words = dict(word.partition("=")[::2] for word in text.split())
        return words.get("NodeAddr") or node

    def cancel(self, jobs: Sequence[str], *, at_once: bool = False) -> None:
        """End jobs: SIGTERM, and SIGKILL after the site's KillWait; `at_once`: SIGKILL first."""
        if not jobs:
            return
        if at_once:
            self._ask(["scancel", "--signal=KILL", "--full", *jobs], missing="Kill job error")
        self._ask(["scancel", *jobs], missing="Kill job error")

    def running(self, name: str) -> tuple[str, ...]:
        """The comments of this user's jobs of a name that wait or run."""
        words = ["squeue", "--noheader", "--me", "--name", name, "--format", "%k"]
        return tuple(sorted(filter(None, self._ask(words).split())))

    def _ask(self, words: Sequence[str], missing: str = "") -> str:
        status, said, complaint = self._run(words)
        tolerated = missing and missing.lower() in complaint.lower()
        if status == 0 or (tolerated and "contact" not in complaint.lower()):
            return said
        raise ClusterUnreachable(
            "the cluster's controller does not answer",
            why=f"{words[0]} ended with {status}: {complaint.strip() or said.strip() or 'no word'}",
            next_step="`scontrol ping` says whether it is up; SLURM_CONF names another"
            " configuration. Jobs go on without it: narrowgauge attach RUN",
        )

    def _command(self, words: Sequence[str]) -> tuple[int, str, str]:
        try:
            done = subprocess.run(
                list(words), env=self._env, capture_output=True, text=True,
                timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise ClusterUnreachable(
                f"there is no {words[0]} on this host",
                why="Slurm's commands are on the login nodes of a cluster",
                next_step="log in to one, or choose another --executor",
            ) from error
        except subprocess.TimeoutExpired:
            return 124, "", f"no answer in {_TIMEOUT_S} s"
        return done.returncode, done.stdout, done.stderr


def refused(complaint: str) -> ClusterRefused | ClusterUnreachable:
    """What sbatch said when it took nothing, as an error with a way out."""
    lines = [
        line.removeprefix("sbatch: ").removeprefix("error: ") for line in complaint.split("\n")
    ]
    why = "\n".join(filter(None, lines))
    if "contact slurm controller" in why.lower() or "connection refused" in why.lower():
        return ClusterUnreachable(
            "the cluster's controller does not answer",
            why=why,
            next_step="`scontrol ping` says whether it is up; nothing was submitted",
        )
    hint = next((hint for sign, hint in _HINTS if sign in why.lower()), "")
    return ClusterRefused("Slurm did not take the job", why=why, next_step=hint)
