"""Runs that share a GPU: what is timed is timed while the others stand aside. Needs no GPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab import turns
from narrowgauge_lab.history import History
from narrowgauge_lab.turns import Turns

#: Works without ever looking up, as one does who captures, searches or scores, and writes when.
_WORKER = """
import sys, time
from pathlib import Path
from narrowgauge_lab.turns import Turns
folder, stop, log = map(Path, sys.argv[1:4])
busy_until = time.monotonic() + float(sys.argv[4])
mine = Turns(folder, lambda: None, lambda: time.monotonic() > busy_until)
mine.listen()
with log.open("w") as out:
    while not stop.exists():
        until = time.monotonic() + 0.0005
        while time.monotonic() < until:
            pass
        out.write(f"{time.monotonic()}\\n")
        out.flush()
"""


def _worker(tmp_path: Path, log: Path, busy_s: float = 0.0) -> subprocess.Popen[bytes]:
    given = [str(tmp_path / "turns"), str(tmp_path / "stop"), str(log), str(busy_s)]
    return subprocess.Popen([sys.executable, "-c", _WORKER, *given])


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[List[Path]]:
    """Two processes on the floor, each with a log; they are stopped at the end."""
    stop = tmp_path / "stop"
    logs = [tmp_path / f"log-{number}" for number in range(2)]
    workers = [_worker(tmp_path, log) for log in logs]
    try:
        _until(lambda: all(log.exists() and log.stat().st_size for log in logs))
        yield logs
        stop.touch()
        assert [worker.wait(30) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _until(is_so: Any) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def _moments(log: Path) -> List[float]:
    return list(map(float, log.read_text().splitlines()[:-1]))


def test_nobody_works_while_one_times(at_work: List[Path], tmp_path: Path) -> None:
    mine = Turns(tmp_path / "turns", lambda: None)
    windows = []
    for _ in range(5):
        with mine.alone():
            began = time.monotonic()
            with mine.alone():  # a window in a window
                mine.step_aside()  # nobody else may ask
                time.sleep(0.02)
            windows.append((began, time.monotonic()))
        sizes = [log.stat().st_size for log in at_work]
        _until(lambda: all(log.stat().st_size > n for log, n in zip(at_work, sizes)))  # noqa: B023
    mine.close()

    assert mine.alone_for >= 0.1
    for log in at_work:
        for began, ended in windows:
            assert not [at for at in _moments(log) if began < at < ended]


def test_who_captures_is_waited_for(tmp_path: Path) -> None:
    """It would break its graph by waiting for the GPU."""
    log = tmp_path / "log"
    worker = _worker(tmp_path, log, busy_s=2.0)
    try:
        _until(lambda: log.exists() and log.stat().st_size)
        mine = Turns(tmp_path / "turns", lambda: None)
        with mine.alone():
            began = time.monotonic()
            time.sleep(0.02)
            ended = time.monotonic()
        first = _moments(log)[0]
        mine.close()
        (tmp_path / "stop").touch()
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.wait()

    assert began >= first + 1.0
    assert not [at for at in _moments(log) if began < at < ended]


def test_a_number_that_is_now_another_process_gets_no_signal(tmp_path: Path) -> None:
    """A signal that it does not expect would end it."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    members = tmp_path / "members"
    try:
        one = Turns(tmp_path, lambda: None)
        told = turns._identity(other.pid)
        pid, began, space = told.split("-")
        (members / f"{pid}-{int(began) - 1}-{space}").touch()
        (members / f"{pid}-{began}-{int(space) + 1}").touch()  # of another container
        timing = threading.Thread(target=lambda: _time_once(tmp_path), daemon=True)
        timing.start()
        _until(lambda: not list(members.iterdir()))
        one.close()  # all that kept the other from the floor
        timing.join(60)
        assert not timing.is_alive()
        assert other.poll() is None
        assert turns._identity(2**22 + 1) == ""
    finally:
        other.kill()
        other.wait()


