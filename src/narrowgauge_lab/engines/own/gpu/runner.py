"""Our engine on a CUDA device, as the registry wants engines to be."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import LayerFact, Preparation, Runner
from narrowgauge_lab.engines.keys import cache_key
from narrowgauge_lab.engines.native import of_batch
from narrowgauge_lab.engines.own import cudnn
from narrowgauge_lab.engines.own.gpu.formats import FORMATS
from narrowgauge_lab.engines.own.gpu.lowered import Observed, lowered
from narrowgauge_lab.engines.own.gpu.network import OwnNetwork
from narrowgauge_lab.engines.own.gpu.phases import Phases
from narrowgauge_lab.engines.own.gpu.tuning import Settled
from narrowgauge_lab.measure.probe import Observation
from narrowgauge_lab.triton_hashes import Installation

__all__ = ["OwnRunner", "missing", "prepare", "refuses"]

#: Triton has products of these formats from these compute capabilities on.
_LEAST_CAPABILITY = {"fp8": (8, 9)}
#: Below this Triton compiles matrix products to scalar arithmetic.
_LEAST = (8, 0)


def missing(device: torch.device) -> str:
    """Why the engine cannot be had on `device`, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; torch for CUDA 12 and later brings it: desktop-next has it"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= _LEAST else f"Triton uses tensor cores from {_dotted(_LEAST)} on"


def refuses(precision: str, device: torch.device) -> str:
    """Why `precision` does not run on `device`, or nothing."""
    if precision not in FORMATS:
        return f"torch {torch.__version__} has no {precision}"
    least = _LEAST_CAPABILITY.get(precision, _LEAST)
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        return f"compute capability {_dotted(capability)}; Triton has it from {_dotted(least)} on"
    return ""


class OwnRunner(Runner):
    """A network by our kernels; batch sizes of the profile are made ready when they first come."""

    def __init__(self, network: OwnNetwork) -> None:
        self._network: Optional[OwnNetwork] = network

    def run(self, x: torch.Tensor) -> torch.Tensor:
        assert self._network is not None
        if x.shape[0] == 0:
            network = self._network.network
            return torch.zeros((0, *network.sizes[network.plan.shaped]), device=x.device)
        return self._network(x)

    def layers(self) -> Tuple[LayerFact, ...]:
        return self._network.layers() if self._network is not None else ()

    def observations(self) -> Optional[Tuple[Observation, ...]]:
        return self._network.observations() if self._network is not None else None

    def phases(self) -> Mapping[str, float]:
        return self._network.phases.seconds if self._network is not None else {}

    def searched(self) -> Mapping[str, int]:
        tunings = self._network.tunings if self._network is not None else []
        if not tunings:
            return {}
        left_out = sum(each.left_out for each in tunings)
        return {"problems": sum(each.problems for each in tunings), "left_out": left_out}

    def memory_bytes(self) -> Optional[int]:
        return self._network.nbytes() if self._network is not None else 0

    def close(self) -> None:
        super().close()
        if self._network is not None:
            # A replay that is still queued would read what is let go of here.
            torch.cuda.synchronize(self._network.network.device)
        self._network = None


def prepare(
    model: nn.Module, example: torch.Tensor, wanted: Preparation, options: Dict[str, Scalar]
) -> OwnRunner:
    """`model` ready on `wanted.device`. The cache keeps which kernel each problem was settled on,
    what running the network showed, and Triton's hash of itself; compiled kernels are in Triton's
    own cache."""
    from narrowgauge_lab.engines.own.gpu.kernels import HASHED_BY

    installation = Installation(HASHED_BY)
    profile = wanted.profile(example)
    form, image = FORMATS[wanted.precision], profile.image
    phases = Phases()

    def ready(settled: Settled, observed: Optional[Observed] = None) -> OwnNetwork:
        network = lowered(
            model, image, form, wanted.calibration, wanted.device, observed=observed, phases=phases
        )
        made = OwnNetwork(
            network, settled, phases=phases,
            tuned=bool(options["tune_s"]), search_s=float(options["search_s"]),
        )  # fmt: skip
        made(of_batch(example, max(1, profile.best)))
        return made

    if wanted.cache is None:
        return OwnRunner(ready({}))
    own: Optional[OwnNetwork] = None

    def build() -> bytes:
        nonlocal own
        own = ready({})
        return json.dumps(_document(own, installation), sort_keys=True).encode()

    with phases.of("key"):
        key = cache_key("narrowgauge", _versions(), model, example, wanted, options)
    kept = wanted.cache.fetch(key, build, _unusable)
    if own is None:
        found = _read(kept.payload)
        if found.compiler["stamp"] == installation.stamp():
            installation.know(found.compiler["hash"])
        own = ready(found.settled, found.observed)
    runner = OwnRunner(own)
    runner.from_cache, runner.cache_key, runner.cache_note = kept.from_cache, kept.key, kept.note
    return runner


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What a cache keeps of an engine. `compiler`: `stamp` and `hash` of Triton's installation."""

    settled: Settled
    observed: Observed
    compiler: Mapping[str, str]


def _document(own: OwnNetwork, installation: Installation) -> Dict[str, Any]:
    compiler = {"stamp": installation.stamp(), "hash": installation.hash()}
    observed = own.network.observed.document()
    return {"settled": own.settled, "observed": observed, "compiler": compiler}


def _read(payload: bytes) -> _Kept:
    """What `_document` gave; raises ValueError for anything else."""
    found = json.loads(payload)
    settled = found.get("settled") if isinstance(found, dict) else None
    if not isinstance(settled, dict) or not all(
        isinstance(each, dict) for each in settled.values()
    ):
        raise ValueError("no kernels")
    observed, compiler = Observed.of_document(found.get("observed")), found.get("compiler")
    if not isinstance(compiler, dict) or not all(
        isinstance(compiler.get(each), str) for each in ("stamp", "hash")
    ):
        raise ValueError("no compiler")
    return _Kept(settled, observed, compiler)


def _unusable(payload: bytes) -> str:
    """Why what was kept is no engine, or nothing."""
    try:
        _read(payload)
    except ValueError as error:  # no JSON among them
        return f"what was kept is no engine: {error}"
    return ""


def _versions() -> Dict[str, str]:
    from narrowgauge_lab.engines.own.gpu.kernels import VERSION

    return {"triton": VERSION, "cudnn-frontend": cudnn.missing() or cudnn.version()}


def _dotted(capability: Tuple[int, ...]) -> str:
    return ".".join(map(str, capability))
