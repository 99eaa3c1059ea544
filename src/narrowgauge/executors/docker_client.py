"""The Docker engine through its SDK: reaching it, asking it, and what its answers mean.

The SDK is imported here and nowhere else at module level: its import costs more than the rest of
the launcher, and `plan`, `list` and `show` never need it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import docker
import docker.utils
import requests.exceptions
from docker.errors import APIError, DockerException, NotFound

from narrowgauge.executors.base import ExecutorFacts
from narrowgauge.executors.docker_errors import (
    LEAST_API,
    architecture_error,
    connection_error,
    refusal_error,
    too_old_error,
)
from narrowgauge.machine import ARCHITECTURES
from narrowgauge.targets import version_tuple

__all__ = [
    "DOCKER",
    "GoneError",
    "ask",
    "connect",
    "engine_address",
    "engine_facts",
    "inspect_image",
    "require_architecture",
]

#: The executor's name, in handles and records.
DOCKER = "docker"

_DEFAULT_HOST = "unix:///var/run/docker.sock"
#: What the engine says of a container while `docker rm --force` from outside is at work.
_BEING_REMOVED = ("marked for removal", "is already in progress")


class GoneError(Exception):
    """What was asked about is not there (any more). Never leaves the executor."""


def connect(env: Mapping[str, str], timeout_s: int = 60) -> docker.APIClient:
    """A client for the engine that DOCKER_HOST or Docker's context names.

    `timeout_s` is for each answer. Raises DockerUnavailable, DockerPermission, DockerTooOld.
    """
    host, _ = engine_address(env)
    try:
        settings = docker.utils.kwargs_from_env(environment=dict(env))
        settings["base_url"] = host
        if host.startswith("unix://"):
            _knock(host.removeprefix("unix://"))
        client = _Client(version="auto", timeout=timeout_s, **settings)
        client.address = host
        return client
    except (DockerException, requests.exceptions.RequestException, OSError) as error:
        raise connection_error(error, host) from error


def engine_address(env: Mapping[str, str]) -> tuple[str, bool]:
    """Where the engine is, by DOCKER_HOST or Docker's context, and whether that asks for TLS."""
    named = env.get("DOCKER_HOST")
    host, tls = (named, False) if named else _context() or (_DEFAULT_HOST, False)
    return host, tls or bool(env.get("DOCKER_TLS_VERIFY"))


def inspect_image(client: docker.APIClient, name: str) -> Mapping[str, Any] | None:
    """What the engine says of an image; None where it has none. Its errors are ours."""
    try:
        found: Mapping[str, Any] = client.inspect_image(name)  # type: ignore[no-untyped-call]
    except NotFound:
        return None
    except APIError as error:
        raise refusal_error(str(error.explanation), error.status_code) from error
    except (DockerException, requests.exceptions.RequestException, OSError) as error:
        raise connection_error(error, _address(client)) from error
    return found


def engine_facts(version: Mapping[str, Any], info: Mapping[str, Any]) -> ExecutorFacts:
    """What an engine offers, from its answers to `version` and `info`."""
    return ExecutorFacts(
        name=DOCKER,
        version=str(version.get("Version", "")),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        cdi=_offers_cdi(info),
    )


def require_architecture(client: docker.APIClient, name: str) -> None:
    """Refuse an image for another processor than the engine's. Raises ContainerRefused.

    With an emulator registered it would start, and every number would be the emulator's; without
    one it starts too, and ends with `exec format error` and no word of why.
    """
    found = inspect_image(client, name) or {}
    made, has = found.get("Architecture"), ask(client, client.version).get("Arch")
    if made and has and ARCHITECTURES.get(made, made) != ARCHITECTURES.get(has, has):
        raise architecture_error(name, str(made), str(has))


def ask(client: docker.APIClient, call: Callable[[], Any]) -> Any:
    """One request, its errors translated. Raises GoneError for what is not there."""
    try:
        return call()
    except NotFound as error:
        said = str(error.explanation).lower()
        if "no such container" in said or "no such volume" in said:
            raise GoneError from error
        raise refusal_error(str(error.explanation), error.status_code) from error
    except APIError as error:
        if any(words in str(error.explanation).lower() for words in _BEING_REMOVED):
            raise GoneError from error
        raise refusal_error(str(error.explanation), error.status_code) from error
    except (DockerException, requests.exceptions.RequestException, OSError) as error:
        raise connection_error(error, _address(client)) from error


class _Client(docker.APIClient):
    """Keeps what the engine said of its version when it was first asked: asking takes it 5 ms."""

    #: Where the engine is, in the user's words; the SDK's own base_url names no socket.
    address = ""

    def version(self, api_version: bool = True) -> dict[str, Any]:
        if "_said" not in self.__dict__:
            self._said: dict[str, Any] = super().version(api_version)
        return self._said

    def _retrieve_server_version(self) -> str:
        """Asked by the SDK as it connects, before it refuses a version without a way out."""
        api = str(super()._retrieve_server_version())  # type: ignore[misc]
        if version_tuple(api) < version_tuple(LEAST_API):
            raise too_old_error(str(self.version().get("Version", "")), api)
        return api


def _address(client: docker.APIClient) -> str:
    return str(getattr(client, "address", "") or client.base_url)


def _knock(path: str) -> None:
    """Try the socket itself: its own error says more than the SDK's, which wraps it four deep."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocker:
        knocker.connect(path)


def _context() -> tuple[str, bool] | None:
    """The host of `docker context use NAME` (rootless engines, Docker Desktop), and whether the
    context has certificates for it."""
    if not (Path.home() / ".docker" / "config.json").exists():
        return None
    try:
        context = docker.ContextAPI.get_current_context()
    except (DockerException, OSError, ValueError):
        return None
    return (str(context.Host), context.TLSConfig is not None) if context.Host else None


def _offers_cdi(info: Mapping[str, Any]) -> bool:
    """Whether this engine gives devices by CDI and knows one of NVIDIA's.

    Docker 28.2 lists the devices; 25 to 28.1 name the folders of their specifications, which are
    looked into here; an older one, or one with CDI switched off, says nothing.
    """
    folders = info.get("CDISpecDirs") or ()
    listed = info.get("DiscoveredDevices")
    if listed is not None:
        return any(str(device.get("ID", "")).startswith("nvidia.com/") for device in listed)
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        if any("nvidia" in name for name in names):
            return True
    return False
