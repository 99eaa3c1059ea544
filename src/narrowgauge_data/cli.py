"""The data sets' command line, for a container and for hosts that have Python and nothing of ours.

python3 -m narrowgauge_data fetch [SET…] --data DIR [--from DIR] [--if-possible]
python3 -m narrowgauge_data verify [SET…] --data DIR [--repair]
python3 -m narrowgauge_data join PART… --data DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Mapping

from narrowgauge_contract.data_commands import commands_in, module_at
from narrowgauge_contract.datasets import DATA_SETS, DataSet, data_set
from narrowgauge_contract.errors import DataUnavailableError, ExitCode, NarrowgaugeError
from narrowgauge_data import local
from narrowgauge_data.caller import Caller

__all__ = ["main"]


def main(words: List[str], env: Mapping[str, str]) -> int:
    """Run one command; the exit code. The one place that turns an error into one."""
    options = _parser().parse_args(words)
    options.data = options.data.absolute()  # package clients run elsewhere
    caller = Caller(_note, env, commands_in(env, module_at(options.data)))
    commands = {"fetch": _fetch, "verify": _verify, "join": _join}
    try:
        commands[options.command](options, caller)
    except NarrowgaugeError as error:
        _complain(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        _note("interrupted")
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m narrowgauge_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="fetch and decode sets; a whole one stays")
    verify = commands.add_parser("verify", help="hash every file of sets again")
    join = commands.add_parser("join", help="join the parts that `narrowgauge data pack` made")
    for command in (fetch, verify):
        command.add_argument(
            "sets", nargs="*", metavar="SET", help=f"{', '.join(DATA_SETS)}; all by default"
        )
    join.add_argument(
        "parts", nargs="+", type=Path, metavar="PART", help="SET.I-of-N.ngpack, all or a few"
    )
    for command in (fetch, verify, join):
        command.add_argument(
            "--data", type=Path, required=True, metavar="DIR", help="the folder of the data sets"
        )
    fetch.add_argument(
        "--from", type=Path, dest="placed", metavar="DIR", help="take files placed here by hand"
    )
    fetch.add_argument(
        "--if-possible",
        action="store_true",
        help="no failure where a set cannot be had; a corrupt one is, and is not replaced",
    )
    verify.add_argument("--repair", action="store_true", help="fetch what is missing or corrupt")
    return parser


def _fetch(options: argparse.Namespace, caller: Caller) -> None:
    from narrowgauge_data.fetch import each

    each(_declared(options.sets), lambda dataset: _fetch_one(dataset, options, caller), caller)


def _fetch_one(dataset: DataSet, options: argparse.Namespace, caller: Caller) -> None:
    from narrowgauge_data.fetch import fetch, fetch_from, in_a_line

    try:
        if options.if_possible:
            # Nobody asked for this set by name, perhaps, so what lies there is not replaced.
            with caller.naming_failures(dataset.name, options.data):
                local.check(dataset, options.data).raise_if_corrupt(caller.commands)
        if options.placed is not None:
            fetch_from(dataset, options.data, options.placed, caller)
        else:
            fetch(dataset, options.data, caller)
    except DataUnavailableError as error:
        if not options.if_possible:
            raise
        _note(f"{in_a_line(dataset, error)}; a run that needs it will say so again")


def _verify(options: argparse.Namespace, caller: Caller) -> None:
    from narrowgauge_data.fetch import verify

    reports = verify(_declared(options.sets), options.data, caller, repair=options.repair)
    for report in reports:
        print(report.finding)
    local.raise_if_wrong(reports, caller.commands)


def _join(options: argparse.Namespace, caller: Caller) -> None:
    from narrowgauge_data.parts import join

    for joined in join(options.parts, options.data, caller):
        print(joined.sentence)


def _declared(names: List[str]) -> List[DataSet]:
    return [data_set(name) for name in names or DATA_SETS]


def _note(text: str) -> None:
    """Tell the user something on the way; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def _complain(error: NarrowgaugeError) -> None:
    first, *rest = str(error).splitlines()
    _note("\n".join([f"error: {first}", *(f"  {line}" for line in rest)]))
