"""The two commands of the README, where something is missing: the line that helps, and exit 14."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What a Debian without anything of ours has.
_TOOLS = ("awk", "cat", "cksum", "date", "dirname", "du", "env", "find", "grep", "head", "mkdir",
          "mktemp", "cp", "rm", "sed", "sh", "sleep", "sort", "tail", "id", "uname",
          "mv", "bash")  # fmt: skip


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A PATH with the tools of a bare system: no Python, no docker, no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in _TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (folder / tool).symlink_to(found)
    room(folder, 100_000_000)
    return folder


def add(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def room(folder: Path, kilobytes: int) -> None:
    """What is free on the disk: the suite refuses to begin on a full one, and may fill this one."""
    add(folder, "df", f"echo header; echo /dev/disk 0 0 {kilobytes} 0% /")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout that a script may write into."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "docker").mkdir()
    for name in ("pyproject.toml", "docker/targets.toml"):
        shutil.copy2(ROOT / name, root / name)
    return root


def start(clone: Path, bare: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": str(bare),
        "HOME": str(bare),
        "NARROWGAUGE_TEST_BASE": "narrowgauge-none:0",
        **more,
    }
    return subprocess.run(
        [str(clone / words[0]), *words[1:]],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_run_without_any_python(clone: Path, bare: Path) -> None:
    done = start(clone, bare, "scripts/run.sh", "mnist")

    assert done.returncode == 14
    assert "needs Python 3.10 or newer" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr
    assert not (clone / ".venv").exists()


def test_run_with_a_python_that_is_too_old(clone: Path, bare: Path) -> None:
    add(bare, "python3", 'case "$1" in -V) echo "Python 3.8.10" ;; *) exit 1 ;; esac')

    done = start(clone, bare, "scripts/run.sh", "mnist")

    assert done.returncode == 14
    assert "python3 is Python 3.8.10" in done.stderr


def test_run_without_the_venv_package(clone: Path, bare: Path) -> None:
    """Debian's python3 has neither ensurepip nor a word about it."""
    add(
        bare,
        "python3",
        f'case "$2" in *ensurepip*) exit 1 ;; esac\nexec "{sys.executable}" "$@"',
    )

    done = start(clone, bare, "scripts/run.sh", "mnist")

    version = ".".join(map(str, sys.version_info[:2]))
    assert done.returncode == 14
    assert f"apt-get install python{version}-venv" in done.stderr


def test_run_installs_once_and_passes_its_words_on(clone: Path, bare: Path) -> None:
    """With a Python whose pip only leaves a mark, and a program that echoes."""
    add(
        bare,
        "python3",
        """case "$1 $2" in
"-m venv") mkdir -p "$4/bin"; printf '#!/bin/sh\\necho ran >>"%s/log"\\n' "$4" >"$4/bin/python"
    printf '#!/bin/sh\\nfor word; do echo "[$word]"; done\\n' >"$4/bin/narrowgauge"
    chmod +x "$4/bin/python" "$4/bin/narrowgauge" ;;
esac""",
    )
    (bare / "chmod").symlink_to(shutil.which("chmod") or "")

    first = start(clone, bare, "scripts/run.sh", "mnist", "-p", "a b=1")
    second = start(clone, bare, "scripts/run.sh", "mnist")

    assert first.returncode == 0, first.stderr
    assert first.stdout == "[run]\n[mnist]\n[-p]\n[a b=1]\n"
    assert "MB" in first.stderr
    assert second.stderr == ""
    assert (clone / ".venv/log").read_text() == "ran\n"


@pytest.fixture
def installed(clone: Path, bare: Path) -> Path:
    """A clone whose launcher is there and echoes."""
    (clone / ".venv/bin").mkdir(parents=True)
    add(clone / ".venv/bin", "narrowgauge", 'echo "ran $*"')
    sums = subprocess.run(
        ["cksum", str(clone / "pyproject.toml")], capture_output=True, text=True, check=True
    )
    (clone / ".venv/.narrowgauge-installed").write_text(sums.stdout)
    return clone