def _time_once(folder: Path) -> None:
    mine = Turns(folder, lambda: None)
    with mine.alone():
        pass
    mine.close()


def test_two_who_time_do_so_one_after_the_other(at_work: List[Path], tmp_path: Path) -> None:
    """Both were at work before, and wait for each other only with the floor left."""
    windows: List[tuple] = []

    def time_often() -> None:
        mine = Turns(tmp_path / "turns", lambda: None)
        for _ in range(5):
            mine.step_aside()
            with mine.alone():
                began = time.monotonic()
                time.sleep(0.005)
                windows.append((began, time.monotonic()))
        mine.close()

    threads = [threading.Thread(target=time_often, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()

    windows.sort()
    assert len(windows) == 15
    assert all(one[1] <= other[0] for one, other in zip(windows, windows[1:]))


def test_who_dies_lets_go(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from narrowgauge_lab.turns import Turns\n"
    code += "with Turns(Path(sys.argv[1]), lambda: None).alone():\n"
    code += "    print('alone', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"alone\n"
        came: List[Turns] = []
        waiting = threading.Thread(
            target=lambda: came.append(Turns(tmp_path, lambda: None)), daemon=True
        )
        waiting.start()
        waiting.join(0.1)
        assert not came
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    waiting.join(60)
    assert came[0].waited > 0.05
    came[0].close()


def test_the_gpu_is_waited_for_before_others_go_on(tmp_path: Path) -> None:
    waits: List[str] = []
    mine = Turns(tmp_path, lambda: waits.append("waited"))
    mine.step_aside()
    assert not waits  # nobody asked
    with mine.alone():
        assert waits == ["waited"]
    assert waits == ["waited", "waited"]
    mine.close()


@pytest.fixture
def _nobody() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, handler)
    if turns._mine is not None:
        turns._mine.close()
    turns._mine = None


@pytest.mark.usefixtures("_nobody")
def test_a_row_takes_part_only_where_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.delenv(turns.ENV, raising=False)
    turns.begin(gpu)
    assert turns.facts() == {}
    monkeypatch.setenv(turns.ENV, str(tmp_path / "turns"))
    turns.begin(torch.device("cpu"))
    with turns.alone():
        pass
    assert turns.facts() == {}
    assert turns.sharing()

    turns.begin(gpu)
    told = turns.facts()["shared_gpu"]
    assert told["alone_seconds"] == 0.0
    assert told["mps"] is False
    monkeypatch.setenv(turns.ENV, str(tmp_path / "turns" / "gate"))
    with pytest.raises(UsageError, match="no locks can be had"):
        turns.begin(gpu)


EPOCH = {"train_loss": 1.0, "train_accuracy": 2.0, "test_loss": 3.0, "test_accuracy": 4.0}
EPOCH.update(images_per_second=5.0, learning_rate=6.0, epoch_seconds=7.0)


class Metrics:
    def __init__(self) -> None:
        self.seen: Dict[str, List[float]] = {}

    def metric(self, name: str, values: List[float], **_: Any) -> None:
        self.seen[name] = values


@pytest.mark.parametrize(("first", "then"), [(True, True), (True, False), (False, True)])
def test_how_long_a_shared_epoch_took_is_no_figure(
    first: bool, then: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor that of a row of which a part was trained beside others."""
    saved: Dict[str, Any] = {}
    for number, shared in enumerate((first, then)):
        monkeypatch.setenv(turns.ENV, "somewhere" if shared else "")
        history = History(scaling=False)
        if saved:
            history.load_state_dict(saved)
        history.add(EPOCH, "cuda-event")
        saved = history.state_dict()
        found = Metrics()
        history.emit(found, first=0)  # type: ignore[arg-type]
        assert len(found.seen["test_accuracy"]) == number + 1
    assert not {"images_per_second", "epoch_seconds"} & set(found.seen)
