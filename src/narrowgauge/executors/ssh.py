"""The ssh executor: containers on a board elsewhere, one command of its own shell for each run.

That one command takes the lease, checks the image, starts the container, sends the events, and in
the end everything else (ADR 9). Where its connection is cut it is taken up again; where that takes
too long, the run goes on and `attach` finds it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.container import LABEL_DEVICE, ContainerPlan, docker_run_words
from narrowgauge.errors import Busy, DataCorrupt, DockerUnavailable, NarrowgaugeError
from narrowgauge.executors.base import (
    ENDING_FILE,
    HANDLE_FORMAT,
    POLL_S,
    STOP_TIMEOUT_S,
    Ending,
    ExecutorFacts,
    Handle,
    save,
)
from narrowgauge.fleet.clock import Clock, require_clock
from narrowgauge.fleet.errors import BoardUnreachable, LinkCut
from narrowgauge.fleet.facts import BoardState
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.leases import holder_text, left_note
from narrowgauge.fleet.link import Link, Patience
from narrowgauge.fleet.sending import pack_inputs, sha256_bytes
from narrowgauge.fleet.watching import Arrival, Watching, offsets
from narrowgauge.plan import (
    Places,
    User,
    cache_volume,
    container_exceptions,
    container_name,
    plan_container,
)
from narrowgauge.selection import choose_accelerator
from narrowgauge.targets import Target
from narrowgauge_contract.events import Event, EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import BoardFacts, ImageFacts

__all__ = ["SSH", "Seat", "SshExecutor", "board_of"]

SSH = "ssh"
#: How often a run whose files arrived changed is asked for them again.
_TRIES = 3
_BUSY_WAIT_S = 2.0


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


class SshExecutor:
    """Runs jobs on one device of a board. Without a `seat` it only watches and collects."""

    name = SSH

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        link: Link | None = None,
        seat: Seat | None = None,
        patience: Patience | None = None,
        wait: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self._env = env
        self._link = link
        self._seat = seat
        self._patience = patience or (link.patience if link is not None else Patience())
        self._wait = wait
        self._say = say
        self._arrivals: dict[str, Arrival] = {}
        self._watching: dict[str, Watching] = {}

    def probe(self) -> ExecutorFacts:
        return self._seat.state.executor if self._seat is not None else ExecutorFacts(SSH, "")

    def prepare(self) -> None:
        """Nothing: a seat is made of what is there already."""

    def start(self, job: Job, places: Places) -> Handle:
        """Send the inputs, take the lease, start the container. Raises Busy unless this waits,
        WrongImage, ContainerRefused, DiskFull, BoardUnreachable."""
        seat = self._seat
        assert seat is not None, "this executor only watches"
        home = f"{seat.data_folder}/runs/{job.run_id}"
        plan = self._plan(seat, job, home, places.data is not None)
        payload = pack_inputs(job, places)
        handle = Handle(
            format=HANDLE_FORMAT,
            executor=SSH,
            run_id=job.run_id,
            identity={
                "board": {
                    "name": seat.board.name,
                    "address": seat.board.address,
                    "user": seat.board.user,
                    "port": seat.board.port,
                    "ssh_config": seat.board.ssh_config,
                },
                "device": seat.device,
                "leases": seat.leases,
                "home": home,
                "container": plan.name,
            },
            image=seat.image,
            engine=seat.state.executor.version,
            exceptions=container_exceptions(plan),
            board=self._board_facts(seat, self._link_of(None).clock or seat.state.clock),
        )
        # Before the start: a launcher killed right after it must not lose the container.
        save(places.folder / "handle.json", handle)
        words = [
            home,
            plan.name,
            seat.device,
            seat.leases,
            holder_text(job, places.folder, home),
            seat.image_there,
            plan.cache_volume,
            str(len(payload)),
            sha256_bytes(payload),
            "--",
            *docker_run_words(plan)[1:],
        ]
        arrival = Arrival(places.folder)
        self._arrivals[job.run_id] = arrival
        self._begin(handle, words, payload)
        for left in arrival.notes:
            self._say(left_note(seat.board.name, left))
        clock = self._link_of(None).clock or seat.state.clock
        handle = dataclasses.replace(
            handle, cache_cold=arrival.cold, board=self._board_facts(seat, clock)
        )
        save(places.folder / "handle.json", handle)
        return handle

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        """The events as they arrive. A connection that is cut is tried again for a while; raises
        BoardUnreachable when that was in vain. The run goes on meanwhile."""
        arrival = self._arrival(handle, out.parent)
        tail = EventTail(arrival.events)
        tries = 0
        while not arrival.complete:
            watching = self._watching.get(handle.run_id) or self._resume(handle, arrival)
            while watching.alive(POLL_S):
                watching.beat(self._patience.pulse)
                yield from tail.poll()
                yield None
            yield from tail.poll()
            self._raise_or_retry(handle, watching, arrival)
            if not arrival.complete:
                self._watching.pop(handle.run_id, None)
                watching.close()
                tries += bool(arrival.wrong)
                if tries >= _TRIES:
                    raise _damaged(handle, arrival)
        yield from tail.poll()

    def alive(self, handle: Handle) -> bool:
        answers = self._link_of(handle).call("alive", [handle.identity["container"]])
        return any(a.word == "alive" and a.text == "true" for a, _ in answers)

    def cancel(self, handle: Handle, timeout_s: int = STOP_TIMEOUT_S) -> None:
        self._link_of(handle).call("stop", [handle.identity["container"], str(timeout_s)])

    def collect(self, handle: Handle, dest: Path) -> Ending:
        """The ending; whatever has not arrived is fetched first. Only then the board forgets it."""
        arrival = self._arrival(handle, dest)
        for _ in self.stream(handle, arrival.out):
            pass  # to the end, where it was left before
        ending = arrival.ending()
        save(dest / ENDING_FILE, ending)
        watching = self._watching.pop(handle.run_id, None)
        if watching is None:
            self.discard(handle)
            return ending
        try:
            watching.remove()
        except LinkCut:
            self.discard(handle)
        # The board removes it in its own time; the connection's process ends by itself.
        threading.Thread(target=watching.close, daemon=True).start()
        return ending

    def discard(self, handle: Handle) -> None:
        words = [handle.identity["home"], handle.identity["container"]]
        try:
            self._link_of(handle).call("discard", words)
        except BoardUnreachable as error:
            # Everything of the run is here; what is left there is only room on a disk.
            self._say(f"{handle.run_id} is collected, but not removed from the board: {error.what}")

    def running(self) -> tuple[str, ...]:
        """The ids of our runs that go on on this board, whoever started them."""
        answers = self._link_of(None).call("runs")
        fields = [answer.fields(2) for answer, _ in answers if answer.word == "run"]
        return tuple(sorted(run for run, state in fields if state == "running"))

    def _begin(self, handle: Handle, words: list[str], payload: bytes) -> None:
        """Start the run's command; where another run is in the way, again until it is not."""
        told = False
        while True:
            try:
                self._open(handle, "run", words, payload).until_started()
                return
            except Busy as error:
                self._close(handle)
                if not self._wait:
                    raise
                if not told:
                    self._say(f"waiting: {error.what}")
                    told = True
                time.sleep(_BUSY_WAIT_S)
            except LinkCut as cut:
                self._close(handle)
                self._recover(handle, cut)
                return
            except BaseException:
                self._close(handle)
                raise

    def _recover(self, handle: Handle, cut: LinkCut) -> None:
        """The connection was cut before the board said that the run goes on: perhaps it does."""
        arrival = self._arrivals[handle.run_id]
        try:
            self._resume(handle, arrival).until_started()
        except NarrowgaugeError as error:
            if arrival.code == "gone":
                raise cut from error
            raise
        self._say(f"{handle.run_id}: the connection was cut as it began; it goes on")

    def _open(self, handle: Handle, verb: str, words: list[str], payload: bytes) -> Watching:
        link = self._link_of(handle)
        channel = link.open(verb, words)
        watching = Watching(channel, self._arrivals[handle.run_id], link.board.name)
        self._watching[handle.run_id] = watching
        try:
            channel.send(payload)
        except LinkCut:
            pass  # what the board or ssh said of it is read by the thread that watches
        return watching

    def _resume(self, handle: Handle, arrival: Arrival) -> Watching:
        """Take a run up again, until it answers or `Patience.away` is over."""
        identity = handle.identity
        deadline = time.monotonic() + self._patience.away
        pause = 0.2
        arrival.started = False
        while True:
            have, files = offsets(arrival)
            words = [
                identity["home"],
                identity["container"],
                identity["device"],
                identity["leases"],
                handle.run_id,
                str(have),
                files,
            ]
            watching = self._open(handle, "watch", words, b"")
            try:
                watching.until_started()
                return watching
            except BoardUnreachable as error:
                self._close(handle)
                if arrival.code == "gone":
                    arrival.complete = True
                    return watching
                if time.monotonic() > deadline:
                    error.next_step = (
                        f"the run goes on; when the board is back: narrowgauge attach"
                        f" {handle.run_id}\n{error.next_step}"
                    )
                    raise
            time.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _raise_or_retry(self, handle: Handle, watching: Watching, arrival: Arrival) -> None:
        """Judge a connection that has ended: in order, cut (try again), or for good."""
        if arrival.code == "lost":
            raise DockerUnavailable(
                f"the engine of the board {self._link_of(handle).board.name} stopped answering",
                why="no answer for a minute",
                next_step=f"when it is back: narrowgauge attach {handle.run_id}",
            )
        if watching.failure is None or arrival.complete:
            return
        if not isinstance(watching.failure, BoardUnreachable):
            raise watching.failure
        self._say(f"{handle.run_id}: the connection is cut; trying again, the run goes on")

    def _close(self, handle: Handle) -> None:
        watching = self._watching.pop(handle.run_id, None)
        if watching is not None:
            watching.close()

    def _arrival(self, handle: Handle, folder: Path) -> Arrival:
        return self._arrivals.setdefault(handle.run_id, Arrival(folder))

    def _link_of(self, handle: Handle | None) -> Link:
        if self._link is None:
            assert handle is not None, "this executor has no board of its own"
            self._link = Link(board_of(handle), self._env, self._patience)
        return self._link

    def _board_facts(self, seat: Seat, clock: Clock) -> BoardFacts:
        require_clock(seat.board.name, clock)
        board = seat.board
        return BoardFacts(board.name, board.address, seat.device, clock.skew_s, clock.bound_s)

    def _plan(self, seat: Seat, job: Job, home: str, reads_data: bool) -> ContainerPlan:
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


def _damaged(handle: Handle, arrival: Arrival) -> DataCorrupt:
    return DataCorrupt(
        f"{', '.join(arrival.wrong)} of {handle.run_id} arrived changed {_TRIES} times",
        why="the sums are not those that the board has; nothing was removed there",
        next_step=f"narrowgauge attach {handle.run_id} asks again",
    )
