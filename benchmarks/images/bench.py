"""What images cost: to build again, in bytes, and to start a run by script; a table and JSON.

    python benchmarks/images/bench.py --base IMAGE --wheels DIR [--target desktop] [--json FILE]

Needs a Docker engine and a base with its wheels; scripts/standin.sh makes both. It works on a copy
of the checkout. The script's start is compared with a bare `docker run` of the same container, one
after the other; the card is made up, so --gpus is left out of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Answers as a driver of the time of 21.07 would.
_CARD = """#!/bin/sh
echo '8.6, 470.57.02, 49140, 1410, 1980, 9501, 9501, a card'
"""
#: The true docker with a claimed runtime, without --gpus, and without what the lab would do.
_DOCKER = """#!/bin/sh
case "$1 ${2-}" in
"info --format") "$REAL_DOCKER" "$@" | sed 's/|/|nvidia /' ;;
"run --name") for word; do shift; case $word in --gpus) skip=yes ;;
    *) if [ -n "$skip" ]; then skip=; else set -- "$@" "$word"; fi ;; esac; done
    shift; exec "$REAL_DOCKER" run --entrypoint true "$@" ;;
*) exec "$REAL_DOCKER" "$@" ;;
esac
"""


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


class Bench:
    """A copy of the checkout, and the words that build its image."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.root = folder / "checkout"
        ignore = shutil.ignore_patterns("__pycache__", "build", "*.whl", ".*")
        for name in ("docker", "images", "experiments", "scripts", "src"):
            shutil.copytree(ROOT / name, self.root / name, ignore=ignore)
        shutil.copy2(ROOT / "compose.yaml", self.root)
        self.folder, self.options = folder, options
        self.env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.words = [sys.executable, "-m", "narrowgauge", "images", "build", options.target]
        self.words += ["--base", options.base, "--project", str(self.root)]
        self.words += ["--wheels", options.wheels] if options.wheels else []
        self._count = 0

    def build(self) -> str:
        """The image's name."""
        done = subprocess.run(self.words, env=self.env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return done.stdout.split()[0]

    def change(self, name: str) -> None:
        """Append a comment that was never there."""
        self._count += 1
        with open(self.root / name, "a", encoding="utf-8") as stream:
            stream.write(f"# {time.time_ns()} {self._count}\n")


def main() -> int:
    options = _options()
    if options.show:
        print(_table(_load(options.show)))
        return 0
    with tempfile.TemporaryDirectory(prefix="narrowgauge-bench-") as place:
        bench = Bench(Path(place), options)
        image = bench.build()
        figures = [
            _seconds("unchanged tree: `images build`", 1, options.repeats, bench.build),
            _changed(bench, "one line of an experiment", 1, "experiments/mnist/run.py"),
            _changed(bench, "one line of the lab", 10, "src/narrowgauge_lab/seeding.py"),
            _beyond(bench, image),
            _script(bench, bench.build()),
        ]
    print(_table(figures))
    if options.json:
        document = [dataclasses.asdict(figure) for figure in figures]
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="narrowgauge-standin:desktop", help="what to build on")
    parser.add_argument("--wheels", metavar="DIR", help="every wheel of the lock")
    parser.add_argument("--target", default="desktop", help="whose image is built")
    parser.add_argument("--repeats", type=int, default=10, help="samples of each figure")
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    parser.add_argument("--show", metavar="FILE", help="print the table of a file, measure nothing")
    return parser.parse_args()


def _load(path: str) -> list[Figure]:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Figure(d["name"], d["unit"], d["target"], tuple(d["samples"])) for d in document]


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _seconds(name: str, target: float, count: int, action: Callable[[], object]) -> Figure:
    return Figure(name, "s", target, tuple(_timed(action) for _ in range(count)))


def _changed(bench: Bench, name: str, target: float, path: str) -> Figure:
    samples = []
    for _ in range(max(3, bench.options.repeats // 2)):
        bench.change(path)
        samples.append(_timed(bench.build))
    return Figure(f"{name}: `images build`", "s", target, tuple(samples))


def _size(image: str) -> int:
    words = ["docker", "image", "inspect", "--format", "{{.Size}}", image]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def _beyond(bench: Bench, image: str) -> Figure:
    """Bytes of the image's layers, less the base's and less the files of torch."""
    code = (
        "import os, torch; from importlib import metadata; "
        "files = metadata.files('torch') or (); "
        "print(sum(os.stat(f.locate()).st_size for f in files if os.path.exists(f.locate())))"
    )
    words = ["docker", "run", "--rm", "--entrypoint", "python3", image, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    beyond = _size(image) - _size(bench.options.base) - int(done.stdout)
    return Figure("image beyond base and torch", "MB", 150, (beyond / 1e6,))


def _script(bench: Bench, image: str) -> Figure:
    """desktop.sh from its start to its end, less the same container by `docker run` alone."""
    programs = bench.folder / "bin"
    programs.mkdir()
    for name, text in (("docker", _DOCKER), ("nvidia-smi", _CARD)):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    env = {**os.environ, "REAL_DOCKER": shutil.which("docker") or "docker", "skip": ""}
    env["PATH"] = f"{programs}:{env['PATH']}"
    script = [str(bench.root / "scripts/desktop.sh"), "--image", image]
    script += ["--results", str(bench.folder / "results"), "--data", str(bench.folder / "data")]
    script += ["mnist", "-p", "data=synthetic"]
    for name in ("results", "data"):
        (bench.folder / name).mkdir()
    line = subprocess.run(
        [script[0], "--dry-run", *script[1:]], env=env, capture_output=True, text=True, check=True
    ).stdout
    words = shlex.split(line)
    differences = []
    for turn in range(bench.options.repeats):
        alone = _timed(lambda turn=turn: _bare(words, f"{os.getpid()}-{turn}", env))
        whole = _timed(lambda: subprocess.run(script, env=env, capture_output=True, check=True))
        differences.append(whole - alone)
    return Figure("desktop.sh beyond a bare `docker run`", "s", 0.5, tuple(differences))


def _bare(words: list[str], name: str, env: Mapping[str, str]) -> None:
    """The container of the script, by name, and its removal, as the script does."""
    named = [*words]
    named[named.index("--name") + 1] = f"narrowgauge-bench-{name}"
    subprocess.run(named, env=dict(env), capture_output=True, check=True)
    removal = ["docker", "rm", "--force", f"narrowgauge-bench-{name}"]
    subprocess.run(removal, env=dict(env), capture_output=True, check=True)


def _table(figures: list[Figure]) -> str:
    lines = ["| figure | median | range | n | target | met |", "|---|---|---|---|---|---|"]
    for f in figures:
        low, high = min(f.samples), max(f.samples)
        met = "yes" if f.value <= f.target else "no"
        lines.append(
            f"| {f.name} | {f.value:.3g} {f.unit} | {low:.3g} to {high:.3g} | {len(f.samples)}"
            f" | {f.target:g} {f.unit} | {met} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
