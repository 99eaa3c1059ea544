"""The lab's command line, for a container's entry point and for hosts without Docker.

    python3 -m narrowgauge_lab run EXPERIMENT [-p name=value …] [--data DIR] --out DIR
    python3 -m narrowgauge_lab run --job job.json --out DIR
    python3 -m narrowgauge_lab facts

With --job, whoever wrote the job composes the record. Without, nobody else will, so this does.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import List, Tuple

from narrowgauge_contract.codec import dumps, write_json_atomic
from narrowgauge_contract.errors import (
    BadValueError,
    ExitCode,
    NarrowgaugeError,
    NotApplicableError,
    UsageError,
)
from narrowgauge_contract.events import EVENTS_FILE, read_events
from narrowgauge_contract.job import (
    Job,
    load_job,
    new_run_id,
    parse_overrides,
    resolve,
    shard_rows,
)
from narrowgauge_contract.outcome import InsideFacts, Outcome
from narrowgauge_contract.record import RECORD_FILE, compose, write_record
from narrowgauge_contract.spec import PROFILES, ExperimentSpec
from narrowgauge_lab.errors import disk_full, is_disk_full

__all__ = ["main"]

JOB_FILE = "job.json"


def main(arguments: List[str]) -> int:
    """Run one command; the exit code. The one place that turns an error into one."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "facts":
            return _facts()
        return _run(options)
    except NarrowgaugeError as error:
        print(f"narrowgauge_lab: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"narrowgauge_lab: {disk_full(options.out)}", file=sys.stderr)
        return int(ExitCode.DISK_FULL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m narrowgauge_lab", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("facts", help="what this environment is, as JSON")
    run = commands.add_parser("run", help="run an experiment, or a job that is decided already")
    run.add_argument("experiment", nargs="?")
    run.add_argument("--job", type=Path, help="a resolved job.json, instead of an experiment")
    run.add_argument("--out", type=Path, required=True, help="where events and results go")
    run.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE")
    run.add_argument("--profile", choices=PROFILES, default="short")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--target", default="native", help="the name to record, when in an image")
    run.add_argument("--data", type=Path, help="the folder that holds the data sets")
    run.add_argument("--experiments", type=Path, help="the folder that holds the experiments")
    run.add_argument("--shard", help="i/n: only every n-th row, from the i-th")
    run.add_argument("--resume", action="store_true", help="skip complete rows, go on in others")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _facts() -> int:
    from narrowgauge_lab import facts

    print(dumps(facts.gather()), end="")
    return int(ExitCode.OK)


def _run(options: argparse.Namespace) -> int:
    from narrowgauge_lab import experiments, facts

    folder = experiments.find_experiments(options.experiments, Path.cwd())
    job = load_job(options.job) if options.job else _decide(options, folder)
    if options.shard:
        job = dataclasses.replace(job, rows=shard_rows(job.rows, _parse_shard(options.shard)))
    spec = job.experiment_spec()
    _prepare_out(options)
    inside = facts.gather()
    _check_requirements(spec, inside, options.device)

    from narrowgauge_lab import supervisor

    setting = supervisor.Setting(
        out=options.out,
        data_root=options.data,
        device=_device(options.device, inside),
        inside=inside,
        source_hash=facts.source_hash(),
        experiment_hash=facts.experiment_hash(folder / job.experiment),
        resume=options.resume,
    )
    function = experiments.load_run(folder, job.experiment)
    if not options.job:
        write_json_atomic(options.out / JOB_FILE, job)
    outcome = supervisor.supervise(job, function, setting)
    if not options.job:
        _record(options.out, job, outcome)
    _say(outcome)
    return outcome.exit_code


def _decide(options: argparse.Namespace, experiments_folder: Path) -> Job:
    """The job that the command line asks for, or the one begun before under --resume."""
    from narrowgauge_lab.experiments import find_spec

    if not options.experiment:
        raise UsageError("name an experiment, or give --job", next_step="run mnist --out DIR")
    spec = find_spec(experiments_folder, options.experiment)
    begun = options.out / JOB_FILE
    run_id = new_run_id(spec.id)
    if options.resume and begun.is_file():
        run_id = load_job(begun).run_id
    job = resolve(
        spec,
        parse_overrides(spec, options.parameter),
        profile=options.profile,
        target=options.target,
        seed=options.seed,
        run_id=run_id,
    )
    if options.resume and begun.is_file():
        before = load_job(begun)
        if (before.parameters, before.seed, before.profile) != (job.parameters, job.seed, job.profile):
            raise UsageError(
                f"{options.out} holds another run",
                why=f"it was begun with {before.parameters}, seed {before.seed}, {before.profile}",
                next_step="resume with the same words, or give another --out",
            )
    return job


def _parse_shard(text: str) -> Tuple[int, int]:
    position, slash, count = text.partition("/")
    if not slash or not position.isdigit() or not count.isdigit():
        raise BadValueError(f"--shard {text} is not i/n", next_step="for example: --shard 1/3")
    return int(position), int(count)


def _prepare_out(options: argparse.Namespace) -> None:
    """Make the folder; a run is never appended to by accident."""
    options.out.mkdir(parents=True, exist_ok=True)
    if (options.out / EVENTS_FILE).exists() and not options.resume:
        raise UsageError(
            f"{options.out} already holds a run",
            why="results are never overwritten",
            next_step="--resume goes on with it; another --out starts anew",
        )


def _check_requirements(spec: ExperimentSpec, inside: InsideFacts, device: str) -> None:
    """Raises NotApplicableError where this torch or this machine cannot run the experiment."""
    wanted = spec.requires_torch
    if not wanted.startswith(">=") or inside.torch is None:
        raise NotApplicableError(f"'{spec.id}' requires torch {wanted}, which is not understood")
    if _version(inside.torch) < _version(wanted[2:]):
        raise NotApplicableError(
            f"'{spec.id}' needs torch {wanted}, this is {inside.torch}",
            next_step="narrowgauge list shows the targets that have it",
        )
    if device == "cuda" and inside.accelerator is None:
        raise NotApplicableError("--device cuda, and torch sees no GPU here")
    if spec.requires_accelerator and (inside.accelerator is None or device == "cpu"):
        raise NotApplicableError(f"'{spec.id}' needs a GPU, and torch sees none here")


def _version(text: str) -> Tuple[int, ...]:
    """`1.8.0+cu111` as (1, 8, 0); a pre-release counts as its release."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
    return tuple((numbers + [0, 0, 0])[:3])


def _device(asked: str, inside: InsideFacts) -> str:
    if asked != "auto":
        return asked
    return "cpu" if inside.accelerator is None else "cuda"


def _record(out: Path, job: Job, outcome: Outcome) -> None:
    """Compose the record. One of an interrupted run before a --resume is kept beside it."""
    path = out / RECORD_FILE
    if path.exists():
        number = 1
        while (out / f"record.{number}.json").exists():
            number += 1
        os.replace(path, out / f"record.{number}.json")
    write_record(path, compose(job, outcome, read_events(out / EVENTS_FILE), None))


def _say(outcome: Outcome) -> None:
    valid = sum(row.validity.valid for row in outcome.rows)
    print(f"{outcome.run_id}: {outcome.status.value}, {valid} of {len(outcome.rows)} rows valid,"
          f" {outcome.seconds:.1f} s")  # fmt: skip
    for row in outcome.rows:
        for reason in row.validity.reasons:
            print(f"row {row.index} INVALID: {reason}")
