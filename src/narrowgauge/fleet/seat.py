"""One device of one board as a place for runs, and the container that a job gets there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.container import LABEL_DEVICE, ContainerPlan
from narrowgauge.executors.base import Handle
from narrowgauge.fleet.facts import BoardState
from narrowgauge.fleet.hosts import Board
from narrowgauge.plan import Places, User, cache_volume, container_name, plan_container
from narrowgauge.selection import choose_accelerator
from narrowgauge.targets import Target
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import ImageFacts

__all__ = ["Seat", "board_of", "plan_on"]


@dataclass(frozen=True)
class Seat:
    """One device of one board, ready for runs: what it is, its target, and its image there, whose
    id may be another than here between two kinds of image store."""

    board: Board
    device: str
    state: BoardState
    target: Target
    image: ImageFacts
    image_there: str

    @property
    def data_folder(self) -> str:
        return self.state.folder(self.board.data)

    @property
    def leases(self) -> str:
        return self.state.folder(self.board.leases)


def plan_on(seat: Seat, job: Job, home: str, reads_data: bool) -> ContainerPlan:
    """The container of a job on a seat; `home` is the run's folder there."""
    folder = Path(home)
    facts = seat.state.executor
    plan = plan_container(
        job,
        seat.target,
        image=seat.image_there,
        cache=cache_volume(
            seat.target.name, seat.image.content_tag or seat.image.digest, seat.state.uid
        ),
        places=Places(
            folder,
            folder / "experiments",
            Path(seat.data_folder, "data") if reads_data else None,
        ),
        user=User(seat.state.uid, seat.state.gid, seat.state.host.device_groups),
        accelerator=choose_accelerator(seat.target, facts.runtimes, facts.cdi),
    )
    assert plan.name == container_name(job.run_id)
    narrowed: dict[str, Any] = {}
    if seat.device.startswith("cpu"):
        narrowed["cpus"] = seat.device[3:]
    # unverified: a board's devices gpu0, gpu1 | no board with GPUs | name them in hosts.toml, run
    if seat.device.startswith("gpu"):
        narrowed["gpu"] = seat.device[3:]
    labels = (*plan.labels, (LABEL_DEVICE, seat.device))
    return dataclasses.replace(plan, labels=labels, **narrowed)


def board_of(handle: Handle) -> Board:
    """The board of a run that was started before, as it was reached then."""
    found = handle.identity["board"]
    return Board(
        name=found["name"],
        address=found["address"],
        user=found["user"],
        port=found["port"],
        ssh_config=found["ssh_config"],
    )
