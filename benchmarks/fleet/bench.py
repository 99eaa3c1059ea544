"""What a board elsewhere costs: round trips of a run, the rate of results, runs over two boards.

    PYTHONPATH=src python benchmarks/fleet/bench.py [command overhead copy sweep] --out FILE

Two real engines and sshds on this machine, one reached over a line that delays (`line.py`), since
few kernels of containers have `netem`. The lab is a shell script that does nothing, so what is
timed is the launcher, ssh and the engine. Needs root, docker.io, openssh-server, and quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
for folder in ("tests/e2e", "tests/launcher", "benchmarks/fleet"):
    sys.path.insert(0, str(ROOT / folder))

from board_lab import checkout, on_board  # noqa: E402
from boards import IMAGE, TOOLS, LabBoard, boards, make_image  # noqa: E402
from line import Line  # noqa: E402
from tiny_image import archive  # noqa: E402

from narrowgauge.checkout import find_checkout  # noqa: E402
from narrowgauge.fleet.facts import ask_board  # noqa: E402
from narrowgauge.fleet.hosts import load_boards  # noqa: E402
from narrowgauge.fleet.link import Link, Patience  # noqa: E402
from narrowgauge.fleet.ready import prepare_fleet  # noqa: E402
from narrowgauge.images.content import content_tag, image_name  # noqa: E402
from narrowgauge.launch import World, prepare, run_all  # noqa: E402
from narrowgauge.launch_fleet import run_fleet  # noqa: E402
from narrowgauge.machine import probe_host  # noqa: E402
from narrowgauge.plan import JobRequest  # noqa: E402
from narrowgauge.progress import SilentReporter  # noqa: E402
from narrowgauge.runner import run_job  # noqa: E402
from narrowgauge.store import Store  # noqa: E402
from narrowgauge.targets import TARGETS_FILE, load_targets  # noqa: E402

PATIENCE = Patience(kept=60)
#: 20 ms each way.
ROUND_TRIP_S = 0.040
#: Round trips are counted on a line so slow that nothing else is as slow, other load included: the
#: rest is subtracted.
COUNTING_S = 3.0
#: One thread of work for the sweep, so many steps of it: 200,000 take about as long as a container
#: takes to start.
WORK = "i=0; while [ $i -lt {} ]; do i=$((i + 1)); done"


def overhead(board: LabBoard, root: Path, repeats: int) -> dict[str, Any]:
    """Seconds of one run without delay and at ROUND_TRIP_S, and how many round trips it makes."""
    with Line(board.port) as line:
        there = on_board(board, root, port=line.port, patience=PATIENCE)
        number = iter(range(10_000))

        def run() -> None:
            there.executor._arrivals.clear()
            job = there.job(f"20261121T101500Z-tiny-{next(number):06d}")
            run_job(job, there.session)

        def cold() -> None:
            there.link.drop()
            run()

        def cold_and_asked() -> None:
            there.link.drop()
            ask_board(there.link)
            run()

        found: dict[str, Any] = {"round_trip_s": ROUND_TRIP_S, "repeats": repeats}
        at_zero = _medians(line, 0.0, repeats, run, cold, cold_and_asked)
        delayed = _medians(line, ROUND_TRIP_S, repeats, run, cold, cold_and_asked)
        counted = _medians(line, COUNTING_S, 1, run, cold, cold_and_asked)
        found["ssh_alone_s"] = _ssh_alone(board, line, repeats)
    local = _local(board, repeats)
    found["local_docker_s"] = local
    names = ("kept", "cold", "cold_asked")
    for name, zero, late, slow in zip(names, at_zero, delayed, counted, strict=True):
        found[name] = {
            "seconds_without_delay": zero,
            "seconds": late,
            "round_trips": (slow - zero) / COUNTING_S,
            "overhead_s": late - local,
        }
    return found


def command(board: LabBoard, root: Path, repeats: int) -> dict[str, Any]:
    """All that `run tiny --host NAME` does once Python is there, image and data being on the board;
    against all that `run tiny` does with the same engine beside it."""
    project = checkout(root / "project")
    target = load_targets(project / TARGETS_FILE)["cpu"]
    board.docker("tag", IMAGE, image_name(target, content_tag(project, target)))
    env = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(board.folder),
        "DOCKER_HOST": board.docker_host,
        "NARROWGAUGE_LOCK": str(root / "lock"),
    }
    world = World(find_checkout(project, project), env, probe_host(), [].append)
    request = JobRequest("tiny", "smoke", (), 0)
    store, data = Store(root / "results"), root / "data"
    reporter = SilentReporter(sys.stderr)

    def local() -> None:
        launch = prepare(world, request, store.root, on="cpu", executor="docker", lab_python=None)
        run_all(world, launch, store=store, data=data, wait=False, reporter=reporter)

    with Line(board.port) as line:
        board.know(line.port)
        hosts = root / "hosts.toml"
        hosts.write_text(board.toml(port=line.port), encoding="utf-8")
        chosen = load_boards(hosts)

        def kept() -> None:
            fleet = prepare_fleet(
                world, request, chosen, store.root, data, spread=False, patience=PATIENCE
            )
            done = run_fleet(
                world, fleet, store=store, data=data, wait=False, errors=sys.stderr,
                reporter=reporter,
            )  # fmt: skip
            assert not done.problems, done.problems
            assert done.runs[0][1].exit_code == 0, done.runs[0][1].error

        def cold() -> None:
            Link(chosen[0], env, PATIENCE).drop()
            kept()

        local()
        here = _median(repeats, local)
        at_zero = _medians(line, 0.0, repeats, kept, cold)
        delayed = _medians(line, ROUND_TRIP_S, repeats, kept, cold)
        counted = _medians(line, COUNTING_S, 1, kept, cold)
        Link(chosen[0], env, PATIENCE).drop()
    found: dict[str, Any] = {"round_trip_s": ROUND_TRIP_S, "repeats": repeats, "local_s": here}
    for name, zero, late, slow in zip(("kept", "cold"), at_zero, delayed, counted, strict=True):
        found[name] = {
            "seconds_without_delay": zero,
            "seconds": late,
            "round_trips": (slow - zero) / COUNTING_S,
            "over_local_s": late - here,
        }
    return found


def copy(board: LabBoard, root: Path, megabytes: int) -> dict[str, Any]:
    """The rate of a run's results, checked, against scp's of the same file over the same line."""
    with Line(board.port, ROUND_TRIP_S) as line:
        middle = f"head -c {megabytes * 1_000_000} /dev/urandom >/out/big"
        there = on_board(board, root, port=line.port, middle=middle, patience=PATIENCE)
        times: list[float] = []
        take = there.executor._arrivals

        begun: list[float] = []
        original = there.executor._open

        def opened(*words: Any) -> Any:
            watching = original(*words)
            part = watching._part

            def timed(answer: Any) -> None:
                begun.append(time.perf_counter())
                part(answer)

            watching._part = timed
            return watching

        there.executor._open = opened  # type: ignore[method-assign]
        job = there.job("20261121T101500Z-tiny-copied")
        folder, record = run_job(job, there.session)
        times.append(time.perf_counter() - begun[0])
        assert record.exit_code == 0, record.error
        assert take
        source = root / "source"
        shutil.move(folder.out / "big", source)
        begin = time.perf_counter()
        words = ["scp", "-q", "-F", str(board.ssh_config), "-P", str(line.port)]
        subprocess.run([*words, f"127.0.0.1:{source}", str(root / "scp")], check=True)
        scp = time.perf_counter() - begin
    return {
        "megabytes": megabytes,
        "seconds": times[0],
        "scp_seconds": scp,
        "rate_of_scp": scp / times[0],
    }


def sweep(made: list[LabBoard], root: Path, runs: int, steps: int) -> dict[str, Any]:
    """The same list of runs over one board and over two, each pinned to a core of its own."""
    seconds = []
    for count in (1, 2):
        places = [
            on_board(
                board, root / f"{count}-{board.name}", middle=WORK.format(steps), patience=PATIENCE
            )
            for board in made[:count]
        ]
        jobs = deque(f"20261121T101500Z-tiny-{count}{number:05d}" for number in range(runs))

        def work(there: Any, jobs: deque[str]) -> None:
            while jobs:
                try:
                    name = jobs.popleft()
                except IndexError:
                    return
                run_job(there.job(name), there.session)

        begin = time.perf_counter()
        workers = [threading.Thread(target=work, args=(there, jobs)) for there in places]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds.append(time.perf_counter() - begin)
    return {
        "runs": runs, "steps": steps, "one_s": seconds[0], "two_s": seconds[1],
        "gain": seconds[0] / seconds[1],
    }  # fmt: skip


def _ssh_alone(board: LabBoard, line: Line, repeats: int) -> dict[str, float]:
    """`ssh BOARD true` on a connection of its own: what a cold run cannot go below."""
    words = ["ssh", "-F", str(board.ssh_config), "-p", str(line.port), "127.0.0.1", "true"]

    def run() -> None:
        subprocess.run(words, check=True)

    (at_zero,) = _medians(line, 0.0, repeats, run)
    (late,) = _medians(line, ROUND_TRIP_S, repeats, run)
    return {"seconds_without_delay": at_zero, "seconds": late}


def _local(board: LabBoard, repeats: int) -> float:
    """The same container by `docker run` beside its engine."""
    words = ["run", "--rm", "--network", "none", "--entrypoint", "/bin/sh"]

    def run() -> None:
        board.docker(*words, "narrowgauge-test/board:1", "-c", "exit 0")

    return _median(repeats, run)


def _medians(
    line: Line, round_trip_s: float, repeats: int, *calls: Callable[[], None]
) -> list[float]:
    line.round_trip_s = round_trip_s
    found = []
    for call in calls:
        call()
        found.append(_median(repeats, call))
    return found


def _median(repeats: int, call: Callable[[], None]) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Measure what is asked for; print it, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["command", "overhead", "copy", "sweep"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200_000, help="of work in a run of the sweep")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ng-", dir="/tmp"))
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "cpus": os.cpu_count()}
    with boards(root, ("a", "b"), cpus=("0", "1") if "sweep" in options.what else ()) as made:
        for board in made:
            make_image(board, archive(TOOLS))
        if "command" in options.what:
            found["command"] = command(made[0], root / "r", options.repeats)
        if "overhead" in options.what:
            found["overhead"] = overhead(made[0], root / "o", options.repeats)
        if "copy" in options.what:
            found["copy"] = copy(made[0], root / "c", options.megabytes)
        if "sweep" in options.what:
            found["sweep"] = sweep(made, root / "s", options.runs, options.steps)
    shutil.rmtree(root, ignore_errors=True)
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
