"""The program `narrowgauge`: its commands, and the one place that turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, TextIO

import typer

from narrowgauge_contract import __version__
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError

__all__ = ["MODULES", "build_app", "main", "run_program"]

#: Set to show the trace of an unexpected error instead of writing it to a file.
TRACEBACK_VARIABLE = "NARROWGAUGE_TRACEBACK"


#: Which module has which commands. Building them all takes typer 25 ms, so a command line that
#: begins with one of these builds only its module's.
MODULES = {
    "narrowgauge.cli.run": ("run", "plan", "attach", "shell", "list"),
    "narrowgauge.cli.sweep": ("sweep",),
    "narrowgauge.cli.results": ("results", "show", "compare"),
    "narrowgauge.cli.anytime_score": ("anytime-score",),
    "narrowgauge.cli.data": ("data", "weights"),
    "narrowgauge.cli.images": ("images",),
    "narrowgauge.cli.doctor": ("doctor",),
    "narrowgauge.cli.hosts": ("hosts",),
    "narrowgauge.cli.notebook": ("notebook",),
    "narrowgauge.cli.placement": ("placement",),
    "narrowgauge.cli.multipliers": ("multipliers",),
    "narrowgauge.cli.image_bin": ("image-bin",),
    "narrowgauge.cli.kernels": ("kernels",),
    "narrowgauge.cli.reproduce": ("reproduce", "kick", "explain", "replay"),
    "narrowgauge.cli.report": ("report", "serve"),
    "narrowgauge.cli.bundle": ("bundle", "verify-bundle"),
    "narrowgauge.cli.ae": ("ae",),
    "narrowgauge.cli.new": ("new",),
}


def build_app(command: str | None = None) -> typer.Typer:
    """The program with every command, or with those beside `command` where that is one.

    Without rich, whose import costs more than the whole help.
    """
    app = typer.Typer(
        name="narrowgauge",
        help="Run experiments on low-precision and heterogeneous deep learning, and judge them.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_program)
    having = [name for name, commands in MODULES.items() if command in commands]
    for name in having or MODULES:
        importlib.import_module(name).register(app)
    return app


def main() -> None:
    """The entry point of the console script."""
    sys.exit(run_program(sys.argv[1:], os.environ, sys.stderr))


def run_program(arguments: Sequence[str], env: Mapping[str, str], errors: TextIO) -> int:
    """Run one command line; the exit code. Errors are told on `errors`, never raised."""
    try:
        first = arguments[0] if arguments else None
        code = build_app(first)(list(arguments), prog_name="narrowgauge", standalone_mode=False)
        return code if isinstance(code, int) else int(ExitCode.OK)
    except NarrowgaugeError as error:
        _tell(error, errors)
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=errors)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # `narrowgauge results | head`: the reader has seen enough. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            # click's usage errors: their class moved between typer's versions, their shape did not.
            error.show(file=errors)
            return int(error.exit_code)
        return _unexpected(error, env, errors)


def _tell(error: NarrowgaugeError, errors: TextIO) -> None:
    lines = str(error).splitlines()
    print(f"error: {lines[0]}", file=errors)
    for line in lines[1:]:
        print(f"  {line}", file=errors)


def _unexpected(error: Exception, env: Mapping[str, str], errors: TextIO) -> int:
    """A bug of ours: one line and where its trace lies, or the trace itself where asked."""
    trace = "".join(traceback.format_exception(error))
    if env.get(TRACEBACK_VARIABLE):
        print(trace, file=errors)
        return int(ExitCode.INTERNAL)
    print(f"error: unexpected {type(error).__name__}: {error}", file=errors)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="narrowgauge-", suffix=".trace", delete=False, encoding="utf-8"
        ) as stream:
            stream.write(trace)
        print(f"  this is a bug; please report it with {stream.name}", file=errors)
    except OSError:
        print(trace, file=errors)
    return int(ExitCode.INTERNAL)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"narrowgauge {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    del version


if __name__ == "__main__":
    main()
