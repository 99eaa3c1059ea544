"""Slow: nvcc 11.8, the compiler generation of the 21.07 and l4t r35 bases, links a loadable library
against torch 1.8.0 for all of their compute capabilities, without a GPU.

torch 1.8.0 of PyPI is a CUDA 10.2 build, so its libc10_cuda.so is there to link and load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda118 import NotProvisioned, cxx_path, nvcc_path, provision

from narrowgauge_kernels.sources import CSRC

pytestmark = pytest.mark.slow

CAPABILITIES = "7.0 7.2 7.5 8.0 8.6 8.7"

#: Prints for which devices torch's dispatcher has an implementation of the operator.
ASK = """
import torch, narrowgauge_kernels
narrowgauge_kernels.load()
print(torch._C._dispatch_dump("narrowgauge::linear"))
"""


@pytest.fixture(scope="module")
def toolkit():
    """The toolkit's folder, in the user's cache; the first time downloads 870 MB."""
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA; run this under torch 1.8.0 from PyPI")
    if not torch.__version__.startswith("1."):
        pytest.skip("nvcc 11.8 is for torch 1.x; newer ones are built with the CUDA of their image")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        return provision(cache / "narrowgauge" / "cuda-11.8")
    except NotProvisioned as error:
        pytest.fail(f"CUDA 11.8 cannot be had: {error}")


def python(arguments, **env):
    """Run this interpreter with the package on its path; the output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(CSRC.parent.parent), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_nvcc_11_8_links_a_library_that_torch_loads(toolkit, tmp_path):
    """All capabilities of the CUDA 11.4 images in one library, the CUDA operators registered."""
    nvcc = nvcc_path(toolkit)
    build = ["-m", "narrowgauge_kernels.build", "--cuda", CAPABILITIES, "--out", str(tmp_path)]
    python(
        [*build, "--compiler", str(cxx_path(toolkit))],
        PATH=f"{nvcc.parent}:{os.environ['PATH']}",
    )
    assert '"nvcc V11.8.89"' in (tmp_path / "build.json").read_text()
    library = tmp_path / "narrowgauge_cuda.so"
    assert "CUDA: registered at" in python(["-c", ASK], NARROWGAUGE_KERNELS=str(tmp_path))
    listing = subprocess.run(
        [str(toolkit / "usr" / "bin" / "cuobjdump"), "--list-elf", str(library)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    for capability in CAPABILITIES.split():
        assert f"sm_{capability.replace('.', '')}.cubin" in listing
