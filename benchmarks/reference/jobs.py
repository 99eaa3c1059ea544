"""The lists that `take.py` runs: what a job is, and what it needs before it may begin."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python before 3.11
    import tomli as tomllib

__all__ = [
    "BEGUN", "DROPPED", "ENDED", "OUT", "RUNNING", "Job", "ListError", "begun_note", "load_jobs",
    "missing_packages", "named", "without_data", "words",
]  # fmt: skip

#: In a job's folder: the GPU that it began on, whether it shares, what it came after and whether it
#: is tests alone (`begun_note`); that it runs; that it is to end now, unfinished; and once it is
#: through, its exit code and seconds.
BEGUN, RUNNING, DROPPED, ENDED = "begun.json", "running", "dropped", "ended.json"

#: In a word of a command or a parameter: the folder of all jobs' folders.
OUT = "{out}"


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of a list: an experiment's run, or a command."""

    name: str
    experiment: str = ""
    profile: str = "short"
    parameters: tuple[str, ...] = ()
    shard: str = ""
    command: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    shares: bool = False
    spread: bool = False
    first: bool = False
    verdict: bool = False


class ListError(Exception):
    """A list that cannot be read."""


def load_jobs(paths: Sequence[Path]) -> list[Job]:
    """The jobs of all lists, in order. Raises ListError: unknown keys, names used twice, a job that
    comes after one which no list has before it."""
    jobs: list[Job] = []
    known = {field.name for field in dataclasses.fields(Job)}
    for path in paths:
        with path.open("rb") as file:
            tables = tomllib.load(file).get("job", [])
        for number, table in enumerate(tables, start=1):
            place = f"{path} job {number}"
            unknown = sorted(set(table) - known)
            if unknown:
                raise ListError(f"{place} has the unknown key '{unknown[0]}'")
            job = _job(table, place)
            if job in jobs:
                continue  # several lists begin with the same
            if job.name in {earlier.name for earlier in jobs}:
                raise ListError(f"{place}: the name '{job.name}' is used twice")
            for name in job.after:
                if name not in {earlier.name for earlier in jobs}:
                    raise ListError(f"{place}: after = '{name}', which is no job before it")
            jobs.append(job)
    if not jobs:
        raise ListError(f"no [[job]] in {', '.join(map(str, paths))}")
    return jobs


def begun_note(folder: Path) -> dict[str, Any]:
    """What a job's folder says of its beginning; nothing where it was not begun, or cannot be read,
    as where it was cut off while it was written."""
    try:
        note = json.loads((folder / BEGUN).read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def missing_packages(paths: Sequence[Path], without: Sequence[str]) -> list[str]:
    """The packages that lists need, that this Python lacks and that nobody said to go without."""
    needed: set[str] = set()
    for path in paths:
        with path.open("rb") as file:
            needed.update(tomllib.load(file).get("needs", []))
    return sorted(name for name in needed - set(without) if importlib.util.find_spec(name) is None)


def named(jobs: Sequence[Job], asked: str) -> list[Job]:
    """The jobs that words with commas between them name, in the order of the words: the one of that
    very name, or all whose name has the word in it, in the order of their lists; before each those
    that it comes after, and before all those that are to be first. So is what a job that shares
    comes after and what does not share, unless a word names it: in its place it would wait until
    all trainings before it have ended, and hold up those after it. Empty: all; of words that name
    none, none."""
    wanted = [word for word in asked.split(",") if word]
    if not wanted:
        return list(jobs)
    by_name = {job.name: job for job in jobs}
    found: dict[str, Job] = {}
    ahead: dict[str, Job] = {}

    def take(job: Job, place: dict[str, Job]) -> None:
        for name in job.after:
            other = by_name[name]
            hurries = job.shares and not other.shares and name not in wanted
            take(other, ahead if hurries else place)
        if job.name not in ahead:
            place.setdefault(job.name, job)

    for word in wanted:
        exact = by_name.get(word)
        for job in [exact] if exact else [job for job in jobs if word in job.name]:
            take(job, found)
    later = [job for name, job in found.items() if name not in ahead]
    begin = [job for job in jobs if job.first and job.name not in {**found, **ahead}]
    return [*begin, *ahead.values(), *later] if found else []


def _job(table: dict[str, Any], place: str) -> Job:
    name = table.get("name", "")
    if not name or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-_."):
        raise ListError(f"{place} needs a name of a-z, 0-9, '-', '_' and '.', not '{name}'")
    if bool(table.get("experiment")) == bool(table.get("command")):
        raise ListError(f"{place} needs either 'experiment' or 'command'")
    return Job(
        name=name,
        experiment=table.get("experiment", ""),
        profile=table.get("profile", "short"),
        parameters=tuple(f"{key}={value}" for key, value in table.get("parameters", {}).items()),
        shard=table.get("shard", ""),
        command=tuple(table.get("command", ())),
        data=tuple(table.get("data", ())),
        after=tuple(table.get("after", ())),
        env=tuple(sorted((key, str(value)) for key, value in table.get("env", {}).items())),
        alone=bool(table.get("alone", False)),
        shares=bool(table.get("shares", False)),
        spread=bool(table.get("spread", False)),
        verdict=bool(table.get("verdict", False)),
        first=bool(table.get("first", False)),
    )


def without_data(jobs: Sequence[Job], data: Path | None) -> dict[str, list[str]]:
    """By job, the sets that it reads and that are not in the data folder; none for most jobs."""
    found = {
        job.name: [name for name in job.data if data is None or not (data / name).is_dir()]
        for job in jobs
    }
    return {name: missing for name, missing in found.items() if missing}


def words(job: Job, folder: Path, data: Path | None, host: Path | None = None) -> list[str]:
    """The command of a job whose own folder is `folder`, beside those of the others: what is in
    one of these, a word or a parameter names by `{out}`. A run that was begun is resumed. `host`:
    the facts of the host."""
    beside = str(folder.parent)
    if job.command:
        given = [sys.executable if word == "python" else word for word in job.command]
        return [word.replace(OUT, beside) for word in given]
    given = [sys.executable, "-m", "narrowgauge_lab", "run", job.experiment]
    given += ["--profile", job.profile, "--out", str(folder)]
    if job.shard:
        given += ["--shard", job.shard]
    for parameter in job.parameters:
        given += ["-p", parameter.replace(OUT, beside)]
    if data is not None:
        given += ["--data", str(data)]
    if host is not None:
        given += ["--host-facts", str(host)]
    if (folder / "job.json").is_file():
        given.append("--resume")
    return given
