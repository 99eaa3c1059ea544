"""The AVX-512, AMX and NEON kernels over codes on stand-ins of their instructions.

What it shows is that the kernels' logic is right as far as the manuals are read rightly; whether a
processor agrees, test_codes.py says there.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from narrowgauge_kernels.sources import CSRC

HERE = Path(__file__).parent

KERNELS = (
    *("avx512vnni", "avx512bw", "amx_avx512bw", "neon"),
    *("terms", "few", "thin", "table", "thin_table"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the stand-ins build on SSE2"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def compiled(source, folder):
    """The object of one file, with the stand-ins for the headers of its instructions."""
    target = folder / f"{source.stem}.o"
    flags = ["-std=c++14", "-O1", "-Wall", "-Wextra", "-Werror", "-DNARROWGAUGE_STAND_INS"]
    includes = [f"-I{HERE / 'stand_ins'}", f"-I{CSRC}"]
    command = ["g++", *flags, *includes, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=300)
    return target


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Of codes_stand_ins.cpp and every kernel, by name."""
    folder = tmp_path_factory.mktemp("objects")
    made = {
        name: compiled(CSRC / "manual_codes" / f"manual_codes_{name}.cpp", folder)
        for name in KERNELS
    }
    return {"program": compiled(HERE / "codes_stand_ins.cpp", folder), **made}


def linked(objects, folder):
    """The program of these objects."""
    program = folder / "codes_stand_ins"
    files = [str(path) for path in objects.values()]
    subprocess.run(["g++", *files, "-o", str(program)], check=True, timeout=300)
    return program


def run(program):
    """Exit code and lines."""
    done = subprocess.run([str(program)], stdout=subprocess.PIPE, timeout=300)
    return done.returncode, done.stdout.decode().splitlines()


def test_every_bit_is_that_of_the_definition(objects, tmp_path):
    """Both types of both operands, several terms, narrow and wide tables."""
    code, lines = run(linked(objects, tmp_path))
    assert code == 0, lines
    known = {"avx512vnni", "neon", "avx512bw table", "neon table"}
    assert known <= set(lines) <= known | {"amx"}


@pytest.mark.parametrize(
    ("name", "right", "wrong", "says"),
    [
        ("avx512bw", "_mm512_srli_epi16(a, 8)", "_mm512_srli_epi16(a, 7)", "avx512bw is wrong"),
        ("neon", "vget_high_s16(right)", "vget_low_s16(right)", "neon is wrong"),
        ("avx512vnni", "(sum, left, right)", "(sum, right, left)", "avx512vnni is wrong"),
        ("amx_avx512bw", "_tile_loadd(1, tile + kTileRows", "_tile_loadd(1, tile", "amx is wrong"),
    ],
)
def test_a_wrong_kernel_is_noticed(objects, tmp_path, name, right, wrong, says):
    """One instruction with another operand."""
    if says.startswith("amx") and "amx" not in run(linked(objects, tmp_path))[1]:
        pytest.skip("this compiler does not know AMX: GCC has it from 11 on")
    text = (CSRC / "manual_codes" / f"manual_codes_{name}.cpp").read_text(encoding="utf-8")
    assert text.count(right) == 1
    source = tmp_path / "wrong.cpp"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    code, lines = run(linked({**objects, name: compiled(source, tmp_path)}, tmp_path))
    assert code == 1
    assert any(line.startswith(says) for line in lines)
