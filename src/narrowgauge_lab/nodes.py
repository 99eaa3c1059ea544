"""Several machines that run one job together: one lab on each, which meet by torchrun's variables.

    torchrun --nnodes 2 --nproc-per-node 1 … -m narrowgauge_lab run EXPERIMENT -p nproc=2 …

Node 0 decides which row comes next and records it; the others follow, and what they write is in a
folder of their own, and no record. Each node forks its own processes of a row (`distributed`), so
`-p nproc` is per node. They speak through a store (torch's TCPStore) that outlives the rows: that
of torchrun's agent, or one that node 0 forks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

from narrowgauge_contract.codec import encode
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, NotApplicableError, UsageError
from narrowgauge_contract.job import Job, RowPlan
from narrowgauge_lab.forking import die_with, fork

__all__ = ["ALONE", "Company", "Meeting", "Nodes", "NodesApartError", "nodes_of", "own_folder"]

#: How long nodes wait for each other at the start: images are pulled, queues differ.
_HELLO_S = 300.0
#: How long node 0 waits for the others to have heard that all is done.
_GOODBYE_S = 10.0
_POLL_S = 0.1
_END = -1
# unverified: rows over two real machines, NCCL across them | one was at hand | run --node there
#: The parameter by which an experiment says that its rows can be spread.
_SPREADS = "nproc"


class NodesApartError(NarrowgaugeError):
    """The machines that were to run one job did not find each other, or lost each other."""

    exit_code = ExitCode.NODES_APART


@dataclasses.dataclass(frozen=True)
class Nodes:
    """This machine among those of a job. `served`: torchrun's agent holds the store already;
    `generation` tells its restarts apart."""

    rank: int = 0
    count: int = 1
    address: str = ""
    port: int = 0
    served: bool = False
    generation: str = ""

    @property
    def leads(self) -> bool:
        """Whether this machine decides and records."""
        return self.rank == 0


ALONE = Nodes()


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where the processes of one row find each other, on whatever machine of `nodes` they are."""

    nodes: Nodes
    name: str

    def store(self) -> Any:
        """A connection of the calling process's own."""
        import torch.distributed as dist

        return dist.PrefixStore(self.name, connect(self.nodes))

    def exchange(self, store: Any, what: str, mine: Dict[str, Any]) -> List[Dict[str, Any]]:
        """What every node says under a name, by node; waits for all. Raises NodesApartError."""
        store.set(f"{what}-{self.nodes.rank}", json.dumps(mine))
        said = []
        for rank in range(self.nodes.count):
            try:
                said.append(json.loads(store.get(f"{what}-{rank}").decode("utf-8")))
            except (RuntimeError, ValueError) as error:
                raise _apart(
                    f"node {rank} of {self.nodes.count} did not come to the row", error
                ) from error
        return said


