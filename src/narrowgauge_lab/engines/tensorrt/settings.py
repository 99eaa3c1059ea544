"""How an engine is to be built: options, precision and what this TensorRT can do, made into one
value. Nothing here touches TensorRT."""

from __future__ import annotations

import dataclasses
from typing import Mapping, Optional, Tuple, cast

import torch

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import DTYPES, Profile
from narrowgauge_lab.engines.tensorrt.features import Features, precisions

__all__ = ["OPTIONS", "Settings", "refused", "settings_for"]

#: The engine's options and their defaults.
#: workspace_mb: scratch memory that a kernel may ask for. typing: weak (flags allow a precision),
#: strong (the network's own types), or auto: weak where there is such a thing. int8: by calibrator
#: (entropy, minmax) or qdq; auto: entropy where there are calibrators. mixed: what is not int8 may
#: be fp16 rather than fp32. refit: weights can be replaced. dla: -1 for the GPU, else the core.
#: aux_streams: at most so many streams beside the caller's, -1 for TensorRT's choice. level: how
#: long to look for kernels, 0 to 5, -1 for TensorRT's default. timing_cache: use and keep one.
OPTIONS: Mapping[str, Scalar] = {
    "workspace_mb": 1024, "typing": "auto", "int8": "auto", "mixed": False, "refit": False,
    "dla": -1, "aux_streams": -1, "level": -1, "timing_cache": True,
}  # fmt: skip

_CHOICES = {"typing": ("auto", "weak", "strong"), "int8": ("auto", "entropy", "minmax", "qdq")}
_LEAST = {"workspace_mb": 1, "dla": -1, "aux_streams": -1, "level": -1}


@dataclasses.dataclass(frozen=True)
class Settings:
    """`file`: which ONNX file is parsed: fp32, fp16, or int8 (with Q/DQ nodes). `flags`: builder
    flags to set, by name. `io`: the type that the network's input is given, None where the file's
    own stays. `calibrator`: entropy, minmax, or none."""

    precision: str
    file: str
    strong: bool
    flags: Tuple[str, ...]
    io: Optional[torch.dtype]
    calibrator: str
    workspace_mb: int
    dla: int
    aux_streams: int
    level: int
    timing_cache: bool


def refused(features: Features, precision: str) -> str:
    """Why this TensorRT has no such precision, or nothing."""
    if precision in precisions(features):
        return ""
    known = ", ".join(sorted(precisions(features)))
    if precision == "fp8":
        return f"it reads fp8 from float8 Q/DQ nodes, which are not written here; it has {known}"
    return f"TensorRT {features.version} has {known} for the networks that are written here"


def settings_for(
    features: Features, precision: str, options: Mapping[str, Scalar], profile: Profile
) -> Settings:
    """All that decides how to build. Raises BadValueError for options that are none, and
    NotApplicableError for those that this TensorRT, or a DLA, has not."""
    _check(options)
    strong = _typing(features, precision, str(options["typing"]))
    method = _method(features, precision, str(options["int8"]), strong)
    dla = cast(int, options["dla"])
    if dla >= 0:
        _check_dla(precision, profile)
    calibrator = method if method in ("entropy", "minmax") else ""
    return Settings(
        precision=precision,
        file=_file(precision, strong, method),
        strong=strong,
        flags=_flags(features, precision, options, strong),
        io=None if strong else DTYPES[precision],
        calibrator=calibrator,
        workspace_mb=cast(int, options["workspace_mb"]),
        dla=dla,
        aux_streams=_supported(features.aux_streams, features, options, "aux_streams"),
        level=_supported(features.optimization_level, features, options, "level"),
        timing_cache=bool(options["timing_cache"]),
    )


def _check(options: Mapping[str, Scalar]) -> None:
    for name, known in _CHOICES.items():
        if options[name] not in known:
            raise BadValueError(f"{name}={options[name]}", next_step=f"one of {', '.join(known)}")
    for name, least in _LEAST.items():
        if cast(int, options[name]) < least:
            raise BadValueError(f"{name}={options[name]}", next_step=f"at least {least}")


def _typing(features: Features, precision: str, wanted: str) -> bool:
    """Whether the network is strongly typed."""
    weak = bool(features.weak) and (precision in features.weak or precision in ("fp32", "tf32"))
    if wanted == "auto":
        return not weak
    if wanted == "weak" and not weak:
        raise NotApplicableError(
            f"TensorRT {features.version} has no weakly typed networks in {precision}",
            next_step="typing=strong, or auto",
        )
    if wanted == "strong" and (not features.strong or precision == "bf16"):
        why = "no ONNX files are written in bf16" if features.strong else "10.0 brought them"
        raise NotApplicableError(
            f"TensorRT {features.version} has no strongly typed networks in {precision}", why=why
        )
    return wanted == "strong"


def _method(features: Features, precision: str, wanted: str, strong: bool) -> str:
    """How int8 gets its scales; nothing for other precisions."""
    if precision != "int8":
        if wanted != "auto":
            raise BadValueError(f"int8={wanted} says nothing about {precision}")
        return ""
    calibrated = features.calibrators and not strong
    if wanted == "auto":
        return "entropy" if calibrated else "qdq"
    if wanted != "qdq" and not calibrated:
        why = "a strongly typed network has the scales in it" if strong else "11.0 removed them"
        raise NotApplicableError(
            f"TensorRT {features.version} has no calibrators for this",
            why=why,
            next_step="int8=qdq, or auto",
        )
    return wanted


def _file(precision: str, strong: bool, method: str) -> str:
    if method == "qdq":
        return "int8"
    # Of a strongly typed network the file's types decide; there is no file in bf16.
    return precision if strong and precision in ("fp16", "bf16") else "fp32"


def _flags(
    features: Features, precision: str, options: Mapping[str, Scalar], strong: bool
) -> Tuple[str, ...]:
    flags = []
    if not strong and precision in features.weak:
        flags.append(precision.upper())
    mixed = bool(options["mixed"])
    if mixed and (precision != "int8" or strong):
        raise BadValueError(
            "mixed=True", why="it lets a weakly typed int8 network run what it must in fp16"
        )
    on_dla = cast(int, options["dla"]) >= 0
    # A DLA has no float32: layers that it cannot run in int8 it runs in fp16, if it may.
    if precision == "int8" and not strong and (mixed or on_dla):
        flags.append("FP16")
    if precision == "tf32":
        flags.append("TF32")
    if options["refit"]:
        flags.append("REFIT")
    if on_dla:
        flags.append("GPU_FALLBACK")
    return tuple(flags)


def _check_dla(precision: str, profile: Profile) -> None:
    if precision not in ("fp16", "int8"):
        raise NotApplicableError(f"a DLA has fp16 and int8, not {precision}")
    if profile.least != profile.most:
        raise NotApplicableError(
            f"a DLA takes one batch size, not {profile.least} to {profile.most}",
            next_step="prepare a runner for each batch size",
        )


def _supported(there: bool, features: Features, options: Mapping[str, Scalar], name: str) -> int:
    value = cast(int, options[name])
    if value >= 0 and not there:
        raise NotApplicableError(
            f"TensorRT {features.version} has no option {name}", next_step=f"leave {name} out"
        )
    return value
