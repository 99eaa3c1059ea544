"""TensorRT as an engine like the others: networks by way of ONNX, convolutions defined directly."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines import onnx_export
from narrowgauge_lab.engines.base import Engine, Preparation
from narrowgauge_lab.engines.keys import CacheKey, cache_key
from narrowgauge_lab.engines.tensorrt import library as libraries
from narrowgauge_lab.engines.tensorrt.build import make_builder
from narrowgauge_lab.engines.tensorrt.calibrator import check_images
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.network import (
    ConvolutionSpec,
    Definition,
    define_convolution,
    parse,
)
from narrowgauge_lab.engines.tensorrt.preparing import Job, calibration_table, prepared
from narrowgauge_lab.engines.tensorrt.refit import Trained
from narrowgauge_lab.engines.tensorrt.runner import TensorRTRunner
from narrowgauge_lab.engines.tensorrt.settings import OPTIONS, Settings, refused, settings_for
from narrowgauge_lab.engines.tensorrt.tables import scales_of_layers
from narrowgauge_lab.quant.calibration import QuantConfig
from narrowgauge_lab.quant.layers import layers_of
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["TensorRTEngine"]

#: Makes a network with a library, a builder, and whether types are strong.
Define = Callable[[Library, Any, bool], Definition]


class TensorRTEngine(Engine):
    """`module`: a TensorRT other than the installed one, called when it is needed."""

    name = "tensorrt"
    options = OPTIONS

    def __init__(self, module: Optional[Callable[[], Any]] = None) -> None:
        self._module = module
        self._library: Optional[Library] = None

    def missing(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"TensorRT runs on NVIDIA GPUs, not on {device.type}"
        return "" if self._module is not None else libraries.why_missing()

    def refuses(self, precision: str, _device: torch.device) -> str:
        return refused(self._open().features, precision)

    def _open(self) -> Library:
        # Once: TensorRT goes on using the first logger that a process gives it.
        if self._library is None:
            self._library = libraries.opened(None if self._module is None else self._module())
        return self._library

    @property
    def version(self) -> str:
        """Of the library. Raises EngineMissingError."""
        return self._open().features.version

    def prepare(
        self, model: nn.Module, example: torch.Tensor, wanted: Preparation
    ) -> TensorRTRunner:
        return prepared(self._job(model, example, wanted))

    def calibration_scales(
        self, model: nn.Module, example: torch.Tensor, wanted: Preparation
    ) -> Dict[str, float]:
        """Layer -> the scale that a calibrator of TensorRT's finds for the layer's input; a layer
        whose input has none of its own is left out. `wanted` is of int8.

        Raises what `prepare` raises, NotApplicableError where int8 goes by Q/DQ nodes.
        """
        job = self._job(model, example, wanted)
        if not job.settings.calibrator:
            raise NotApplicableError(
                f"TensorRT {job.library.features.version} finds no scales here",
                why="by Q/DQ nodes it takes those that it is given",
                next_step="int8=entropy or int8=minmax where there are calibrators",
            )
        file = _onnx(model, example, wanted, job.settings)
        return scales_of_layers(calibration_table(job), file, layers_of(fold_batch_norm(model)))

    def _job(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Job:
        library = self._open()
        options = self.chosen(wanted)
        profile = wanted.profile(example)
        if wanted.precision == "int8":
            check_images(wanted.calibration, profile)
        settings = settings_for(library.features, wanted.precision, options, profile)
        key = _key(library, model, example, wanted, options)
        weights = _weights_of_model(model, settings) if options["refit"] else None

        def define(builder: Any) -> Any:
            return parse(library, builder, _onnx(model, example, wanted, settings), settings.strong)

        return Job(library, define, settings, profile, wanted, key, weights)

    def prepare_convolution(
        self, spec: ConvolutionSpec, weights: Mapping[str, torch.Tensor], wanted: Preparation
    ) -> TensorRTRunner:
        """One convolution whose `weights` ("kernel", and "bias" if the spec has one) can be
        refitted under these names; its output is [B, outputs, height, width].

        A cached engine is used whatever its weights: it gets the ones given here. Raises what
        `prepare` raises, and BadValueError for weights of other shapes or for no `batches`.
        """
        library = self._open()
        options = {**self.chosen(wanted), "refit": True}
        if wanted.precision == "int8":
            raise NotApplicableError(
                "a convolution alone has no int8",
                next_step="prepare a model of one convolution, with calibration images",
            )
        weights = _of_convolution(spec, weights, wanted)
        dtype = weights["kernel"].dtype
        if not wanted.batches[2]:
            raise BadValueError("a convolution's batches are open", next_step="give `batches`")
        example = torch.empty(wanted.batches[1], spec.inputs, *spec.image, dtype=dtype)
        profile = wanted.profile(example)
        settings = settings_for(library.features, wanted.precision, options, profile)
        key = _key(library, _Sizes(repr(spec)), example, wanted, options)

        def define(builder: Any) -> Any:
            return define_convolution(library, builder, spec, weights, settings.strong)

        trained = Trained({name: each.clone() for name, each in weights.items()}, dtype)
        runner = prepared(Job(library, define, settings, profile, wanted, key, trained))
        if runner.from_cache:
            runner.refit(weights)
        return runner

    def prepare_network(
        self, sizes: str, define: Define, example: torch.Tensor, wanted: Preparation
    ) -> TensorRTRunner:
        """A network that `define` makes, given the library, a builder, and whether types are
        strong; its first input, by name, is like `example`. `sizes` says all that it depends on.

        Raises what `prepare` raises.
        """
        library = self._open()
        if wanted.precision == "int8":
            raise NotApplicableError("a network defined directly has no int8")
        options = self.chosen(wanted)
        profile = wanted.profile(example)
        settings = settings_for(library.features, wanted.precision, options, profile)
        key = _key(library, _Sizes(sizes), example, wanted, options)

        def made(builder: Any) -> Definition:
            return define(library, builder, settings.strong)

        return prepared(Job(library, made, settings, profile, wanted, key))

    def dla_cores(self, device: torch.device) -> int:
        """How many DLA cores the device has. Raises EngineBuildError without a usable device."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return int(make_builder(self._open()).num_DLA_cores)