def nodes_of(env: Mapping[str, str]) -> Nodes:
    """Which machine this is, by the variables of torchrun or of our executors; ALONE without them.

    Raises UsageError where torchrun started several labs on one machine, or says too little.
    """
    size = env.get("WORLD_SIZE", "1")
    if "RANK" not in env or size == "1":
        return ALONE
    if env.get("LOCAL_WORLD_SIZE", "") != "1":
        raise UsageError(
            f"torchrun started {size} labs, and one lab a machine records one run",
            why="the lab forks each row into processes of its own, with RANK, LOCAL_RANK and "
            "WORLD_SIZE as torchrun sets them, and ends and records them together",
            next_step=f"on one machine, without torchrun: python3 -m narrowgauge_lab run … "
            f"-p nproc={size}; on several: torchrun --nnodes N --nproc-per-node 1 … -p nproc=M",
        )
    try:
        rank, count = int(env["RANK"]), int(size)
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            "the machines of this job cannot find each other",
            why=f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: {error} is missing or no number",
            next_step="torchrun sets them, and so do the executors",
        ) from error
    if not 0 <= rank < count:
        raise UsageError(f"RANK={rank} is none of the {count} machines of WORLD_SIZE")
    words = (env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    served = env.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    return Nodes(rank, count, address, port, served, "-".join(words))


def own_folder(out: Path, nodes: Nodes) -> Path:
    """Where a node that does not record writes: a new folder below `out`, which they may share."""
    name = f"node-{nodes.rank}"
    number = 0
    while (out / (name if not number else f"{name}.{number}")).exists():
        number += 1
    return out / (name if not number else f"{name}.{number}")


class Company:
    """The nodes of a job, from hello to goodbye; a context manager, which never leaves a process.

    In the lab's parent: it talks to the store, and runs no operation of torch.
    """

    def __init__(self, nodes: Nodes, job: Job, hashes: Mapping[str, str]) -> None:
        """`hashes`: what has to be the same everywhere, by name. Raises NotApplicableError where
        the experiment cannot be spread."""
        if _SPREADS not in job.experiment_spec().parameters:
            raise NotApplicableError(
                f"{job.experiment} runs on one machine",
                why=f"it has no parameter {_SPREADS}, so each of {nodes.count} would run all of it",
                next_step="one machine; or an experiment that trains, such as resnet",
            )
        self.nodes = nodes
        self._hashes = {**hashes, "the job": _digest(job)}
        self._server = 0
        self._store: Any = None
        self._step = 0
        self._ended = False

    def __enter__(self) -> Company:
        if self.nodes.leads and not self.nodes.served:
            self._server = _serve(self.nodes)
        try:
            self._hello()
        except UsageError:
            self._wait_for("met", self.nodes.count)  # or the others would only see it vanish
            self._stop_server()
            raise
        except BaseException:
            self._stop_server()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.nodes.leads:
                self._announce(_END)
                self._wait_for("goodbye", self.nodes.count - 1)
            else:
                self._store.add("goodbye", 1)
        except RuntimeError:
            return  # whoever held the store is gone, and with it those who could have listened
        finally:
            self._stop_server()

    def lead(self, plan: RowPlan) -> Meeting:
        """Tell the others which row comes next, and where its processes meet.

        Raises NodesApartError where a node has left."""
        if self._store.add("goodbye", 0):
            raise NodesApartError(
                "a node of this job has ended before the job",
                why=f"row {plan.index} needs all {self.nodes.count}",
                next_step="its own log says why; then --resume goes on with what is missing",
            )
        return self._announce(plan.index)

    def follow(self, job: Job) -> Iterator[Tuple[RowPlan, Meeting]]:
        """The rows that node 0 announces, as it does. Raises NodesApartError when it is gone."""
        plans = {plan.index: plan for plan in job.rows}
        while True:
            self._step += 1
            key = f"step-{self._step}"
            try:
                while not self._store.add(f"{key}-said", 0):
                    time.sleep(_POLL_S)
                index = int(self._store.get(key).decode("ascii"))
            except RuntimeError as error:
                raise _apart("node 0 is gone", error) from error
            if index == _END:
                return
            yield plans[index], self._meeting()

    def _announce(self, index: int) -> Meeting:
        self._step += 1
        if not self._ended:
            self._store.set(f"step-{self._step}", str(index))
            self._store.add(f"step-{self._step}-said", 1)
        self._ended = index == _END
        return self._meeting()

    def _meeting(self) -> Meeting:
        return Meeting(self.nodes, f"{self._prefix}/step-{self._step}")

    @property
    def _prefix(self) -> str:
        return f"narrowgauge-{self.nodes.generation}"

    def _hello(self) -> None:
        """Wait for all, and see that they are to do the same. Raises NodesApartError, UsageError"""
        import torch.distributed as dist

        try:
            self._store = dist.PrefixStore(self._prefix, connect(self.nodes))
        except RuntimeError as error:
            where = f"{self.nodes.address}:{self.nodes.port}"
            raise _apart(f"node 0 does not answer at {where}", error) from error
        mine = {"host": socket.gethostname(), "has": self._hashes}
        said = Meeting(self.nodes, "").exchange(self._store, "hello", mine)
        self._store.add("met", 1)
        for rank, other in enumerate(said):
            differing = [k for k, v in self._hashes.items() if other["has"].get(k) != v]
            if differing:
                raise UsageError(
                    f"node {rank} ({other['host']}) is to do something else than this one",
                    why=f"{', '.join(differing)} differ",
                    next_step="start all nodes with the same words, source and environment",
                )

    def _wait_for(self, what: str, count: int) -> None:
        """Until so many nodes have said it, or the time is up: one that has died says nothing."""
        deadline = time.monotonic() + _GOODBYE_S
        while self.nodes.leads and time.monotonic() < deadline:
            if self._store.add(what, 0) >= count:
                return
            time.sleep(_POLL_S / 2)

    def _stop_server(self) -> None:
        if self._server:
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)
            self._server = 0


def connect(nodes: Nodes) -> Any:
    """A client of the nodes' store; waits for the store. RuntimeError where it does not come."""
    import torch.distributed as dist

    return dist.TCPStore(nodes.address, nodes.port, 1, False, timedelta(seconds=_HELLO_S))


def _serve(nodes: Nodes) -> int:
    """Fork the process that holds the store, for as long as this one lives; its pid."""
    import torch.distributed as dist

    parent = os.getpid()
    ready, told = os.pipe()
    child = fork()
    if child == 0:
        os.close(ready)
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # the rows' last words go through it
            die_with(parent)
            store = dist.TCPStore(nodes.address, nodes.port, 1, True, timedelta(seconds=30))
            os.write(told, b"+")
            while store is not None:
                time.sleep(3600)
        except BaseException as error:
            os.write(told, str(error).encode("utf-8", "replace")[:2000] or b"?")
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(ready, "rb") as stream:
        word = os.read(stream.fileno(), 2000)
    if word != b"+":
        os.waitpid(child, 0)
        raise NodesApartError(
            f"node 0 cannot listen at port {nodes.port}",
            why=word.decode("utf-8", "replace").splitlines()[0] if word else "its process died",
            next_step="another port, if this one is taken: MASTER_PORT, or --node …:PORT",
        )
    return child


def _apart(what: str, error: BaseException) -> NodesApartError:
    return NodesApartError(
        what,
        why=(str(error).splitlines() or [type(error).__name__])[0],
        next_step="see that every node was started, that their logs tell of no error, and that the "
        "address of node 0 is reached from all of them",
    )


def _digest(job: Job) -> str:
    """Of what has to be the same; the run's id and target are each machine's own."""
    same = {
        "experiment": job.experiment, "profile": job.profile, "seed": job.seed,
        "rows": encode(job.rows), "data": job.data_sets, "plan": job.plan,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode("utf-8")).hexdigest()
