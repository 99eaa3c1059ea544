"""Data-parallel processes of one row, and what they say to each other (torch.distributed).

    distributed.spread(ctx, nproc, body)    calls body(ctx, group) in each of `nproc` processes

The row's own process takes no part in it: it forks the ranks and records how they end (`ranks`).
Rank 0 speaks for the row; what the others record goes nowhere. They talk by NCCL on GPUs, one each,
and by gloo on CPUs, over the loopback interface and a file, since a run may have no network.
Where several machines run the row (`nodes`), each forks as many, and they meet by the nodes' store.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import tempfile
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import torch
import torch.distributed as dist

from narrowgauge_contract.errors import (
    ExperimentFileError,
    NarrowgaugeError,
    NotApplicableError,
    UsageError,
)
from narrowgauge_lab import facts, turns
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.network_interface import interface_towards
from narrowgauge_lab.nodes import Meeting
from narrowgauge_lab.profiling import profiler_of
from narrowgauge_lab.ranks import log_of, run_ranks

__all__ = ["ALONE", "Body", "Group", "spread"]

#: What rank 0 ran with, left for the process that records the row.
_SETTINGS = "settings.json"
_LOOPBACK = "lo"
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes that train one model. Every method that talks must be called by all of them, in
    the same order; in a group of one it does nothing.

    `backend`: nccl, gloo, or none for a group of one; `device`: where this rank's tensors are.
    """

    rank: int = 0
    size: int = 1
    backend: str = "none"
    device: torch.device = _CPU

    @property
    def speaks(self) -> bool:
        """Whether this process records what all have done."""
        return self.rank == 0

    def shard(self, indices: torch.Tensor) -> torch.Tensor:
        """This rank's part of what all share: consecutive, none longer than another by more than
        one, and empty for the last ranks where there is too little."""
        each, more = divmod(int(indices.shape[0]), self.size)
        first = self.rank * each + min(self.rank, more)
        return indices[first : first + each + (self.rank < more)]

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Put the sum over all ranks into `tensor`, which every rank has on its own device."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put what rank 0 has into the tensors of all."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def sum(self, values: Sequence[float]) -> List[float]:
        """The sums over all ranks of numbers; waits for the device."""
        if self.size == 1:
            return [float(value) for value in values]
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """The largest of what the ranks have; waits for the device."""
        return value if self.size == 1 else self._reduced([value], dist.ReduceOp.MAX)[0]

    def agree(self, text: str) -> bool:
        """Whether all ranks have the same text."""
        number = float(zlib.crc32(text.encode("utf-8")))
        return self.largest(number) == -self.largest(-number)

    def wait(self) -> None:
        """Until every rank is here, and what it has queued is done."""
        self.sum([0.0])

    def _reduced(self, values: Sequence[float], how: Any) -> List[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how)
        listed: List[float] = tensor.tolist()
        return listed


#: The one process of a row that is not spread.
ALONE = Group()

Body = Callable[[RowContext, Group], None]


