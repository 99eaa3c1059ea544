"""Everything the checks look at, gathered once. Values only: no check opens a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.errors import ExitCode, NarrowgaugeError
from narrowgauge.executors.base import ExecutorFacts
from narrowgauge.machine import Host
from narrowgauge.targets import Target

__all__ = [
    "Board",
    "BuildTool",
    "DataState",
    "DeviceFile",
    "Engine",
    "Folder",
    "GpuState",
    "Lab",
    "Memory",
    "Problem",
    "Processor",
    "Project",
    "Sensor",
    "Situation",
    "Socket",
    "Swap",
    "User",
]


@dataclass(frozen=True)
class Problem:
    """Why something could not be had, with the way out. `code` is that of the error it was; `late`:
    nothing went wrong, but the answer did not come in time."""

    what: str
    why: str = ""
    next_step: str = ""
    code: ExitCode = ExitCode.INTERNAL
    late: bool = False

    @classmethod
    def of(cls, error: NarrowgaugeError) -> Problem:
        return cls(error.what, error.why, error.next_step, error.exit_code)

    def text(self) -> str:
        """What happened, and on further lines why."""
        return "\n".join(filter(None, (self.what, self.why)))


@dataclass(frozen=True)
class User:
    """Who asks. `groups` are numbers, the primary one among them."""

    uid: int
    groups: frozenset[int]


@dataclass(frozen=True)
class Engine:
    """What the Docker engine says. `free_bytes` is that of its images' folder, None where this
    host does not see it. `hook`: what `--gpus` needs is installed here. `remaps`: it has
    userns-remap. `volumes` are this user's cache volumes for the target."""

    address: str
    api: str
    architecture: str
    facts: ExecutorFacts
    default_runtime: str = ""
    hook: bool = False
    folder: str = ""
    free_bytes: int | None = None
    rootless: bool = False
    remaps: bool = False
    limits_memory: bool = True
    limits_swap: bool = True
    has_image: bool = False
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Socket:
    """How the engine is reached. `mode` is a unix socket's permission bits, None where it is not
    there."""

    address: str
    tls: bool
    mode: int | None


@dataclass(frozen=True)
class BuildTool:
    """The docker command that can build."""

    executable: str
    buildx: bool


@dataclass(frozen=True)
class GpuState:
    """What NVML says of one GPU beside its name; None where it does not say."""

    name: str
    energy: bool | None
    persistence: bool | None


@dataclass(frozen=True)
class Processor:
    """`governors` are the distinct ones of all cores. `turbo` and `smt` are None where the kernel
    does not say."""

    governors: tuple[str, ...] = ()
    smt: bool | None = None
    turbo: bool | None = None


@dataclass(frozen=True)
class Swap:
    """One swap area in bytes. `zram` lies in memory itself."""

    name: str
    bytes: int
    zram: bool


@dataclass(frozen=True)
class Memory:
    """In bytes. `limit` is this process's control group's, None without one."""

    total: int
    available: int
    swaps: tuple[Swap, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Sensor:
    """An energy counter or a power rail of the kernel's, and whether this user may read it."""

    name: str
    path: str
    readable: bool


@dataclass(frozen=True)
class Board:
    """A Jetson. `power_mode` as `nvpmodel -q` prints it, on one line; frequencies in Hz."""

    power_mode: str | None = None
    gpu_clock: tuple[int, int] | None = None
    rails: tuple[Sensor, ...] = ()


@dataclass(frozen=True)
class DeviceFile:
    """A device file of the GPU's. `usable`: this user may read and write it."""

    path: str
    group: str
    usable: bool


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to. Where it is not there yet, of the one it would be made in."""

    path: str
    exists: bool
    writable: bool
    owner: int
    free_bytes: int


@dataclass(frozen=True)
class DataState:
    """One declared data set as it lies here: `complete`, `missing` or `corrupt`."""

    name: str
    state: str


@dataclass(frozen=True)
class Lab:
    """The native executor's environment. `starts`: its Python is there."""

    path: str
    python: str
    torch: str
    starts: bool


@dataclass(frozen=True)
class Project:
    """What the checkout and the data folder hold. `lab` is None where no environment was made."""

    results: Folder
    data: tuple[DataState, ...] | Problem
    data_root: str
    lab: Lab | None
    unresolved: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Situation:
    """The host, the engine and the checkout.

    `target` is what the checks hold the host against: the named one, else the one that fits, else
    the one that the least keeps from fitting. `refused` is why it (or any) cannot be used.
    """

    host: Host
    targets: Mapping[str, Target]
    target: Target | None
    refused: Problem | None
    user: User
    engine: Engine | Problem
    socket: Socket
    build_tool: BuildTool | Problem
    gpus: tuple[GpuState, ...]
    processor: Processor
    memory: Memory
    board: Board | None
    counters: tuple[Sensor, ...]
    devices: tuple[DeviceFile, ...]
    docker_group: bool
    project: Project
