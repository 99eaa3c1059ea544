"""The one module that talks to NVIDIA's management library, by ctypes: no package is needed for it.

Only what measuring needs: a card's energy, power, clocks and what holds them back. Which card a
torch device is, the CUDA driver says by its PCI address: CUDA_VISIBLE_DEVICES and MIG reorder the
devices that torch counts, and NVML counts all of them in an order of its own.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import torch

__all__ = [
    "CUDA_LIBRARY",
    "EVENT_REASONS",
    "FAULT_REASONS",
    "LOST",
    "NOT_SUPPORTED",
    "NVML_LIBRARY",
    "Card",
    "Nvml",
    "NvmlError",
    "bus_id",
    "reason_names",
]

NVML_LIBRARY = "libnvidia-ml.so.1"
CUDA_LIBRARY = "libcuda.so.1"

#: The bits of nvmlDeviceGetCurrentClocksEventReasons (until 2023 "ThrottleReasons"), from nvml.h.
EVENT_REASONS = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
#: The reasons that no measurement should be taken under: heat, and hardware that pulls the brake.
#: The others are how the card is set up and meant to run. A power cap is the card's ordinary limit
#: under load; sync boost holds the cards of a group at one clock, and stays until it is configured
#: away; both are recorded, and trying again would change neither.
FAULT_REASONS = frozenset(
    ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
)

#: The code of what a card cannot do, which is an absence and no failure.
NOT_SUPPORTED = 3
#: The codes of a card that is gone (fallen off the bus), and of one that needs a reset to go on.
LOST = frozenset((15, 16))
_SUCCESS = 0
_INSUFFICIENT_SIZE = 7
_FUNCTION_NOT_FOUND = 13
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_PERF_POLICY_THERMAL = 1
_NAME_BYTES = 96
_BUS_ID_BYTES = 32
#: Processes may start between the call that asks for their number and the one that lists them.
_SPARE_PROCESSES = 8

T = TypeVar("T")


class NvmlError(Exception):
    """A call was refused, or cannot be made. `code` is nvml.h's; 0 where no library answered."""

    def __init__(self, what: str, code: int = 0) -> None:
        super().__init__(what)
        self.code = code


