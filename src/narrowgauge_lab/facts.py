"""What the lab sees from inside: versions, the processor, the accelerator, the sources' hashes.

The accelerator is asked for in a forked child, because asking initialises CUDA, and a process that
has done so cannot fork rows.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from narrowgauge_contract.hashing import tree_hash
from narrowgauge_contract.outcome import InsideFacts

__all__ = ["experiment_hash", "gather", "in_child", "source_hash"]

#: Packages whose versions change results or what can run; absent ones are left out.
_PACKAGES = ("numpy", "torchvision", "triton", "onnx", "onnxruntime", "tensorrt")
_SOURCE = Path(__file__).resolve().parents[1]


def source_hash() -> str:
    """One sha256 over what the image holds of ours: contract, kernels and lab."""
    names = ("narrowgauge_contract", "narrowgauge_kernels", "narrowgauge_lab")
    return tree_hash([_SOURCE / name for name in names])


def experiment_hash(folder: Path) -> str:
    """One sha256 over an experiment's folder."""
    return tree_hash([folder])


def gather() -> InsideFacts:
    """Everything but the rows' own facts. Imports torch; touches CUDA only in a child."""
    import torch

    from narrowgauge_lab.measure import MEASUREMENT_VERSION

    device: Dict[str, Any] = in_child(_device_facts)
    return InsideFacts(
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}",
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=device["cudnn"],
        kernels_build=_kernels_build(),
        accelerator=device["accelerator"],
        capability=device["capability"],
        cpu=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0)),
        threads=device["threads"],
        packages=_versions(),
        measurement=MEASUREMENT_VERSION,
    )


def _device_facts() -> Dict[str, Any]:
    import torch

    found = torch.cuda.is_available()
    version = torch.backends.cudnn.version() if found else None
    return {
        "accelerator": torch.cuda.get_device_name(0) if found else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))) if found else None,
        "cudnn": None if version is None else str(version),
        "threads": torch.get_num_threads(),
    }


def in_child(question: Callable[[], Any]) -> Any:
    """The JSON-able answer of `question`, asked in a forked child so that its traces go with it.

    RuntimeError where the child died.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as stream:
                json.dump(question(), stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise RuntimeError(f"{question.__name__} failed in its child process (status {status})")
    return json.loads(text)


def _kernels_build() -> Optional[str]:
    import narrowgauge_kernels

    return narrowgauge_kernels.build_hash() if narrowgauge_kernels.is_built() else None


def _versions() -> Dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; arm64 kernels give none, so there the machine type has to do."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.machine()
