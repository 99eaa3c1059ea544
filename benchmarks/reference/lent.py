"""Lists of reference jobs on a GPU host whose commands are cut off after minutes, and that takes
files only in pieces: what runs goes on behind the commands that bring data and fetch records.

    python3 benchmarks/reference/lent.py begin WORK [--seconds N] [--gpus 0] [--caches FILE]
                                              LIST[+LIST…][=JOB,…][@GPUS] …
                                              [--unfinished PIECE…]
    python3 benchmarks/reference/lent.py parts WORK PART…
    python3 benchmarks/reference/lent.py wait WORK SECONDS --into DIR [--unfinished MB]
    python3 benchmarks/reference/lent.py drop WORK JOB…
    python3 benchmarks/reference/lent.py stop WORK

`begin` copies this checkout to WORK/tree, unless one is there: no later command can change that,
and whatever is begun later is looked up there.
It starts a session of its own that runs `take.py` for each list in turn, by its name in `lists/`,
or for those of its jobs that are named, in this order, and what they come after (`kernels` first,
unless they are named in another place).
`A+B=JOB,…` are two lists run as one: without names, of A before B.
`@0,0,1,1` gives a list its own lanes instead of those of `--gpus`: trainings may share GPUs where
the list before them times something. Before lists whose jobs read data sets it waits until `parts`
has brought them (parts that `narrowgauge data pack` made, in any order), for five minutes at most.
N: after so many seconds what runs is stopped in order.
`--caches`: what an earlier `wait` brought back, so that tiles and plans found then are known.
`--unfinished`, after the lists: the trainings that it brought back; those of these jobs go on.

`wait` returns after so many seconds, or once all has ended, and leaves in DIR: `records.tar.gz`,
`log.txt`, and `caches.tar.gz`, the small files of the cache folder, which is WORK/cache here.
It prints how far each job is, and how long it takes at its pace of the last minutes.
Of a run that goes on the archive has its events: `narrowgauge_lab record` makes a record of them.
`--unfinished`: the newest checkpoints of trainings that have not ended, what is nearly done first,
in so many MB, as `unfinished.….1-of-3` and so on, for another host (see `unfinished.py`).
Its exit code is 0 once all has ended, however it did (WORK/ended has the worst code), 3 before, and
2 at once where nothing has begun, as on a host that has come in another's place.

`drop` ends jobs that will not be through in time, in order, so that their lanes take the next ones.
`stop` ends all that runs, in order, and waits until it has.

What a host needs beside torch (see `needs` of the lists) is found by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from jobs import DROPPED, Job, ListError, load_jobs, named, without_data
from packing import pack
from progress import running, runs
from unfinished import pack_unfinished, restore_unfinished

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: In WORK: a copy of the checkout, what was recorded, the data sets, the caches, what was printed.
TREE, RUNS, DATA, CACHE, LOG = "tree", "runs", "data", "cache", "log.txt"
#: There once all lists have been run.
ALL_ENDED = "ended"
#: There once what runs is to end.
STOPPED = "stopped"
#: How long a list waits for its data.
PATIENCE_S = 300.0
#: For all jobs to end in order, or to be killed (GRACE_S of `take.py`, and twice that of MPS).
STOP_S = 90.0
#: The exit code while something runs.
GOES_ON = 3


def _asked(text: str) -> tuple[str, str, str]:
    """The lists, the jobs and the lanes that a word names: none are all jobs, and `--gpus`."""
    rest, _, gpus = text.partition("@")
    name, _, only = rest.partition("=")
    return name, only, gpus


def _lists(names: str) -> list[Path]:
    return [HERE / "lists" / f"{name}.toml" for name in names.split("+")]


def _jobs(text: str) -> list[Job]:
    names, only, _ = _asked(text)
    jobs = named(load_jobs(_lists(names)), only)
    if not jobs:
        raise ValueError(f"'{text}' names no job of {ROOT}")
    return jobs


def _copy_tree(work: Path) -> None:
    """This checkout as WORK/tree, whole or not at all; what is there already stays."""
    if (work / TREE).is_dir():
        return
    if ROOT in (work, *work.parents):
        raise ValueError(f"{work} is in the checkout, which would be copied into itself")
    partial = work / f"{TREE}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    left = shutil.ignore_patterns(".test", ".nox", ".venv*")
    shutil.copytree(ROOT, partial, symlinks=True, ignore=left)
    os.replace(partial, work / TREE)


def _begin(options: argparse.Namespace) -> int:
    work: Path = options.work
    script = work / TREE / "benchmarks" / "reference" / Path(__file__).name
    copied = script.resolve() == Path(__file__).resolve()
    if script.is_file() and not copied:
        # What runs are the lists that were copied, whatever has become of these.
        return subprocess.call([sys.executable, str(script), *options.arguments])
    for text in options.lists:
        _jobs(text)
    work.mkdir(parents=True, exist_ok=True)
    if not copied:
        _copy_tree(work)
    (work / CACHE).mkdir(exist_ok=True)
    if options.caches:
        _restore(options.caches, work / CACHE)
    if options.unfinished:
        names = restore_unfinished(options.unfinished, work / RUNS, ROOT / "experiments")
        print(f"go on: {', '.join(names)}")
    (work / ALL_ENDED).unlink(missing_ok=True)
    (work / STOPPED).unlink(missing_ok=True)
    words = [sys.executable, str(script), "run", str(work), "--gpus", options.gpus]
    words += ["--seconds", str(options.seconds), *options.lists]
    env = {**os.environ, "XDG_CACHE_HOME": str(work / CACHE), "PYTHONUNBUFFERED": "1"}
    # Hosts that write no byte code parse all of torch in each process, which images never do.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with (work / LOG).open("ab") as log:
        subprocess.Popen(
            words, cwd=work / TREE, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    print(f"begun: {', '.join(options.lists)}")
    return 0


def _restore(archive: Path, cache: Path) -> None:
    """What `_wait` kept; nothing of it may lie outside of the folder."""
    with tarfile.open(archive) as opened:
        for member in opened:
            path = (cache / member.name).resolve()
            if not member.isfile() or cache.resolve() not in path.parents:
                raise ValueError(f"{archive} has '{member.name}', which is no file of a cache")
            body = opened.extractfile(member)
            assert body is not None  # of a file there is one
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body.read())


def _run(options: argparse.Namespace) -> int:
    """What `begin` starts. However it ends, that is written down: `wait` waits for nothing else."""
    worst = 2
    signal.signal(signal.SIGTERM, lambda *_: (options.work / STOPPED).touch())
    try:
        worst = _run_lists(options)
    finally:
        (options.work / ALL_ENDED).write_text(f"{worst}\n")
    return worst


def _run_lists(options: argparse.Namespace) -> int:
    """Each list in turn, in the time that is left; the worst of their exit codes."""
    work: Path = options.work
    begun = time.monotonic()
    worst = 0
    for text in options.lists:
        left = begun + options.seconds - time.monotonic()
        _await_data(_jobs(text), work, min(PATIENCE_S, left))
        if (work / STOPPED).exists():
            return max(worst, GOES_ON)
        spent = time.monotonic() - begun
        print(f"== {text}, {spent:.0f} s", flush=True)
        names, only, gpus = _asked(text)
        words = [sys.executable, str(HERE / "take.py"), *map(str, _lists(names)), "--only", only]
        words += ["--out", str(work / RUNS), "--data", str(work / DATA)]
        words += ["--gpus", gpus or options.gpus]
        words += ["--limit", f"{max(0.0, options.seconds - spent):.0f}"]
        worst = max(worst, _call(words, work))
    return worst


def _call(words: Sequence[str], work: Path) -> int:
    """The exit code of `take.py`, which ends its jobs in order once it is interrupted."""
    child = subprocess.Popen(words)
    while not (work / STOPPED).exists():
        try:
            return child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    child.send_signal(signal.SIGINT)
    return child.wait()


def _await_data(jobs: Sequence[Job], work: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while without_data(jobs, work / DATA) and time.monotonic() < until:
        if (work / STOPPED).exists():
            break
        time.sleep(0.5)


def _parts(options: argparse.Namespace) -> int:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "narrowgauge_data", "join", *map(str, options.parts)]
    return subprocess.call([*words, "--data", str(options.work / DATA)], env=env)


def _drop(options: argparse.Namespace) -> int:
    """Nothing is dropped unless all that are named run."""
    folders = [options.work / RUNS / name for name in options.jobs]
    for folder in folders:
        if not runs(folder):
            raise ValueError(f"'{folder.name}' does not run in {options.work}")
    for folder in folders:
        (folder / DROPPED).touch()
    return 0


def _stop(options: argparse.Namespace) -> int:
    work: Path = options.work
    if not (work / LOG).is_file() or (work / ALL_ENDED).is_file():
        raise ValueError(f"nothing runs in {work}")
    (work / STOPPED).touch()
    until = time.monotonic() + STOP_S
    while not (work / ALL_ENDED).is_file():
        if time.monotonic() > until:
            raise ValueError(f"what runs in {work} has not ended in {STOP_S:.0f} s; it may be gone")
        time.sleep(0.1)
    return 0


def _wait(options: argparse.Namespace) -> int:
    work: Path = options.work
    if not ((work / LOG).is_file() or (work / RUNS).is_dir()):
        # Where a lease was over meanwhile, the host is a new one: each second of it is paid for.
        raise ValueError(f"nothing has begun in {work} of this host")
    until = time.monotonic() + options.seconds
    while not (work / ALL_ENDED).is_file() and time.monotonic() < until:
        time.sleep(0.2)
    options.into.mkdir(parents=True, exist_ok=True)
    if (work / RUNS).is_dir():
        pack(work / RUNS, options.into / "records.tar.gz")
    with tarfile.open(options.into / "caches.tar.gz", "w:gz") as archive:
        for path in sorted((work / CACHE).rglob("*.json")):
            archive.add(path, str(path.relative_to(work / CACHE)), recursive=False)
    if (work / LOG).is_file():
        shutil.copy(work / LOG, options.into / LOG)
        print((work / LOG).read_text(errors="replace")[-8000:])
    for line in running(work / RUNS):
        print(line)
    if options.unfinished:
        room = int(options.unfinished * 1e6)
        kept, left = pack_unfinished(work / RUNS, options.into, room, work / TREE / "experiments")
        for line in (*(f"kept: {each}" for each in kept), *(f"left: {each}" for each in left)):
            print(line)
    return 0 if (work / ALL_ENDED).is_file() else GOES_ON


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="begin|parts|wait|drop|stop")
    made = {}
    does = {
        "begin": _begin, "run": _run, "parts": _parts, "wait": _wait, "drop": _drop, "stop": _stop,
    }  # fmt: skip
    for name, do in does.items():
        made[name] = verbs.add_parser(name)
        made[name].set_defaults(do=do)
        made[name].add_argument("work", type=lambda text: Path(text).absolute(), metavar="WORK")
    for name in ("begin", "run"):
        made[name].add_argument("lists", nargs="+", metavar="LIST[+LIST…][=JOB,…][@GPUS]")
        made[name].add_argument("--seconds", type=float, default=1500.0)
        made[name].add_argument("--gpus", default="0")
    made["begin"].add_argument("--caches", type=Path, metavar="FILE")
    made["begin"].add_argument("--unfinished", nargs="+", type=Path, metavar="PIECE")
    made["parts"].add_argument("parts", nargs="+", type=Path, metavar="PART")
    made["drop"].add_argument("jobs", nargs="+", metavar="JOB")
    made["wait"].add_argument("seconds", type=float, metavar="SECONDS")
    made["wait"].add_argument("--into", type=Path, required=True, metavar="DIR")
    made["wait"].add_argument("--unfinished", type=float, default=0.0, metavar="MB")
    return parser.parse_args(arguments, argparse.Namespace(arguments=list(arguments)))


def main(arguments: Sequence[str]) -> int:
    """Do as asked; 2 for what cannot be done."""
    options = _options(arguments)
    try:
        return int(options.do(options))
    except (ListError, OSError, ValueError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
