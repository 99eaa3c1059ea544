"""The kernels, built once per torch and loaded once per session."""

from __future__ import annotations

import json

import pytest

import narrowgauge_kernels
from narrowgauge_kernels.build import Request, build


@pytest.fixture(scope="session")
def kernels():
    """The loaded kernels' directory. Builds what is missing or stale, for the capabilities (if any)
    that an earlier build had: a GPU build is never replaced by a CPU one."""
    directory = narrowgauge_kernels.library_directory()
    if not narrowgauge_kernels.is_built():
        previous = directory / "build.json"
        architectures = (
            json.loads(previous.read_text())["cuda_architectures"] if previous.exists() else []
        )
        build(Request(cuda=" ".join(architectures) or "none", out=directory))
    return narrowgauge_kernels.load()