@pytest.mark.parametrize("xdg", [True, False])
def test_run_tells_compose_who_runs_and_where_the_data_are(
    installed: Path, bare: Path, tmp_path: Path, xdg: bool
) -> None:
    base = tmp_path / "xdg" if xdg else bare / ".local/share"
    given = {"XDG_DATA_HOME": str(base) if xdg else "not/absolute"}

    done = start(installed, bare, "scripts/run.sh", "mnist", **given)

    assert (done.stdout, done.stderr) == ("ran run mnist\n", "")
    data = base / "narrowgauge/data"
    assert data.is_dir(), "Docker would make it, as root"
    lines = (installed / ".env").read_text().splitlines()
    assert set(lines) == {
        f"NARROWGAUGE_UID={os.getuid()}", f"NARROWGAUGE_GID={os.getgid()}",
        f"NARROWGAUGE_DATA={data}", "NARROWGAUGE_TARGET=cpu",
    }  # fmt: skip


def test_run_keeps_the_target_that_another_script_chose(installed: Path, bare: Path) -> None:
    (installed / ".env").write_text("MINE=1\nNARROWGAUGE_TARGET=desktop\n")

    start(installed, bare, "scripts/run.sh", "mnist")

    lines = (installed / ".env").read_text().splitlines()
    assert {"MINE=1", "NARROWGAUGE_TARGET=desktop", f"NARROWGAUGE_UID={os.getuid()}"} < set(lines)


def test_run_goes_on_where_env_cannot_be_written(installed: Path, bare: Path) -> None:
    """Only compose reads it. Here there is no place for the data."""
    done = start(installed, bare, "scripts/run.sh", "mnist", XDG_DATA_HOME="/proc/none")

    assert (done.returncode, done.stdout) == (0, "ran run mnist\n")
    assert ".env is not written" in done.stderr
    assert not (installed / ".env").exists()


def test_run_that_could_not_install_is_not_taken_for_installed(clone: Path, bare: Path) -> None:
    add(
        bare,
        "python3",
        """case "$1 $2" in
"-m venv") mkdir -p "$4/bin"; printf '#!/bin/sh\\nexit 1\\n' >"$4/bin/python"
    chmod +x "$4/bin/python" ;;
esac""",
    )
    (bare / "chmod").symlink_to(shutil.which("chmod") or "")

    for _ in range(2):
        done = start(clone, bare, "scripts/run.sh", "mnist")
        assert done.returncode == 14
        assert "could not be installed" in done.stderr


def test_the_suite_lists_what_is_missing_and_installs_nothing(clone: Path, bare: Path) -> None:
    done = start(clone, bare, "scripts/test.sh")

    assert done.returncode == 14, done.stdout + done.stderr
    for name in ("python3.8", "g++", "engine", "compose", "buildx", "debootstrap"):
        assert f"  {name} " in done.stdout, name
    assert "apt-get install docker.io" in done.stdout
    assert "--provision" in done.stdout


def test_the_suite_without_containers_needs_no_engine(clone: Path, bare: Path) -> None:
    done = start(clone, bare, "scripts/test.sh", "--no-docker")

    assert done.returncode == 14
    assert "engine" not in done.stdout
    assert "python3.8" in done.stdout


@pytest.mark.parametrize(
    ("words", "needed"), [((), 16), (("--slow",), 28), (("--no-docker",), 6)], ids=str
)
def test_the_suite_begins_on_no_disk_that_it_would_fill(
    clone: Path, bare: Path, words: tuple[str, ...], needed: int
) -> None:
    room(bare, needed * 1_000_000 - 1)

    done = start(clone, bare, "scripts/test.sh", *words)

    assert done.returncode == 14
    assert f"needs {needed} GB in {clone}/.test: {needed - 1} GB are free" in done.stdout
    assert "NARROWGAUGE_TEST_STATE=" in done.stdout


def test_continuous_integration_is_the_same_suite() -> None:
    text = (ROOT / ".ci/run").read_text(encoding="utf-8")

    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "CI=1 exec ./scripts/test.sh" in text


@pytest.mark.parametrize(
    ("cases", "code", "last"),
    [
        ("<testcase/><testcase/>", 0, "2 passed, 0 failed"),
        ("<testcase/><testcase><failure/></testcase>", 1, "1 passed, 1 failed"),
        ("<testcase><error/></testcase><testcase><skipped/></testcase>", 1, "0 passed, 1 failed"),
        (None, 1, "0 passed, 0 failed"),
    ],
)
def test_the_sum_at_the_end(cases: str | None, code: int, last: str, tmp_path: Path) -> None:
    if cases is not None:
        text = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        (tmp_path / "lane.xml").write_text(text)

    done = subprocess.run(
        [sys.executable, ROOT / "scripts/summarise.py", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == last
