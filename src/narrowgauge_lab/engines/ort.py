"""ONNX Runtime: on the CPU, and on a GPU where the installed build has providers for one."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import Engine, LayerFact, Preparation, Runner
from narrowgauge_lab.engines.errors import EngineBuildError
from narrowgauge_lab.engines.native import of_batch
from narrowgauge_lab.engines.onnx_export import cached_export, export, node_layers
from narrowgauge_lab.quant.ort import onnxruntime_library

__all__ = ["ENGINE", "OrtEngine", "OrtRunner", "layer_facts"]

_CPU = "CPUExecutionProvider"
_GPU = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_WORDS = {
    "float": "fp32", "float16": "fp16", "bfloat16": "bf16", "double": "fp64",
    "int8": "int8", "uint8": "int8",
}  # fmt: skip
#: What graph optimisations put around the name of a node or of its output.
_ADDED = re.compile(r"^InsertedPrecisionFreeCast_|_(?:nchwc|token_\d+|kernel_time)(?=$|_)")


class OrtEngine(Engine):
    """Options: `threads` inside an operator (0: as many as torch uses), `spinning`: whether those
    spin while they wait for work, as they do by default; `provider` on a GPU, cuda or tensorrt.

    All graph optimisations are on, those for this processor's layouts included.
    """

    name = "onnxruntime"
    options: ClassVar[Mapping[str, Scalar]] = {"threads": 0, "spinning": True, "provider": "cuda"}

    def missing(self, device: torch.device) -> str:
        for library in ("onnxruntime", "onnx"):
            reason = _not_importable(library)
            if reason:
                return reason
        there = onnxruntime_library().get_available_providers()
        if device.type == "cuda" and _GPU["cuda"] not in there:
            return f"this build of ONNX Runtime has no CUDA provider, only {', '.join(there)}"
        return ""

    def refuses(self, precision: str, device: torch.device) -> str:
        if device.type == "cuda":
            if precision in ("fp32", "tf32", "fp16"):
                return ""
            return f"its CUDA provider has no {precision} convolutions"
        if precision in ("fp32", "int8"):
            return ""
        if precision == "fp16":
            ran = _float16_runs_as()
            return "" if ran == "fp16" else f"on this CPU it runs float16 networks in {ran}"
        return f"its CPU provider has no {precision} convolutions"

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        options = self.chosen(wanted)
        ort = onnxruntime_library()
        versions = {"onnxruntime": str(ort.__version__)}
        file = cached_export(self.name, versions, model, example, wanted, options)
        providers = _providers(ort, options, wanted)
        runner = OrtRunner(file.payload, providers, options, example, wanted)
        runner.from_cache, runner.cache_key, runner.cache_note = (
            file.from_cache, file.key, file.note,
        )  # fmt: skip
        return runner


class OrtRunner(Runner):
    """A session on one file. Its first run is profiled: that tells what each layer ran as."""

    def __init__(
        self,
        file: bytes,
        providers: Sequence[Any],
        options: Mapping[str, Scalar],
        example: torch.Tensor,
        wanted: Preparation,
    ) -> None:
        self.engine = OrtEngine.name
        self.profile = wanted.profile(example)
        first = of_batch(example, self.profile.best)
        with tempfile.TemporaryDirectory() as folder:
            self._session: Any = _session(file, providers, options, Path(folder))
            self._classes = 0
            self._classes = int(self.run(first).shape[-1])
            events = json.loads(Path(self._session.end_profiling()).read_text(encoding="utf-8"))
        self._facts = layer_facts(events, node_layers(file))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().contiguous()
        if x.device.type == "cuda":
            return self._run_on_cuda(x)
        (result,) = self._session.run(None, {"input": x.numpy()})
        return torch.from_numpy(result)

    # unverified: ONNX Runtime's GPU on GPUs | no build had them | `nox -s gpu` with onnxruntime-gpu
    def _run_on_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs and outputs stay on the device, by address."""
        import numpy as np

        element = {torch.float32: np.float32, torch.float16: np.float16}[x.dtype]
        binding, index = self._session.io_binding(), x.device.index or 0
        # Its own stream is another than torch's: what is queued for `x` has to be done.
        torch.cuda.current_stream(x.device).synchronize()
        binding.bind_input("input", "cuda", index, element, tuple(x.shape), x.data_ptr())
        if not self._classes:
            binding.bind_output("output", "cpu")
            self._session.run_with_iobinding(binding)
            return torch.from_numpy(binding.copy_outputs_to_cpu()[0])
        result = torch.empty(x.shape[0], self._classes, dtype=x.dtype, device=x.device)
        binding.bind_output(
            "output", "cuda", index, element, tuple(result.shape), result.data_ptr()
        )
        self._session.run_with_iobinding(binding)
        return result

    def layers(self) -> Tuple[LayerFact, ...]:
        return self._facts

    def close(self) -> None:
        super().close()
        self._session = None


