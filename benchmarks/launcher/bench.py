"""What the launcher costs: medians of interleaved pairs, as a table and as JSON.

    python benchmarks/launcher/bench.py [--pairs 20] [--target cpu] [--json FILE] [--check]

Needs a Docker engine and the target's image (it is built where it can be). Runs use made-up data
and are killed once their container has started, so what they measure does not matter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
sys.path[:0] = [str(SOURCE), str(Path(__file__).parent)]

from narrowgauge.checkout import Checkout  # noqa: E402
from narrowgauge.container import ContainerPlan, docker_run_words  # noqa: E402
from narrowgauge.executors.docker import DockerExecutor  # noqa: E402
from narrowgauge.executors.docker_client import connect  # noqa: E402
from narrowgauge.launch import World, container_planner, image_finder  # noqa: E402
from narrowgauge.machine import probe_host  # noqa: E402
from narrowgauge.plan import JobRequest, Places, plan_jobs  # noqa: E402
from narrowgauge.targets import load_targets, target_named  # noqa: E402
from narrowgauge_contract.codec import write_json_atomic  # noqa: E402
from narrowgauge_contract.spec import load_spec  # noqa: E402

EXPERIMENT = "mnist"
PARAMETERS = ("data=synthetic",)
#: All that a docker run imports before its container starts; subtracted to see what is ours.
IMPORTS = (
    "import narrowgauge.cli.app, narrowgauge.launch, narrowgauge.runner, narrowgauge.store,"
    " narrowgauge.executors.docker, narrowgauge.images.inspect, narrowgauge_data"
)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table. `samples` are in `unit`; the figure is their median."""

    name: str
    unit: str
    target: float
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def met(self) -> bool:
        return self.value <= self.target


def main() -> int:
    options = _options()
    if options.show:
        print(_table(_load(options.show)))
        return 0
    env = _environment()
    with tempfile.TemporaryDirectory(prefix="narrowgauge-bench-") as place:
        env["NARROWGAUGE_LOCK"] = str(Path(place) / "lock")
        figures = [
            _command("narrowgauge --help", ("--help",), 150, options.pairs, env),
            _command("narrowgauge plan mnist", ("plan", EXPERIMENT), 300, options.pairs, env),
            *_start(options.target, options.pairs, Path(place), env),
            *_memory(options.events, env),
        ]
    print(_table(figures))
    document = [{**dataclasses.asdict(f), "value": f.value, "met": f.met} for f in figures]
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    else:
        print(json.dumps([{k: v for k, v in d.items() if k != "samples"} for d in document]))
    return 1 if options.check and not all(figure.met for figure in figures) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="samples of each figure")
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the memory test")
    parser.add_argument("--target", default="cpu", help="whose image is started")
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    parser.add_argument("--show", metavar="FILE", help="print the table of a file, measure nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    return parser.parse_args()


def _load(path: str) -> list[Figure]:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Figure(d["name"], d["unit"], d["target"], tuple(d["samples"])) for d in document]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


def _timed(words: list[str], env: Mapping[str, str]) -> float:
    """Milliseconds of a whole process."""
    began = time.perf_counter()
    subprocess.run(words, env=dict(env), stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - began) * 1e3


def _command(
    name: str, words: tuple[str, ...], target: float, count: int, env: Mapping[str, str]
) -> Figure:
    command = [sys.executable, "-m", "narrowgauge", *words]
    _timed(command, env)  # byte code is compiled and files are cached by now
    return Figure(name, "ms", target, tuple(_timed(command, env) for _ in range(count)))


def _start(target: str, pairs: int, place: Path, env: Mapping[str, str]) -> list[Figure]:
    """From the command to the container's first instruction: ours minus a bare `docker run`."""
    bare = _Bare(target, place)
    ours, theirs, imports = [], [], []
    _launched(target, place, bare, env)
    for _ in range(pairs):
        ours.append(_launched(target, place, bare, env))
        theirs.append(bare.run())
        imports.append(_timed([sys.executable, "-c", IMPORTS], env))
    over = [one - other for one, other in zip(ours, theirs, strict=True)]
    beyond = [one - loading for one, loading in zip(over, imports, strict=True)]
    return [
        Figure("narrowgauge run, minus docker run", "ms", 250, tuple(over)),
        Figure("  of that, beyond imports", "ms", 40, tuple(beyond)),
        Figure("  docker run of the same, alone", "ms", float("inf"), tuple(theirs)),
        Figure("  imports alone", "ms", float("inf"), tuple(imports)),
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr)


