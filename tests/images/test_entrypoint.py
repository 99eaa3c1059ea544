"""docker/entrypoint.sh: what a container's words mean, under every shell that an image may have.

Who may write where is tried in containers: tests/e2e/test_compose.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge_contract.errors import ExitCode

SCRIPT = Path(__file__).parents[2] / "docker/entrypoint.sh"
SHELLS = [
    shell for shell in ("dash", "bash --posix", "busybox sh") if shutil.which(shell.split()[0])
]
Start = Callable[..., "subprocess.CompletedProcess[str]"]
LAB = ["-m", "narrowgauge_lab"]
RUN = ["--experiments", "/experiments", "--data", "/data"]


@pytest.fixture(params=SHELLS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Starts the entry point with a python3 that prints its words, one a line."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (fake / "python3").chmod(0o755)
    (fake / "a-folder").mkdir()
    (fake / "no-program").write_text("")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{fake}:{os.environ['PATH']}"}
        command = [*request.param.split(), str(SCRIPT), *words]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return call


def words_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["mnist", "--results", "."], ["run", "mnist", *RUN, "--results", "."]),
        (["-p", "epochs=1", "--out", "o"], ["run", "mnist", *RUN, "-p", "epochs=1", "--out", "o"]),
        (["resnet", "--out=o"], ["run", "resnet", *RUN, "--out=o"]),
        (["minst", "--out", "."], ["run", "minst", *RUN, "--out", "."]),
        (["a-folder", "--out", "."], ["run", "a-folder", *RUN, "--out", "."]),
        (["no-program", "--out", "."], ["run", "no-program", *RUN, "--out", "."]),
        (
            ["mnist", "-p", "a b=1", "--out", "."],
            ["run", "mnist", *RUN, "-p", "a b=1", "--out", "."],
        ),
        (["run", "--job", "/job.json", "--out", "o"], ["run", "--job", "/job.json", "--out", "o"]),
        (["run", "--help"], ["run", "--help"]),
        (["facts"], ["facts"]),
        (["record", "--out", "o"], ["record", "--out", "o"]),
    ],
)
def test_the_lab_is_started(start: Start, words: list[str], given: list[str]) -> None:
    """The user's own words come last, so that they win over the places of the image."""
    assert words_of(start(*words)) == [*LAB, *given]


@pytest.mark.parametrize("words", [[], ["fetch"]])
def test_data_are_fetched(start: Start, words: list[str]) -> None:
    done = start("fetch", *words, "--data", ".", "--if-possible", "mnist")

    assert words_of(done) == [
        "-m", "narrowgauge_data", "fetch", "--data", "/data", "--data", ".", "--if-possible",
        "mnist",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["printf", "/usr/bin/printf"])
def test_any_program_of_the_image_is_started(start: Start, word: str) -> None:
    assert words_of(start(word, "[%s]\n", "a b", "--out")) == ["[a b]", "[--out]"]


def test_what_is_no_folder_is_refused_before_anything_starts(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    done = start("mnist", "--out", "file")

    assert (done.returncode, done.stdout) == (ExitCode.RESULTS_UNWRITABLE, "")
    assert done.stderr.startswith("error: cannot write to file\n  why:  it is not a folder")


def test_looking_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    start("mnist", "--out", "new/deep")

    assert sorted(tmp_path.iterdir()) == before


def test_the_codes_are_those_of_the_contract() -> None:
    named = dict(re.findall(r"^(\w+)=(\d+)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))

    assert {name: ExitCode[name.upper()] for name in named} == {
        name: int(code) for name, code in named.items()
    }
    assert set(named) == {"data_unavailable", "results_unwritable"}


def test_the_script_may_be_started() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
