"""Runs that share a GPU: what is timed is timed while the others stand aside. Needs no GPU."""

from __future__ import annotations

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

#: Works in steps of a millisecond, and writes when each began and ended.
_WORKER = """
import sys, time
from pathlib import Path
from narrowgauge_lab.turns import Turns
folder, stop, log = map(Path, sys.argv[1:])
mine = Turns(folder, lambda: None)
with log.open("w") as out:
    while not stop.exists():
        began = time.monotonic()
        time.sleep(0.001)
        out.write(f"{began} {time.monotonic()}\\n")
        out.flush()
        mine.let_others()
"""


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[List[Path]]:
    """Two processes on the floor, each with a log; they are stopped at the end."""
    stop = tmp_path / "stop"
    logs = [tmp_path / f"log-{number}" for number in range(2)]
    workers = [
        subprocess.Popen([sys.executable, "-c", _WORKER, str(tmp_path / "turns"), str(stop), log])
        for log in map(str, logs)
    ]
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


def _steps(log: Path) -> List[List[float]]:
    return [list(map(float, line.split())) for line in log.read_text().splitlines()[:-1]]


def test_nobody_works_while_one_times(at_work: List[Path], tmp_path: Path) -> None:
    mine = Turns(tmp_path / "turns", lambda: None)
    windows = []
    for _ in range(5):
        with mine.alone():
            began = time.monotonic()
            with mine.alone():  # a window in a window
                mine.let_others()  # a step that is timed
                time.sleep(0.02)
            windows.append((began, time.monotonic()))
        counts = [len(_steps(log)) for log in at_work]
        _until(lambda: all(len(_steps(log)) > n for log, n in zip(at_work, counts)))  # noqa: B023
    mine.close()

    assert mine.alone_for >= 0.1
    for log in at_work:
        for began, ended in windows:
            assert not [s for s in _steps(log) if s[1] > began and s[0] < ended]


def test_two_who_time_do_so_one_after_the_other(at_work: List[Path], tmp_path: Path) -> None:
    """Both were at work before, and wait for each other only with the floor left."""
    windows: List[tuple] = []

    def time_often() -> None:
        mine = Turns(tmp_path / "turns", lambda: None)
        for _ in range(5):
            mine.let_others()
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
    mine.let_others()
    assert not waits  # nobody asked
    with mine.alone():
        assert waits == ["waited"]
    assert waits == ["waited", "waited"]
    mine.close()


@pytest.fixture
def _nobody() -> Iterator[None]:
    yield
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
        turns.let_others()
    assert turns.facts() == {}
    assert turns.sharing()

    turns.begin(gpu)
    turns.let_others()
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
