"""The energy of an NVIDIA card: what its driver counts, or, where it counts none, its power read.

The counter steps every 100 ms or so, and integrates the card's own sensor. On A100 and H100 that
sensor sees a quarter of the time, so only windows of seconds say anything (arXiv 2312.02741).
"""

from __future__ import annotations

from typing import Callable, Optional

import torch

from narrowgauge_lab.errors import device_lost
from narrowgauge_lab.measure import nvml
from narrowgauge_lab.measure.energy.counter import CounterSource
from narrowgauge_lab.measure.energy.sampled import SampledSource
from narrowgauge_lab.measure.energy.source import (
    Clock,
    EnergyError,
    EnergyMissingError,
    Rail,
    Source,
    Total,
)

__all__ = ["COUNTER", "POWER", "open_nvml"]

COUNTER, POWER = "nvml-counter", "nvml-power"
#: Power is read this often; the sensor behind it is slower, on every card.
_INTERVAL_S = 0.02
_COUNTER_CAVEAT = "counted by the driver from the card's own power sensor"
_POWER_CAVEAT = (
    "power as NVML shows it, read and integrated: newer cards average it over up to 1 s, and some"
    " sensors see a quarter of the time"
)


def open_nvml(
    device: torch.device,
    clock: Clock,
    *,
    library: str = nvml.NVML_LIBRARY,
    cuda_library: str = nvml.CUDA_LIBRARY,
    power_every_s: Optional[float] = None,
) -> Source:
    """The counter of the card that `device` is, or its power where it has none.

    `power_every_s`: read the power, so often, whatever it has. Raises EnergyMissingError, and
    DeviceLostError where the card is gone; what it gives does so too.
    """
    if device.type != "cuda":
        raise EnergyMissingError(
            f"NVML says nothing of {device}", next_step="energy=auto takes what there is"
        )
    try:
        handle = nvml.Nvml(library)
    except nvml.NvmlError as error:
        raise _missing(error) from error
    try:
        card = handle.card(nvml.bus_id(device, cuda_library))
        return _source(handle, card, clock, power_every_s)
    except nvml.NvmlError as error:
        handle.close()
        if error.code in nvml.LOST:
            raise device_lost(str(error)) from error
        raise _missing(error) from error
    except BaseException:
        handle.close()
        raise


def _source(
    handle: nvml.Nvml, card: nvml.Card, clock: Clock, power_every_s: Optional[float]
) -> Source:
    if card.mig():
        raise EnergyMissingError(
            "this card is split into MIG slices",
            why="NVML says the energy of the whole card, and other slices draw from it too",
            next_step="measure energy on a card that is not split",
        )
    name = card.name()
    rails = (Rail(name, ("board",), "NVML", f"PCI {card.address}"),)
    total = Total("rail", (name,), "the whole card: chip, memory and regulators")
    if power_every_s is not None or not _counts(card):
        card.power_mw()  # what has neither raises here: absent
        return SampledSource(
            POWER,
            rails,
            total,
            lambda: {name: _say(card.power_mw) / 1e3},
            clock=clock,
            interval_s=power_every_s or _INTERVAL_S,
            quanta_w={name: 1e-3},
            caveat=_POWER_CAVEAT,
            close=handle.close,
        )
    return CounterSource(
        COUNTER,
        rails,
        total,
        lambda: {name: _say(card.energy_mj) / 1e3},
        clock=clock,
        quantum_j=1e-3,
        caveat=_COUNTER_CAVEAT,
        close=handle.close,
    )


def _counts(card: nvml.Card) -> bool:
    """Whether the card has a counter. Another refusal than "not supported" is a failure."""
    try:
        card.energy_mj()
    except nvml.NvmlError as error:
        if error.code != nvml.NOT_SUPPORTED:
            raise
        return False
    return True


def _say(ask: Callable[[], int]) -> int:
    """What the card answers while it is measured: a refusal is a failure then, not an absence."""
    try:
        return ask()
    except nvml.NvmlError as error:
        if error.code in nvml.LOST:
            raise device_lost(str(error)) from error
        raise EnergyError("the card stopped saying its energy", why=str(error)) from error


def _missing(error: nvml.NvmlError) -> EnergyMissingError:
    return EnergyMissingError(
        "NVML says no energy here",
        why=str(error),
        next_step="on a Jetson: energy=ina3221; in a container NVML comes with the NVIDIA runtime's"
        " 'utility' capability; before Volta and in virtual GPUs there is no counter",
    )
