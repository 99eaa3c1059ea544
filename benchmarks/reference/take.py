"""Takes the reference records of a GPU host: a list of jobs, over all its GPUs, resumable.

    python3 benchmarks/reference/take.py LIST… --out DIR [--gpus 0,1] [--limit SECONDS]
                                              [--only WORD,…] [--without PACKAGE,…]
                                              [--data DIR] [--pack FILE] [--arrays STEM]

For hosts without Docker, and for those that are lent in short slices: what is complete is not done
again, and what was cut off goes on (`python3 -m narrowgauge_lab run --resume`), row by row. Each
GPU is a lane with its share of the cores; a lane takes the next job of the list when it is free,
and a run that was cut off goes on in the lane it began in: on another GPU it would be another run.

A list is a TOML file; what several have in common is done once. Its `needs`, if any, names the
packages without which its records would lack something, by the names they are imported by; where
one is missing nothing begins, unless it is said to go `--without` it. Then come `[[job]]` tables,
each with a unique `name` and either `experiment` (with `profile`, `parameters` as `-p` takes them,
and `shard`, I/N, for every N-th row only) or `command`, a list of words. `data` names the sets that
it reads: it is left for another time where one is not in the data folder. `after` names jobs before
it in the list that it waits for and whose folders it may read, as `{out}/NAME/…` in its words: it
is left undone where one of them failed. `env` sets variables, `alone = true` waits until every
other lane has ended, and the others wait for it: for what measures the CPU or the bus too.
`first = true` is for what all others need, such as the kernels: it is done whichever are named.
`verdict = true` is for tests: what comes after one waits for its exit code and reads nothing of it.
`spread = true` keeps no job to its lane's cores: for what the CPU binds, beside what needs one core
of its share; its `env` says how many threads.

A GPU that is named several times (`--gpus 0,0,0,0`) has as many lanes, by NVIDIA's MPS where that
is installed. Only jobs with `shares = true` run side by side there, each on its share of the cores,
and whatever one of them times is timed while the others stand aside (`narrowgauge_lab.turns`); how
fast they trained is not recorded. Every other job has the host to itself.

The host is described once, as the launcher would (DIR/host.json), so that records say where they
come from; where this Python is too old for the launcher they do not, and it is said.

A file `dropped` in a job's folder ends it as the limit would, and its lane takes the next one.

Each job has a folder DIR/NAME: the run (events, record), `log.txt`, and `ended.json` once it is
through. The exit code is that of the worst job: 0, or 1 where one failed, or 3 where the time or
the data was not enough for all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs import (
    BEGUN,
    DROPPED,
    ENDED,
    RUNNING,
    Job,
    ListError,
    begun_note,
    load_jobs,
    missing_packages,
    named,
    without_data,
    words,
)
from packing import pack, pack_arrays
from sharing import is_shared, mps, sharing, turns_of

ROOT = Path(__file__).resolve().parents[2]
#: What a job is given to end in order once the time is up, before it is killed.
GRACE_S = 20.0
#: No job begins with less time than this left.
LEAST_S = 30.0
#: The exit code of a job whose program is not there.
NO_SUCH_COMMAND = 127


def describe_host(out: Path) -> Path | None:
    """Write what the launcher would know of this host; None, and say so, where it cannot."""
    sys.path.insert(0, str(ROOT / "src"))
    try:
        from narrowgauge.checkout import git_facts
        from narrowgauge.machine import machine_facts
        from narrowgauge_contract.codec import write_json_atomic
        from narrowgauge_contract.record import HOST_NOTE_FORMAT, HostNote
    except (ImportError, SyntaxError, TypeError) as error:
        print(f"records will not say what this host is: {error}", flush=True)
        return None
    note = HostNote(HOST_NOTE_FORMAT, "native", machine_facts(), git=git_facts(ROOT))
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / "host.json", note)
    return out / "host.json"


class Queue:
    """Jobs in order; what is alone has the host to itself. Safe between threads."""

    def __init__(self, jobs: Sequence[Job], options: argparse.Namespace) -> None:
        self._jobs = list(jobs)
        self._options = options
        self._running: set[str] = set()
        self._alone = False
        self._changed = threading.Condition()
        #: Jobs that cannot begin any more, and what they waited for.
        self.left_out: dict[str, str] = {}

    def take(self, gpu: str) -> Job | None:
        """The next job of this lane, once it may begin; None when none is left, or no time."""
        with self._changed:
            while True:
                self._leave_out()
                mine = [job for job in self._jobs if self._may_run(job, gpu)]
                if not mine or time.monotonic() > self._options.until - LEAST_S:
                    return None
                # The first that waits for nothing; none overtakes what is alone.
                job = next((each for each in mine if not self._awaited(each)), None)
                if job is not None and not self._alone and not (job.alone and self._running):
                    self._jobs.remove(job)
                    self._running.add(job.name)
                    self._alone = job.alone
                    return job
                self._changed.wait(timeout=1.0)

    def _may_run(self, job: Job, gpu: str) -> bool:
        """It has not begun in another lane of these."""
        begun = begun_on(self._options.out / job.name)
        return job.alone or begun == gpu or begun not in self._options.gpus.split(",")

    def _awaited(self, job: Job) -> list[str]:
        """What it comes after and has not ended well."""
        return [name for name in job.after if ended_with(self._options.out / name) != 0]

    def _leave_out(self) -> None:
        """Forget jobs that wait for what failed, or for what nobody is going to run."""
        coming = {job.name for job in self._jobs} | self._running
        for job in list(self._jobs):
            for name in self._awaited(job):
                if name not in coming or ended_with(self._options.out / name) is not None:
                    self._jobs.remove(job)
                    self.left_out[job.name] = name
                    coming.discard(job.name)
                    break

    def give_back(self, job: Job) -> None:
        """It has ended."""
        with self._changed:
            self._running.remove(job.name)
            self._alone = False
            self._changed.notify_all()

    @property
    def left(self) -> int:
        """How many jobs nobody has taken."""
        return len(self._jobs)


def lane(
    queue: Queue,
    gpu: str,
    cores: Sequence[int],
    options: argparse.Namespace,
    codes: dict[str, int | None],
) -> None:
    """Take jobs for one GPU until none is left."""
    while True:
        job = queue.take(gpu)
        if job is None:
            return
        codes[job.name] = 1
        try:
            codes[job.name] = run_job(job, gpu, cores, options)
        except OSError as error:  # as of a full disk: the lane goes on with the next job
            print(f"{job.name:40} {error}", file=sys.stderr, flush=True)
        finally:
            queue.give_back(job)


def ended_with(folder: Path) -> int | None:
    """The exit code of a job that has ended; None where it has not."""
    try:
        return int(json.loads((folder / ENDED).read_text())["exit_code"])
    except (OSError, ValueError, KeyError):
        return None


def begun_on(folder: Path) -> str | None:
    """The GPU of a job that was begun; None where it was not."""
    note = begun_note(folder)
    return str(note["gpu"]) if "gpu" in note else None


def run_job(job: Job, gpu: str, cores: Sequence[int], options: argparse.Namespace) -> int | None:
    """Run one job to its end or the limit; its exit code, None where the time was up."""
    folder = options.out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # Before what is there already: packages may lie beside this Python rather than in it.
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if gpu:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    if job.shares and is_shared(options.gpus.split(",")):
        env.update(options.mps)
        env.update(turns_of(options.out, gpu))
    env.update(job.env)
    env["OUT"] = str(folder)
    if begun_on(folder) is None:
        begun = {"gpu": gpu, "shares": job.shares, "after": job.after, "verdict": job.verdict}
        (folder / BEGUN).write_text(json.dumps(begun) + "\n")
    begin = time.monotonic()
    with (folder / "log.txt").open("ab") as log:
        try:
            (folder / DROPPED).unlink(missing_ok=True)
            (folder / RUNNING).touch()
            child = subprocess.Popen(
                words(job, folder, options.data, options.host),
                cwd=ROOT, env=env, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # as of a shell: the lane goes on with the next job
            log.write(f"{error}\n".encode())
            code: int | None = NO_SUCH_COMMAND
        else:
            _pin(child.pid, () if job.alone or job.spread else cores)
            code = _wait(child, folder, options)
        finally:
            (folder / RUNNING).unlink(missing_ok=True)
    seconds = time.monotonic() - begin
    if code is not None:
        body = {"exit_code": code, "seconds": round(seconds, 1), "gpu": gpu}
        (folder / ENDED).write_text(json.dumps(body) + "\n")
    print(f"{job.name:40} {'cut off' if code is None else code:>7} {seconds:7.1f} s", flush=True)
    return code


def _pin(pid: int, cores: Sequence[int]) -> None:
    if cores:
        try:
            os.sched_setaffinity(pid, cores)
        except ProcessLookupError:  # it has ended already
            pass


def _wait(child: subprocess.Popen, folder: Path, options: argparse.Namespace) -> int | None:
    # In small steps: an interrupt brings `until` forward, and `lent.py drop` may come.
    while time.monotonic() < options.until and not (folder / DROPPED).exists():
        try:
            return child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    code = child.poll()
    if code is not None:  # it has ended in the meantime
        return code
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return None


@contextlib.contextmanager
def interruptible(options: argparse.Namespace) -> Iterator[None]:
    """Interrupted, or told to end, jobs end in order: in sessions of their own they would stay
    behind. No exception says so: of a thread that was waited for when one came, Python 3.11 knows
    no more that it runs. And a shell starts what it puts into the background with interrupts
    ignored, which jobs would inherit."""

    def end(*_: object) -> None:
        options.until = time.monotonic()

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def share_cores(lanes: int) -> list[list[int]]:
    """This process's cores, in equal runs of neighbours, one for each lane."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // lanes)
    return [cores[i * each : (i + 1) * each] or cores for i in range(lanes)]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="+", type=Path, metavar="LIST")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpus", default="0", help="which, with commas; empty: CPU only")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--only", default="", metavar="WORD,…", help="parts of names, in order")
    parser.add_argument("--without", default="", metavar="PACKAGE,…", help="go on without them")
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="records in one archive")
    parser.add_argument("--arrays", type=Path, metavar="STEM", help="logits: STEM-0.tar, …")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the lists; see the module."""
    options = _options(arguments)
    options.out = options.out.absolute()
    options.until = time.monotonic() + options.limit
    options.host = None
    try:
        jobs = load_jobs(options.lists)
        missing = missing_packages(options.lists, options.without.split(","))
    except (ListError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if missing:
        names = ",".join(missing)
        print(
            f"error: the lists need packages that are not here: {names}\n"
            f"next: install them, or --without {names}: their records then lack something",
            file=sys.stderr,
        )
        return 2
    jobs = named(jobs, options.only)
    due = [job for job in jobs if not (options.out / job.name / ENDED).is_file()]
    print(f"{len(due)} of {len(jobs)} jobs to do", flush=True)
    lacking = without_data(due, options.data)
    for name, sets in lacking.items():
        print(f"{name:40} left: {', '.join(sets)} not in --data", flush=True)
    due = [job for job in due if job.name not in lacking]
    if any(job.experiment for job in due):
        options.host = describe_host(options.out)
    shared = is_shared(options.gpus.split(","))
    queue = Queue(sharing(due) if shared else due, options)
    codes: dict[str, int | None] = {}
    gpus = options.gpus.split(",")
    threads = [
        threading.Thread(target=lane, args=(queue, gpus[i], cores, options, codes))
        for i, cores in enumerate(share_cores(len(gpus)))
    ]
    with interruptible(options), mps() if shared else contextlib.nullcontext({}) as options.mps:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if options.pack:
        pack(options.out, options.pack)
    if options.arrays:
        pack_arrays(options.out, options.arrays)
    for name, other in queue.left_out.items():
        print(f"{name:40} left: it comes after {other}, which has not ended well", flush=True)
    if lacking and not queue.left and None not in codes.values():
        print(f"{len(lacking)} left for want of data; the same command goes on", flush=True)
        return 1 if any(codes.values()) else 3
    if queue.left or None in codes.values():
        cut = sum(code is None for code in codes.values())
        print(f"{cut} cut off, {queue.left} not begun; the same command goes on", flush=True)
        return 3
    return 1 if any(codes.values()) or queue.left_out else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
