"""The lab's command line, for a container's entry point and for hosts without Docker.

    python3 -m narrowgauge_lab run EXPERIMENT [-p name=value …] [--data DIR] --results DIR
    python3 -m narrowgauge_lab run --job job.json --out DIR
    python3 -m narrowgauge_lab record --out DIR
    python3 -m narrowgauge_lab facts

With --job, whoever wrote the job composes the record. Without, nobody else will, so this does.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import List, Optional, Tuple

from narrowgauge_contract.codec import dumps
from narrowgauge_contract.errors import BadValueError, ExitCode, UsageError
from narrowgauge_contract.job import load_job
from narrowgauge_contract.outcome import Outcome, Status, why_nothing_measured
from narrowgauge_contract.record import HostNote, load_host_note
from narrowgauge_contract.spec import PROFILES
from narrowgauge_contract.summary import summary_lines
from narrowgauge_lab.console import complain, say
from narrowgauge_lab.errors import known_error
from narrowgauge_lab.nodes import nodes_of
from narrowgauge_lab.session import JOB_FILE, Request, record_killed, run

__all__ = ["main"]

#: The target's name, in every image of ours.
_TARGET_VARIABLE = "NARROWGAUGE_TARGET"
#: What cannot stand beside a job that is decided and recorded elsewhere: option, attribute of the
#: parser.
_DECIDING = {
    "EXPERIMENT": "experiment",
    "-p": "parameter",
    "--profile": "profile",
    "--seed": "seed",
    "--target": "target",
    "--results": "results",
    "--host-facts": "host_facts",
}


def main(words: List[str]) -> int:
    """Run one command; the exit code. The one place that turns an error into one."""
    options = _parser().parse_args(words)
    out = getattr(options, "out", None) or getattr(options, "results", None) or Path()
    try:
        if options.command == "facts":
            return _facts()
        if options.command == "record":
            return _record(options)
        request = _request(options)
        outcome = run(request)
    except KeyboardInterrupt:
        complain("error: interrupted")
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        known = known_error(error, out)
        if known is None:
            raise
        complain(f"error: {known}")
        return int(known.exit_code)
    _summarise(outcome)
    nodes = nodes_of(request.env)
    if not nodes.leads:
        say(f"node {nodes.rank} of {nodes.count}: node 0 records the run")
        return outcome.exit_code
    _close(request, outcome)
    if options.results is not None:
        say(f"in {options.results / options.experiment / outcome.run_id}")
    return outcome.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m narrowgauge_lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("facts", help="what this environment is, as JSON")
    _add_record(commands.add_parser("record", help="compose the record of a run that was killed"))
    _add_run(commands.add_parser("run", help="run an experiment, or a job decided elsewhere"))
    return parser


def _add_record(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--out", type=Path, required=True, metavar="DIR", help="the run's folder, with its job.json"
    )
    add("--host-facts", type=Path, metavar="FILE", help="what a script wrote of its host, as JSON")
    add("--out-of-memory", action="store_true", help="the host saw that it was killed for memory")


def _add_run(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("experiment", nargs="?", help="its folder's name in the folder of experiments")
    add("--job", type=Path, metavar="FILE", help="a resolved job.json, instead of an experiment")
    place = command.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, metavar="DIR", help="where events and results go")
    place.add_argument(
        "--results", type=Path, metavar="DIR", help="they go to EXPERIMENT/RUN-ID in here, made now"
    )
    add(
        "-p",
        "--parameter",
        action="append",
        metavar="NAME=VALUE",
        help="a comma list makes rows; a placement plan is a name that is built in, or a TOML file",
    )
    add("--profile", choices=PROFILES, help="how much of it to do (default: short)")
    add("--seed", type=int, help="of the first repeat (default: 0)")
    add(
        "--target",
        metavar="NAME",
        help=f"the target's name, for the record (default: ${_TARGET_VARIABLE}, or native)",
    )
    add("--data", type=Path, metavar="DIR", help="the folder that holds the data sets")
    add("--experiments", type=Path, metavar="DIR", help="the folder that holds the experiments")
    add("--shard", metavar="I/N", help="only every N-th row, from the I-th")
    add("--resume", action="store_true", help="go on with the run in --out; skip complete rows")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--host-facts", type=Path, metavar="FILE", help="what a script wrote of its host, as JSON")


def _request(options: argparse.Namespace) -> Request:
    """The parsed words as a value. Raises UsageError, BadValueError."""
    if options.job is not None:
        given = [word for word, name in _DECIDING.items() if getattr(options, name) is not None]
        if given:
            raise UsageError(
                f"--job and {', '.join(given)} do not go together",
                why="a job is decided already, and whoever wrote it records it",
            )
    elif options.experiment is None:
        raise UsageError("name an experiment, or give --job", next_step="run mnist --results DIR")
    if options.resume and options.results is not None:
        raise UsageError(
            "--resume and --results do not go together",
            why="--results makes a new folder",
            next_step="--out RESULTS/EXPERIMENT/RUN-ID names the run to go on with",
        )
    return Request(
        out=(options.out or options.results).absolute(),
        start=Path.cwd(),
        env=os.environ,
        job=options.job,
        experiment=options.experiment or "",
        parameters=tuple(options.parameter or ()),
        profile=options.profile or "short",
        seed=options.seed or 0,
        target=options.target or os.environ.get(_TARGET_VARIABLE) or "native",
        data=options.data,
        experiments=options.experiments,
        shard=_parse_shard(options.shard),
        resume=options.resume,
        device=options.device,
        new_folder=options.results is not None,
        note=_note(options),
    )


def _note(options: argparse.Namespace) -> Optional[HostNote]:
    return None if options.host_facts is None else load_host_note(options.host_facts)


def _parse_shard(text: Optional[str]) -> Optional[Tuple[int, int]]:
    if text is None:
        return None
    position, _, count = text.partition("/")
    if not position.isdigit() or not count.isdigit():
        raise BadValueError(f"--shard {text} is not I/N", next_step="for example: --shard 1/3")
    return int(position), int(count)


def _record(options: argparse.Namespace) -> int:
    record = record_killed(
        options.out.absolute(), _note(options), out_of_memory=options.out_of_memory
    )
    say(f"{record.run_id}: {record.status.value}, recorded with {len(record.rows)} rows")
    return int(ExitCode.OK)


def _facts() -> int:
    from narrowgauge_lab import facts

    say(dumps(facts.gather(os.environ)).rstrip("\n"))
    return int(ExitCode.OK)


def _summarise(outcome: Outcome) -> None:
    for row in outcome.rows:
        # What ended a row was said when it did.
        for reason in row.validity.reasons if row.error is None else ():
            said = reason if row.status is Status.SKIPPED else f"INVALID: {reason}"
            say(f"row {row.index} {said}")
    lacking = why_nothing_measured(outcome.rows)
    if lacking and outcome.exit_code == ExitCode.NOT_APPLICABLE:
        say(f"{outcome.run_id}: nothing could be measured here: {lacking}")
        return
    valid = sum(row.validity.valid for row in outcome.rows)
    say(
        f"{outcome.run_id}: {outcome.status.value}, {valid} of {len(outcome.rows)} rows valid, "
        f"{outcome.seconds:.1f} s"
    )


def _close(request: Request, outcome: Outcome) -> None:
    """What the experiment itself has to say of its rows, where its `[summary]` says how."""
    profilers = sorted({str(r.facts["profiled"]) for r in outcome.rows if "profiled" in r.facts})
    if profilers:
        say(f"profiled ({', '.join(profilers)}): timings include the profiler")
    folder = request.out
    if request.new_folder:
        folder = folder / request.experiment / outcome.run_id
    closing = load_job(request.job or folder / JOB_FILE).experiment_spec().closing
    for line in summary_lines(closing, outcome.rows) if closing else ():
        say(line)
