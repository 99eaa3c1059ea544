"""docs/tutorial.md, block by block, as a reader would type it: with the true lab and torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"```sh\n(?P<commands>.*?)```\n(?:```text\n(?P<said>.*?)```\n)?", re.DOTALL)
#: A Python with torch: the suite names its own; `scripts/test.sh` keeps one here.
_LAB = os.environ.get("NARROWGAUGE_TEST_LAB_PYTHON", str(ROOT / ".test/lab311/bin/python"))
#: What the commands that measure get, so that they use that Python and wait for their turn.
_MEASURING = f"""#!/bin/sh
case $1 in
run) set -- "$@" --executor native --lab-python {_LAB} --wait ;;
reproduce) set -- "$@" --executor native --lab-python {_LAB} ;;
esac
exec {sys.executable} -m narrowgauge "$@"
"""


def _blocks() -> list[tuple[str, str]]:
    found = _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    return [(match["commands"], match["said"] or "") for match in found]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without results, with the compiled kernels where they are there."""
    if not Path(_LAB).exists():
        pytest.skip(f"no Python with torch: {_LAB}; name one: NARROWGAUGE_TEST_LAB_PYTHON")
    root = tmp_path_factory.mktemp("clone")
    ignore = shutil.ignore_patterns("__pycache__", "*.whl")
    for name in ("docker", "docs", "experiments", "images", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    for name in ("README.md", "ARTIFACT.md", "CITATION.cff", "LICENSE"):
        shutil.copy2(ROOT / name, root)
    (root / "bin").mkdir()
    program = root / "bin" / "narrowgauge"
    program.write_text(_MEASURING)
    program.chmod(0o755)
    return root


@pytest.fixture(scope="module")
def environment(clone: Path) -> Mapping[str, str]:
    home = clone / "home"
    home.mkdir()
    return {
        "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(clone / "src"),
        "HOME": str(home),
        "COLUMNS": "120",
        "LANG": "C.UTF-8",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def test_the_tutorial_works_as_it_is_written(clone: Path, environment: Mapping[str, str]) -> None:
    for commands, said in _blocks():
        done = subprocess.run(
            ["bash", "-eu", "-c", commands], cwd=clone, env=dict(environment),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{commands}\n{done.stdout}"
        told = " ".join(done.stdout.split())
        for line in said.splitlines():
            for part in filter(None, (" ".join(word.split()) for word in line.split("…"))):
                assert part in told, f"{commands}\nshould say: {part}\nsaid:\n{done.stdout}"


def test_every_block_of_the_tutorial_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert len(_blocks()) == text.count("```sh\n") >= 8
    assert sum(bool(said) for _, said in _blocks()) == text.count("```text\n")
    commands = " ".join(commands for commands, _ in _blocks())
    for word in ("new", "run", "reproduce", "explain", "replay", "report", "bundle", "ae check"):
        assert f"narrowgauge {word}" in commands, word
