"""The suite's stages beside each other: what one track awaits of another comes, or has failed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

STAGES = Path(__file__).parents[2] / "scripts/stages.sh"


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A script after `stages.sh`, its logs in `folder`; one that waits for ever fails the test."""
    begin = f"set -u\nlogs='{folder}' stages='{folder}/stages.tsv'\n. '{STAGES}'\n"
    return subprocess.run(
        ["bash", "-c", begin + script], capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip


@pytest.mark.parametrize("code", [0, 3])
def test_a_stage_that_is_awaited_gives_its_code(tmp_path: Path, code: int) -> None:
    done = run(tmp_path, f"{{ sleep 0.3; stage made sh -c 'exit {code}'; }} & await made")

    assert done.returncode == code
    assert (tmp_path / "stages.tsv").read_text().split("\t")[::2] == ["made", f"{code}\n"]


def test_a_stage_that_its_track_did_not_come_to_has_failed(tmp_path: Path) -> None:
    """It was awaited for ever: one full disk held a whole suite until it was killed."""
    done = run(
        tmp_path,
        """
        both() { stage first false && stage second true; }
        track 'first second' both &
        await second""",
    )

    assert done.returncode == 1
    assert "FAILED (1)" in done.stdout


def test_a_track_whose_stages_have_passed_has_passed(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        both() { stage first true && stage second true; }
        track 'first second' both && await first && await second""",
    )

    assert done.returncode == 0, done.stdout


def test_a_code_that_the_disk_had_no_room_for_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "made.code").touch()

    assert run(tmp_path, "await made").returncode == 1


def test_the_log_of_what_failed_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path, "stage made sh -c 'echo why >&2; exit 2'; stage other sh -c 'echo quiet'")

    assert "made | why" in done.stdout
    assert "quiet" not in done.stdout
