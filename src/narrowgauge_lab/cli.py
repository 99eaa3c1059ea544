"""The lab's command line, for a container's entry point and for hosts without Docker.

    python3 -m narrowgauge_lab run EXPERIMENT [-p name=value …] [--data DIR] --out DIR
    python3 -m narrowgauge_lab run --job job.json --out DIR
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
from narrowgauge_contract.outcome import Outcome
from narrowgauge_contract.spec import PROFILES
from narrowgauge_lab.console import complain, say
from narrowgauge_lab.errors import known_error
from narrowgauge_lab.session import Request, run

__all__ = ["main"]

#: What decides a job, so what cannot stand beside a decided one: option, attribute of the parser.
_DECIDING = {
    "EXPERIMENT": "experiment",
    "-p": "parameter",
    "--profile": "profile",
    "--seed": "seed",
    "--target": "target",
}


def main(words: List[str]) -> int:
    """Run one command; the exit code. The one place that turns an error into one."""
    options = _parser().parse_args(words)
    out = getattr(options, "out", Path())
    try:
        if options.command == "facts":
            return _facts()
        outcome = run(_request(options))
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
    return outcome.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m narrowgauge_lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("facts", help="what this environment is, as JSON")
    command = commands.add_parser("run", help="run an experiment, or a job decided elsewhere")
    add = command.add_argument
    add("experiment", nargs="?", help="its folder's name in the folder of experiments")
    add("--job", type=Path, metavar="FILE", help="a resolved job.json, instead of an experiment")
    add("--out", type=Path, required=True, metavar="DIR", help="where events and results go")
    add("-p", "--parameter", action="append", metavar="NAME=VALUE", help="a comma list makes rows")
    add("--profile", choices=PROFILES, help="how much of it to do (default: short)")
    add("--seed", type=int, help="of the first repeat (default: 0)")
    add("--target", metavar="NAME", help="the target's name, for the record (default: native)")
    add("--data", type=Path, metavar="DIR", help="the folder that holds the data sets")
    add("--experiments", type=Path, metavar="DIR", help="the folder that holds the experiments")
    add("--shard", metavar="I/N", help="only every N-th row, from the I-th")
    add("--resume", action="store_true", help="go on with the run in --out; skip complete rows")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    return parser


def _request(options: argparse.Namespace) -> Request:
    """The parsed words as a value. Raises UsageError, BadValueError."""
    if options.job is not None:
        given = [word for word, name in _DECIDING.items() if getattr(options, name) is not None]
        if given:
            raise UsageError(
                f"--job and {', '.join(given)} do not go together", why="a job is decided already"
            )
    elif options.experiment is None:
        raise UsageError("name an experiment, or give --job", next_step="run mnist --out DIR")
    return Request(
        out=options.out.absolute(),
        start=Path.cwd(),
        env=os.environ,
        job=options.job,
        experiment=options.experiment or "",
        parameters=tuple(options.parameter or ()),
        profile=options.profile or "short",
        seed=options.seed or 0,
        target=options.target or "native",
        data=options.data,
        experiments=options.experiments,
        shard=_parse_shard(options.shard),
        resume=options.resume,
        device=options.device,
    )


def _parse_shard(text: Optional[str]) -> Optional[Tuple[int, int]]:
    if text is None:
        return None
    position, _, count = text.partition("/")
    if not position.isdigit() or not count.isdigit():
        raise BadValueError(f"--shard {text} is not I/N", next_step="for example: --shard 1/3")
    return int(position), int(count)


def _facts() -> int:
    from narrowgauge_lab import facts

    say(dumps(facts.gather(os.environ)).rstrip("\n"))
    return int(ExitCode.OK)


def _summarise(outcome: Outcome) -> None:
    for row in outcome.rows:
        for reason in row.validity.reasons:
            say(f"row {row.index} INVALID: {reason}")
    valid = sum(row.validity.valid for row in outcome.rows)
    say(
        f"{outcome.run_id}: {outcome.status.value}, {valid} of {len(outcome.rows)} rows valid, "
        f"{outcome.seconds:.1f} s"
    )
