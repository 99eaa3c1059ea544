"""Gathers the Situation. Whatever may take its time is asked at once, and not waited for long."""

from __future__ import annotations

import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from narrowgauge.checkout import Checkout
from narrowgauge.doctor import probe_files
from narrowgauge.doctor.situation import (
    BuildTool,
    DataState,
    Engine,
    Folder,
    GpuState,
    Lab,
    Problem,
    Project,
    Situation,
    Socket,
    User,
)
from narrowgauge.errors import NarrowgaugeError, NotApplicableError
from narrowgauge.fitting import nearest_miss
from narrowgauge.machine import ROOT, Host, ask_power_mode, has_driver, probe_host
from narrowgauge.selection import pick_target
from narrowgauge.targets import Target, load_targets, target_named, unresolved

__all__ = ["Surroundings", "gather", "gpu_states"]

#: How long what answers slowly is waited for, in seconds, all of it together; the engine and the
#: docker command, which a busy host slows; and all where there is a GPU, whose driver takes its
#: time.
_PATIENCE_S = 1.5
_PATIENCE_DOCKER_S = 5.0
_PATIENCE_GPU_S = 8.0
#: How much longer the thread that asks the engine waits than whoever wants its answer.
_SLACK_S = 60
#: What the NVIDIA Container Toolkit puts on the path; with it the engine's `--gpus` works.
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")

T = TypeVar("T")


@dataclass(frozen=True)
class Surroundings:
    """Where a Situation is gathered. `machine` is the kernel's name for the processor, None for
    this host's; `patience_s` None for the usual."""

    checkout: Checkout
    env: Mapping[str, str]
    data_root: Path
    root: Path = ROOT
    machine: str | None = None
    user: User = field(default_factory=probe_files.this_user)
    patience_s: float | None = None


class _Asked(Generic[T]):
    """A question asked in a thread of its own, which may never come back."""

    def __init__(self, what: str, ask: Callable[[], T]) -> None:
        self._what = what
        self._box: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(ask,), daemon=True).start()

    def _run(self, ask: Callable[[], T]) -> None:
        try:
            self._box.put((ask(), None))
        except Exception as error:  # raised again where the answer is wanted
            self._box.put((None, error))

    def answer(self, until: float) -> T | Problem:
        """The answer; a Problem where it was an error of ours, or did not come in time."""
        try:
            found, error = self._box.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return Problem(f"{self._what} did not answer in time", late=True)
        if isinstance(error, NarrowgaugeError):
            return Problem.of(error)
        if isinstance(error, OSError):
            return Problem(f"{self._what} cannot be asked", str(error))
        if error is not None:
            raise error
        return cast(T, found)


def gather(where: Surroundings, on: str | None) -> Situation:
    """Ask host, engine and checkout. Raises UsageError for a target or file that is wrong."""
    began = time.monotonic()
    targets = load_targets(where.checkout.targets_file)
    if on is not None:
        target_named(targets, on)
    slow = has_driver(where.root) or (where.root / "etc/nv_tegra_release").exists()
    patience = where.patience_s or (_PATIENCE_GPU_S if slow else _PATIENCE_S)
    patience_docker = where.patience_s or (_PATIENCE_GPU_S if slow else _PATIENCE_DOCKER_S)
    until, until_docker = began + patience, began + patience_docker
    asked_tool = _Asked("the docker command", lambda: _build_tool(where.env))
    asked_data = _Asked("the data folder", lambda: _data(where.data_root))
    asked_mode = _Asked("nvpmodel", lambda: ask_power_mode(where.root))
    asked_gpus = _Asked("NVML", lambda: _gpus(where.root))
    host = _host(_Asked("NVML", lambda: probe_host(where.root, where.machine)).answer(until), where)
    target, refused = _target(targets, host, on)
    asked_engine = _Asked("the Docker engine", lambda: _engine(where, target, patience_docker))
    files, user = where.root, where.user
    mode, gpus = asked_mode.answer(until), asked_gpus.answer(until)
    power_mode = None if isinstance(mode, Problem) else mode
    engine = asked_engine.answer(until_docker)
    return Situation(
        host=host,
        targets=targets,
        target=target,
        refused=refused,
        user=user,
        engine=engine,
        socket=_socket(where, engine),
        build_tool=asked_tool.answer(until_docker),
        gpus=() if isinstance(gpus, Problem) else gpus,
        processor=probe_files.processor(files),
        memory=probe_files.memory(files),
        board=probe_files.board(files, power_mode, user) if host.l4t is not None else None,
        counters=probe_files.counters(files, user),
        devices=probe_files.devices(files, host, user),
        docker_group=probe_files.in_group(files, "docker", user),
        project=Project(
            results=_results(where.checkout.results),
            data=asked_data.answer(until),
            data_root=str(where.data_root),
            lab=_lab(where.checkout),
            unresolved=unresolved(targets),
        ),
    )


