"""`python3 -m narrowgauge_data`: exit codes, what is told where, and what to type next."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, Tuple

import pytest
from data_cases import (
    COLOUR,
    ENV,
    GREY,
    assert_whole,
    dataset,
    files_answer,
    idx_files,
    mirror,
    serving,
)
from data_cases import write as write_files

from narrowgauge_contract.datasets import DATA_SETS
from narrowgauge_data.cli import main

IN_CONTAINER = {**ENV, "NARROWGAUGE_TARGET": "jetson"}
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiny` and `other` are all that is declared, and no source of them answers."""
    unreachable = mirror("https://127.0.0.1:1", list(idx_files()), "idx")
    for name in list(DATA_SETS):
        monkeypatch.delitem(DATA_SETS, name)
    for name in ("tiny", "other"):
        monkeypatch.setitem(DATA_SETS, name, dataset(GREY, unreachable, name=name))


def _run(
    capsys: pytest.CaptureFixture[str], *words: object, env: Dict[str, str] = ENV
) -> Tuple[int, str, str]:
    code = main([str(word) for word in words], env)
    told = capsys.readouterr()
    return code, told.out, told.err


def _place(folder: Path) -> Path:
    return write_files(folder, {name: array.tobytes() for name, array in GREY.items()})


def test_a_set_is_fetched_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    with serving(files_answer(idx_files())) as server:
        declared = dataset(GREY, mirror(server.root, list(idx_files()), "idx"))
        monkeypatch.setitem(DATA_SETS, "tiny", declared)

        code, out, err = _run(capsys, "fetch", "tiny", "--data", data)

    assert (code, out) == (0, "")
    assert "tiny: complete and verified" in err
    assert_whole(data, GREY)
    assert _run(capsys, "verify", "tiny", "--data", data)[:2] == (
        0, "tiny: complete and verified\n",
    )  # fmt: skip


def test_files_placed_by_hand_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = write_files(tmp_path / "given", idx_files())

    assert _run(capsys, "fetch", "tiny", "--data", tmp_path / "data", "--from", given)[0] == 0
    assert_whole(tmp_path / "data", GREY)


@pytest.mark.parametrize(
    ("env", "take"),
    [
        (ENV, "python3 -m narrowgauge_data fetch tiny --data {data} --from FOLDER"),
        (IN_CONTAINER, 'docker compose run --rm --volume "$PWD/FOLDER:/given:ro" data-fetch tiny '
                       "--from /given"),
    ],
)  # fmt: skip
def test_no_source_is_exit_20_and_the_next_step_fits_where_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: Dict[str, str], take: str
) -> None:
    code, _, err = _run(capsys, "fetch", "tiny", "--data", tmp_path, env=env)

    assert code == 20
    assert f"then: {take.format(data=tmp_path)}\n" in err
    assert "narrowgauge data fetch" not in err
    assert ("NARROWGAUGE_DATA of .env" in err) == (env is IN_CONTAINER)


