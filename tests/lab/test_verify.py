"""The check that an image runs on itself, on this environment in place of an image."""

from __future__ import annotations

import dataclasses
import platform
import sys
import types
from pathlib import Path
from typing import List

import pytest
import torch

from narrowgauge_contract.errors import ExitCode
from narrowgauge_kernels.library import library_directory
from narrowgauge_lab import verify as verifying
from narrowgauge_lab.facts import source_hash
from narrowgauge_lab.verify import Expected, VerifyError, main, verify

HERE = Expected(target="cpu", python=platform.python_version(), torch=torch.__version__)


@pytest.fixture(autouse=True)
def in_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_TARGET", "cpu")
    monkeypatch.setenv("NARROWGAUGE_UNRESOLVED", "base torch")


def said(expected: Expected) -> List[str]:
    lines: List[str] = []
    verify(expected, lines.append)
    return lines


def test_what_is_as_expected_passes_and_ends_with_the_source() -> None:
    lines = said(HERE)

    assert lines[-1] == f"source {source_hash()}"
    assert f"torch {torch.__version__}" in lines
    assert "unresolved pins: base torch" in lines
    assert any(line.startswith("kernel linear_mac on cpu: within ") for line in lines)
    assert any(line.startswith("instruction sets generic") for line in lines)
    assert any(line.startswith("modules ") and int(line.split()[1]) > 40 for line in lines)


def test_a_version_may_be_given_up_to_a_dot() -> None:
    major, minor = sys.version_info[:2]

    assert f"python {platform.python_version()}" in said(
        dataclasses.replace(HERE, python=f"{major}.{minor}")
    )
    with pytest.raises(VerifyError, match="python is"):
        said(dataclasses.replace(HERE, python=f"{major}.{str(minor)[0]}0"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target", "desktop", "NARROWGAUGE_TARGET is not desktop"),
        ("python", "2.7", "python is .*, and the target says 2.7"),
        ("torch", "0.1", "torch is .*, and the target says 0.1"),
        ("capabilities", ("8.6",), "compiled for no GPU"),
    ],
)
def test_what_differs_is_said(field: str, value: object, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        said(dataclasses.replace(HERE, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("python", "2.7", "not judged: the base is a stand-in, the target has 2.7"),
        ("torch", "0.1", "not judged: the base is a stand-in, the target has 0.1"),
        ("capabilities", ("8.6",), "CUDA kernels not judged"),
    ],
)
def test_a_stand_in_is_not_judged_by_its_versions(field: str, value: object, message: str) -> None:
    lines = said(dataclasses.replace(HERE, standin=True, **{field: value}))

    assert any(message in line for line in lines), lines


def tensorrt(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = types.ModuleType("tensorrt")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", module)


def test_tensorrt_must_be_there_and_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = dataclasses.replace(HERE, tensorrt="8.0.1")
    tensorrt(monkeypatch, "8.0.1.6")
    assert "tensorrt 8.0.1.6" in said(expected)

    tensorrt(monkeypatch, "8.5.2")
    with pytest.raises(VerifyError, match=r"tensorrt is 8\.5\.2"):
        said(expected)

    monkeypatch.setitem(sys.modules, "tensorrt", None)  # cannot be imported
    with pytest.raises(VerifyError, match="tensorrt cannot be imported"):
        said(expected)
    lines = said(dataclasses.replace(expected, standin=True))
    assert "tensorrt not judged: the base is a stand-in and has none" in lines


class _NeedsDriver:
    """Finds tensorrt, which then lacks a library."""

    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "tensorrt":
            raise ImportError(f"{self.library}: cannot open shared object file: No such file")


def test_a_library_of_the_hosts_driver_cannot_be_judged_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    expected = dataclasses.replace(HERE, tensorrt="8.5.2")

    monkeypatch.setattr(sys, "meta_path", [_NeedsDriver("libnvdla_compiler.so")])
    lines = said(expected)
    assert any("tensorrt not judged: libnvdla_compiler.so is the host" in line for line in lines)

    monkeypatch.setattr(sys, "meta_path", [_NeedsDriver("libnvinfer.so.8")])
    with pytest.raises(VerifyError, match="tensorrt cannot be imported"):
        said(expected)


def test_a_local_part_counts_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_KERNELS", str(library_directory()))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert "torch 2.11.0+cu130" in said(dataclasses.replace(HERE, torch="2.11.0"))
    for wrong in ("2.11.0+cu126", "2.1", "2.11.1"):
        with pytest.raises(VerifyError, match="torch is"):
            said(dataclasses.replace(HERE, torch=wrong))


def test_a_module_from_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = types.ModuleType("narrowgauge_lab.other")
    other.__file__ = str(tmp_path / "other.py")
    monkeypatch.setitem(sys.modules, "narrowgauge_lab.other", other)
    monkeypatch.setattr(verifying, "_modules", lambda: iter(["narrowgauge_lab.other"]))

    with pytest.raises(VerifyError, match=r"narrowgauge_lab\.other is"):
        said(HERE)


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise ArithmeticError("linear_mac on cpu is off by nan")

    monkeypatch.setattr("narrowgauge_kernels.selfcheck.check_all", wrong)
    with pytest.raises(VerifyError, match="a kernel is wrong") as raised:
        said(HERE)
    assert "off by nan" in raised.value.why


def test_an_arm_without_its_own_path_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_KERNELS", str(library_directory()))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")

    with pytest.raises(VerifyError, match="no NEON path"):
        said(HERE)


def test_no_operator_at_all_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge_kernels.selfcheck.check_all", dict)

    with pytest.raises(VerifyError, match="no operator"):
        said(HERE)


def test_the_program_says_what_is_wrong_and_exits_with_its_code(
    capsys: pytest.CaptureFixture,
) -> None:
    assert main(dataclasses.replace(HERE, torch="0.1")) == ExitCode.BUILD_FAILED
    assert "error: torch is" in capsys.readouterr().err
    assert main(HERE) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[-1].startswith("source ")
