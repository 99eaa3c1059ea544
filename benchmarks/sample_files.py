"""The samples of a benchmark in a file, which `--json` writes and `--show` reads again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--show`."""
    parser.add_argument("--json", type=Path, help="write the raw samples there")
    parser.add_argument("--show", type=Path, help="print the table of such a file; measure nothing")


def shown_or_measured(
    options: argparse.Namespace, measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The samples of `--show`; or those that `measure` gives, kept where `--json` says."""
    if options.show:
        result: dict[str, Any] = json.loads(options.show.read_text(encoding="utf-8"))
        return result
    result = measure()
    if options.json:
        write(options.json, result)
    return result


def write(path: Path, result: dict[str, Any]) -> None:
    """As `--show` takes it; in a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
