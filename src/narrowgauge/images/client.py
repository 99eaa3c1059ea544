"""A docker command line that can build with BuildKit.

The SDK cannot build with BuildKit at all. Of the command lines, those before 23 ask the engine's
own BuildKit; later ones need the buildx component. A machine may have both kinds on its PATH.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import (
    BaseUnreachable,
    BuildFailed,
    DiskFull,
    DockerPermission,
    DockerUnavailable,
    NarrowgaugeError,
    ToolchainMissing,
)
from narrowgauge.targets import Builder

__all__ = ["BuildClient", "find_client", "translate"]

_QUICK_S = 30.0
#: The last client that reaches the engine's own BuildKit without buildx is 22.
_BUILDX_ONLY_SINCE = 23

_GET_BUILDX = (
    "install buildx: apt-get install docker-buildx (Debian 13, Ubuntu 24.04) "
    "or docker-buildx-plugin (Docker's own packages)"
)


@dataclass(frozen=True)
class BuildClient:
    """One docker executable, how it builds, and the environment its commands get."""

    executable: str
    buildx: bool
    env: Mapping[str, str]

    def build_words(self) -> tuple[str, ...]:
        """The start of a build command; `--load` puts the result where runs find it."""
        if self.buildx:
            return (self.executable, "buildx", "build", "--load")
        return (self.executable, "build")

    def build_environment(self) -> dict[str, str]:
        return {**self.env, "DOCKER_BUILDKIT": "1"}

    def run(
        self, words: Sequence[str], timeout_s: float | None = _QUICK_S
    ) -> subprocess.CompletedProcess[str]:
        """`docker WORDS`, its output captured; 127 where it could not run or took too long."""
        return _run([self.executable, *words], self.env, timeout_s)

    def architecture(self) -> str:
        """The engine's, as Docker names it: `amd64`. Raises what `translate` gives."""
        return self._ask("version", "{{.Server.Arch}}")

    def root_folder(self) -> Path | None:
        """Where the engine keeps its images, on its own host."""
        folder = self._ask("info", "{{.DockerRootDir}}")
        return Path(folder) if folder else None

    def is_local(self) -> bool:
        """Whether the engine runs on this host itself, not elsewhere and not in a machine of its
        own (Docker Desktop)."""
        host = self.env.get("DOCKER_HOST", "")
        if host and not host.startswith("unix://"):
            return False
        return self._ask("info", "{{.OperatingSystem}}") != "Docker Desktop"

    def _ask(self, command: str, template: str) -> str:
        done = self.run([command, "--format", template])
        if done.returncode != 0:
            raise translate(done.stderr, "the Docker engine does not answer")
        return done.stdout.strip()

    def tag(self, name: str, alias: str) -> None:
        """Give an image another name. Raises what `translate` gives."""
        done = self.run(["tag", name, alias])
        if done.returncode != 0:
            raise translate(done.stderr, f"{name} cannot be tagged {alias}")

    def inspect(self, name: str) -> Mapping[str, Any] | None:
        """What the engine says of an image; None where it has none of that name."""
        done = _run([self.executable, "image", "inspect", name], self.env)
        if done.returncode == 0:
            found: Mapping[str, Any] = json.loads(done.stdout)[0]
            return found
        if "no such image" in done.stderr.lower():
            return None
        raise translate(done.stderr, f"cannot inspect the image {name}")


def find_client(builder: Builder | None, env: Mapping[str, str]) -> BuildClient:
    """The first docker on PATH that can build for `builder`; any, where nothing is built (None).

    Raises DockerUnavailable (no docker at all) or ToolchainMissing (none that has BuildKit).
    """
    tried = []
    for executable in _executables(env):
        if _answers([executable, "buildx", "version"], env):
            return BuildClient(executable, buildx=True, env=env)
        major = _major([executable, "--version"], env)
        if builder is Builder.BUILDKIT and major is not None and major < _BUILDX_ONLY_SINCE:
            return BuildClient(executable, buildx=False, env=env)
        if builder is None:
            return BuildClient(executable, buildx=False, env=env)
        tried.append(f"{executable} (version {major or 'unknown'}) has no buildx")
    if not tried:
        raise DockerUnavailable(
            "there is no docker command on the PATH",
            next_step="apt-get install docker.io, or choose --executor native",
        )
    raise ToolchainMissing(
        "no docker command here can build with BuildKit",
        why="\n".join(tried),
        next_step=_GET_BUILDX,
    )


#: What a failing docker says, and what it means; the first match counts.
_MEANINGS: tuple[tuple[str, type[NarrowgaugeError], str], ...] = (
    (
        r"permission denied.*(docker|daemon).*(socket|\.sock)",
        DockerPermission,
        "add yourself to the group docker (sudo usermod -aG docker $USER, then log in again)",
    ),
    (
        r"cannot connect to the docker daemon|is the docker daemon running",
        DockerUnavailable,
        "start it: sudo systemctl start docker",
    ),
    (
        r"no space left on device|disk quota exceeded",
        DiskFull,
        "docker system df shows what takes the space; docker system prune frees some",
    ),
    (
        r"exec format error|exec user process caused",
        ToolchainMissing,
        "the image is for another machine, and this host cannot run its programs:"
        " sudo apt-get install qemu-user-static binfmt-support",
    ),
    (
        r"buildx.*(missing|broken)|requires buildkit|is not a docker command",
        ToolchainMissing,
        _GET_BUILDX,
    ),
)
_UNREACHABLE = re.compile(
    r"no such host|connection refused|i/o timeout|tls handshake|network is unreachable"
    r"|pull access denied|unauthorized|manifest unknown|not found|server misbehaving"
    r"|temporary failure in name resolution|deadline exceeded|no route to host|\beof\b",
    re.IGNORECASE,
)


def translate(output: str, what: str, *, pulling: str = "") -> NarrowgaugeError:
    """The error class that a failing docker command's output belongs to.

    `pulling`: the image that was being pulled, when only a pull can have failed.
    """
    tail = "\n".join(output.strip().splitlines()[-30:])
    for pattern, kind, next_step in _MEANINGS:
        if re.search(pattern, output, re.IGNORECASE | re.DOTALL):
            return kind(what, why=tail, next_step=next_step)
    if pulling and _UNREACHABLE.search(output):
        return BaseUnreachable(
            f"the base image {pulling} is not here and cannot be pulled",
            why=tail,
            next_step="connect to the registry, or bring it: docker save on another machine and "
            "docker load here;\nor run without a container: --executor native",
        )
    return BuildFailed(what, why=tail, next_step="the log above says which step failed")


def _executables(env: Mapping[str, str]) -> Iterator[str]:
    seen = set()
    for folder in env.get("PATH", os.defpath).split(os.pathsep):
        path = Path(folder or ".") / "docker"
        if path.is_file() and os.access(path, os.X_OK) and path.resolve() not in seen:
            seen.add(path.resolve())
            yield str(path)


def _answers(words: list[str], env: Mapping[str, str]) -> bool:
    return _run(words, env).returncode == 0


def _major(words: list[str], env: Mapping[str, str]) -> int | None:
    match = re.search(r"version v?([0-9]+)\.", _run(words, env).stdout)
    return int(match.group(1)) if match else None


def _run(
    words: list[str], env: Mapping[str, str], timeout_s: float | None = _QUICK_S
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, env=dict(env), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))
