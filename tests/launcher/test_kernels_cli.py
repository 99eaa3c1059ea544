"""`narrowgauge kernels`: which run it asks for, and what it prints of it."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from result_cases import job, record_of

from narrowgauge import launch
from narrowgauge.cli.app import run_program
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import parse_overrides
from narrowgauge_contract.outcome import SideFile
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]
#: What every command says of the variant unless told otherwise.
PLAIN = (
    "precision=fp32", "accumulation=deterministic", "granularity=element", "layout=nchw",
    "path=fused", "bias=false", "relu_output=false",
)  # fmt: skip
_FILES = {"source.cu": "a source\n", "tune.txt": "4x7x8\n", "tune.json": "{}\n"}


def _with_files(folder: RunFolder) -> Record:
    record = record_of(folder)
    row, sides = record.rows[0], []
    for name, text in _FILES.items():
        path = folder.out / f"row-{row.index}" / name
        path.write_text(text, encoding="utf-8")
        relative = f"row-{row.index}/{name}"
        sides.append(SideFile(relative, sha256_file(path), path.stat().st_size))
    changed = dataclasses.replace(row, side_files=tuple(sides))
    return dataclasses.replace(record, rows=(changed, *record.rows[1:]))


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str, list[Any], RunFolder]]:
    """Runs a command line whose run is a recorded one; gives what was asked for, too."""
    folder = Store(tmp_path / "results").new_run(job())
    record = _with_files(folder)
    asked: list[Any] = []

    def prepare(world: Any, request: Any, root: Path, **how: Any) -> Any:
        asked.append((request, how["executor"]))
        return launch

    def run_all(world: Any, prepared: Any, **how: Any) -> list[tuple[RunFolder, Record]]:
        return [(folder, record)]

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch, "run_all", run_all)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str, list[Any], RunFolder]:
        errors = io.StringIO()
        given = ["kernels", *words, "--project", str(ROOT), "--results", str(tmp_path / "r")]
        code = run_program(given, os.environ, errors)
        said = capsys.readouterr()
        return code, said.out, said.err + errors.getvalue(), asked, folder

    return call


@pytest.mark.parametrize(
    ("words", "first", "printed"),
    [
        (
            ("generate", "1,128,28,28,32"),
            ("action=generate", "shape=1x128x28x28x32", "tile=auto", "arch=auto"),
            "a source\n",
        ),
        (
            ("generate", "1x8x9x9x4xk1s2p0", "--tile", "4x7x8/g2", "--arch", "9.0"),
            ("action=generate", "shape=1x8x9x9x4xk1s2p0", "tile=4x7x8/g2", "arch=9.0"),
            "a source\n",
        ),
        (
            ("tune", "resnet50", "--batch", "8", "--seconds", "5"),
            ("action=tune", "shape=resnet50", "batch=8", "seconds=5.0"),
            "4x7x8\n",
        ),
        (
            ("tune", "1,8,9,9,4", "--json"),
            ("action=tune", "shape=1x8x9x9x4", "batch=1", "seconds=60.0"),
            "{}\n",
        ),
    ],
)
def test_a_command_is_a_run_and_prints_its_side_file(
    cli: Callable[..., Any], words: tuple[str, ...], first: tuple[str, ...], printed: str
) -> None:
    code, out, err, [(request, executor)], _ = cli(*words)

    assert (code, out, executor) == (0, printed, "auto")
    assert (request.experiment, request.profile) == ("sparse-kernels", "smoke")
    assert request.parameters == (*first, *PLAIN)
    assert "recorded: " in err


def test_the_variant_is_what_the_options_say(cli: Callable[..., Any]) -> None:
    _, _, _, [(request, executor)], _ = cli(
        "generate", "8,64,14,14,64", "--precision", "fp16", "--granularity", "tensor-core",
        "--accumulation", "atomic", "--layout", "nhwc", "--bias", "--relu-output",
        "--executor", "native",
    )  # fmt: skip

    assert executor == "native"
    assert request.parameters[-7:] == (
        "precision=fp16", "accumulation=atomic", "granularity=tensor-core", "layout=nhwc",
        "path=fused", "bias=true", "relu_output=true",
    )  # fmt: skip


def test_what_is_asked_for_is_what_the_experiment_declares(cli: Callable[..., Any]) -> None:
    """Every word is a parameter with such a value: one row."""
    spec = load_spec(ROOT / "experiments" / "sparse-kernels" / "experiment.toml")
    for words in (("generate", "1,128,28,28,32"), ("tune", "vgg16")):
        _, _, _, asked, _ = cli(*words)
        overrides = parse_overrides(spec, asked[-1][0].parameters)
        assert all(len(values) == 1 for values in overrides.values())


def test_one_at_a_time(cli: Callable[..., Any]) -> None:
    code, out, err, asked, _ = cli("generate", "1,8,9,9,4", "--precision", "fp32,fp16")

    assert (code, out, asked) == (ExitCode.USAGE, "", [])
    assert "precision=fp32,fp16 is more than one" in err


def test_a_side_file_that_is_gone_is_said(cli: Callable[..., Any], tmp_path: Path) -> None:
    for path in tmp_path.rglob("source.cu"):
        path.unlink()
    code, out, err, _, _ = cli("generate", "1,8,9,9,4")

    assert (code, out) == (ExitCode.RECORD_DAMAGED, "")
    assert "source.cu" in err