class _Bare:
    """`docker run` with the image and flags of a run of ours."""

    def __init__(self, target: str, place: Path) -> None:
        self.client = connect(os.environ)
        checkout = Checkout(ROOT)
        self.target = target_named(load_targets(checkout.targets_file), target)
        self.world = World(checkout, dict(os.environ), probe_host(), _say)
        self.image = image_finder(self.world, self.client, self.target)()
        self.folder = place / "bare"
        (self.folder / "out").mkdir(parents=True)
        self._count = 0

    def plan(self) -> ContainerPlan:
        spec = load_spec(ROOT / "experiments" / EXPERIMENT / "experiment.toml")
        request = JobRequest(EXPERIMENT, "smoke", PARAMETERS, 0)
        job = plan_jobs(spec, request, self.target.name)[0]
        write_json_atomic(self.folder / "job.json", job)
        places = Places(self.folder, ROOT / "experiments", None)
        facts = DockerExecutor(self.client).probe()
        return container_planner(self.world, self.target)(job, places, self.image, facts)

    def run(self) -> float:
        self._count += 1
        name = f"narrowgauge-bench-{os.getpid()}-{self._count}"
        plan = dataclasses.replace(self.plan(), name=name)
        began = time.time()
        made = subprocess.run(docker_run_words(plan), capture_output=True, text=True, check=True)
        name = made.stdout.strip()
        started = self.started(name)
        self.client.remove_container(name, force=True)
        return (started - began) * 1e3

    def started(self, container: str) -> float:
        """When the engine started it, in seconds since the epoch, by this machine's clock."""
        text = self.client.inspect_container(container)["State"]["StartedAt"]
        return datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00").timestamp()


def _launched(target: str, place: Path, bare: _Bare, env: Mapping[str, str]) -> float:
    """One `narrowgauge run`, until its container starts; then the container is killed."""
    words = [sys.executable, "-m", "narrowgauge", "run", EXPERIMENT, "--profile", "smoke"]
    words += [word for parameter in PARAMETERS for word in ("-p", parameter)]
    words += ["--executor", "docker", "--on", target, "--results", str(place / "results"), "--json"]
    with _events(bare) as starts:
        began = time.time()
        process = subprocess.Popen(
            words, env=dict(env), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        event = next(starts, None)
        if event is None or process.poll() is not None:
            raise SystemExit(f"narrowgauge run did not start:\n{process.communicate()[1]}")
        started = bare.started(event["id"])
        bare.client.kill(event["id"])
        process.communicate()
    return (started - began) * 1e3


@contextlib.contextmanager
def _events(bare: _Bare) -> Iterator[Iterator[dict[str, Any]]]:
    filters = {"type": "container", "event": "start", "label": "io.narrowgauge.run"}
    stream = bare.client.events(decode=True, filters=filters)
    try:
        yield stream
    finally:
        stream.close()


def _memory(events: int, env: Mapping[str, str]) -> list[Figure]:
    """Peak memory of a launcher that streams so many events, and of composing the record after."""
    words = [sys.executable, str(Path(__file__).with_name("replay.py")), str(events)]
    done = subprocess.run(words, env=dict(env), stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout)
    name = f"memory while {events:,} events stream"
    return [
        Figure(name, "MB", 100, (said["streaming_mb"],)),
        Figure("  and after the record", "MB", float("inf"), (said["recorded_mb"],)),
        Figure("  seconds it took", "s", float("inf"), (said["seconds"],)),
    ]


def _table(figures: list[Figure]) -> str:
    lines = [f"{'':42} {'median':>9} {'min':>8} {'max':>8} {'n':>3}  target"]
    for each in figures:
        target = "" if each.target == float("inf") else f"<= {each.target:g} {each.unit}"
        verdict = "" if not target else ("  met" if each.met else "  MISSED")
        lines.append(
            f"{each.name:42} {each.value:7.1f} {each.unit:2} {min(each.samples):7.1f}"
            f" {max(each.samples):8.1f} {len(each.samples):3}  {target}{verdict}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
