"""Fused convolutions by cuDNN: every engine and configuration of it that can do one, as a plan.

The one module that imports `cudnn`, which nvidia-cudnn-frontend installs. What is asked of cuDNN
is its graph API: heuristics A and B, its fallback list, and then engine by engine with the knobs
that each has. A plan is bound to its problem, the GPU and the cuDNN at hand.

What was found with cuDNN 9.19 for compute capability 9.0: a bias of the data's own type brings the
precompiled fusions (see `cudnn_graphs.forms`), so `ConvPlan.bias_dtype` says what a plan reads; a
problem without a bias has none of them, so that zeros are a bias worth giving; and notes on an
engine's arithmetic do not tell everything, since engines that compile at run time carry none.
"""
# unverified: cuDNN plans on Volta, Turing, Ampere, Ada, Jetson | no such card | nox -s gpu there

from __future__ import annotations

import functools
import weakref
from typing import List, Tuple

import torch

from narrowgauge_lab.engines.errors import EngineMissingError
from narrowgauge_lab.engines.own.cudnn_graphs import ConvProblem
from narrowgauge_lab.engines.own.cudnn_plans import (
    ConvPlan,
    CudnnPlanError,
    Library,
    first_line,
    load,
)
from narrowgauge_lab.engines.own.cudnn_search import Bounds, Survey, search

__all__ = [
    "ConvPlan", "ConvProblem", "CudnnPlanError", "Survey",
    "missing", "plans", "rebuild", "survey", "version",
]  # fmt: skip

_INSTALL = "pip install 'nvidia-cudnn-frontend>=1.18,<1.25'"
#: Later frontends rank engines of their own among cuDNN's and hide some of these.
_NEEDED = (
    "build_plan_at_index", "create_execution_plan", "create_execution_plans",
    "deselect_numeric_notes", "deselect_workspace_greater_than", "deserialize",
    "execute_plan_at_index", "get_behavior_notes_for_plan_at_index", "get_engine_count",
    "get_execution_plan_count", "get_knobs_for_engine", "get_plan_name_at_index",
    "get_workspace_size_plan_at_index", "serialize",
)  # fmt: skip
_LEAST_CUDNN = 90000
_WORKSPACE = 1 << 28
#: Plans that somebody holds, by library, problem, what was stored, and device.
_held: weakref.WeakValueDictionary[Tuple[Library, ConvProblem, bytes, torch.device], ConvPlan] = (
    weakref.WeakValueDictionary()
)


@functools.lru_cache(maxsize=None)
def missing() -> str:
    """Why this host cannot have plans; "" where it can."""
    try:
        import cudnn
    except ImportError as error:
        if error.name == "cudnn":
            return f"nvidia-cudnn-frontend is not installed: {_INSTALL}"
        return f"nvidia-cudnn-frontend cannot be imported ({first_line(error)})"
    except (AssertionError, OSError, RuntimeError) as error:
        return f"nvidia-cudnn-frontend cannot be imported ({first_line(error)})"
    lacking = [name for name in _NEEDED if not hasattr(getattr(cudnn, "pygraph", None), name)]
    if lacking:
        given = getattr(cudnn, "__version__", "of unknown version")
        return f"nvidia-cudnn-frontend {given} has no {lacking[0]}: {_INSTALL}"
    try:
        found = int(cudnn.backend_version())
    except RuntimeError as error:
        return f"nvidia-cudnn-frontend found no cuDNN ({first_line(error)})"
    if found < _LEAST_CUDNN:
        return f"nvidia-cudnn-frontend found cuDNN {found}, and plans need {_LEAST_CUDNN}"
    beside = torch.backends.cudnn.version()
    if beside is not None and beside != found:
        return (
            f"nvidia-cudnn-frontend found cuDNN {found} beside torch's {beside}, and one process "
            "cannot hold both"
        )
    return ""


def version() -> str:
    """The frontend's version and cuDNN's, as found. Raises EngineMissingError."""
    front = _library().front
    return f"nvidia-cudnn-frontend {front.__version__} with cuDNN {front.backend_version()}"


def plans(
    problem: ConvProblem,
    device: torch.device,
    *,
    limit: int = 96,
    seconds: float = 30.0,
    workspace: int = _WORKSPACE,
) -> List[ConvPlan]:
    """Every configuration that does the problem, built; [] where none does. See `survey`."""
    found = survey(problem, device, limit=limit, seconds=seconds, workspace=workspace)
    return list(found.plans)


def survey(
    problem: ConvProblem,
    device: torch.device,
    *,
    limit: int = 96,
    seconds: float = 30.0,
    workspace: int = _WORKSPACE,
) -> Survey:
    """As many plans as there are, up to `limit` and while `seconds` last, of at most `workspace`
    bytes each: the heuristics' first, of every form of the problem, then other configurations of
    precompiled engines, then of those that compile, which takes a second or more each.

    float32 is strict: a plan counts only if its engine is not noted to use tensor cores, does not
    compile at run time, and kept float32 in a run whose sums show rounding.

    Not for a stream that is being captured. Raises EngineMissingError.
    """
    bounds = Bounds(limit, seconds, workspace)
    return search(_library(), problem, _indexed(device), bounds)


def rebuild(problem: ConvProblem, blob: bytes, device: torch.device) -> ConvPlan:
    """The plan that `ConvPlan.blob` stored, without heuristics or compilation. One plan serves all
    who hold one of the same problem: cuDNN takes milliseconds to read a plan, and a ResNet-152 has
    some twenty problems in its 155 convolutions.

    Raises CudnnPlanError where it is damaged, or of another problem, GPU, cuDNN or frontend;
    EngineMissingError. Not for a stream that is being captured.
    """
    library, where = _library(), _indexed(device)
    key = (library, problem, blob, where)
    found = _held.get(key)
    if found is None:
        found = _held[key] = load(library, problem, blob, where)
    return found


@functools.lru_cache(maxsize=None)
def _library() -> Library:
    reason = missing()
    if reason:
        raise EngineMissingError("this host has no plans of cuDNN", why=reason)
    import cudnn

    return Library(cudnn)


def _indexed(device: torch.device) -> torch.device:
    """With its number, as tensors have it."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