def spread(ctx: RowContext, nproc: int, body: Body) -> None:
    """Call `body(ctx, group)` in `nproc` processes, with a GPU each where the row runs on one; 0:
    as many as there are GPUs. One process is this one, and nothing is forked. Where other machines
    run the row too, `nproc` is of each, and all are one group.

    To be called before the row has run any torch operation. Records `world_size`, and of more than
    one process `backend` and `rank_devices`, of more than one machine their names as `nodes`. A
    rank's log is a side file, where it has a line.
    Raises UsageError and NotApplicableError before anything starts, and what `run_ranks` raises.
    """
    on_gpu = ctx.device.type == "cuda"
    alone = ctx.meeting is None
    devices = _devices(ctx, nproc) if nproc != 1 or not alone else [ctx.device.type]
    here = nproc or len(devices)
    if here == 1 and alone:
        ctx.fact("world_size", 1)
        body(ctx, ALONE)
        return
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu and turns.sharing():
        raise UsageError(
            f"a row of {here} processes cannot share its GPUs with other runs",
            why="one that stands aside would keep the others of its row waiting on theirs",
            next_step=f"unset {turns.ENV}, and run nothing else there",
        )
    _require(ctx, here, backend)
    away = None if ctx.meeting is None else _Away(ctx.meeting, devices[:here])
    machines = [devices[:here]] if away is None else away.devices
    size = here * len(machines)
    ctx.fact("world_size", size)
    ctx.fact("backend", backend)
    ctx.fact("rank_devices", [name for machine in machines for name in machine])
    if away is not None:
        ctx.fact("nodes", away.hosts)
    threads = max(1, torch.get_num_threads() // here)
    place = _Place(here, size, backend, threads, ctx.meeting)
    with tempfile.TemporaryDirectory(prefix="narrowgauge-ranks-") as name:
        folder = Path(name)
        live = functools.partial(_live, ctx, body, folder, place)
        try:
            run_ranks(here, live, folder, ctx.out, str if away is None else away.failed)
        except NarrowgaugeError as error:
            if away is not None:
                away.tell(error)
            raise
        finally:
            # What is recorded of this process at the row's end is to be what the ranks ran with.
            torch.set_num_threads(threads)
            _take_settings(folder)
            _keep_logs(ctx, folder, here)


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the processes of a row on this machine share: how many they are here and in all."""

    here: int
    size: int
    backend: str
    threads: int
    meeting: Optional[Meeting]


class _Away:
    """The other machines of a row, as the process sees them that forks the ranks on this one."""

    def __init__(self, meeting: Meeting, devices: List[str]) -> None:
        """Meets them. Raises NodesApartError; UsageError where they have other numbers of ranks."""
        self._meeting = meeting
        self._store = meeting.store()
        mine = {"devices": devices, "host": socket.gethostname()}
        said = meeting.exchange(self._store, "row", mine)
        self.devices: List[List[str]] = [each["devices"] for each in said]
        self.hosts = [str(each["host"]) for each in said]
        counts = [len(each) for each in self.devices]
        if len(set(counts)) > 1:
            raise UsageError(
                "the machines of the row have different numbers of processes",
                why=", ".join(f"{h}: {n}" for h, n in zip(self.hosts, counts)),
                next_step=f"-p nproc={min(counts)}",
            )

    def failed(self) -> str:
        """What another machine said of its failure; empty: nothing. A lost store is one too."""
        try:
            if not self._store.add("failures", 0):
                return ""
            return str(self._store.get("failed").decode("utf-8"))
        except RuntimeError as error:
            return f"the other machines are out of reach: {str(error).splitlines()[0]}"

    def tell(self, error: NarrowgaugeError) -> None:
        """Say that this machine has failed, unless another was first: then why is added here."""
        rank, count = self._meeting.nodes.rank, self._meeting.nodes.count
        try:
            if self._store.add("failing", 1) == 1:
                text = f"node {rank} of {count} ({self.hosts[rank]}): {error.what}"
                self._store.set("failed", text)
                self._store.add("failures", 1)
                return
        except RuntimeError:
            return  # it is what ended this machine's part
        first = self.failed()
        if first and first != error.what:
            error.why = "\n".join(filter(None, [error.why, f"before it, {first}"]))


def _devices(ctx: RowContext, nproc: int) -> List[str]:
    """The name of each device that a rank may have. Asked in a child: after asking here, no process
    that is forked from this one could use CUDA."""
    if ctx.device.type != "cuda":
        return ["cpu"] * (nproc or 1)
    # A process that has only counted GPUs, as torch.cuda.is_available does, does not know that it
    # has: what it forks does.
    names: Optional[List[str]] = None
    if not torch.cuda.is_initialized():
        names = facts.in_child(_gpu_names)
    if names is None:
        raise ExperimentFileError(
            "the experiment used the GPU before it spread its row over processes",
            why="a process that has begun to use CUDA or counted GPUs cannot fork one that uses it",
            next_step="call distributed.spread first, and the GPU in its body",
        )
    if nproc > len(names):
        raise NotApplicableError(
            f"-p nproc={nproc} needs a GPU for each process, and there are {len(names)}",
            why=", ".join(names),
            next_step=f"-p nproc={len(names)}; -p nproc=0 takes as many as there are",
        )
    return names


def _gpu_names() -> Optional[List[str]]:
    """None where the process that forked this one has made CUDA useless to it."""
    if torch.cuda._is_in_bad_fork():
        return None
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _require(ctx: RowContext, size: int, backend: str) -> None:
    profiler = profiler_of(ctx.parameters)
    if profiler != "none":
        raise UsageError(
            f"-p profile={profiler} and -p nproc={size} do not go together",
            why="a profiler watches the row's own process, which only waits for the others",
            next_step="-p nproc=1, or no profiler",
        )
    there = dist.is_available()
    if there and backend == "nccl":
        there = dist.is_nccl_available()
    if not there:
        raise NotApplicableError(
            f"-p nproc={size}: this torch has no {backend}",
            why=f"torch {torch.__version__} was built without it",
            next_step="-p nproc=1",
        )


def _live(ctx: RowContext, body: Body, folder: Path, place: _Place, local: int) -> None:
    """What a rank does, in its own process. `local`: its number on this machine."""
    meeting = place.meeting
    rank = local if meeting is None else meeting.nodes.rank * place.here + local
    torch.set_num_threads(place.threads)
    # As torchrun sets them, for libraries that look.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local))
    os.environ.update(WORLD_SIZE=str(place.size), LOCAL_WORLD_SIZE=str(place.here))
    # In a container without network the host's name has no address, and this is all there is.
    interface = _LOOPBACK if meeting is None else interface_towards(meeting.nodes.address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    device = ctx.device
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if meeting is None:
        store = f"file://{folder / 'store'}"
        dist.init_process_group(place.backend, init_method=store, rank=rank, world_size=place.size)
    else:
        dist.init_process_group(
            place.backend, store=meeting.store(), rank=rank, world_size=place.size
        )
    group = Group(rank, place.size, place.backend, device)
    group.wait()  # connections are made at the first word, which no timing should contain
    mine = ctx.for_rank(rank, device, folder / f"rank-{rank}")
    if meeting is not None:
        _share_checkpoint(mine, group, meeting, local)
    complete = False
    try:
        body(mine, group)
        complete = True
    finally:
        mine.finish(complete=complete)
    if local == 0:
        _leave_settings(folder)
    group.wait()
    dist.destroy_process_group()


def _share_checkpoint(ctx: RowContext, group: Group, meeting: Meeting, local: int) -> None:
    """Give every machine the checkpoint that rank 0 goes on from: it is where rank 0 records."""
    content = ctx.checkpoints.take() if group.speaks else b""
    size = torch.tensor([len(content)], dtype=torch.int64, device=group.device)
    group.broadcast_([size])
    count = int(size.item())
    data = torch.zeros(count, dtype=torch.uint8)
    if content:
        data = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
    data = data.to(group.device)
    if count:
        group.broadcast_([data])
    if not meeting.nodes.leads and local == 0:
        ctx.checkpoints.put(data.cpu().numpy().tobytes())
    group.wait()  # the others on this machine read the same file
    ctx.checkpoints.resume = count > 0


def _leave_settings(folder: Path) -> None:
    flags: Dict[str, bool] = {
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    (folder / _SETTINGS).write_text(json.dumps(flags), encoding="utf-8")


def _take_settings(folder: Path) -> None:
    if not (folder / _SETTINGS).is_file():
        return  # rank 0 did not come to its end
    flags = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    torch.backends.cudnn.benchmark = flags["benchmark"]
    torch.backends.cudnn.deterministic = flags["cudnn_deterministic"]
    if flags["deterministic"] != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(flags["deterministic"])  # imports half of torch


def _keep_logs(ctx: RowContext, folder: Path, size: int) -> None:
    """The logs that say something become side files of the row, now: it may be about to end."""
    for rank in range(size):
        log = log_of(folder, rank)
        if log.is_file() and log.stat().st_size > 0:
            kept = ctx.folder / log.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(log.read_bytes())
            ctx.add_side_file(kept)
