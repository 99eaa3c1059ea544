"""Who works in a row: which workers, on what, with which batch and options."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Mapping, Tuple

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_contract.parameters import Scalar

__all__ = ["Station", "plan_stations"]

Options = Tuple[Tuple[str, Scalar], ...]

#: How many deep-learning accelerators the boards have that have any.
_MOST_DLAS = 2


@dataclasses.dataclass(frozen=True)
class Station:
    """One worker. `options` are its engine's, `threads` of a CPU (0: not its business)."""

    name: str
    batch: int
    threads: int = 0
    options: Options = ()


def plan_stations(
    parameters: Mapping[str, Any], device_type: str, processors: int
) -> Tuple[Station, ...]:
    """The workers of a row on a `device_type` device, whose host has so many processors for it.

    Accelerators come first: what they cannot do is found out before the GPU's engine is built.
    Raises UsageError for parameters that contradict each other, NotApplicableError where there can
    be no accelerators.
    """
    dlas, count, batch = parameters["dlas"], parameters["workers"], parameters["batch"]
    if device_type != "cuda":
        if dlas:
            raise NotApplicableError(
                f"a {device_type} has no deep-learning accelerators",
                why="Jetson Xavier and Orin have them, and TensorRT alone runs networks there",
                next_step="leave out dlas",
            )
        threads = parameters["threads"] or max(1, processors // count)
        options: Options = ()
        if parameters["engine"] == "narrowgauge":
            options = (("threads", threads),)
        return tuple(Station(f"cpu-{n}", batch, threads, options) for n in range(count))
    if parameters["threads"]:
        raise UsageError("threads are for rows on a CPU", next_step="leave out threads")
    if not dlas:
        return tuple(Station(f"gpu-{number}", batch) for number in range(count))
    return _with_accelerators(parameters, min(dlas, _MOST_DLAS), count)


def _with_accelerators(parameters: Mapping[str, Any], dlas: int, count: int) -> Tuple[Station, ...]:
    engine, precision = parameters["engine"], parameters["precision"]
    if engine != "tensorrt":
        raise UsageError(
            f"{engine} runs nothing on a deep-learning accelerator", next_step="-p engine=tensorrt"
        )
    if precision not in ("fp16", "int8"):
        raise UsageError(
            f"deep-learning accelerators have no {precision}", next_step="-p precision=int8"
        )
    stations: List[Station] = []
    for number in range(dlas):
        options: Options = (("dla", number),)
        stations.append(Station(f"dla-{number}", parameters["dla_batch"], options=options))
    for number in range(count):
        stations.append(Station(f"gpu-{number}", parameters["batch"], options=(("dla", -1),)))
    return tuple(stations)
