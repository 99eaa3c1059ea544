"""A network that TensorRT has made ready."""

from __future__ import annotations

from typing import Mapping, Optional, Tuple, Union

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.engines.base import LayerFact, Profile, Runner
from narrowgauge_lab.engines.errors import EngineClosedError
from narrowgauge_lab.engines.tensorrt.bundle import Built
from narrowgauge_lab.engines.tensorrt.dla import CORES
from narrowgauge_lab.engines.tensorrt.execution import Loaded, load, make_queue
from narrowgauge_lab.engines.tensorrt.failures import EngineRunError
from narrowgauge_lab.engines.tensorrt.inspector import (
    count_loadables,
    facts_of_network,
    layer_facts,
)  # fmt: skip
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.refit import Refit, Trained
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["TensorRTRunner"]

#: TensorRT's own rule for the memory that it is given, in bytes.
_ALIGNMENT = 256


class TensorRTRunner(Runner):
    """One execution context with memory for its output; for one thread at a time, on any stream.

    `notes`: what the build had to say, of a DLA's layers above all. What a runner holds on a DLA
    core other runners of this process cannot have until it is closed.
    """

    def __init__(
        self,
        library: Library,
        built: Built,
        profile: Profile,
        device: torch.device,
        dla: int = -1,
        weights: Optional[Trained] = None,
        loaded: Optional[Loaded] = None,
    ) -> None:
        """`weights`: for refitting. `loaded`: the engine of `built`, where it is loaded already."""
        self.engine = "tensorrt"
        self.profile = profile
        self.notes = built.notes
        self._library, self._built, self._device, self._dla = library, built, device, dla
        self._weights = weights
        self._refit: Optional[Refit] = None
        self._queue = make_queue(device)
        self._taken = 0
        if dla >= 0:
            CORES.take(dla, built.loadables)
            self._taken = built.loadables
        try:
            self._loaded = loaded or load(library, built.plan, dla, self._queue)
            self._output = self._room(profile)
        except BaseException:
            self.close()
            raise

    def _room(self, profile: Profile) -> torch.Tensor:
        """Memory for the output of the largest batch."""
        calls = self._loaded.calls
        if calls.input_dtype != profile.dtype:
            raise EngineRunError(f"the engine takes {calls.input_dtype}, not {profile.dtype}")
        with self._queue.on_device():
            shape = calls.shape_of((max(1, profile.most), *profile.image))
            return torch.empty(shape, dtype=calls.output_dtype, device=self._device)

    def run(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """`more`: the further inputs of an engine that has them, in the order of their names, each
        with as many images as `x`."""
        for each in (x, *more):
            if each.device != self._output.device:
                where = f"on {each.device}, the engine on {self._output.device}"
                raise BadValueError(f"the input is {where}")
        if not x.shape[0]:
            return self._output[:0]
        inputs = [_aligned(each) for each in (x, *more)]
        # A sum over the images has as many rows as it has, however many images there are.
        y = self._output[: self._loaded.calls.shape_of(x.shape)[0]]
        with self._queue.entered() as stream:
            self._loaded.calls.call(inputs, y, stream)
        return y

    def layers(self) -> Tuple[LayerFact, ...]:
        information = self._information()
        if information is None:
            return facts_of_network(self._built, self._dla)
        return layer_facts(information, self._built, self._dla)

    def loadables(self) -> int:
        """Pieces of this engine on a DLA: as TensorRT made them, or as planned where it does not
        tell."""
        information = self._information() if self._dla >= 0 else None
        return self._built.loadables if information is None else count_loadables(information)

    def _information(self) -> Optional[str]:
        if not self._library.features.inspector:
            return None
        inspector = self._open().engine.create_engine_inspector()
        # Formats of a network with a batch of any size are told for the shape in the context.
        inspector.execution_context = self._open().calls.context
        return str(inspector.get_engine_information(self._library.trt.LayerInformationFormat.JSON))

    def memory_bytes(self) -> Optional[int]:
        """What free memory shrank by while the engine was loaded, and the output; other processes
        on the device are in it too."""
        held = self._open().held
        return None if held is None else held + self._output.numel() * self._output.element_size()

    @property
    def refits_on_device(self) -> bool:
        """Whether weights in device memory are taken from there."""
        return self._library.features.stream_refit

    @property
    def weight_names(self) -> Tuple[str, ...]:
        """The weights that `refit` can replace."""
        return self._refitter().names

    def refit(self, weights: Union[nn.Module, Mapping[str, torch.Tensor]]) -> Tuple[str, ...]:
        """Replace weights; the names of those that were not what the engine had already.

        `weights`: by name, some or all; or a model like the one that was prepared. Raises
        BadValueError where the engine was not built with refit=True, UnknownNameError,
        EngineRunError.
        """
        refit = self._refitter()
        if isinstance(weights, nn.Module):
            state = fold_batch_norm(weights).state_dict()
            weights = {name: state[name] for name in refit.names if name in state}
        with self._queue.entered() as stream:
            return refit.set(weights, stream, self._queue.settle)

    def _refitter(self) -> Refit:
        loaded = self._open()
        if self._refit is None:
            if self._weights is None:
                raise BadValueError(
                    "this engine was not built to be refitted", next_step="the option refit=True"
                )
            with self._queue.on_device():
                self._refit = Refit(self._library, loaded.engine, self._weights)
        return self._refit

    def twin(self) -> TensorRTRunner:
        """Another runner of the same engine, for another thread or stream, with its own weights in
        memory: until 8.6 two contexts cannot share the shapes of one engine. A refitted runner's
        twin has the weights of the build."""
        assert self.profile is not None
        made = TensorRTRunner(
            self._library, self._built, self.profile, self._device, self._dla, self._weights
        )
        made.from_cache, made.cache_key = True, self.cache_key
        return made

    def _open(self) -> Loaded:
        if self._closed:
            raise EngineClosedError(
                "this runner of tensorrt is closed", next_step="prepare the network again"
            )
        return self._loaded

    def close(self) -> None:
        super().close()
        taken, self._taken = self._taken, 0
        if taken:
            CORES.give_back(self._dla, taken)
        for name in ("_refit", "_loaded", "_output"):
            vars(self).pop(name, None)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x
