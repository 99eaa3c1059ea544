"""What the lab sees from inside: versions, the processor, the accelerator, the sources' hashes.

The accelerator is asked for in a forked child, because asking initialises CUDA, and a process that
has done so cannot fork rows.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_contract.hashing import tree_hash
from narrowgauge_contract.outcome import InsideFacts
from narrowgauge_lab.errors import TorchMissingError
from narrowgauge_lab.forking import fork
from narrowgauge_lab.waiting import processors

__all__ = ["FactsError", "experiment_hash", "gather", "in_child", "require_torch", "source_hash"]

#: Packages whose versions change results or what can run; absent ones are left out.
_PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "nvidia-cudnn-frontend",
    "onnx",
    "onnxruntime",
    "openvino",
    "pytorch-quantization",
    "tensorrt",
    "torch2trt",
    "torchvision",
    "triton",
)
#: What begins the names of the variables that change speed or arithmetic.
_ENVIRONMENT = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "GLIBC_TUNABLES",
    "GOMP_",
    "KMP_",
    "LD_PRELOAD",
    "MALLOC_",
    "MKL_",
    "NVIDIA_TF32_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHONHASHSEED",
    "PYTORCH_",
    "THP_",
    "TORCH_",
)
#: These hold paths or say what an image is made of, and change nothing by themselves.
_NOT_ENVIRONMENT = ("CUDA_HOME", "CUDA_PATH", "CUDA_VERSION", "CUDNN_VERSION", "TORCH_HOME")
_SOURCE = Path(__file__).resolve().parents[1]


class FactsError(NarrowgaugeError):
    """torch or the driver failed when asked what is here."""

    exit_code = ExitCode.NOT_APPLICABLE


@functools.lru_cache(maxsize=None)
def source_hash() -> str:
    """One sha256 over what the image holds of ours: contract, kernels, lab and scores. Taken once:
    rows, which are forked from who asked first, run what was there then."""
    names = (
        "narrowgauge_contract", "narrowgauge_kernels", "narrowgauge_lab", "narrowgauge_scores",
    )  # fmt: skip
    return tree_hash([_SOURCE / name for name in names])


def experiment_hash(folder: Path) -> str:
    """One sha256 over an experiment's folder."""
    return tree_hash([folder])


def require_torch() -> None:
    """Import torch and numpy, so that every row's process has them. Raises TorchMissingError."""
    try:
        import numpy  # noqa: F401
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        raise TorchMissingError(
            f"{sys.executable} cannot import {getattr(error, 'name', None) or 'torch'}",
            why=str(error),
            next_step="pip install torch numpy, or use the Python of an environment that has both",
        ) from error


def gather(env: Mapping[str, str]) -> InsideFacts:
    """Everything but the rows' own facts. Imports torch; touches CUDA only in a child.

    Raises TorchMissingError; FactsError where the driver or torch breaks on being asked.
    """
    require_torch()
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
        cpu_count=processors(),
        threads=device["threads"],
        packages=_versions(),
        environment=_environment(env),
        measurement=MEASUREMENT_VERSION,
        pins_unresolved=tuple(env.get("NARROWGAUGE_UNRESOLVED", "").split()),
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

    Raises FactsError where the question raised, or its process died.
    """
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(reading)
        _answer(question, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    reply: Dict[str, Any] = json.loads(text) if text else {}
    if "answer" not in reply:
        raise FactsError(
            "torch or the GPU driver failed when asked what is here",
            why=reply.get("trace", f"the process that asked ended with wait status {status}"),
            next_step="nvidia-smi says whether the driver works; CUDA_VISIBLE_DEVICES= hides it",
        )
    return reply["answer"]


def _answer(question: Callable[[], Any], descriptor: int) -> None:
    """The child's whole life; never returns."""
    try:
        try:
            reply = {"answer": question()}
        except Exception:
            reply = {"trace": traceback.format_exc()}
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(reply, stream)
    finally:
        os._exit(0)


def _kernels_build() -> Optional[str]:
    """None where no kernels are built for this torch: an experiment that needs them says so."""
    import narrowgauge_kernels

    return narrowgauge_kernels.build_hash() if narrowgauge_kernels.is_built() else None


def _environment(env: Mapping[str, str]) -> Dict[str, str]:
    return {
        name: env[name]
        for name in sorted(env)
        if name.startswith(_ENVIRONMENT) and name not in _NOT_ENVIRONMENT
    }


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
