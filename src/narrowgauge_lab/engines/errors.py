"""What can go wrong between a network and an engine. Memory that runs out is
`narrowgauge_lab.errors.OutOfMemoryError`, as everywhere."""

from __future__ import annotations

from typing import Sequence

from narrowgauge_contract.errors import (
    ExitCode,
    NarrowgaugeError,
    NotApplicableError,
    SkippedError,
)

__all__ = [
    "EngineBuildError",
    "EngineCacheError",
    "EngineClosedError",
    "EngineMissingError",
    "HooksNotTakenError",
    "OperatorNotTakenError",
    "ShapeOutsideProfileError",
]


class EngineMissingError(SkippedError):
    """This host lacks an engine; its rows are skipped with the reason."""


class EngineBuildError(NarrowgaugeError):
    """An engine could not be made of a network that it should take."""

    exit_code = ExitCode.RUN_FAILED


class EngineCacheError(NarrowgaugeError):
    """The folder for engines cannot be one."""

    exit_code = ExitCode.RESULTS_UNWRITABLE


class EngineClosedError(NarrowgaugeError):
    """A runner was called after it had been closed."""

    exit_code = ExitCode.RUN_FAILED


class OperatorNotTakenError(NotApplicableError):
    """The network has an operator that the engine does not know."""

    def __init__(self, engine: str, operator: str, layer: str, why: str = "") -> None:
        super().__init__(
            f"{engine} does not take the operator {operator}, which is layer {layer or 'unnamed'}",
            why=why,
            next_step="write the layer with another operator, or run the network by another engine",
        )
        self.engine, self.operator, self.layer = engine, operator, layer


class HooksNotTakenError(NotApplicableError):
    """The network has hooks, and the engine would leave them out."""

    def __init__(self, engine: str, layer: str) -> None:
        super().__init__(
            f"{engine} does not run the hooks of {layer or 'the network itself'}",
            why="it runs what it reads of the network's graph, in which they are not",
            next_step="remove them (handle.remove()), or run the network by engine=eager",
        )
        self.engine, self.layer = engine, layer


class ShapeOutsideProfileError(NarrowgaugeError):
    """A runner was called with a shape that it was not prepared for."""

    exit_code = ExitCode.USAGE

    def __init__(self, engine: str, shape: Sequence[int], prepared: str) -> None:
        given = " x ".join(map(str, shape))
        super().__init__(
            f"{engine} was given inputs of {given}, and was prepared for {prepared}",
            next_step="prepare it with `batches` that hold this batch, or for this image size",
        )
