"""OpenVINO on the CPU, from ONNX. The one module that imports openvino."""

from __future__ import annotations

from typing import Any, ClassVar, Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import Engine, LayerFact, Preparation, Runner
from narrowgauge_lab.engines.errors import EngineBuildError
from narrowgauge_lab.engines.native import of_batch
from narrowgauge_lab.engines.onnx_export import cached_export, node_layers
from narrowgauge_lab.quant.qdq import onnx_library

__all__ = ["ENGINE", "OpenVinoEngine", "OpenVinoRunner"]

_TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32"}
_WORDS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "i8": "int8", "u8": "int8"}
_HINTS = ("latency", "throughput")
#: Nodes of the executed graph that compute nothing.
_IDLE = ("Const", "Input", "Output")


class OpenVinoEngine(Engine):
    """Options: `threads` (0: as many as torch uses), `hint`: latency (one stream) or throughput.

    Asked for f16 or bf16 on a processor that has neither, OpenVINO runs float32 and says nothing;
    asked for nothing on one that has bf16, it runs that. So it is told, and then looked at.
    """

    name = "openvino"
    options: ClassVar[Mapping[str, Scalar]] = {"threads": 0, "hint": "latency"}

    def missing(self, device: torch.device) -> str:
        if device.type != "cpu":
            return "OpenVINO runs on CPUs here, and on no GPU of NVIDIA's"
        for library in (_openvino, onnx_library):
            try:
                library()
            except NotApplicableError as error:
                return f"{error.why}: {error.next_step}"
        return ""

    def refuses(self, precision: str, device: torch.device) -> str:  # noqa: ARG002
        if precision in ("fp32", "int8"):
            return ""
        there = _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if precision in ("fp16", "bf16") and precision.upper() in there:
            return ""
        return f"on this processor it runs {', '.join(there)}, and would run {precision} in float32"

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        options = self.chosen(wanted)
        if options["hint"] not in _HINTS:
            raise BadValueError(f"hint '{options['hint']}' is none", next_step=", ".join(_HINTS))
        versions = {"openvino": str(_openvino().__version__)}
        # A float16 file for fp16, since inputs come in it; what is executed is up to the hint.
        file = cached_export(self.name, versions, model, example, wanted, options)
        runner = OpenVinoRunner(file.payload, options, example, wanted)
        runner.from_cache, runner.cache_key, runner.cache_note = (
            file.from_cache, file.key, file.note,
        )  # fmt: skip
        return runner


class OpenVinoRunner(Runner):
    """A compiled network per batch size: with the batch left open it computes shapes anew at every
    call. That of the best batch is made at once."""

    def __init__(
        self,
        file: bytes,
        options: Mapping[str, Scalar],
        example: torch.Tensor,
        wanted: Preparation,
    ) -> None:
        self.engine = OpenVinoEngine.name
        self.profile = wanted.profile(example)
        self._file: Optional[bytes] = file
        self._core = _openvino().Core()
        self._config = {
            "INFERENCE_PRECISION_HINT": _TYPES[wanted.precision],
            "INFERENCE_NUM_THREADS": int(options["threads"]) or torch.get_num_threads(),
            "PERFORMANCE_HINT": str(options["hint"]).upper(),
        }
        self._dtype = torch.float16 if wanted.precision == "fp16" else torch.float32
        self._requests: Dict[int, Any] = {}
        first = of_batch(example, self.profile.best)
        self._classes = int(self.run(first).shape[-1])
        self._facts = _facts(self._requests[first.shape[0]], node_layers(file))
        self._require(wanted.precision)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        if count == 0:  # OpenVINO has no batch of none: its pooling refuses one
            return torch.empty(0, self._classes)
        if count not in self._requests:
            self._requests[count] = self._compiled(x).create_infer_request()
        given = x.detach().to(self._dtype).contiguous().numpy()
        result = self._requests[count].infer([given], share_inputs=True)
        return torch.from_numpy(result[0])

    def _compiled(self, x: torch.Tensor) -> Any:
        try:
            network = self._core.read_model(self._file)
            network.reshape(list(x.shape))
            return self._core.compile_model(network, "CPU", self._config)
        except RuntimeError as error:
            raise EngineBuildError(
                "OpenVINO could not compile the network that was exported",
                why=str(error).strip().splitlines()[-1] if str(error).strip() else "",
            ) from error

    def _require(self, precision: str) -> None:
        """At least one product ran as asked; each single one is in `layers`."""
        ran = {fact.precision for fact in self._facts if fact.is_product}
        if precision not in ran:
            raise NotApplicableError(
                f"OpenVINO ran the network in {', '.join(sorted(ran))}, not in {precision}",
                why="it falls back where this processor has no kernels, and does not say so",
            )

    def layers(self) -> Tuple[LayerFact, ...]:
        return self._facts

    def close(self) -> None:
        super().close()
        self._requests.clear()
        self._file = None


def _facts(request: Any, layers: Mapping[str, str]) -> Tuple[LayerFact, ...]:
    """The graph as it is executed, in order."""
    facts = []
    for node in request.get_compiled_model().get_runtime_model().get_ordered_ops():
        said = {key: _value(value) for key, value in node.get_rt_info().items()}
        kind = said.get("layerType", "")
        if kind in _IDLE:
            continue
        # A convolution's bias is an addition of its own at first, and takes its name.
        names = said.get("originalLayersNames", "").replace("/WithoutBiases", "")
        merged = [name for name in names.split(",") if name]
        known = [layers[name] for name in merged if name in layers]
        layer = (known or merged or [node.get_friendly_name()])[0]
        word = said.get("runtimePrecision", "")
        kernel = said.get("primitiveType", "")
        facts.append(LayerFact(layer, kind, "openvino", kernel, _WORDS.get(word, word)))
    return tuple(facts)


def _value(info: Any) -> str:
    """Of OpenVINO's own container for anything, or already a Python value."""
    return str(getattr(info, "value", info))


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise NotApplicableError(
            "this Python has no OpenVINO",
            why="openvino is not installed",
            next_step="pip install openvino",
        ) from error
    return openvino


ENGINE = OpenVinoEngine()
