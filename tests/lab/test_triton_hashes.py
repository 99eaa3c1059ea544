"""What Triton hashes of its functions, and of itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from narrowgauge_lab.triton_hashes import Installation, hash_functions


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


@pytest.fixture
def holder(tmp_path: Path) -> types.SimpleNamespace:
    """Like `triton.runtime.cache`, in an installation of two files that count and one that does
    not."""
    for name in ("runtime/cache.py", "_C/libtriton.so", "_C/notes.txt"):
        path = tmp_path / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        os.utime(path, ns=(5, 5))
    file = str(tmp_path / "triton" / "runtime" / "cache.py")
    return types.SimpleNamespace(__file__=file, triton_key=lambda: "computed")


def test_the_hash_is_that_of_the_module_that_has_one(holder: types.SimpleNamespace) -> None:
    installation = Installation([types.SimpleNamespace(__file__="/elsewhere/x.py"), holder])

    assert installation.hash() == "computed"
    assert installation.stamp()


def test_what_is_known_is_not_computed_again(holder: types.SimpleNamespace) -> None:
    Installation([holder]).know("kept")

    assert holder.triton_key() == "kept"
    assert Installation([holder]).hash() == "kept"


def test_a_version_that_keeps_its_hash_elsewhere_is_let_be() -> None:
    module = types.SimpleNamespace()
    installation = Installation([module])
    installation.know("kept")

    assert (installation.stamp(), installation.hash()) == ("", "")
    assert vars(module) == {}


def test_the_stamp_is_the_same_until_a_file_that_counts_changes(
    holder: types.SimpleNamespace, tmp_path: Path
) -> None:
    installation = Installation([holder])
    root = tmp_path / "triton"
    seen = {installation.stamp()}
    (root / "_C" / "notes.txt").write_text("longer than before")
    assert installation.stamp() in seen

    changes: List[Callable[[], object]] = [
        lambda: (root / "_C" / "libtriton.so").write_text("another size"),
        lambda: os.utime(root / "runtime" / "cache.py", ns=(5, 6)),
        lambda: (root / "more.py").touch(),
        lambda: (root / "more.py").unlink(),
    ]
    for number, change in enumerate(changes[:-1]):
        change()
        seen.add(installation.stamp())
        assert len(seen) == number + 2
    before = installation.stamp()
    changes[-1]()
    assert installation.stamp() != before


def test_the_stamp_tells_places_apart(holder: types.SimpleNamespace, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "triton", moved / "triton")
    other = types.SimpleNamespace(
        __file__=str(moved / "triton/runtime/cache.py"), triton_key=lambda: "computed"
    )

    assert Installation([other]).stamp() != Installation([holder]).stamp()


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


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 10), reason="Triton needs Python 3.10")
def test_triton_takes_the_hash_that_is_known() -> None:
    """In the version at hand, where its keys are made."""
    pytest.importorskip("triton")
    program = (
        "from narrowgauge_lab.engines.own.gpu.kernels import HASHED_BY\n"
        "from narrowgauge_lab.triton_hashes import Installation\n"
        "from triton.runtime.cache import get_cache_key\n"
        "import types\n"
        "part = types.SimpleNamespace(hash=lambda: 'part')\n"
        "def key(): return get_cache_key(part, part, part, {})\n"
        "found = Installation(HASHED_BY)\n"
        "assert found.stamp() == Installation(HASHED_BY).stamp() != ''\n"
        "right = found.hash()\n"
        "assert key().startswith(right)\n"
        "found.know('kept')\n"
        "assert key().startswith('kept-part')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
