"""What every engine is asked for and what it gives: `Preparation`, `Engine`, `Runner`."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, ClassVar, Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.errors import EngineClosedError, ShapeOutsideProfileError
from narrowgauge_lab.measure.probe import Observation

if TYPE_CHECKING:
    from narrowgauge_lab.engines.cache import EngineCache

__all__ = [
    "DTYPES", "PRECISIONS", "Engine", "LayerFact", "Preparation", "Profile", "Runner",
]  # fmt: skip

#: fp32 is strict: products and convolutions in IEEE float32, TF32 off.
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")

#: The dtype in which inputs come, by precision: images for 8 bits are float32.
DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "int8": torch.float32, "fp8": torch.float32,
}  # fmt: skip

#: Parts of what engines call convolutions and matrix products.
_PRODUCTS = ("conv", "dot", "fullyconnected", "gemm", "linear", "matmul", "matrixmultiply")


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What a runner has to be.

    `calibration`: real images, float32 [B, C, H, W] on the CPU, for int8 and fp8. `batches`: least,
    best and most images per call; zeros: the example's alone. `cache`: None builds always.
    `options`: the engine's own; one that it does not have is an error that names those it has.
    """

    precision: str
    device: torch.device
    calibration: Tuple[torch.Tensor, ...] = ()
    batches: Tuple[int, int, int] = (0, 0, 0)
    cache: Optional[EngineCache] = None
    options: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)

    def profile(self, example: torch.Tensor) -> Profile:
        """The shapes a runner takes. Raises BadValueError where `batches` make no sense."""
        least, best, most = self.batches
        if (least, best, most) == (0, 0, 0):
            least = best = most = int(example.shape[0])
        if not 0 <= least <= best <= most or most < 1:
            raise BadValueError(
                f"batches of {least}, {best}, {most} are no profile",
                next_step="give the least, the best and the most images of a call, in this order",
            )
        return Profile(least, best, most, tuple(map(int, example.shape[1:])), example.dtype)


@dataclasses.dataclass(frozen=True)
class Profile:
    """Inputs that a runner takes: least to most images of `image` = (channels, height, width)."""

    least: int
    best: int
    most: int
    image: Tuple[int, ...]
    dtype: torch.dtype

    def require(self, engine: str, x: torch.Tensor) -> None:
        """Raise ShapeOutsideProfileError where `x` is not among them; its dtype counts too."""
        shape = x.shape
        if (
            not self.least <= shape[0] <= self.most
            or shape[1:] != self.image
            or x.dtype != self.dtype
        ):
            raise ShapeOutsideProfileError(engine, shape, f"{self}, not {x.dtype}")

    def __str__(self) -> str:
        images = str(self.least) if self.least == self.most else f"{self.least} to {self.most}"
        return f"{images} x {' x '.join(map(str, self.image))} of {self.dtype}"


@dataclasses.dataclass(frozen=True)
class LayerFact:
    """What one layer runs as; empty where an engine does not tell."""

    layer: str
    operator: str
    provider: str
    kernel: str
    precision: str

    @property
    def is_product(self) -> bool:
        """Whether it is a convolution or a matrix product, by the engine's own word for it: those
        are what a precision is asked for."""
        word = self.operator.lower()
        return "quantizelinear" not in word and any(each in word for each in _PRODUCTS)


class Runner(abc.ABC):
    """A network that an engine has made ready.

    The registry fills in `engine` and `build_seconds`; an engine with a cache fills in the rest:
    `cache_note` says why a cached engine was not used, or could not be kept.
    """

    engine: str = ""
    build_seconds: float = 0.0
    from_cache: bool = False
    cache_key: str = ""
    cache_note: str = ""
    profile: Optional[Profile] = None
    _closed: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes] on the device, float32 or in the precision's dtype, in memory that
        the next call may write over.

        `x` [B, C, H, W] is of the example's dtype and device, with any strides. Raises
        ShapeOutsideProfileError for another shape, EngineClosedError after `close`.
        """
        if self._closed:
            raise EngineClosedError(
                f"this runner of {self.engine} is closed", next_step="prepare the network again"
            )
        if self.profile is not None:
            self.profile.require(self.engine, x)
        return self.run(x)

    @abc.abstractmethod
    def run(self, x: torch.Tensor) -> torch.Tensor:
        """What the engine does with `x`, whose shape is within the profile."""

    def layers(self) -> Tuple[LayerFact, ...]:
        """What each layer runs as, in order; empty where the engine tells nothing."""
        return ()

    def observations(self) -> Optional[Tuple[Observation, ...]]:
        """What the precision probe saw while the runner was made or first ran; None where the
        engine runs no operators of torch, and `layers` tells the precisions instead."""
        return None

    def phases(self) -> Mapping[str, float]:
        """Seconds that parts of the preparation took, by name; empty where the engine does not
        say."""
        return {}

    def searched(self) -> Mapping[str, int]:
        """What a search for kernels went through in the preparation, counted by name; empty where
        there was none, or the engine does not say."""
        return {}

    def memory_bytes(self) -> Optional[int]:
        """Device memory that the engine holds; None where it does not say."""
        return None

    def close(self) -> None:
        """Let go of all that the engine holds. May be called twice."""
        self._closed = True


class Engine(abc.ABC):
    """One way to run networks. An instance per name, `ENGINE` (or several in `ENGINES`) of its leaf
    module, made without importing the engine's library."""

    name: str
    #: The engine's own options and their defaults, whose types are the options' types.
    options: ClassVar[Mapping[str, Scalar]] = {}

    @abc.abstractmethod
    def missing(self, device: torch.device) -> str:
        """Why this host cannot have the engine, or nothing."""

    @abc.abstractmethod
    def refuses(self, precision: str, device: torch.device) -> str:
        """Why the engine has no such precision on `device`, or nothing. Asked where it is not
        missing."""

    @abc.abstractmethod
    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        """`model` (eval, float32, on the CPU, never changed) ready for inputs like `example`, which
        is on the device and of the dtype in which inputs will come.

        Called by the registry, which has checked all of this and holds TF32 as `wanted` says.
        Raises OperatorNotTakenError, EngineBuildError, and whatever says that memory ran out.
        """

    def chosen(self, wanted: Preparation) -> Dict[str, Scalar]:
        """All options of the engine, those of `wanted` in place of the defaults. Raises
        UnknownNameError, BadValueError."""
        values = dict(self.options)
        for name, value in wanted.options.items():
            if name not in values:
                raise UnknownNameError("option", name, values, where=f"of the engine {self.name}")
            kind = type(values[name])
            if type(value) is int and kind is float:
                value = float(value)
            if type(value) is not kind:
                raise BadValueError(
                    f"option {name} of {self.name} is {value!r}, not of type {kind.__name__}"
                )
            values[name] = value
        return values
