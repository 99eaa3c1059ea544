"""The native executor's environment: a virtual environment with torch, and the kernels for it.

Made once, and recognised by a stamp that is written last; a half-made one is made anew. What was
installed is in the stamp.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.checkout import Checkout
from narrowgauge.errors import BuildFailed, DiskFull, NotApplicableError, ToolchainMissing
from narrowgauge.fitting import refusal
from narrowgauge.machine import Host
from narrowgauge.targets import Target, load_targets
from narrowgauge.wheels import Offer, choose_offer
from narrowgauge_contract.codec import decode, read_json, write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.hashing import tree_hash

__all__ = ["STAMP_FILE", "Stamp", "ensure_lab_python"]

STAMP_FILE = "narrowgauge-environment.json"
_LOG_FILE = "narrowgauge-environment.log"
#: The first pip whose `install` has --dry-run and --report.
_LEAST_PIP = (22, 2)
#: torch and numpy unpacked, beside their wheels.
_DISK_FACTOR = 4
_COMPILE_SAID = "compiling the kernels, once: a minute or more"
_PERHAPS_SAID = (
    "looking at the kernels; where they are new for it, compiling takes a minute or more"
)
#: Seconds that nothing is said of a step which mostly has nothing to do.
_SILENT_S = 3.0
_FACTS = """
import json, sys
import numpy, torch
print(json.dumps({"python": sys.version.split()[0], "torch": torch.__version__}))
"""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stamp:
    """What an environment is. `wanted` is the requirement it was made for; `kernels` the hash of
    the kernels' source that was compiled; `installed` is `pip freeze`."""

    wanted: str
    python: str
    torch: str
    kernels: str
    installed: tuple[str, ...] = ()


def ensure_lab_python(
    checkout: Checkout, host: Host, env: Mapping[str, str], say: Say, given: Path | None = None
) -> Path:
    """A Python with torch, and the kernels built for it. `given` is a Python of the user's own.

    Costs a few file look-ups when all is there. Raises ToolchainMissing, BuildFailed, DiskFull,
    NotApplicableError.
    """
    clean = _clean(env)
    if given is not None:
        return _own_python(checkout, host, clean, say, given.absolute())
    folder = checkout.lab_environment
    python = folder / "bin" / "python"
    wanted = _wanted_torch(checkout, host)
    kernels = tree_hash([checkout.source / "narrowgauge_kernels"])
    if _is_current(folder, python, wanted, kernels):
        return python
    with _alone(checkout.root):
        stamp = _load(folder / STAMP_FILE)
        if stamp is None or stamp.wanted != wanted or not python.exists():
            _check_compiler(env)
            stamp = _make(folder, python, wanted, want_cpu=not host.has_gpu, env=clean, say=say)
        if stamp.kernels != kernels:
            say(_COMPILE_SAID)
            _build_kernels(checkout, python, host, clean, folder / _LOG_FILE)
            stamp = Stamp(stamp.wanted, stamp.python, stamp.torch, kernels, stamp.installed)
            write_json_atomic(folder / STAMP_FILE, stamp)
    return python


def _is_current(folder: Path, python: Path, wanted: str, kernels: str) -> bool:
    stamp = _load(folder / STAMP_FILE)
    return (
        stamp is not None
        and stamp.wanted == wanted
        and stamp.kernels == kernels
        and python.exists()
    )


def _own_python(
    checkout: Checkout, host: Host, env: Mapping[str, str], say: Say, python: Path
) -> Path:
    """The user's interpreter, if it has torch and numpy; kernels that are new are compiled."""
    done = _run([str(python), "-c", _FACTS], env)
    if done is None or done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] if done else ["it does not start"]
        raise ToolchainMissing(
            f"--lab-python {python} is not a Python with torch and numpy",
            why="".join(last),
            next_step=f"{python} -m pip install torch numpy; or leave --lab-python out",
        )
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    say(f"native: Python {facts['python']} with torch {facts['torch']} at {python}")
    # Builds by content: what is compiled already is left as it is.
    build = checkout.source / "narrowgauge_kernels" / "build"
    build.mkdir(exist_ok=True)
    # Where there is nothing to compile it takes a second or two, and nothing need be said.
    saying = threading.Timer(_SILENT_S, say, [_PERHAPS_SAID])
    saying.start()
    try:
        _build_kernels(checkout, python, host, env, build / "lab-python.log")
    finally:
        saying.cancel()
    return python


def _wanted_torch(checkout: Checkout, host: Host) -> str:
    """The requirement: the torch of the target that fits this host, as its image would have it."""
    targets = load_targets(checkout.targets_file).values()
    fitting = [t for t in targets if t.fits.needs_gpu == host.has_gpu and refusal(t, host) is None]
    # The newest: a host that two targets fit has no reason for the older torch.
    versions = [_release(target) for target in fitting if target.torch.version]
    if not versions:
        raise NotApplicableError(
            f"no torch is known for this host ({host.describe()})",
            next_step="name a Python that has one: --lab-python PYTHON",
        )
    return f"torch=={max(versions, key=lambda text: [int(part) for part in text.split('.')])}"