class _ViolationTime(ctypes.Structure):
    _fields_ = (("reference", ctypes.c_ulonglong), ("violation", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise NvmlError(f"{name} cannot be loaded: {error}") from error


def reason_names(bits: int) -> Tuple[str, ...]:
    """The names of the bits that are set; a bit that nobody named here is kept as a number."""
    names = [name for bit, name in EVENT_REASONS if bits & bit]
    rest = bits & ~sum(bit for bit, _ in EVENT_REASONS)
    return (*names, hex(rest)) if rest else tuple(names)


def bus_id(device: torch.device, library: str = CUDA_LIBRARY) -> str:
    """The PCI address of a torch device, such as `0000:3B:00.0`; a MIG slice's is its card's.

    Asks the CUDA driver, since torch says it in its newest versions only. Raises NvmlError.
    """
    cuda = _load(library)
    index = device.index if device.index is not None else torch.cuda.current_device()
    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    # cuInit again is free; without it the driver answers nothing at all.
    for name, arguments in (
        ("cuInit", (ctypes.c_uint(0),)),
        ("cuDeviceGetPCIBusId", (text, ctypes.c_int(_BUS_ID_BYTES), ctypes.c_int(index))),
    ):
        function = getattr(cuda, name, None)
        if function is None:
            raise NvmlError(f"{library} has no {name}")
        function.restype = ctypes.c_int
        code = int(function(*arguments))
        if code != _SUCCESS:
            raise NvmlError(f"the CUDA driver's {name} gave error {code} for {device}")
    return text.value.decode("ascii", "replace")


class Nvml:
    """The library, initialised; a context manager. Raises NvmlError where it cannot be."""

    def __init__(self, library: str = NVML_LIBRARY) -> None:
        self._library = _load(library)
        self._open = False
        self.call("nvmlInit_v2")
        self._open = True

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Shut it down; a second call does nothing. Never raises: a lost card fails here too, and
        that would hide what failed first."""
        if self._open:
            self._open = False
            try:
                self.call("nvmlShutdown")
            except NvmlError:
                pass  # the library ends with the process

    def card(self, address: str) -> Card:
        """The card at a PCI address. Raises NvmlError."""
        handle = ctypes.c_void_p()
        self.call(
            "nvmlDeviceGetHandleByPciBusId_v2",
            ctypes.c_char_p(address.encode("ascii")),
            ctypes.byref(handle),
        )
        return Card(self, handle, address)

    def call(self, name: str, *arguments: Any) -> None:
        """One function of the library. Raises NvmlError, with NVML's own words for the code."""
        code = self.raw(name, *arguments)
        if code != _SUCCESS:
            raise NvmlError(f"{name}: {self._words(code)}", code)

    def raw(self, name: str, *arguments: Any) -> int:
        """The same, for calls whose error codes mean something; an older driver may lack it."""
        function = getattr(self._library, name, None)
        if function is None:
            raise NvmlError(f"{name}: this driver's NVML does not have it", _FUNCTION_NOT_FOUND)
        function.restype = ctypes.c_int
        return int(function(*arguments))

    def _words(self, code: int) -> str:
        function = getattr(self._library, "nvmlErrorString", None)
        if function is None:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        text = function(ctypes.c_int(code))
        return text.decode("utf-8", "replace") if text else f"error {code}"


class Card:
    """One card. Each method asks the driver anew, and raises NvmlError where it does not say."""

    def __init__(self, nvml: Nvml, handle: Any, address: str) -> None:
        self.address = address
        self._nvml = nvml
        self._handle = handle

    def name(self) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("nvmlDeviceGetName", text, ctypes.c_uint(_NAME_BYTES))
        return text.value.decode("utf-8", "replace")

    def energy_mj(self) -> int:
        """Since the driver was loaded, in mJ (Volta and later)."""
        return self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())

    def power_mw(self) -> int:
        """Now, in mW; the newer a card, the longer the time that it averages this over."""
        return self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint())

    def power_limit_mw(self) -> int:
        return self._number("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())

    def temperature_c(self) -> int:
        return self._number(
            "nvmlDeviceGetTemperature", ctypes.c_uint(), ctypes.c_int(_TEMPERATURE_GPU)
        )

    def sm_clock_mhz(self) -> int:
        return self._clock(_CLOCK_SM)

    def memory_clock_mhz(self) -> int:
        return self._clock(_CLOCK_MEMORY)

    def persistence(self) -> bool:
        return bool(self._number("nvmlDeviceGetPersistenceMode", ctypes.c_int()))

    def event_reasons(self) -> int:
        """Why the clocks are not higher, as bits. The name changed; drivers keep the old one."""
        names = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        return self._newest(names, lambda name: self._number(name, ctypes.c_ulonglong()))

    def thermal_violation_ns(self) -> int:
        """For how long heat has held the clocks down, ever: what happened between two looks."""
        time = _ViolationTime()
        self._call(
            "nvmlDeviceGetViolationStatus", ctypes.c_int(_PERF_POLICY_THERMAL), ctypes.byref(time)
        )
        return int(time.violation)

    def mig(self) -> bool:
        """Whether the card is split; False too where it cannot be."""
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", ctypes.byref(now), ctypes.byref(pending))
        except NvmlError as error:
            if error.code in (_FUNCTION_NOT_FOUND, NOT_SUPPORTED):
                return False
            raise
        return bool(now.value)

    def processes(self) -> List[int]:
        """The numbers of the processes that compute on it, as far as this user may see them."""
        names = (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetComputeRunningProcesses_v2",
        )
        return self._newest(names, self._processes)

    def _processes(self, name: str) -> List[int]:
        count = ctypes.c_uint(0)
        code = self._nvml.raw(name, self._handle, ctypes.byref(count), None)
        if code == _SUCCESS:
            return []
        if code == _INSUFFICIENT_SIZE:
            count.value += _SPARE_PROCESSES
            found = (_Process * count.value)()
            self._call(name, ctypes.byref(count), found)
            return [int(found[index].pid) for index in range(count.value)]
        raise NvmlError(f"{name}: error {code}", code)

    def _clock(self, kind: int) -> int:
        value = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", ctypes.c_int(kind), ctypes.byref(value))
        return int(value.value)

    def _number(self, name: str, value: Any, *before: Any) -> int:
        """A call whose last argument is where the answer goes."""
        self._call(name, *before, ctypes.byref(value))
        return int(value.value)

    def _call(self, name: str, *arguments: Any) -> None:
        self._nvml.call(name, self._handle, *arguments)

    @staticmethod
    def _newest(names: Sequence[str], ask: Callable[[str], T]) -> T:
        """The answer of the first function that this driver has."""
        missing: Optional[NvmlError] = None
        for name in names:
            try:
                return ask(name)
            except NvmlError as error:
                if error.code != _FUNCTION_NOT_FOUND:
                    raise
                missing = error
        assert missing is not None
        raise missing
