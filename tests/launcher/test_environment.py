"""The native environment: what is missing is named, what is half made is made anew."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from narrowgauge import environment
from narrowgauge.checkout import Checkout
from narrowgauge.environment import STAMP_FILE, Stamp, ensure_lab_python
from narrowgauge.errors import BuildFailed, DiskFull, NotApplicableError, ToolchainMissing
from narrowgauge.machine import Gpu, Host
from narrowgauge.wheels import Offer, choose_offer, read_report
from narrowgauge_contract.codec import decode, read_json

LAPTOP = Host("amd64")
CPU = Offer("2.13.0+cpu", True, (), "a local file", 0)


def report(version: str, url: str, *requires: str) -> dict[str, Any]:
    metadata = {"name": "torch", "version": version, "requires_dist": list(requires)}
    return {"install": [{"download_info": {"url": url}, "metadata": metadata}]}


class Steps:
    """Stands for pip, venv and the compiler: remembers, makes the interpreter, may fail at one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[str] = []
        self.fail = ""

    def __call__(self, words: Any, env: Any, log: Any, failure: str) -> None:
        name = next(w for w in ("venv", "install", "narrowgauge_kernels.build") if w in words)
        self.done.append(name)
        if name == self.fail:
            raise BuildFailed(failure)
        if name == "venv":
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.folder / "bin").mkdir(parents=True)
            (self.folder / "bin" / "python").write_text("")