def _release(target: Target) -> str:
    return (target.torch.version or "").partition("+")[0]


def _make(
    folder: Path, python: Path, wanted: str, *, want_cpu: bool, env: Mapping[str, str], say: Say
) -> Stamp:
    """The virtual environment, torch and numpy; the stamp without kernels, so that a stop here is
    not taken for a finished environment."""
    base = Path(sys.executable)
    _check_venv(base, env)
    say(f"making the native environment {folder} with Python {sys.version.split()[0]}")
    log = folder / _LOG_FILE
    _step([str(base), "-m", "venv", "--clear", str(folder)], env, None, "python -m venv failed")
    _renew_pip(python, env, log)
    offer = choose_offer(python, (wanted, "numpy"), want_cpu=want_cpu, env=env)
    say(f"installing {offer.describe()}")
    _check_room(folder, offer)
    requirement = f"torch=={offer.version}"
    words = [str(python), "-m", "pip", "install", *offer.arguments, requirement, "numpy"]
    _step(words, env, log, f"pip could not install {requirement}")
    facts = _run([str(python), "-c", _FACTS], env)
    if facts is None or facts.returncode != 0:
        raise BuildFailed(
            "the installed torch cannot be imported",
            why=facts.stderr.strip()[-400:] if facts else "",
            next_step=f"see {log}",
        )
    said = json.loads(facts.stdout.strip().splitlines()[-1])
    frozen = _run([str(python), "-m", "pip", "freeze"], env)
    installed = tuple(frozen.stdout.split("\n")[:-1]) if frozen else ()
    stamp = Stamp(wanted, said["python"], said["torch"], "", installed)
    write_json_atomic(folder / STAMP_FILE, stamp)
    return stamp


def _build_kernels(
    checkout: Checkout, python: Path, host: Host, env: Mapping[str, str], log: Path
) -> None:
    _check_compiler(env)
    cuda = "auto" if host.has_gpu and shutil.which("nvcc", path=env.get("PATH")) else "none"
    words = [str(python), "-m", "narrowgauge_kernels.build", "--cuda", cuda]
    _step(
        words,
        {**env, "PYTHONPATH": str(checkout.source)},
        log,
        "the kernels could not be compiled",
    )


def _check_compiler(env: Mapping[str, str]) -> None:
    if shutil.which("g++", path=env.get("PATH", os.defpath)) is None:
        raise ToolchainMissing(
            "no C++ compiler: g++ is not on the path",
            why="a native run compiles the project's kernels",
            next_step="sudo apt-get install g++",
        )


def _check_venv(python: Path, env: Mapping[str, str]) -> None:
    """Debian keeps `ensurepip` in a package of its own; without it `venv` fails half-way."""
    done = _run([str(python), "-c", "import venv, ensurepip"], env)
    if done is None or done.returncode != 0:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise ToolchainMissing(
            f"{python} cannot make virtual environments",
            why="the modules venv and ensurepip are a package of their own on Debian and Ubuntu",
            next_step=f"sudo apt-get install python3-venv (or {package})",
        )


def _renew_pip(python: Path, env: Mapping[str, str], log: Path) -> None:
    done = _run([str(python), "-m", "pip", "--version"], env)
    words = done.stdout.split() if done else []
    version = tuple(int(part) for part in words[1].split(".")[:2]) if len(words) > 1 else (0, 0)
    if version < _LEAST_PIP:
        command = [str(python), "-m", "pip", "install", "--upgrade", "pip"]
        _step(command, env, log, "pip is too old and could not be renewed")


def _check_room(folder: Path, offer: Offer) -> None:
    needed = (offer.bytes or 0) * _DISK_FACTOR
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"the native environment needs some {needed >> 20} MiB in {folder}",
            why=f"{free >> 20} MiB are left",
            next_step="free some space, or name a Python that has torch: --lab-python PYTHON",
        )


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Two launchers must not make one environment at once; the second finds it made.

    The lock is on the folder itself, so that no file is left behind.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _load(path: Path) -> Stamp | None:
    try:
        return decode(Stamp, read_json(path), str(path))
    except (OSError, DamagedRecordError):
        return None


def _clean(env: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would lead another Python astray."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in env.items() if name not in dropped}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def _run(words: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(words, env=dict(env), capture_output=True, text=True, check=False)
    except OSError:
        return None


def _step(words: Sequence[str], env: Mapping[str, str], log: Path | None, failure: str) -> None:
    """Run one step, its output into `log`; BuildFailed (or DiskFull) with its last lines."""
    done = subprocess.run(
        words,
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if log is not None:
        with open(log, "a", encoding="utf-8") as stream:
            stream.write(f"$ {' '.join(words)}\n{done.stdout}\n")
    if done.returncode == 0:
        return
    tail = "\n".join(done.stdout.strip().splitlines()[-8:])
    if "No space left on device" in done.stdout:
        raise DiskFull(failure, why=tail, next_step="free some space and start again")
    raise BuildFailed(failure, why=tail, next_step=f"the whole output is in {log}" if log else "")
