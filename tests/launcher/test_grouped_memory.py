"""benchmarks/kernels/grouped_memory.py: what compute-sanitizer says, by a stand-in of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "kernels"
WRITE = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 8 bytes
=========     at sm80_xmma_wgrad_implicit_gemm_indexed_split_k_kernel__5x_cudnn+0x970
=========     by thread (96,0,0) in block (3,0,1)
=========     Access to 0x7f0c72ff5bf8 is out of bounds
=========     and is 25 bytes after the nearest allocation at 0x7f0c72ff5400 of size 2,016 bytes
=========
"""
READ = WRITE.replace("write", "read").replace("wgrad", "fprop").replace("is 25", "is 1")
MISALIGNED = """\
========= Invalid __shared__ read of size 16 bytes
=========     at void gemm<float, 2>(float *)+0x40 in gemm.cu:12
=========     by thread (1,0,0) in block (0,0,0)
=========     Access to 0x7 is misaligned
"""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("grouped_memory")
    sys.path.remove(str(SCRIPTS))


def test_the_first_access_of_a_log(script: ModuleType) -> None:
    kernel = "sm80_xmma_{}_implicit_gemm_indexed_split_k_kernel__5x_cudnn"
    assert script.accessed(WRITE + READ) == {
        "kernel": kernel.format("wgrad"),
        "access": "write",
        "bytes": 8,
        "beyond": 24,
        "allocation": 2016,
    }
    assert script.accessed("said before\n" + READ)["beyond"] == 0
    assert script.accessed(READ)["kernel"] == kernel.format("fprop")


def test_an_access_that_is_behind_no_allocation_takes_no_other_ones_place(
    script: ModuleType,
) -> None:
    expected = {"kernel": "void gemm<float, 2>(float *)", "access": "read", "bytes": 16}
    assert script.accessed(MISALIGNED) == expected
    assert script.accessed(MISALIGNED + WRITE) == expected


@pytest.mark.parametrize(
    "log", ["", "========= ERROR SUMMARY: 0 errors\n", "Invalid __global__ write of size 8"]
)
def test_no_access_is_none(script: ModuleType, log: str) -> None:
    assert script.accessed(log) is None


def _stand_in(folder: Path, body: str) -> Path:
    """A program that is given the words of a case; BRANCH, GROUPS and so on are those."""
    program = folder / "sanitizer"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "words = sys.argv\n"
        "dtype, layout, branch, groups = words[words.index('--case') + 1:][:4]\n" + body
    )
    program.chmod(0o755)
    return program


WORDS = ("--dtypes", "float32", "bfloat16", "--layouts", "nhwc", "--branches", "4", "--groups", "3")


@pytest.mark.parametrize(("more", "code"), [((), 0), (("--ours",), 1)])
def test_rows_tell_the_pass_and_the_kernel(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    code: int,
) -> None:
    """In float32 all is well; in bfloat16 the gradient's kernel writes beyond it."""
    body = (
        f"assert ('--ours' in words) is {bool(more)}\n"
        "assert words[words.index('--search') + 1] == 'off'\n"
        "print('forward'); print('backward')\n"
        f"print({WRITE!r} if dtype == 'bfloat16' else 'done')\n"
    )
    into = tmp_path / "out" / "samples.json"
    words = [*WORDS, *more, "--search", "off", "--json", str(into)]

    assert script.main([*words, "--sanitizer", str(_stand_in(tmp_path, body))]) == code

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["float32", "nhwc", "3", "of", "4", "-"]
    assert "backward: writes 8, 24 bytes behind 2016: sm80_xmma_wgrad" in lines[1]
    found = json.loads(into.read_text())
    assert (found["ours"], found["search"]) == (bool(more), "off")
    assert [row["fault"] is None for row in found["rows"]] == [True, False]
    assert found["rows"][1]["fault"]["pass"] == "backward"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("print('forward'); print('no GPU', file=sys.stderr); sys.exit(1)\n", "no GPU"),
        ("print('forward')\n", "no end"),
    ],
)
def test_a_case_that_did_not_run_is_no_clean_one(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, told: str
) -> None:
    assert script.main([*WORDS, "--sanitizer", str(_stand_in(tmp_path, body))]) == 2
    assert capsys.readouterr().out.count(f"NOT RUN: {told}") == 2


def test_without_the_tool_nothing_runs(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--sanitizer", "no-such-program"]) == 2
    assert "no no-such-program here" in capsys.readouterr().err