@pytest.fixture
def steps(tiny_checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps(tiny_checkout / ".venv-lab")

    def run(words: Any, env: Any) -> Any:
        said = json.dumps({"python": "3.11.2", "torch": "2.13.0+cpu"})
        text = {"freeze": "numpy==2.4\ntorch==2.13.0\n", "--version": "pip 25.0 from x"}
        out = text.get(words[-1], said)
        return type("Done", (), {"returncode": 0, "stdout": out, "stderr": ""})()

    monkeypatch.setattr(environment, "_step", steps)
    monkeypatch.setattr(environment, "_run", run)
    monkeypatch.setattr(environment, "choose_offer", lambda *a, **k: CPU)
    return steps


def ensure(root: Path, said: list[str] | None = None) -> Path:
    says = said if said is not None else []
    return ensure_lab_python(Checkout(root), LAPTOP, dict(os.environ), says.append)


def test_it_is_made_once_and_says_what_it_downloads(tiny_checkout: Path, steps: Steps) -> None:
    said: list[str] = []
    python = ensure(tiny_checkout, said)
    again = ensure(tiny_checkout)

    assert python == again == tiny_checkout / ".venv-lab" / "bin" / "python"
    assert steps.done == ["venv", "install", "narrowgauge_kernels.build"]
    assert "torch 2.13.0+cpu without CUDA from a local file, nothing to download" in said[1]
    stamp = decode(Stamp, read_json(tiny_checkout / ".venv-lab" / STAMP_FILE))
    assert stamp.wanted == "torch==2.13.0"
    assert stamp.installed == ("numpy==2.4", "torch==2.13.0")


@pytest.mark.parametrize(
    ("fails", "second"),
    [
        ("install", ["venv", "install", "narrowgauge_kernels.build"]),
        ("narrowgauge_kernels.build", ["narrowgauge_kernels.build"]),
    ],
)
def test_what_is_half_made_is_mended(
    tiny_checkout: Path, steps: Steps, fails: str, second: list[str]
) -> None:
    steps.fail = fails
    with pytest.raises(BuildFailed):
        ensure(tiny_checkout)
    steps.fail, steps.done = "", []
    ensure(tiny_checkout)

    assert steps.done == second


def test_changed_kernels_are_compiled_and_nothing_else(tiny_checkout: Path, steps: Steps) -> None:
    ensure(tiny_checkout)
    steps.done = []
    (tiny_checkout / "src" / "narrowgauge_kernels" / "new.cpp").write_text("int x;")
    ensure(tiny_checkout)

    assert steps.done == ["narrowgauge_kernels.build"]


def test_a_missing_compiler_is_named_before_anything_is_downloaded(
    tiny_checkout: Path, steps: Steps
) -> None:
    with pytest.raises(ToolchainMissing) as missing:
        ensure_lab_python(Checkout(tiny_checkout), LAPTOP, {"PATH": "/nowhere"}, print)

    assert missing.value.next_step == "sudo apt-get install g++"
    assert steps.done == []


def test_a_missing_venv_is_named_with_its_package(
    tiny_checkout: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_run", lambda words, env: None)
    with pytest.raises(ToolchainMissing) as missing:
        ensure(tiny_checkout)

    assert "apt-get install python3-venv" in missing.value.next_step
    assert steps.done == []


def test_too_little_room_is_told_before_the_download(
    tiny_checkout: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = Offer("2.13.0", False, (), "somewhere", 1 << 60)
    monkeypatch.setattr(environment, "choose_offer", lambda *a, **k: huge)
    with pytest.raises(DiskFull, match="needs some"):
        ensure(tiny_checkout)

    assert steps.done == ["venv"]


def test_a_board_without_a_known_torch_asks_for_its_python(
    tiny_checkout: Path, steps: Steps
) -> None:
    board = Host("arm64", l4t="35.2.1")
    with pytest.raises(NotApplicableError) as refused:
        ensure_lab_python(Checkout(tiny_checkout), board, dict(os.environ), print)

    assert "--lab-python" in refused.value.next_step


def test_a_gpu_host_gets_the_torch_of_its_target(
    tiny_checkout: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        environment, "choose_offer", lambda *words, **how: asked.append((words[1], how)) or CPU
    )
    host = Host("amd64", (Gpu("NVIDIA H200", "9.0", 1, {}),), "580.65")
    ensure_lab_python(Checkout(tiny_checkout), host, dict(os.environ), print)

    assert asked[0][0][0] == "torch==2.11.0"
    assert asked[0][1]["want_cpu"] is False


def test_a_given_python_without_torch_is_refused(tiny_checkout: Path, tmp_path: Path) -> None:
    place = tmp_path / "python"
    place.write_text("#!/bin/sh\necho no torch >&2; exit 1\n")
    place.chmod(0o755)
    with pytest.raises(ToolchainMissing, match="not a Python with torch") as refused:
        ensure_lab_python(Checkout(tiny_checkout), LAPTOP, dict(os.environ), print, place)

    assert refused.value.why == "no torch"


def test_a_given_python_for_which_kernels_are_compiled_is_said_to_take_a_while(
    tiny_checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes without a word look like a hang; where nothing is compiled nothing is said."""
    (tiny_checkout / "src/narrowgauge_kernels").mkdir(parents=True, exist_ok=True)
    place = tmp_path / "python"
    facts = '{"python": "3.11.2", "torch": "2.13.0"}'
    place.write_text(f"#!/bin/sh\n[ \"$1\" != -c ] || exec echo '{facts}'\nsleep 0.5\n")
    place.chmod(0o755)
    said: list[str] = []
    for silent in (30.0, 0.1):
        monkeypatch.setattr(environment, "_SILENT_S", silent)
        ensure_lab_python(Checkout(tiny_checkout), LAPTOP, dict(os.environ), said.append, place)

    named = "native: Python 3.11.2 with torch 2.13.0 at " + str(place)
    assert said[:2] == [named, named]
    (late,) = said[2:]
    assert "a minute or more" in late


def test_a_report_tells_a_cpu_build_from_a_cuda_build() -> None:
    local = read_report(report("2.13.0+cpu", "file:///w/torch.whl"), (), "pip")
    cuda = read_report(
        report("2.13.0", "file:///w/t.whl", 'nvidia-cublas==13.1; platform_system == "Linux"'),
        (),
        "pip",
    )
    plain = read_report(report("2.13.0", "file:///w/t.whl", "numpy", "sympy"), (), "pip")

    assert (local.cpu_only, local.bytes, local.source) == (True, 0, "a local file")
    assert cuda.cpu_only is False
    assert plain.cpu_only is True  # arm64 wheels have no local version and no CUDA


def test_sizes_are_said_in_megabytes_and_minutes() -> None:
    offer = Offer("2.13.0+cpu", True, (), "an index", 190_000_000)
    unknown = Offer("2.13.0", False, (), "an index", None)

    assert offer.describe().endswith("190 MB to download (38 s at 5 MB/s)")
    assert unknown.describe().endswith("about 3000 MB to download (10 min at 5 MB/s)")


PIP = """#!{python}
import json, sys
asked = sys.argv
cpu = any("whl/cpu" in word for word in asked)
if cpu and {no_index}:
    sys.exit("no such index")
version = "2.13.0+cpu" if cpu else "2.13.0"
needs = [] if cpu else ["nvidia-cublas==13"]
item = {{"download_info": {{"url": "file:///t.whl"}}, "metadata":
        {{"name": "torch", "version": version, "requires_dist": needs}}}}
print(json.dumps({{"install": [item]}}))
"""


@pytest.mark.parametrize(
    ("no_index", "want_cpu", "version"),
    [(False, True, "2.13.0+cpu"), (True, True, "2.13.0"), (False, False, "2.13.0")],
)
def test_a_build_without_cuda_is_looked_for_where_no_gpu_is(
    tmp_path: Path, no_index: bool, want_cpu: bool, version: str
) -> None:
    python = tmp_path / "python"
    python.write_text(PIP.format(python=sys.executable, no_index=no_index))
    python.chmod(0o755)
    offer = choose_offer(python, ("torch==2.13.0", "numpy"), want_cpu=want_cpu, env={})

    assert offer.version == version
    assert ("--extra-index-url" in offer.arguments) == (version == "2.13.0+cpu")


def test_no_torch_at_all_is_an_error_that_quotes_pip(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution' >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(BuildFailed) as failed:
        choose_offer(python, ("torch==2.13.0",), want_cpu=True, env={})

    assert failed.value.why == "ERROR: No matching distribution"
