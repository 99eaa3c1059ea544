"""What holds for every test, on every Python. Tests that need a container engine or a browser are
left out only by a flag."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

# A test that imports hypothesis says by itself where it is not installed.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # How long an example takes on a busy machine is no property of what it tries.
    settings.register_profile(
        "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unhurried")

_LEFT_OUT = {"docker": "a Docker engine", "browser": "Chromium", "cluster": "Slurm's daemons"}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, needed in _LEFT_OUT.items():
        parser.addoption(
            f"--no-{name}",
            action="store_true",
            help=f"leave out the tests that need {needed}; nothing else leaves them out",
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # jax and OpenVINO start threads, and what is forked after that warns, hangs or dies.
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)
    flags = [name for name in _LEFT_OUT if config.getoption(f"--no-{name}")]
    left_out = [item for item in items if any(map(item.get_closest_marker, flags))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _no_ambient_change() -> Iterator[None]:
    """A test that changes the environment or the working directory changes the tests after it."""
    # Names of pytest and of libraries that set one on import are not the test's doing.
    ignored = (
        "PYTEST_",
        "KMP_",
        "OMP_",
        "MPLBACKEND",
        "TF_CPP_",
        "TORCHINDUCTOR_",
        "TPU_",
        "_TORCHINDUCTOR_",
        "TRITON_",
    )
    before, folder = dict(os.environ), os.getcwd()
    yield
    after = dict(os.environ)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and not name.startswith(ignored)
    )
    moved = os.getcwd() != folder
    if changed or moved:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)
    assert not changed, f"the test changed the environment: {', '.join(changed)}"
    assert not moved, "the test changed the working directory"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small networks on a machine that others use too: one thread is faster than threads that
    wait."""
    import torch

    from narrowgauge_lab.torch_compat import threads_may_change

    if not threads_may_change():  # a convolution of the same shape in a later test might crash
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
