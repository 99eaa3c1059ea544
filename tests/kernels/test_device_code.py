"""Every .cuh and .cu compiles for every capability of docker/targets.toml, without a GPU.

NVRTC 11.8 takes 7.0 and 7.2, which nvcc 13 refuses; nvcc 13 takes the rest. The slow tier has all
but the oldest, and the one with features of its own. The NVRTC package is a test
dependency, so its absence is a failure.
"""

from __future__ import annotations

import locale
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nvrtc_compiler import Nvrtc, NvrtcError, find_library

from narrowgauge_kernels.sources import CSRC

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TARGETS = Path(__file__).parents[2] / "docker" / "targets.toml"
NVRTC_ONLY = ("7.0", "7.2")
QUICK = ("7.0", "9.0a")
HEADERS = sorted(CSRC.rglob("*.cuh"))
LAUNCHERS = sorted(CSRC.rglob("*.cu"))


def capabilities():
    """Every compute capability that some target compiles for, in order."""
    with TARGETS.open("rb") as file:
        targets = tomllib.load(file).values()
    found = {name for target in targets for name in target.get("capabilities", ())}
    return sorted(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def kernels_of(source):
    """How many kernels a file defines by explicit instantiation."""
    return len(
        re.findall(r"^template __global__", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    )


@pytest.fixture(scope="module")
def nvrtc():
    return Nvrtc(find_library())


def test_there_is_something_to_compile():
    """An empty list would let every test below pass."""
    assert HEADERS
    assert LAUNCHERS
    assert {*NVRTC_ONLY, *QUICK} < set(capabilities())
    assert all(kernels_of(header) for header in HEADERS)


def test_nvrtc_is_the_one_that_knows_volta(nvrtc):
    """A newer package would fail below, and not say why."""
    assert nvrtc.version() == (11, 8)


def tiered(names):
    return [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in names]


@pytest.mark.parametrize("capability", tiered(NVRTC_ONLY))
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_device_code_compiles_with_nvrtc(nvrtc, header, capability):
    """To machine code, with every kernel in it."""
    code = nvrtc.compile(header, capability, CSRC)
    assert code.startswith(b"\x7fELF")
    # One section of instructions per kernel; the names are also in the section-name table once.
    assert len(set(re.findall(rb"\.text\.(\w+)", code))) == kernels_of(header)


def test_a_mistake_is_reported_with_the_compilers_log(nvrtc, tmp_path):
    """So that a silent success above means something."""
    wrong = tmp_path / "wrong.cuh"
    wrong.write_text("__global__ void kernel() { undeclared(); }\n")
    with pytest.raises(NvrtcError, match='identifier "undeclared" is undefined'):
        nvrtc.compile(wrong, "7.2", tmp_path)


def test_the_locale_survives(nvrtc):
    """The thread's, by which Python reads files, and the process's."""
    before = locale.nl_langinfo(locale.CODESET), locale.setlocale(locale.LC_ALL)

    nvrtc.compile(HEADERS[0], "7.0", CSRC)

    assert (locale.nl_langinfo(locale.CODESET), locale.setlocale(locale.LC_ALL)) == before


def test_a_missing_nvrtc_names_the_line_that_installs_it(tmp_path):
    """Nothing is skipped when it is not there."""
    with pytest.raises(NvrtcError, match=r"pip install nvidia-cuda-nvrtc-cu11==11\.8"):
        find_library([str(tmp_path)])


_UNOPTIMISED = ("-Xcicc", "-O0", "-Xptxas", "-O0")


@pytest.mark.parametrize(
    "capability", tiered([each for each in capabilities() if each not in NVRTC_ONLY])
)
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.name)
def test_launchers_compile_with_nvcc(launcher, capability, tmp_path, request):
    """Device and host code, to machine code for exactly this capability, without a warning. In the
    quick tier unoptimised, in half of the time: what is compiled there is built whenever there is a
    GPU."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed (CUDA 13: apt-get install cuda-toolkit-13-0)")
    number = capability.replace(".", "")
    target = tmp_path / "code.cubin"
    done = subprocess.run(
        [
            nvcc,
            "-std=c++14",
            f"-gencode=arch=compute_{number},code=sm_{number}",
            "-cubin",
            "-Werror=all-warnings",
            *(() if request.node.get_closest_marker("slow") else _UNOPTIMISED),
            "-I",
            str(CSRC),
            "-o",
            str(target),
            str(launcher),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert target.read_bytes().startswith(b"\x7fELF")
