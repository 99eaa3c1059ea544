"""Which source of energy is used: by its name, or by what this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.measure.energy.ina3221 import channels, open_ina3221
from narrowgauge_lab.measure.energy.nvml_source import open_nvml
from narrowgauge_lab.measure.energy.rapl import open_rapl
from narrowgauge_lab.measure.energy.replay import ReplaySource, load_recording
from narrowgauge_lab.measure.energy.source import (
    REAL_CLOCK,
    Clock,
    EnergyError,
    EnergyMissingError,
    NullSource,
    Source,
)
from narrowgauge_lab.measure.nvml import CUDA_LIBRARY, NVML_LIBRARY

__all__ = ["HERE", "NAMES", "Places", "open_source", "source_or_invalid"]

NAMES = ("auto", "nvml", "ina3221", "rapl", "none")
_REPLAY = "replay:"


@dataclass(frozen=True)
class Places:
    """Where things are looked for; tests give their own."""

    root: Path = Path("/")
    nvml: str = NVML_LIBRARY
    cuda: str = CUDA_LIBRARY


#: This machine's.
HERE = Places()


def open_source(
    name: str, device: torch.device, places: Places = HERE, clock: Clock = REAL_CLOCK
) -> Source:
    """The source `name`: one of NAMES, or `replay:FILE`. A context manager.

    `auto`: the power rails of a board that has them, since its GPU and processor draw from those;
    else NVML for a CUDA device and RAPL for the processor. Raises EnergyMissingError where the
    source is not here, UnknownNameError, and UsageError for a file that is no recording.
    """
    if name == "none":
        return NullSource()
    if name.startswith(_REPLAY):
        return ReplaySource(load_recording(Path(name[len(_REPLAY) :])), clock)
    if name == "auto":
        name = _automatic(device, places)
    try:
        if name == "nvml":
            return open_nvml(device, clock, library=places.nvml, cuda_library=places.cuda)
        if name == "ina3221":
            return open_ina3221(places.root, clock)
        if name == "rapl":
            return open_rapl(places.root, clock)
    except EnergyMissingError:
        raise
    except EnergyError as error:
        # A source that is broken before anything was measured is as good as none.
        raise EnergyMissingError(error.what, why=error.why, next_step=error.next_step) from error
    raise UnknownNameError("energy source", name, [*NAMES, f"{_REPLAY}FILE"])


def source_or_invalid(
    ctx: Any,
    name: str,
    device: torch.device,
    places: Places = HERE,
    clock: Clock = REAL_CLOCK,
) -> Optional[Source]:
    """The source; or None where it is not here, and then the row is INVALID and says why.

    `ctx` is the row's RowContext. Fact `energy_asked` is what was asked for.
    """
    ctx.fact("energy_asked", name)
    try:
        return open_source(name, device, places, clock)
    except EnergyMissingError as error:
        ctx.invalid(f"energy was asked for ({name}) and is not here: {error.in_words()}")
        return None


def _automatic(device: torch.device, places: Places) -> str:
    try:
        if channels(places.root):
            return "ina3221"
    except EnergyError:
        return "ina3221"  # there, and not readable: opening it says how to mend that
    return "nvml" if device.type == "cuda" else "rapl"
