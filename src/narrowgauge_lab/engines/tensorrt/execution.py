"""Built engines, loaded and called: one execution context, by either of TensorRT's two ways to say
which memory it reads and writes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, ContextManager, Iterator, Optional, Sequence, Tuple, Union

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.engines.tensorrt.failures import EngineRunError, failure
from narrowgauge_lab.engines.tensorrt.features import data_types
from narrowgauge_lab.engines.tensorrt.library import Library

__all__ = ["Calls", "CudaQueue", "Loaded", "load", "make_queue"]


class CudaQueue:
    """The stream that calls go to: the caller's; its default one makes TensorRT synchronise the
    device in each call, so that a stream of our own stands in for that, in the caller's order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[int]:
        """The handle of the stream, on this device."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            if current.cuda_stream:
                yield current.cuda_stream
                return
            self._own.wait_stream(current)
            try:
                yield self._own.cuda_stream
            finally:
                current.wait_stream(self._own)

    def on_device(self) -> ContextManager[Any]:
        return torch.cuda.device(self.device)

    def settle(self) -> None:
        """Wait for all that was queued on the device."""
        torch.cuda.synchronize(self.device)

    def free_memory(self) -> Optional[int]:
        return torch_compat.free_memory(self.device)


def make_queue(device: torch.device) -> CudaQueue:
    return CudaQueue(device)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """`runtime` has to outlive `engine`, and that `calls`. `held`: bytes by which the device's free
    memory shrank meanwhile; None where nobody tells."""

    runtime: Any
    engine: Any
    calls: Calls
    held: Optional[int]


def load(library: Library, plan: bytes, dla: int, queue: CudaQueue) -> Loaded:
    """An engine with one context. Raises EngineRunError, OutOfMemoryError."""
    with queue.on_device():
        before = queue.free_memory()
        runtime, engine = _engine(library, plan, dla)
        calls = Calls(library, engine)
        after = queue.free_memory()
    library.said.take()  # what it said was no obstacle
    held = None if before is None or after is None else max(0, before - after)
    return Loaded(runtime, engine, calls, held)


def _engine(library: Library, plan: bytes, dla: int) -> Tuple[Any, Any]:
    trt = library.trt
    try:
        runtime = trt.Runtime(library.said)
    except TypeError as error:  # pybind11's word for a null pointer
        why = library.said.take() or str(error)
        raise failure("TensorRT gives no runtime", why, kind=EngineRunError) from error
    if dla >= 0:
        runtime.DLA_core = dla
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise failure("TensorRT cannot load the engine", library.said.take(), kind=EngineRunError)
    return runtime, engine


class _ByName:
    """Tensors have names; 8.5 and later."""

    def __init__(self, library: Library, engine: Any, context: Any) -> None:
        modes = library.trt.TensorIOMode
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        # In the order of their names, which is the callers' to choose.
        self.sources = sorted(n for n in names if engine.get_tensor_mode(n) == modes.INPUT)
        self.result = next(n for n in names if engine.get_tensor_mode(n) == modes.OUTPUT)
        self._images = [tuple(engine.get_tensor_shape(n))[1:] for n in self.sources[1:]]
        self.input_type = engine.get_tensor_dtype(self.sources[0])
        self.output_type = engine.get_tensor_dtype(self.result)
        self._context = context

    def reshape(self, shape: Sequence[int]) -> Optional[Tuple[int, ...]]:
        shapes = [tuple(shape), *((shape[0], *image) for image in self._images)]
        for name, each in zip(self.sources, shapes):
            if not self._context.set_input_shape(name, each):
                return None
        return tuple(self._context.get_tensor_shape(self.result))

    def enqueue(self, inputs: Sequence[int], y: int, stream: int) -> bool:
        where = zip((*self.sources, self.result), (*inputs, y))
        return bool(
            all(self._context.set_tensor_address(name, address) for name, address in where)
            and self._context.execute_async_v3(stream)
        )


class _ByIndex:
    """Bindings have indices; until 8.6."""

    def __init__(self, _library: Library, engine: Any, context: Any) -> None:
        indices = range(engine.num_bindings)
        inputs = (i for i in indices if engine.binding_is_input(i))
        self.sources = sorted(inputs, key=engine.get_binding_name)
        self.result = next(i for i in indices if not engine.binding_is_input(i))
        self._images = [tuple(engine.get_binding_shape(i))[1:] for i in self.sources[1:]]
        self.input_type = engine.get_binding_dtype(self.sources[0])
        self.output_type = engine.get_binding_dtype(self.result)
        self._context = context
        self._bindings = [0] * engine.num_bindings

    def reshape(self, shape: Sequence[int]) -> Optional[Tuple[int, ...]]:
        shapes = [tuple(shape), *((shape[0], *image) for image in self._images)]
        for index, each in zip(self.sources, shapes):
            if not self._context.set_binding_shape(index, each):
                return None
        return tuple(self._context.get_binding_shape(self.result))

    def enqueue(self, inputs: Sequence[int], y: int, stream: int) -> bool:
        for index, address in zip((*self.sources, self.result), (*inputs, y)):
            self._bindings[index] = address
        return bool(self._context.execute_async_v2(self._bindings, stream))


class Calls:
    """A context with its shapes. `shape_of` and `call` are for one thread at a time."""

    def __init__(self, library: Library, engine: Any) -> None:
        self._library = library
        self.context = engine.create_execution_context()
        if self.context is None:
            raise self._failure("TensorRT makes no execution context")
        way = _ByName if library.features.tensors_by_name else _ByIndex
        self._way: Union[_ByName, _ByIndex] = way(library, engine, self.context)
        self._shape: Tuple[int, ...] = ()
        self._result: Tuple[int, ...] = ()
        known = data_types(library.trt)
        self.input_dtype = known.get(self._way.input_type)
        self.output_dtype = known.get(self._way.output_type)
        if self.input_dtype is None or self.output_dtype is None:
            types = f"{self._way.input_type} and {self._way.output_type}"
            raise EngineRunError(f"the engine's input and output are of {types}")

    def shape_of(self, shape: Sequence[int]) -> Tuple[int, ...]:
        """The output's shape for the first input's; others have as many images as that."""
        shape = tuple(shape)
        if shape != self._shape:
            result = self._way.reshape(shape)
            if result is None:
                raise self._failure(f"TensorRT refuses inputs of {shape}")
            self._shape, self._result = shape, result
        return self._result

    def call(self, inputs: Sequence[torch.Tensor], y: torch.Tensor, stream: int) -> None:
        """Queue one call behind what is on the stream; inputs, in the order of their names, and `y`
        are contiguous."""
        self.shape_of(inputs[0].shape)
        if not self._way.enqueue([x.data_ptr() for x in inputs], y.data_ptr(), stream):
            raise self._failure("TensorRT did not run the engine")

    def _failure(self, what: str) -> Exception:
        return failure(what, self._library.said.take(), kind=EngineRunError)
