"""The docker executor: detached containers, found again by name, removed only once collected."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import docker
import requests.exceptions
from docker.errors import APIError, NotFound

from narrowgauge.container import LABEL_RUN, ContainerPlan, create_body
from narrowgauge.errors import DockerUnavailable, NarrowgaugeError
from narrowgauge.executors.base import (
    ENDING_FILE,
    HANDLE_FORMAT,
    LOG_LINES,
    POLL_S,
    STOP_TIMEOUT_S,
    Ending,
    ExecutorFacts,
    Handle,
    save,
)
from narrowgauge.executors.docker_client import (
    DOCKER,
    GoneError,
    ask,
    engine_facts,
    require_architecture,
)
from narrowgauge.executors.ending import ending_from, vanished
from narrowgauge.plan import Places, container_exceptions
from narrowgauge_contract.events import EVENTS_FILE, Event, EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import ImageFacts

__all__ = ["DockerExecutor", "PlanContainer"]

#: One `wait` request. It expires as a connection error, and so does one to a lost engine.
_WAIT_S = 60
_KILLED = 128 + 9
#: How long after a container's end its engine may still say that memory was what ended it.
_OOM_LATE_S = 3.0
#: How long an engine may be away (restarting) before the launcher gives up watching.
_ENGINE_AWAY_S = 30.0

#: Plans the container of one job: (job, places, image, what probe said).
PlanContainer = Callable[[Job, Places, ImageFacts, ExecutorFacts], ContainerPlan]


class DockerExecutor:
    """Runs jobs in containers of one image.

    `ensure_image` gives the image, building it where it is not there; `plan` gives a job's
    container. Both may be absent where runs are only watched and collected (`attach`).
    """

    name = DOCKER

    def __init__(
        self,
        client: docker.APIClient,
        *,
        ensure_image: Callable[[], ImageFacts] | None = None,
        plan: PlanContainer | None = None,
        needs_accelerator: bool = False,
    ) -> None:
        self._client = client
        self._ensure_image = ensure_image
        self._plan = plan
        self._needs_accelerator = needs_accelerator
        self._image: ImageFacts | None = None
        self._facts: ExecutorFacts | None = None

    def probe(self) -> ExecutorFacts:
        """The engine's version, asked once; where an accelerator is needed, what it offers too."""
        if self._facts is None:
            version = self._ask(self._client.version)
            info = self._ask(self._client.info) if self._needs_accelerator else {}
            self._facts = engine_facts(version, info)
        return self._facts

    def prepare(self) -> None:
        if self._image is None:
            assert self._ensure_image is not None, "this executor only watches"
            image = self._ensure_image()
            require_architecture(self._client, image.name)
            self._image = image

    def start(self, job: Job, places: Places) -> Handle:
        """Create, remember, start. A container whose start fails is removed."""
        self.prepare()
        assert self._image is not None
        assert self._plan is not None
        facts = self.probe()
        plan = self._plan(job, places, self._image, facts)
        cold = not self._has_volume(plan.cache_volume)
        made = self._ask(
            lambda: self._client.create_container_from_config(  # type: ignore[no-untyped-call]
                create_body(plan), name=plan.name
            )
        )
        handle = Handle(
            format=HANDLE_FORMAT,
            executor=self.name,
            run_id=job.run_id,
            identity={"container": made["Id"], "name": plan.name},
            image=self._image,
            engine=facts.version,
            cache_cold=cold,
            exceptions=container_exceptions(plan),
        )
        try:
            # Before the start: a launcher killed right after it must not lose the container.
            save(places.folder / "handle.json", handle)
            self._ask(lambda: self._client.start(made["Id"]))
        except BaseException:
            self._remove(made["Id"])
            raise
        return handle

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        """Tails the events file while a thread waits for the container's end."""
        container = handle.identity["container"]
        ended: queue.SimpleQueue[NarrowgaugeError | None] = queue.SimpleQueue()
        watch = threading.Thread(target=self._wait, args=(container, ended), daemon=True)
        watch.start()
        tail = EventTail(out / EVENTS_FILE)
        while watch.is_alive():
            yield from tail.poll()
            yield None
            watch.join(POLL_S)
        yield from tail.poll()
        failure = ended.get()
        if failure is not None:
            raise failure

    def alive(self, handle: Handle) -> bool:
        state = self._state(handle.identity["container"])
        return state is not None and bool(state.get("Running"))

    def cancel(self, handle: Handle, timeout_s: int = STOP_TIMEOUT_S) -> None:
        try:
            self._ask(lambda: self._client.stop(handle.identity["container"], timeout=timeout_s))
        except GoneError:
            return

    def collect(self, handle: Handle, dest: Path) -> Ending:
        """Exit code, OOM flag and the log's tail into `dest`; only then remove the container."""
        container = handle.identity["container"]
        ending = self._judge(container)
        save(dest / ENDING_FILE, ending)
        self.discard(handle)
        return ending

    def discard(self, handle: Handle) -> None:
        self._remove(handle.identity["container"])

    def running(self) -> tuple[str, ...]:
        """The run ids of our containers that run on this engine, whoever started them."""
        found = self._ask(
            lambda: self._client.containers(filters={"label": LABEL_RUN, "status": "running"})
        )
        return tuple(sorted(item["Labels"][LABEL_RUN] for item in found))

    def _judge(self, container: str) -> Ending:
        state = self._state(container)
        if state is None:
            return vanished("container", "it was removed from outside before it was collected")
        try:
            log = self._ask(lambda: self._client.logs(container, tail=LOG_LINES))
        except GoneError:
            return vanished("container", "it was removed from outside before it was collected")
        log_tail = log.decode("utf-8", errors="replace")
        if state.get("Status") == "created":
            return vanished("container", "it was made but never started", log_tail)
        status = int(state["ExitCode"])
        return ending_from(
            status,
            out_of_memory=bool(state.get("OOMKilled"))
            or (status == _KILLED and self._said_oom(container, state)),
            log_tail=log_tail,
            what="container",
        )

    def _said_oom(self, container: str, state: Mapping[str, Any]) -> bool:
        """Whether the engine's events say that memory ended a container that was killed.

        On a busy host the kernel's word may reach the engine after the exit; the state's flag then
        stays false for ever (Docker 20.10). Waits for it, unless somebody sent the signal.
        """
        begin, end = _seconds(state["StartedAt"]), _seconds(state["FinishedAt"])
        if "kill" in self._happened(container, begin, end):
            return False
        return "oom" in self._happened(container, begin, end + _OOM_LATE_S)

    def _happened(self, container: str, since: float, until: float) -> list[str]:
        """What the engine did with a container; answers once `until` is over, by its own clock."""
        # Written out: the engine takes no date here, and finds nothing where it is given one.
        span: dict[str, Any] = {"since": f"{since:.6f}", "until": f"{until:.6f}"}
        ask = self._client.events
        events = self._ask(lambda: list(ask(**span, filters={"container": container}, decode=True)))
        return [str(event.get("Action", "")) for event in events]

    def _wait(self, container: str, ended: queue.SimpleQueue[NarrowgaugeError | None]) -> None:
        """Wait for the end in requests that expire, and tell an expired one from a lost engine."""
        away_since: float | None = None
        while True:
            try:
                self._client.wait(container, timeout=_WAIT_S)
                ended.put(None)
                return
            except NotFound:
                ended.put(None)
                return
            except (APIError, requests.exceptions.RequestException):
                # An expired wait looks like this too (as a ConnectionError); ask what is true.
                pass
            try:
                state = self._client.inspect_container(container)["State"]
                away_since = None
                if not state.get("Running"):
                    ended.put(None)
                    return
            except NotFound:
                ended.put(None)
                return
            except (APIError, requests.exceptions.RequestException, OSError):
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if now - away_since > _ENGINE_AWAY_S:
                    ended.put(_engine_lost())
                    return
                time.sleep(1.0)

    def _state(self, container: str) -> dict[str, Any] | None:
        try:
            inspected = self._ask(lambda: self._client.inspect_container(container))
        except GoneError:
            return None
        state: dict[str, Any] = inspected["State"]
        return state

    def _has_volume(self, name: str) -> bool:
        try:
            self._ask(lambda: self._client.inspect_volume(name))
        except GoneError:
            return False
        return True

    def _remove(self, container: str) -> None:
        try:
            self._ask(lambda: self._client.remove_container(container, force=True))
        except GoneError:
            return

    def _ask(self, call: Callable[[], Any]) -> Any:
        return ask(self._client, call)


def _seconds(text: str) -> float:
    """The engine's own way to write a time, `2026-01-01T00:00:02.123456789Z`, since the epoch."""
    whole = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    return whole.timestamp() + float("0" + text[19:].rstrip("Z"))


def _engine_lost() -> DockerUnavailable:
    return DockerUnavailable(
        "the Docker engine stopped answering while the run went on",
        why=f"no answer for {_ENGINE_AWAY_S:.0f} s",
        next_step="when it is back: narrowgauge attach RUN",
    )
