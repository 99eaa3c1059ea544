"""Every command and every option, frozen: the command line does not grow by accident.

A change here is a change for users, and belongs into the changelog.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from narrowgauge.cli.app import MODULES, build_app

FROZEN = """
narrowgauge --version
narrowgauge ae
narrowgauge ae check [CRITERION] --explain --results --project --json
narrowgauge anytime-score RUN --out --into --base --results --project --json
narrowgauge attach RUN --results --project --wait --json
narrowgauge bundle [RUN] --public --full --images/--no-images --out --force --results --project \
--json
narrowgauge compare RUN RUN [RUN] --plot --results --project --json
narrowgauge data
narrowgauge data fetch [SET] --data --from
narrowgauge data pack SET --max --out --data
narrowgauge data unpack PART --data
narrowgauge data verify [SET] --data --repair --json
narrowgauge doctor --explain --on --project --json
narrowgauge explain CLAIM --references --results --project --json
narrowgauge hosts
narrowgauge hosts add NAME ADDRESS --user --port --target --device... --data --label... --project
narrowgauge hosts doctor [NAME] --project --json
narrowgauge hosts list --project --json
narrowgauge image-bin
narrowgauge image-bin pack PICTURE --out --order --preprocessing --fit --force
narrowgauge image-bin unpack FILE.BIN --out --order --preprocessing
narrowgauge images
narrowgauge images build TARGET --base --wheels --no-cache --frozen --project
narrowgauge images load FILE --project
narrowgauge images lock [TARGET] --packages --project
narrowgauge images render --check --project
narrowgauge images save TARGET --out --project
narrowgauge images verify TARGET --project
narrowgauge kernels
narrowgauge kernels generate SHAPE --tile --arch --precision --accumulation --granularity --layout \
--path --bias --relu-output --on --executor --results --project --lab-python
narrowgauge kernels tune SHAPE|NETWORK --batch --seconds --precision --accumulation --granularity \
--layout --path --bias --relu-output --on --executor --results --project --lab-python --json
narrowgauge kick --on --executor --results --data --project --lab-python
narrowgauge list --project --json
narrowgauge multipliers
narrowgauge multipliers analyse NAME --signed --on --executor --results --project --lab-python \
--json
narrowgauge multipliers compare NAME OTHER --signed --on --executor --results --project \
--lab-python --json
narrowgauge multipliers export NAME FILE.NPY --signed --force --on --executor --results \
--project --lab-python
narrowgauge multipliers list --on --executor --results --project --lab-python --json
narrowgauge multipliers show NAME --signed --on --executor --results --project --lab-python --json
narrowgauge new NAME --title --project
narrowgauge notebook [EXPERIMENT] --on --port --write --results --data --project
narrowgauge placement
narrowgauge placement list --json
narrowgauge placement show PLAN --toml --json
narrowgauge placement solve [RUN] --network-elsewhere --precision --memory --what-if --row --out \
--results --project --json
narrowgauge plan EXPERIMENT --on --executor --profile -p/--parameter... --seed --results --data \
--project --kubernetes... --json
narrowgauge replay [CLAIM] --references --every --out --results --project --json
narrowgauge report --format --out --into --check --judged --replay --results --project
narrowgauge reproduce [CLAIM] --all --budget --resume --dry-run --cooldown --order-seed --seed \
--on --executor --results --data --project --lab-python --json
narrowgauge results --experiment --status --limit --results --project --json
narrowgauge results draw [RUN] --results --project
narrowgauge results export RUN --reference --out --picture... --results --project
narrowgauge results tables [EXPERIMENT] --check --project
narrowgauge run EXPERIMENT --on --executor --profile -p/--parameter... --seed --results --data \
--project --lab-python --wait --slurm... --kubernetes... --node --host... --all --label \
--spread --json
narrowgauge serve --port --results --project
narrowgauge shell [COMMAND] --on --executor --data --project --lab-python
narrowgauge show [RUN] --results --project --json
narrowgauge sweep FILE --on --executor --slurm... --results --data --project --lab-python --plan \
--show --wait --host... --all --label --json
narrowgauge verify-bundle FILE --sha256 --json
narrowgauge weights
narrowgauge weights import FILE --name --recipe --store
narrowgauge weights list --store --json
narrowgauge weights train EXPERIMENT --name --on --executor --profile -p/--parameter... --seed \
--results --data --store --project --lab-python
"""


def _lines(command: Any, name: str) -> list[str]:
    """One line for a command and its parameters, then those of its subcommands."""
    words = []
    for parameter in command.params:
        options = sorted({*parameter.opts, *parameter.secondary_opts}, key=lambda o: (len(o), o))
        if parameter.param_type_name == "argument":
            shown = (parameter.metavar or parameter.name).strip("[].").upper()
            words.append(shown if parameter.required else f"[{shown}]")
        elif parameter.name not in ("install_completion", "show_completion", "help"):
            words.append("/".join(options) + ("..." if parameter.multiple else ""))
    lines = [" ".join([name, *words])]
    for sub in sorted(getattr(command, "commands", {})):
        lines += _lines(command.commands[sub], f"{name} {sub}".strip())
    return lines


def test_every_option_is_frozen() -> None:
    found = _lines(typer.main.get_command(build_app()), "narrowgauge")

    assert found == FROZEN.strip().splitlines(), "\n" + "\n".join(found)


@pytest.mark.parametrize("module", MODULES)
def test_the_table_of_modules_is_true(module: str) -> None:
    app = typer.Typer()
    importlib.import_module(module).register(app)
    named = {each.name for each in (*app.registered_commands, *app.registered_groups)}

    assert named == set(MODULES[module])


def test_every_command_has_a_help_and_every_option_too() -> None:
    def check(command: Any) -> None:
        assert command.help, command.name
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, f"{command.name} {parameter.opts}"
        for sub in getattr(command, "commands", {}).values():
            check(sub)

    check(typer.main.get_command(build_app()))


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (["--help"], {"rich", "docker", "pydantic", "matplotlib", "scipy", "jinja2", "numpy"}),
        (["plan", "mnist"], {"rich", "docker", "pydantic", "matplotlib", "scipy", "numpy"}),
        (["run", "--help"], {"rich", "docker", "pydantic", "matplotlib", "scipy", "numpy"}),
    ],
)
def test_quick_commands_import_nothing_slow(words: list[str], forbidden: set[str]) -> None:
    code = (
        "import sys; from narrowgauge.cli.app import run_program; import os;"
        f"assert run_program({words!r}, os.environ, sys.stderr) == 0;"
        f"print(sorted({forbidden!r} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def _complete(shell_words: str, position: int) -> list[str]:
    """What bash would be offered for the word at `position`."""
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "_NARROWGAUGE_COMPLETE": "complete_bash",
        "COMP_WORDS": shell_words,
        "COMP_CWORD": str(position),
    }
    code = "from narrowgauge.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    return re.split(r"\s+", done.stdout.strip())


@pytest.mark.parametrize(
    ("words", "position", "offered"),
    [
        ("narrowgauge pl", 1, "plan"),
        ("narrowgauge run mni", 2, "mnist"),
        ("narrowgauge run mnist --on deskt", 4, "desktop"),
        ("narrowgauge run mnist --profile sm", 4, "smoke"),
        ("narrowgauge run mnist -p prec", 4, "precision="),
        ("narrowgauge run mnist -p prof", 4, "profile="),
        ("narrowgauge attach late", 2, "latest"),
        ("narrowgauge placement show hetero-in", 3, "hetero-int8"),
    ],
)
def test_the_shell_completes_names(words: str, position: int, offered: str) -> None:
    assert offered in _complete(words, position)


def test_the_version_is_told() -> None:
    from narrowgauge_contract import __version__

    code = "from narrowgauge.cli.app import main; main()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"narrowgauge {__version__}\n"