def layer_facts(
    events: Sequence[Mapping[str, Any]], layers: Mapping[str, str]
) -> Tuple[LayerFact, ...]:
    """What a profile (the JSON of ONNX Runtime's own) says of the nodes that ran, in order.

    `layers`: of `node_layers`. A node that is no layer's keeps its own name; the precision is that
    of its first input.
    """
    return tuple(_facts(events, layers))


def _facts(events: Sequence[Mapping[str, Any]], layers: Mapping[str, str]) -> Iterator[LayerFact]:
    for event in events:
        if event.get("cat") != "Node" or not str(event["name"]).endswith("_kernel_time"):
            continue
        said = event["args"]
        name = str(event["name"])
        while _ADDED.search(name):
            name = _ADDED.sub("", name)
        kinds = [kind for each in said.get("input_type_shape", ()) for kind in each]
        precision = _WORDS.get(kinds[0], kinds[0]) if kinds else ""
        yield LayerFact(layers.get(name, name), said["op_name"], said["provider"], "", precision)


def _session(
    file: bytes, providers: Sequence[Any], options: Mapping[str, Scalar], folder: Path
) -> Any:
    """A session whose next runs are profiled into a file below `folder`."""
    ort = onnxruntime_library()
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    settings.intra_op_num_threads = int(options["threads"]) or torch.get_num_threads()
    settings.add_session_config_entry(
        "session.intra_op.allow_spinning", "1" if options["spinning"] else "0"
    )
    settings.log_severity_level = 3
    settings.enable_profiling = True
    settings.profile_file_prefix = str(folder / "profile")
    try:
        session = ort.InferenceSession(file, settings, providers=list(providers))
    # Its errors have classes of a module that it does not promise; all of them are exceptions.
    except Exception as error:
        raise EngineBuildError(
            "ONNX Runtime could not load the network that was exported",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
        ) from error
    first = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if first not in session.get_providers():  # it warns and goes on without one that fails
        raise EngineBuildError(
            f"ONNX Runtime could not start its {first}",
            why=f"it has only {', '.join(session.get_providers())} for this network",
        )
    return session


def _providers(ort: Any, options: Mapping[str, Scalar], wanted: Preparation) -> List[Any]:
    if wanted.device.type != "cuda":
        return [_CPU]
    word = str(options["provider"])
    if word not in _GPU:
        raise BadValueError(f"provider '{word}' is none", next_step=", ".join(_GPU))
    index = wanted.device.index
    device = {"device_id": torch.cuda.current_device() if index is None else index}
    cuda = (_GPU["cuda"], {**device, "use_tf32": str(int(wanted.precision == "tf32"))})
    if word == "cuda":
        return [cuda, _CPU]
    if _GPU[word] not in ort.get_available_providers():
        raise NotApplicableError(
            "this build of ONNX Runtime has no TensorRT provider", next_step="provider=cuda"
        )
    half = {"trt_fp16_enable": str(wanted.precision == "fp16")}
    return [(_GPU[word], {**device, **half}), cuda, _CPU]


@functools.lru_cache(maxsize=None)
def _float16_runs_as() -> str:
    """The precision in which the CPU provider runs a convolution of a float16 file: where it has
    no kernels for float16 it puts casts around those for float32, and says nothing."""
    layer = nn.Conv2d(1, 1, 1).eval()
    example = torch.zeros(1, 1, 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        export(layer, example, Path(folder) / "one.onnx", "fp16")
        file = (Path(folder) / "one.onnx").read_bytes()
    wanted = Preparation("fp16", torch.device("cpu"))
    options: Dict[str, Scalar] = {**OrtEngine.options, "threads": 1}
    runner = OrtRunner(file, [_CPU], options, example.half(), wanted)
    return next(each.precision for each in runner.layers() if each.is_product)


def _not_importable(library: str) -> str:
    import importlib.util
    import sys

    absent = library in sys.modules and sys.modules[library] is None
    if absent or importlib.util.find_spec(library) is None:
        return f"{library} is not installed: pip install {library}"
    return ""


ENGINE = OrtEngine()