def _key(
    library: Library,
    model: nn.Module,
    example: torch.Tensor,
    wanted: Preparation,
    options: Mapping[str, Scalar],
) -> Optional[CacheKey]:
    """None without a cache: hashing all weights takes its time."""
    if wanted.cache is None:
        return None
    versions = {"tensorrt": library.features.version}
    return cache_key("tensorrt", versions, model, example, wanted, options)


class _Sizes(nn.Module):
    """What an engine of a network defined directly is kept under: its sizes, and no weights."""

    def __init__(self, sizes: str) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing, which fx can follow: else the class's source would be looked up each time."""
        return x


def _of_convolution(
    spec: ConvolutionSpec, weights: Mapping[str, torch.Tensor], wanted: Preparation
) -> Mapping[str, torch.Tensor]:
    """The weights in the precision's dtype, on the CPU."""
    shapes = {"kernel": spec.weight_shape(), **({"bias": (spec.outputs,)} if spec.bias else {})}
    given = {name: tuple(each.shape) for name, each in weights.items()}
    if given != shapes:
        raise BadValueError(f"the convolution's weights are {given}", next_step=f"give {shapes}")
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = dtypes.get(wanted.precision, torch.float32)
    return {name: each.detach().to("cpu", dtype).contiguous() for name, each in weights.items()}


def _weights_of_model(model: nn.Module, settings: Settings) -> Trained:
    """Copies of the weights as they stand in the ONNX file: the model may be trained on."""
    if settings.file == "int8":
        raise NotApplicableError(
            "a network with Q/DQ nodes cannot be refitted",
            why="its weights are integers, whose scales would have to change with them",
            next_step="int8=entropy where there are calibrators, or build it again",
        )
    state = fold_batch_norm(model).state_dict()
    dtype = torch.float16 if settings.file == "fp16" else torch.float32
    return Trained({name: each.clone() for name, each in state.items()}, dtype)


def _onnx(
    model: nn.Module, example: torch.Tensor, wanted: Preparation, settings: Settings
) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        if settings.file == "int8":
            # Symmetric, and of inputs only: TensorRT's own rules for Q/DQ.
            config = QuantConfig(activation_symmetric=True, outputs=False)
            style = onnx_export.TENSORRT_INT8
            onnx_export.export_int8(model, example, wanted.calibration, path, config, style)
        else:
            onnx_export.export(model, example, path, settings.file)
        return path.read_bytes()