def gpu_states(nvml: Any) -> tuple[GpuState, ...]:
    """What an initialised NVML says of each GPU. Raises its NVMLError where it says nothing."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        energy = _told(nvml, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))  # noqa: B023
        mode = _told(nvml, lambda: nvml.nvmlDeviceGetPersistenceMode(handle))  # noqa: B023
        found.append(
            GpuState(
                name=str(nvml.nvmlDeviceGetName(handle)),
                energy=energy is not None,
                persistence=None if mode is None else bool(mode),
            )
        )
    return tuple(found)


def _told(nvml: Any, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _gpus(root: Path) -> tuple[GpuState, ...]:
    if not has_driver(root):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # what it says is the host's driver_problem
    try:
        return gpu_states(pynvml)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _host(found: Host | Problem, where: Surroundings) -> Host:
    """A driver that hangs is a host whose driver has a problem."""
    if isinstance(found, Host):
        return found
    without_nvml = probe_host(where.root, where.machine, nvml=False)
    return replace(without_nvml, driver_problem=found.what)


def _target(
    targets: Mapping[str, Target], host: Host, on: str | None
) -> tuple[Target | None, Problem | None]:
    try:
        return pick_target(targets, host, on), None
    except NotApplicableError as error:
        held = target_named(targets, on) if on is not None else nearest_miss(targets, host)
        return held, Problem.of(error)


def _engine(where: Surroundings, target: Target | None, patience: float) -> Engine:
    from narrowgauge.executors.docker_client import ask, connect, engine_facts, inspect_image

    # Far longer than anybody waits, on a busy host too: what is late is then told as such.
    client = connect(where.env, timeout_s=math.ceil(patience) + _SLACK_S)
    try:
        version, info = ask(client, client.version), ask(client, client.info)
        names: tuple[str, ...] = ()
        if target is not None:
            named = {"name": f"narrowgauge-cache-{target.name}-"}
            listed = ask(client, lambda: client.volumes(filters=named))
            names = tuple(sorted(each["Name"] for each in listed.get("Volumes") or ()))
        address = str(getattr(client, "address", ""))
        folder = str(info.get("DockerRootDir") or "")
        options = info.get("SecurityOptions") or ()
        return Engine(
            address=address,
            api=str(version.get("ApiVersion", "")),
            architecture=str(version.get("Arch", "")),
            facts=engine_facts(version, info),
            default_runtime=str(info.get("DefaultRuntime") or ""),
            hook=any(shutil.which(hook, path=where.env.get("PATH")) for hook in _HOOKS),
            folder=folder,
            free_bytes=_free(Path(folder)) if address.startswith("unix://") else None,
            rootless=any("rootless" in word for word in options),
            remaps=any("name=userns" in word for word in options),
            limits_memory=bool(info.get("MemoryLimit", True)),
            limits_swap=bool(info.get("SwapLimit", True)),
            has_image=target is not None and inspect_image(client, target.alias) is not None,
            volumes=tuple(name for name in names if name.endswith(f"-{where.user.uid}")),
        )
    finally:
        client.close()


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _socket(where: Surroundings, engine: Engine | Problem) -> Socket:
    from narrowgauge.executors.docker_client import engine_address

    named, tls = engine_address(where.env)
    address = engine.address if isinstance(engine, Engine) else named
    path = address.removeprefix("unix://")
    mode = probe_files.socket_mode(Path(path)) if address.startswith("unix://") else None
    return Socket(address, tls, mode)


def _build_tool(env: Mapping[str, str]) -> BuildTool:
    from narrowgauge.images.client import find_client
    from narrowgauge.targets import Builder

    client = find_client(Builder.BUILDKIT, env)
    return BuildTool(client.executable, client.buildx)


def _data(root: Path) -> tuple[DataState, ...]:
    """Each declared set. One that was never verified is hashed here, and that is remembered."""
    from narrowgauge_contract.datasets import DATA_SETS
    from narrowgauge_data import local

    found = []
    for dataset in DATA_SETS.values():
        problems = {state.problem for state in local.check(dataset, root).files} - {""}
        state = "corrupt" if "corrupt" in problems else "missing" if problems else "complete"
        found.append(DataState(dataset.name, state))
    return tuple(found)


def _results(path: Path) -> Folder:
    """The results folder or, where one of its experiments' folders cannot be written, that one."""
    there = next(place for place in (path, *path.parents) if place.exists())
    inside = sorted(each for each in path.glob("*") if each.is_dir())
    shut = [each for each in inside if not os.access(each, os.W_OK | os.X_OK)]
    shown = shut[0] if shut else there
    return Folder(
        path=str(shown if shut else path),
        exists=path.is_dir(),
        writable=there.is_dir() and not shut and os.access(there, os.W_OK | os.X_OK),
        owner=shown.stat().st_uid,
        free_bytes=_free(there) or 0,
    )


def _lab(checkout: Checkout) -> Lab | None:
    from narrowgauge.environment import STAMP_FILE, Stamp
    from narrowgauge_contract.codec import decode, read_json

    folder = checkout.lab_environment
    try:
        stamp = decode(Stamp, read_json(folder / STAMP_FILE), str(folder))
    except (OSError, NarrowgaugeError):
        return None
    starts = os.access(folder / "bin" / "python", os.X_OK)
    return Lab(str(folder), stamp.python, stamp.torch, starts)
