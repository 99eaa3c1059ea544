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
from pathlib import Path

from narrowgauge.container import docker_run_words
from narrowgauge.errors import (
    Busy,
    DataCorrupt,
    DockerUnavailable,
    Interrupted,
    NarrowgaugeError,
)
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
from narrowgauge.fleet.errors import BoardUnreachable, HostKeyRefused, LinkCut
from narrowgauge.fleet.guard import Guards
from narrowgauge.fleet.leases import holder_text, left_note
from narrowgauge.fleet.link import Link, Patience
from narrowgauge.fleet.seat import Seat, board_of, plan_on
from narrowgauge.fleet.sending import pack_inputs, sha256_bytes
from narrowgauge.fleet.watching import Arrival, Watching, offsets
from narrowgauge.plan import Places, container_exceptions
from narrowgauge_contract.events import Event, EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import BoardFacts

__all__ = ["SSH", "SshExecutor"]

SSH = "ssh"
#: How often a run whose files arrived changed is asked for them again.
_TRIES = 3
_BUSY_WAIT_S = 2.0
#: Connections in a row that end so soon, and bring nothing, before that is taken to be for good.
_FRUITLESS = 10
_BRIEF_S = 20.0


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
        stopped: Callable[[], bool] = lambda: False,
        begun: Callable[[str], None] | None = None,
    ) -> None:
        self._env = env
        self._link = link
        self._seat = seat
        self._patience = patience or (link.patience if link is not None else Patience())
        self._wait = wait
        self._say = say
        self._stopped = stopped
        self._tell_begun = begun
        self._live: dict[str, Handle] = {}
        self._guards = Guards()
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
        plan = plan_on(seat, job, home, places.data is not None)
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
        self._arrivals[job.run_id] = Arrival(places.folder)
        try:
            self._begin(handle, words, payload)
        except BaseException:
            self._guards.release(job.run_id)
            raise
        try:
            handle = self._started(seat, handle, places.folder)
        except BaseException:
            # The caller takes what this raises for a run that never began.
            try:
                self.discard(handle)
            finally:
                self._close(handle)
                self._guards.release(job.run_id)
            raise
        self._live[job.run_id] = handle
        if self._tell_begun is not None:
            self._tell_begun(job.run_id)
        return handle

    def _started(self, seat: Seat, handle: Handle, folder: Path) -> Handle:
        """The handle with what is known since the run began, kept."""
        arrival = self._arrivals[handle.run_id]
        for left in arrival.notes:
            self._say(left_note(seat.board.name, left))
        clock = self._link_of(None).clock or seat.state.clock
        board = self._board_facts(seat, clock)
        handle = dataclasses.replace(handle, cache_cold=arrival.cold, board=board)
        save(folder / "handle.json", handle)
        return handle

    def kill_all(self) -> None:
        """End every run of this executor at once; whoever watches them sees them end."""
        for handle in list(self._live.values()):
            try:
                self.cancel(handle, timeout_s=0)
            except NarrowgaugeError as error:
                self._say(f"{handle.run_id} cannot be killed now: {error.what}")

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        """The events as they arrive. A connection that is cut is tried again for a while; raises
        BoardUnreachable when that was in vain. The run goes on meanwhile."""
        try:
            yield from self._stream(handle, out)
        except NarrowgaugeError:
            self._close(handle)
            self._guards.release(handle.run_id)  # for whoever attaches to it next
            raise

    def _stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        arrival = self._arrival(handle, out.parent)
        tail = EventTail(arrival.events)
        tries = fruitless = 0
        while not arrival.complete:
            watching = self._watching.get(handle.run_id) or self._resume(handle, arrival)
            here, since = arrival.bytes_here(), time.monotonic()
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
                idle = arrival.bytes_here() <= here and time.monotonic() - since < _BRIEF_S
                fruitless = fruitless + 1 if idle else 0
                if fruitless >= _FRUITLESS:
                    raise watching.failure or _damaged(handle, arrival)
                time.sleep(min(0.2 * fruitless, _BUSY_WAIT_S))
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
        self._live.pop(handle.run_id, None)
        self._guards.release(handle.run_id, dest)
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
                self._pause(_BUSY_WAIT_S)
                if self._stopped():
                    raise Interrupted(f"stopped while waiting: {error.what}") from error
            except LinkCut as cut:
                old = self._watching[handle.run_id].followed
                self._close(handle)
                try:
                    self._recover(handle, cut)
                    return
                except LinkCut:
                    if not old:
                        raise
                # That connection was open since the board was asked, and nothing of the run is
                # there: another may do.
                self._arrivals[handle.run_id] = Arrival(self._arrivals[handle.run_id].folder)
            except BaseException:
                self._close(handle)
                raise

    def _recover(self, handle: Handle, cut: LinkCut) -> None:
        """The connection was cut before the board said that the run goes on: perhaps it does."""
        arrival = self._arrivals[handle.run_id]
        try:
            self._resume(handle, arrival).until_started()
        except (BoardUnreachable, HostKeyRefused, Interrupted) as error:
            if arrival.code == "gone":
                raise cut from error
            # Nobody knows, so its folder and handle must stay: whoever watches it finds out.
            self._say(f"{handle.run_id}: the connection was cut as it began; perhaps it goes on")
            return
        self._say(f"{handle.run_id}: the connection was cut as it began; it goes on")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stopped():
            time.sleep(min(POLL_S, seconds))

    def _open(self, handle: Handle, verb: str, words: list[str], payload: bytes) -> Watching:
        self._guards.take(handle.run_id, self._arrivals[handle.run_id].folder)
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
        arrival.started = arrival.behind = False
        while True:
            have, files = offsets(arrival)
            payload = files.encode("utf-8", errors="surrogateescape")
            words = [
                identity["home"],
                identity["container"],
                identity["device"],
                identity["leases"],
                handle.run_id,
                str(have),
                str(len(payload)),
            ]
            watching = self._open(handle, "watch", words, payload)
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
                if self._stopped():
                    raise Interrupted(
                        f"stopped while the board {self._link_of(handle).board.name} was away",
                        why=error.what,
                        next_step=f"the run may go on: narrowgauge attach {handle.run_id}",
                    ) from error
            self._pause(pause)
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


def _damaged(handle: Handle, arrival: Arrival) -> DataCorrupt:
    return DataCorrupt(
        f"{', '.join(arrival.wrong)} of {handle.run_id} arrived changed {_TRIES} times",
        why="the sums are not those that the board has; nothing was removed there",
        next_step=f"narrowgauge attach {handle.run_id} asks again",
    )
