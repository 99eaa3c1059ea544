"""The native executor: the lab as a process of this host, in a session of its own.

The process outlives its launcher. A handle names it by pid and start time, since pids are reused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from narrowgauge.errors import ToolchainMissing
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
from narrowgauge.executors.ending import ending_from, vanished
from narrowgauge.plan import Places, lab_arguments
from narrowgauge_contract.codec import read_json
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.events import EVENTS_FILE, Event, EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import OUTCOME_FILE

__all__ = ["LOG_FILE", "NativeExecutor", "lab_environment", "tail"]

LOG_FILE = "lab.log"
_LOG_BYTES = 64 * 1024
PROC = Path("/proc")


def lab_environment(env: Mapping[str, str], source: Path) -> dict[str, str]:
    """What the lab's process gets: the caller's environment, and our source on the path."""
    return {**env, "PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"}


class NativeExecutor:
    """Runs jobs with a Python of this host that has torch.

    `ensure_python` gives that interpreter, making its environment where it is not there.
    """

    name = "native"

    def __init__(
        self,
        source: Path,
        env: Mapping[str, str],
        *,
        ensure_python: Callable[[], Path] | None = None,
        proc: Path = PROC,
    ) -> None:
        self._source = source
        self._env = env
        self._ensure_python = ensure_python
        self._proc = proc
        self._python: Path | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def probe(self) -> ExecutorFacts:
        return ExecutorFacts(self.name, str(self._python or ""))

    def prepare(self) -> None:
        if self._python is None:
            assert self._ensure_python is not None, "this executor only watches"
            self._python = self._ensure_python()

    def start(self, job: Job, places: Places) -> Handle:
        """Start the lab with its output in `lab.log` of the run's folder."""
        self.prepare()
        data = None if places.data is None else str(places.data)
        arguments = lab_arguments(str(places.job), str(places.out), str(places.experiments), data)
        command = [str(self._python), "-m", "narrowgauge_lab", *arguments]
        with open(places.folder / LOG_FILE, "ab") as log:
            try:
                child = subprocess.Popen(
                    command,
                    env=lab_environment(self._env, self._source),
                    cwd=places.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ToolchainMissing(
                    f"cannot start {command[0]}",
                    why=error.strerror or str(error),
                    next_step="name a Python with torch: --lab-python PATH",
                ) from error
        self._children[child.pid] = child
        handle = Handle(
            format=HANDLE_FORMAT,
            executor=self.name,
            run_id=job.run_id,
            identity={
                "pid": child.pid,
                "start_ticks": self._start_ticks(child.pid) or 0,
                "boot": self._boot(),
                "folder": str(places.folder),
                "python": str(self._python),
            },
        )
        try:
            save(places.folder / "handle.json", handle)
        except BaseException:
            self.cancel(handle, timeout_s=0)
            raise
        return handle

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        tail = EventTail(out / EVENTS_FILE)
        while self.alive(handle):
            yield from tail.poll()
            yield None
            time.sleep(POLL_S)
        yield from tail.poll()

    def alive(self, handle: Handle) -> bool:
        child = self._children.get(handle.identity["pid"])
        if child is not None:
            return child.poll() is None
        same_boot = handle.identity["boot"] == self._boot()
        ticks = self._start_ticks(handle.identity["pid"])
        return same_boot and ticks is not None and ticks == handle.identity["start_ticks"]

    def cancel(self, handle: Handle, timeout_s: int = STOP_TIMEOUT_S) -> None:
        """SIGTERM to the lab, which stops its row and writes its outcome; then SIGKILL."""
        pid = handle.identity["pid"]
        if timeout_s > 0 and self.alive(handle):
            _signal(pid, signal.SIGTERM)
            deadline = time.monotonic() + timeout_s
            while self.alive(handle) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self._kill_group(handle)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.alive(handle) and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)

    def collect(self, handle: Handle, dest: Path) -> Ending:
        """The exit status, where this launcher is the parent; else what the outcome says."""
        self.discard(handle)
        log_tail = tail(dest / LOG_FILE)
        child = self._children.pop(handle.identity["pid"], None)
        status = child.wait() if child is not None else _said_status(dest / "out" / OUTCOME_FILE)
        if status is None:
            ending = vanished(
                "process",
                "it left no outcome, and its exit status went to the launcher that started it",
                log_tail,
            )
        else:
            code = status if status >= 0 else 128 - status
            ending = ending_from(code, out_of_memory=False, log_tail=log_tail, what="process")
        save(dest / ENDING_FILE, ending)
        return ending

    def discard(self, handle: Handle) -> None:
        self._kill_group(handle)

    def running(self) -> tuple[str, ...]:
        """No engine keeps a list; the host's lock names the folder of a run that is live."""
        return ()

    def _kill_group(self, handle: Handle) -> None:
        """End what is left of the lab's process group: a row whose parent was killed runs on."""
        pid = handle.identity["pid"]
        ticks = self._start_ticks(pid)
        if handle.identity["boot"] != self._boot():
            return
        if ticks is not None and ticks != handle.identity["start_ticks"]:
            return  # the pid belongs to somebody else now
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _start_ticks(self, pid: int) -> int | None:
        """When a live process started, in clock ticks since boot; None for none or a zombie."""
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The second field is the command in parentheses and may hold anything, so split behind it.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])

    def _boot(self) -> str:
        try:
            return (self._proc / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _said_status(path: Path) -> int | None:
    try:
        data = read_json(path)
    except (OSError, DamagedRecordError):
        return None
    code = data.get("exit_code") if isinstance(data, dict) else None
    return code if isinstance(code, int) else None


def tail(path: Path) -> str:
    """The last lines of the lab's output, read from the end only."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _LOG_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "".join(text.splitlines(keepends=True)[-LOG_LINES:])
