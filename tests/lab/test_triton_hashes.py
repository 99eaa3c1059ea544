"""The order in which Triton's hashes are computed, and the interpreter meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from typing import Any, Dict, List

import pytest

from narrowgauge_lab.triton_hashes import hash_functions, hash_installation


class Hashed:
    """Like one of Triton's functions: its hash is computed when it is first asked for."""

    def __init__(self, name: str, log: List[str]) -> None:
        self._name, self._log = name, log

    @property
    def cache_key(self) -> str:
        self._log.append(self._name)
        return self._name


def test_functions_are_hashed_in_the_order_of_their_definition() -> None:
    log: List[str] = []
    called, calls = Hashed("called", log), Hashed("calls", log)
    namespace = {"os": os, "called": called, "LIMIT": 3, "calls": calls}

    hash_functions(namespace)

    assert log == ["called", "calls"]


def test_the_key_is_that_of_the_first_module_that_has_one() -> None:
    log: List[str] = []
    modules = [types.SimpleNamespace(), types.SimpleNamespace(triton_key=lambda: log.append("2")),
               types.SimpleNamespace(triton_key=lambda: log.append("3"))]  # fmt: skip

    hash_installation(modules).join()

    assert log == ["2"]


def test_a_version_that_keeps_its_key_elsewhere_is_let_be() -> None:
    hash_installation([types.SimpleNamespace()]).join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_threads_take_shorter_turns_only_meanwhile(fails: bool) -> None:
    before = sys.getswitchinterval()
    begun, seen = threading.Event(), []

    def key() -> None:
        seen.append(sys.getswitchinterval())
        begun.set()
        if fails:
            raise OSError("the library is gone")

    hash_installation([types.SimpleNamespace(triton_key=key)]).join()

    assert begun.is_set()
    assert seen[0] < before
    assert sys.getswitchinterval() == before


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 10), reason="Triton needs Python 3.10")
@pytest.mark.parametrize(
    "module",
    ["narrowgauge_lab.engines.own.gpu.kernels", "narrowgauge_lab.layers.passes.triton_kernels"],
)
def test_hashes_are_the_same_whatever_is_asked_for_first(module: str) -> None:
    pytest.importorskip("triton")
    # Asking a function whether it has a key computes it.
    program = (
        "import importlib, json, sys\n"
        f"names = vars(importlib.import_module('{module}'))\n"
        "made = [each for each in names if type(names[each]).__name__ == 'JITFunction']\n"
        "made.sort(reverse=len(sys.argv) > 1)\n"
        "keys = {name: names[name].cache_key for name in made}\n"
        "print(json.dumps(keys, sort_keys=True))\n"
    )

    def keys(*words: str) -> Dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", program, *words], check=True, stdout=subprocess.PIPE
        )
        return dict(json.loads(done.stdout))

    assert keys() == keys("reversed")
    assert len(keys()) > 5
