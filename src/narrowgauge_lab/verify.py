"""What an image's own `verify` does: is in it what its target promises, and does that work?

    /opt/narrowgauge/verify        in the image, as any user, without network, on a read-only root

`images/<target>/verify` is rendered from docker/targets.toml and hands in what to expect. On a
stand-in base what the true base would bring is not judged, and the output says so.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import pkgutil
import platform
import re
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_lab.console import complain, say

__all__ = ["Expected", "VerifyError", "main", "verify"]

_PACKAGES = (
    "narrowgauge_contract",
    "narrowgauge_data",
    "narrowgauge_kernels",
    "narrowgauge_lab",
    "narrowgauge_scores",
)
#: Modules that cannot be read without what not every target has: Triton's kernels are made as their
#: module is read, and torch 1.8 has no dispatch modes to derive one from.
_NEEDS = {
    "narrowgauge_lab.measure.dispatching": "torch.utils._python_dispatch",
    "narrowgauge_lab.engines.own.gpu.kernels": "triton",
    "narrowgauge_lab.layers.passes.triton_kernels": "triton",
    "narrowgauge_lab.layers.passes.launches": "triton",
    "narrowgauge_lab.layers.passes.implicit": "triton",
}

#: Libraries that the NVIDIA runtime mounts from the host; a build has none of them, nor has a PC
#: that builds for a board.
_DRIVER_LIBRARY = re.compile(
    r"lib(?:EGL|cuda|cudla|nvcudla|nvdla\w*|nvmedia\w*|nvos|nvrm\w*)\.so[.\d]*"
)


class VerifyError(NarrowgaugeError):
    """The image does not hold what its target promises."""

    exit_code = ExitCode.BUILD_FAILED


@dataclasses.dataclass(frozen=True)
class Expected:
    """What docker/targets.toml says of this image. None: the base decides.

    `capabilities`: what the CUDA kernels were compiled for; empty for no CUDA library at all.
    `standin`: the base is a stand-in, so its versions are not the target's.
    """

    target: str
    python: str
    torch: Optional[str] = None
    tensorrt: Optional[str] = None
    capabilities: Tuple[str, ...] = ()
    standin: bool = False


def main(expected: Expected) -> int:
    """Print a line per check; the exit code. The last line is the hash of lab and kernels."""
    try:
        verify(expected, say)
    except NarrowgaugeError as error:
        complain(f"error: {error}")
        return int(error.exit_code)
    return int(ExitCode.OK)


def verify(expected: Expected, say: Callable[[str], None]) -> None:
    """Every check in turn. Raises VerifyError at the first that fails."""
    if os.environ.get("NARROWGAUGE_TARGET") != expected.target:
        raise VerifyError(f"NARROWGAUGE_TARGET is not {expected.target}")
    _check_python(expected, say)
    imported, left_out = _import_everything()
    say(f"modules {imported} imported" + (f", left out {left_out}" if left_out else ""))
    _check_torch(expected, say)
    _check_tensorrt(expected, say)
    _check_kernels(expected, say)
    pins = os.environ.get("NARROWGAUGE_UNRESOLVED", "")
    say(f"unresolved pins: {pins or 'none'}")

    from narrowgauge_lab.facts import source_hash

    say(f"source {source_hash()}")


def _check_python(expected: Expected, say: Callable[[str], None]) -> None:
    found = platform.python_version()
    _judge("python", found, expected.python, expected.standin, say)


def _judge(
    what: str, found: str, wanted: Optional[str], standin: bool, say: Callable[[str], None]
) -> None:
    """`wanted` is the version, or the beginning of it up to a dot; a local part (`+cu130`, `+cpu`)
    is compared where it has one."""
    compared = found if wanted is None or "+" in wanted else found.partition("+")[0]
    right = wanted is None or compared == wanted or compared.startswith(f"{wanted}.")
    if right:
        say(f"{what} {found}")
    elif standin:
        say(f"{what} {found}, not judged: the base is a stand-in, the target has {wanted}")
    else:
        raise VerifyError(f"{what} is {found}, and the target says {wanted}")


def _modules() -> Iterator[str]:
    for name in _PACKAGES:
        package = importlib.import_module(name)
        yield name
        for module in pkgutil.walk_packages(package.__path__, name + "."):
            # A module that runs as a program is named __main__.
            if not module.name.endswith("__main__"):
                yield module.name


def _import_everything() -> Tuple[int, str]:
    """Import every module of ours from the image's own source: how many there are, and which need
    a library that this image does not have."""
    source = Path(__file__).resolve().parents[1]
    count = 0
    left_out = []
    for name in _modules():
        library = _NEEDS.get(name)
        if library is not None and importlib.util.find_spec(library) is None:
            left_out.append(f"{name} (no {library})")
            continue
        module = importlib.import_module(name)
        path = Path(str(module.__file__)).resolve()
        if source not in path.parents:
            raise VerifyError(
                f"{name} is {path}, not of {source}", why="PYTHONPATH leads elsewhere"
            )
        count += 1
    return count, ", ".join(left_out)


def _check_torch(expected: Expected, say: Callable[[str], None]) -> None:
    import numpy
    import torch

    _judge("torch", str(torch.__version__), expected.torch, expected.standin, say)
    say(f"numpy {numpy.__version__}, torch built for CUDA {torch.version.cuda or 'none'}")
    product = torch.ones(3, 4) @ torch.from_numpy(numpy.full((4, 2), 2.0, dtype="float32"))
    if not bool((product == 8).all()):
        raise VerifyError("torch and numpy do not work together", why=f"{product.tolist()}")


def _check_tensorrt(expected: Expected, say: Callable[[str], None]) -> None:
    if expected.tensorrt is None:
        return
    try:
        tensorrt = importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        of_the_driver = _DRIVER_LIBRARY.search(str(error))
        if of_the_driver:
            say(f"tensorrt not judged: {of_the_driver[0]} is the host driver's, and not here")
        elif expected.standin:
            say("tensorrt not judged: the base is a stand-in and has none")
        else:
            raise VerifyError("tensorrt cannot be imported", why=str(error)) from error
        return
    _judge("tensorrt", str(tensorrt.__version__), expected.tensorrt, expected.standin, say)


def _check_instruction_sets(say: Callable[[str], None]) -> None:
    """The last of them is the one that is used; a 64-bit ARM always has NEON."""
    import torch

    found = list(torch.ops.narrowgauge.cpu_instruction_sets())
    if platform.machine() == "aarch64" and "neon" not in found:
        raise VerifyError("the kernels have no NEON path", why=f"they have {' '.join(found)}")
    say(f"instruction sets {' '.join(found)}")


def _check_kernels(expected: Expected, say: Callable[[str], None]) -> None:
    from narrowgauge_kernels.library import library_directory
    from narrowgauge_kernels.selfcheck import check_all

    folder = library_directory()
    record = json.loads((folder / "build.json").read_text(encoding="utf-8"))
    compiled: List[str] = record["cuda_architectures"]
    if compiled != list(expected.capabilities):
        if not expected.standin:
            raise VerifyError(
                f"the kernels are compiled for {' '.join(compiled) or 'no GPU'}",
                why=f"the target says {' '.join(expected.capabilities) or 'no GPU'}",
            )
        say("CUDA kernels not judged: the base is a stand-in without a CUDA compiler")
    try:
        checked = check_all()
    except ArithmeticError as error:
        raise VerifyError("a kernel is wrong", why=str(error)) from error
    if not checked:
        raise VerifyError("no operator was found to check")
    _check_instruction_sets(say)
    for name, worst in checked.items():
        say(f"kernel {name}: within {worst:.1e} of its reference")
    say(f"kernels in {folder}, for compute capability {' '.join(compiled) or 'none'}")
