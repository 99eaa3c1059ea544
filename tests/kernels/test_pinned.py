"""The pinned allocator: all of it but the driver, which here gives ordinary memory; and what is
said where there is no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pinned_scenarios
import pytest
import torch

from narrowgauge_kernels import pinned, toolchain
from narrowgauge_kernels.errors import KernelsError, KernelsNotBuiltError
from narrowgauge_kernels.sources import CSRC

HERE = Path(__file__).parent
NAMES = [scenario.__name__ for scenario in pinned_scenarios.SCENARIOS]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each scenario says, from processes of their own, with this torch."""
    facts = toolchain.query_torch(sys.executable)
    library = tmp_path_factory.mktemp("pinned") / "standin.so"
    flags = [f"-std={facts.standard}", f"-D_GLIBCXX_USE_CXX11_ABI={int(facts.cxx11_abi)}"]
    flags += ["-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror"]
    paths = ["-I", str(CSRC), "-isystem", facts.include, "-L", facts.library]
    source = str(HERE / "pinned_standin.cpp")
    toolchain.run(
        [toolchain.find_cxx("g++").path, *flags, *paths, source, "-o", str(library), "-lc10"],
        "compiling the stand-in",
    )
    output = subprocess.run(
        [sys.executable, str(HERE / "pinned_scenarios.py"), str(library)],
        env={**os.environ, "PYTHONPATH": str(CSRC.parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return json.loads(output)


@pytest.mark.parametrize("name", NAMES)
def test_scenario(name, said):
    assert said[name] is None, said[name]


def test_nothing_is_installed_unless_asked_for():
    assert not pinned.is_installed()
    assert not pinned.keep(torch.ones(5000))
    with pytest.raises(KernelsError, match="no page-locked memory is installed") as caught:
        pinned.statistics()
    assert "pinned.install" in caught.value.next_step


def test_a_build_for_the_cpu_says_what_is_missing(kernels):
    if (kernels / "narrowgauge_cuda.so").exists():
        pytest.skip("the kernels here are built for CUDA")
    with pytest.raises(KernelsNotBuiltError, match="built for the CPU only") as caught:
        pinned.install(1 << 20)
    assert "--cuda auto" in caught.value.next_step
    assert not pinned.is_installed()


def test_the_driver_is_never_asked_when_memory_is_freed():
    """At the end of a process there may be none."""
    pool = (CSRC / "pinned_memory" / "pinned_pool.h").read_text(encoding="utf-8")
    freeing = re.search(r"void give_back\(.*?\n  }\n", pool, flags=re.DOTALL)
    assert "driver_" in pool
    assert freeing
    assert "driver_" not in freeing.group(0)
    assert "settle" not in freeing.group(0)
