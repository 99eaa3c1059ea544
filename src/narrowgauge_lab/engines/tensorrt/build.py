"""From a network and settings to a serialised engine."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.base import Profile
from narrowgauge_lab.engines.tensorrt.bundle import Built
from narrowgauge_lab.engines.tensorrt.calibrator import batches_of, make_calibrator
from narrowgauge_lab.engines.tensorrt.dla import Placement, place, read_layers
from narrowgauge_lab.engines.tensorrt.failures import failure
from narrowgauge_lab.engines.tensorrt.features import Features, data_types
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.network import Definition
from narrowgauge_lab.engines.tensorrt.settings import Settings
from narrowgauge_lab.errors import CalibrationError

__all__ = ["Kept", "build", "make_builder"]

#: Makes the network with a builder.
Define = Callable[[Any], Definition]

_NO_BUILDER = (
    "TensorRT needs a GPU that its version knows, and a driver as new as its CUDA: look at "
    "nvidia-smi and at NVIDIA's support matrix"
)


@dataclasses.dataclass
class Kept:
    """What outlives a build and helps the next: timings of kernels on this device, and the table of
    a calibration. `timings` is what was there before, then what to keep."""

    timings: Optional[bytes] = None
    table: Optional[bytes] = None
    new_table: Optional[bytes] = None

    def keep_table(self, table: bytes) -> None:
        self.new_table = table


def make_builder(library: Library) -> Any:
    """Raises EngineBuildError where TensorRT gives none, as it does without a GPU."""
    try:
        return library.trt.Builder(library.said)
    except TypeError as error:  # pybind11's word for a null pointer
        why = library.said.take() or str(error)
        raise failure("TensorRT gives no builder", why, _NO_BUILDER) from error


def build(
    library: Library,
    define: Define,
    settings: Settings,
    profile: Profile,
    images: Sequence[torch.Tensor],
    device: torch.device,
    kept: Kept,
) -> Built:
    """Build an engine; `define` makes the network with the builder it is given. `images`: float32
    on the CPU, for a calibrator; they go to `device` batch by batch.

    Raises OperatorNotTakenError, EngineBuildError, NotApplicableError for what this device has not,
    CalibrationError, OutOfMemoryError.
    """
    with warnings.catch_warnings():
        # From 10.1 on calibrators say at every turn that Q/DQ nodes supersede them. Which of the
        # two is used was decided by what there is, and by the option.
        warnings.filterwarnings("ignore", ".*TensorRT", DeprecationWarning)
        return _build(library, define, settings, profile, images, device, kept)


def _build(
    library: Library, define: Define, settings: Settings, profile: Profile,
    images: Sequence[torch.Tensor], device: torch.device, kept: Kept,
) -> Built:  # fmt: skip
    trt = library.trt
    builder = make_builder(library)
    _check_device(builder, settings)
    definition = define(builder)
    network = definition.network
    if settings.io is not None:
        _set_input_type(trt, network, settings.io)
    config = builder.create_builder_config()
    _configure(trt, library.features, config, settings)
    _add_profile(builder, config, network, profile)
    calibrator = _calibrate(trt, builder, config, network, settings, profile, images, device, kept)
    notes, placement = _place(trt, config, network, settings)
    timings = _timings(config, settings, kept, notes)
    plan = builder.build_serialized_network(network, config)
    if calibrator is not None and calibrator.error is not None:
        raise calibrator.error
    if plan is None:
        raise failure(
            "TensorRT could not build the engine",
            library.said.take(),
            "read what it says; a larger workspace_mb allows kernels that need more scratch memory",
        )
    _check_calibrated(calibrator, kept)
    library.said.take()  # what it said was no obstacle
    if timings is not None:
        kept.timings = bytes(timings.serialize())
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    return Built(
        plan=bytes(plan),
        network=tuple((str(e.name), str(e.type).rpartition(".")[2]) for e in layers),
        on_dla=placement.on_dla,
        fallback=placement.fallback,
        loadables=placement.loadables,
        notes=tuple(notes),
    )


def _check_device(builder: Any, settings: Settings) -> None:
    """NotApplicableError where the device has no fast kernels of this precision, or no such DLA."""
    for precision, name in (("fp16", "platform_has_fast_fp16"), ("int8", "platform_has_fast_int8")):
        if settings.precision == precision and not getattr(builder, name, True):
            raise NotApplicableError(
                f"TensorRT has no {precision} on this device", why=f"no {name}"
            )
    if settings.dla >= builder.num_DLA_cores:
        raise NotApplicableError(
            f"there is no DLA core {settings.dla} here",
            why=f"TensorRT finds {builder.num_DLA_cores}",
            next_step="leave out the option dla",
        )


def _set_input_type(trt: Any, network: Any, dtype: torch.dtype) -> None:
    """A weakly typed network computes in what it likes; its inputs are what they are said to be."""
    types = {each: name for name, each in data_types(trt).items()}
    for source in _inputs(network):
        if source.dtype != types[dtype]:
            source.dtype = types[dtype]


def _inputs(network: Any) -> List[Any]:
    return [network.get_input(number) for number in range(network.num_inputs)]


def _configure(trt: Any, features: Features, config: Any, settings: Settings) -> None:
    size = settings.workspace_mb << 20
    if features.memory_pools:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, size)
    else:
        config.max_workspace_size = size
    flags = trt.BuilderFlag
    config.clear_flag(flags.TF32)  # which is set unless one asks
    for name in settings.flags:
        config.set_flag(getattr(flags, name))
    if hasattr(trt.ProfilingVerbosity, "DETAILED"):
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if settings.aux_streams >= 0:
        config.max_aux_streams = settings.aux_streams
    if settings.level >= 0:
        config.builder_optimization_level = settings.level
    if settings.dla >= 0:
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = settings.dla


def _add_profile(builder: Any, config: Any, network: Any, profile: Profile) -> None:
    # An empty batch is answered without the engine, so none is built for it.
    sizes = [max(1, each) for each in (profile.least, profile.best, profile.most)]
    config.add_optimization_profile(_profile(builder, network, profile, sizes))


def _profile(builder: Any, network: Any, profile: Profile, sizes: Sequence[int]) -> Any:
    """The first input's images are the profile's; others have their own, and as many of them."""
    made = builder.create_optimization_profile()
    for number, source in enumerate(_inputs(network)):
        image = tuple(source.shape)[1:] if number else profile.image
        least, best, most = ((size, *image) for size in sizes)
        made.set_shape(source.name, least, best, most)
    return made


def _calibrate(
    trt: Any, builder: Any, config: Any, network: Any, settings: Settings, profile: Profile,
    images: Sequence[torch.Tensor], device: torch.device, kept: Kept,
) -> Any:  # fmt: skip
    """The calibrator that the config refers to, and does not own; None where there is none."""
    if not settings.calibrator:
        return None
    batches = batches_of(images, max(1, profile.best))
    calibrator = make_calibrator(
        trt, settings.calibrator, batches, device, kept.table, kept.keep_table
    )
    config.int8_calibrator = calibrator
    size = calibrator.get_batch_size()
    shapes = _profile(builder, network, profile, [size, size, size])
    if not config.set_calibration_profile(shapes):
        raise CalibrationError(f"TensorRT takes no calibration batches of {size} images")
    return calibrator


def _check_calibrated(calibrator: Any, kept: Kept) -> None:
    """An int8 engine that was built without looking at an image is none."""
    if calibrator is not None and kept.table is None and calibrator.given == 0:
        raise CalibrationError(
            "TensorRT built an int8 engine without looking at the calibration images",
            next_step="calibrate by Q/DQ nodes: the option int8=qdq",
        )


def _place(trt: Any, config: Any, network: Any, settings: Settings) -> Tuple[List[str], Placement]:
    """Send what a DLA cannot run, or has no room for, to the GPU; what to say about it."""
    if settings.dla < 0:
        return [], Placement((), (), 0)
    layers = read_layers(network, config.can_run_on_DLA)
    placement = place(layers)
    on_dla = set(placement.on_dla)
    for index, layer in enumerate(layers):
        if layer.name not in on_dla:
            config.set_device_type(network.get_layer(index), trt.DeviceType.GPU)
    notes = [
        f"DLA core {settings.dla} runs {len(placement.on_dla)} layers in {placement.loadables} "
        f"loadables, the GPU {len(placement.fallback)}"
    ]
    reasons = dict.fromkeys(reason for _, reason in placement.fallback)
    for reason in reasons:
        names = [name for name, why in placement.fallback if why == reason]
        notes.append(f"on the GPU because {reason}: {', '.join(names)}")
    return notes, placement


def _timings(config: Any, settings: Settings, kept: Kept, notes: List[str]) -> Any:
    """The timing cache that the build reads and adds to; None where none is used."""
    if not settings.timing_cache:
        return None
    cache = config.create_timing_cache(kept.timings or b"")
    if cache is None or not config.set_timing_cache(cache, False):
        notes.append("not used: the timing cache is of another TensorRT or device")
        kept.timings = None
        cache = config.create_timing_cache(b"")
        if cache is None or not config.set_timing_cache(cache, False):
            notes.append("this TensorRT keeps no timings")
            return None
    return config.get_timing_cache()
