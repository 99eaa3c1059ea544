"""Solves for a placement plan by the costs of an earlier run, and measures steps by it.

    OUT=DIR python3 benchmarks/reference/planned.py COSTS cpu|accelerator|free [-p NAME=VALUE]…

A job of a list that comes after the run of costs on the same host, whose folder COSTS is: it needs
the lab's packages and the planner's (scipy, rich). In $OUT it leaves the plan (plan.toml), what the
planner says of it (solved.txt: every pass, what is busy for how long, and which measured steps its
parts explain), and a run of hetero-plan that was given the plan, its prediction and its bound. What
was cut off goes on. Passes are in fp32, as the claims have them; the exit code is that of the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs import Job, words

from narrowgauge.placement_toml import plan_toml
from narrowgauge.planner.report import Report, make_report, print_report
from narrowgauge.planner.search import ELSEWHERE, Asked
from narrowgauge.planner.source import costs_of
from narrowgauge.screen import Screen
from narrowgauge.store import RunFolder
from narrowgauge_contract.errors import NarrowgaugeError

ROOT = Path(__file__).resolve().parents[2]
PLAN_FILE, SOLVED_FILE = "plan.toml", "solved.txt"
_WIDTH = 160


def solve(costs: Path, elsewhere: str, out: Path) -> Report:
    """The fastest plan by the costs of that run's folder; also written to `out`. Raises what
    `costs_of` and `make_report` raise."""
    found, _ = costs_of(RunFolder(costs))
    report = make_report(found, Asked(elsewhere), (), "solved")
    out.mkdir(parents=True, exist_ok=True)
    (out / PLAN_FILE).write_text(plan_toml(report.plan), encoding="utf-8")
    with (out / SOLVED_FILE).open("w", encoding="utf-8") as page:
        print_report(report, Screen(file=page, width=_WIDTH, highlight=False))
    return report


def command(report: Report, out: Path, options: argparse.Namespace) -> list[str]:
    """The run's command line. The plan is of one network and batch, whose the costs were; what was
    begun is resumed, since the same costs give the same plan and prediction."""
    parameters = (
        f"network={report.costs.network}",
        f"batch={report.costs.batch}",
        f"plan={out / PLAN_FILE}",
        *report.options,
        f"elsewhere={report.asked.elsewhere}",
        *options.parameter,
    )
    job = Job(out.name, "hetero-plan", options.profile, parameters)
    host = out.parent / "host.json"
    _, *rest = words(job, out, None, host if host.is_file() else None)
    return [options.python, *rest]


def main(arguments: Sequence[str]) -> int:
    """Solve and measure; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("costs", type=Path, metavar="COSTS", help="the folder of a run of costs")
    parser.add_argument("elsewhere", choices=ELSEWHERE, help="where all but the products may live")
    parser.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--profile", default="paper", help="the claims' (default: paper)")
    parser.add_argument("--python", default=sys.executable, help="one that has torch")
    options = parser.parse_args(arguments)
    if not os.environ.get("OUT"):
        parser.error("OUT is not set: the folder of this job")
    out = Path(os.environ["OUT"]).absolute()
    try:
        report = solve(options.costs.absolute(), options.elsewhere, out)
    except NarrowgaugeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((out / SOLVED_FILE).read_text(encoding="utf-8"), flush=True)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.call(
        command(report, out, options), cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