class TestAllSets:
    """What one set lacks keeps no other from being fetched."""

    @pytest.fixture
    def given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder that holds `colour`, which comes last, and nothing of the others."""
        monkeypatch.setitem(DATA_SETS, "colour", dataset(COLOUR, name="colour"))
        flat = {name: array.tobytes() for name, array in COLOUR.items()}
        return write_files(tmp_path / "given", flat)

    def test_the_rest_is_taken_and_the_first_failure_is_the_exit_code(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: Path
    ) -> None:
        code, _, err = _run(capsys, "fetch", "--data", tmp_path / "data", "--from", given)

        assert code == 20
        assert "colour: complete and verified" in err
        assert f"error: {given} does not hold tiny" in err
        assert f"\n{given} does not hold other (" in err

    def test_a_corrupt_one_is_still_a_failure(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: Path
    ) -> None:
        wrong = _place(tmp_path / "data" / "tiny") / "test-labels.u8"
        wrong.write_bytes(b"0" * 10)

        words = ("fetch", "--if-possible", "--data", tmp_path / "data", "--from", given)
        code, _, err = _run(capsys, *words)

        assert code == 21
        assert "colour: complete and verified" in err
        assert "does not hold other" in err

    def test_the_launcher_does_the_same(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: Path
    ) -> None:
        pytest.importorskip("typer")
        from narrowgauge.cli import app

        errors = io.StringIO()
        words = ["data", "fetch", "--data", str(tmp_path / "data"), "--from", str(given)]

        assert app.run_program(words, ENV, errors) == 20

        told = errors.getvalue() + capsys.readouterr().err
        assert "colour: complete and verified" in told
        assert f"{given} does not hold tiny" in told
        assert f"{given} does not hold other (" in told


def test_the_launcher_packs_onto_a_full_disk_with_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    from narrowgauge.cli import app

    _place(tmp_path / "data" / "tiny")

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("narrowgauge_data.pack.shutil.copyfileobj", fill)
    errors = io.StringIO()
    words = ["data", "pack", "tiny", "--data", tmp_path / "data", "--out", tmp_path / "out"]

    assert app.run_program([str(word) for word in words], ENV, errors) == 22
    assert "--out DIR" in errors.getvalue()


class TestIfPossible:
    def test_what_cannot_be_fetched_is_one_line_and_no_failure(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = _run(capsys, "fetch", "--if-possible", "--data", tmp_path)

        assert (code, out) == (0, "")
        last = [line for line in err.splitlines() if "say so again" in line]
        assert [line.partition(" (")[0] for line in last] == [
            "no source of tiny could be used", "no source of other could be used",
        ]  # fmt: skip
        assert all("refused); a run that needs it will say so again" in line for line in last)
        assert "error:" not in err

    def test_a_folder_that_is_none_says_why(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()

        code, _, err = _run(
            capsys, "fetch", "tiny", "--if-possible", "--data", tmp_path / "file" / "data"
        )

        assert code == 0
        [line] = err.splitlines()
        assert line.startswith("tiny: cannot use the folder")
        assert "Not a directory" in line
        assert line.endswith("; a run that needs it will say so again")

    @pytest.mark.parametrize(
        ("env", "repair"),
        [
            (ENV, "python3 -m narrowgauge_data verify tiny --data {data} --repair"),
            (IN_CONTAINER, "docker compose run --rm data-fetch tiny"),
        ],
    )
    def test_corrupt_data_is_a_failure_and_stays(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        env: Dict[str, str],
        repair: str,
    ) -> None:
        wrong = _place(tmp_path / "tiny") / "test-labels.u8"
        wrong.write_bytes(b"0" * 10)

        code, _, err = _run(capsys, "fetch", "tiny", "--if-possible", "--data", tmp_path, env=env)

        assert code == 21
        assert f"next: {repair.format(data=tmp_path)} fetches the set again" in err
        assert wrong.read_bytes() == b"0" * 10

    def test_a_name_that_nobody_knows_is_still_a_mistake(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, err = _run(capsys, "fetch", "tinny", "--if-possible", "--data", tmp_path)

        assert code == 2
        assert "did you mean 'tiny'" in err


class TestVerify:
    def test_missing_is_20_and_corrupt_is_21(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _place(tmp_path / "tiny")

        code, out, err = _run(capsys, "verify", "--data", tmp_path)
        assert (code, out) == (20, "tiny: complete and verified\nother: missing\n")
        assert f"next: python3 -m narrowgauge_data fetch other --data {tmp_path}" in err

        (tmp_path / "tiny" / "test-labels.u8").write_bytes(b"0" * 10)
        code, out, _ = _run(capsys, "verify", "--data", tmp_path)
        assert (code, out) == (21, "tiny: corrupt\nother: missing\n")

    def test_repair_fetches_what_is_wrong_only(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _place(tmp_path / "tiny")
        _place(tmp_path / "other")
        (tmp_path / "tiny" / "test-labels.u8").write_bytes(b"0" * 10)
        with serving(files_answer(idx_files())) as server:
            declared = dataset(GREY, mirror(server.root, list(idx_files()), "idx"))
            monkeypatch.setitem(DATA_SETS, "tiny", declared)

            code, out, _ = _run(capsys, "verify", "--repair", "--data", tmp_path)

        assert (code, out) == (
            0, "tiny: complete and verified\nother: complete and verified\n",
        )  # fmt: skip


def test_an_interrupt_is_exit_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowgauge_data.fetch.fetch", interrupt)

    assert _run(capsys, "fetch", "tiny", "--data", tmp_path)[::2] == (130, "interrupted\n")


def test_the_module_runs_from_a_copy_of_the_source(tmp_path: Path) -> None:
    """As a container calls it; a relative folder is meant where the command was typed."""
    done = subprocess.run(
        [sys.executable, "-m", "narrowgauge_data", "verify", "mnist", "--data", "here"],
        cwd=tmp_path, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (20, "mnist: missing\n")
    assert f"fetch mnist --data {tmp_path / 'here'}" in done.stderr
