"""New weights for an engine that was built with REFIT: only those that differ are handed over."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Tuple

import torch

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.engines.tensorrt.failures import EngineRunError, failure
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.network import weights_of

__all__ = ["Refit", "Trained", "Weights"]

Weights = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The weights that an engine was built with, by name, and their dtype in its network."""

    weights: Weights
    dtype: torch.dtype


class Refit:
    """The refitter of one engine, and the weights that the engine has."""

    def __init__(self, library: Library, engine: Any, built_with: Trained) -> None:
        self._library = library
        self._dtype = built_with.dtype
        self._initial = built_with.weights
        self._refitter = library.trt.Refitter(engine, library.said)
        self._has: Dict[str, torch.Tensor] = {}
        self.names: Tuple[str, ...] = tuple(map(str, self._refitter.get_all_weights()))

    def set(self, weights: Weights, stream: int, settle: Callable[[], None]) -> Tuple[str, ...]:
        """The names of the weights that were replaced: those given that are not what the engine has
        already. Those in device memory are taken from there, in the order of `stream`, where
        TensorRT can do so; others through the CPU, when `settle` has ended what the engine does.

        Raises UnknownNameError for a weight that the engine has not, EngineRunError.
        """
        for name in weights:
            if name not in self.names:
                raise UnknownNameError("weight", name, self.names, where="of this engine")
        changed = {name: each for name, each in weights.items() if self._differs(name, each)}
        if not changed:
            return ()
        on_stream = self._library.features.stream_refit and all(
            each.device.type == "cuda" for each in changed.values()
        )
        if not on_stream:
            settle()
        owners = [self._give(name, each, on_stream) for name, each in changed.items()]
        owners += self._complete(changed)
        done = (
            self._refitter.refit_cuda_engine_async(stream)
            if on_stream
            else self._refitter.refit_cuda_engine()
        )
        if not done:
            raise self._failure("TensorRT did not refit the engine")
        return tuple(changed)

    def _differs(self, name: str, new: torch.Tensor) -> bool:
        has = self._has.get(name)
        if has is None or has.device != new.device or has.shape != new.shape:
            return True
        return not torch.equal(has, new.detach().to(self._dtype))

    def _give(self, name: str, new: torch.Tensor, on_stream: bool) -> torch.Tensor:
        """Hand one weight over; what TensorRT reads until the engine is refitted."""
        # A copy: the caller's tensor is written by the next step of training.
        mine = new.detach().to(self._dtype, copy=True).contiguous()
        value, owner = weights_of(self._library.trt, mine if on_stream else mine.cpu())
        location = self._library.trt.TensorLocation
        taken = (
            self._refitter.set_named_weights(name, value, location.DEVICE)
            if on_stream
            else self._refitter.set_named_weights(name, value)
        )
        if not taken:
            raise self._failure(f"TensorRT does not take {tuple(mine.shape)} as {name}")
        self._has[name] = mine
        return owner

    def _complete(self, given: Weights) -> List[torch.Tensor]:
        """Hand over what TensorRT merged with a given weight and cannot do without."""
        missing = [str(name) for name in self._refitter.get_missing_weights() if name not in given]
        owners = []
        for name in missing:
            has = self._has.get(name)
            known = has if has is not None else self._initial.get(name)
            if known is None:
                raise EngineRunError(
                    f"TensorRT cannot refit {', '.join(given)} without {name}",
                    why="it was merged with them, and this engine was not given it",
                    next_step=f"give {name} too",
                )
            owners.append(self._give(name, known, on_stream=False))
        return owners

    def _failure(self, what: str) -> Exception:
        return failure(what, self._library.said.take(), kind=EngineRunError)
