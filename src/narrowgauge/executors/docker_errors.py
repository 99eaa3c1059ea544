"""What the engine and the docker SDK say, as errors of ours with a next step.

The engine's texts are matched as Docker 20.10 to 28 write them; an unknown one is passed on whole.
"""

from __future__ import annotations

from narrowgauge.errors import (
    ContainerRefused,
    DiskFull,
    DockerPermission,
    DockerTooOld,
    DockerUnavailable,
    NarrowgaugeError,
)

__all__ = [
    "LEAST_API",
    "TOOLKIT",
    "architecture_error",
    "connection_error",
    "refusal_error",
    "too_old_error",
]

#: Docker 20.10: the first whose BuildKit takes our Dockerfiles, and the oldest that was tried.
#: Of what containers use, `--gpus` is the youngest (1.40); CDI is only used where it is offered.
LEAST_API = "1.41"

TOOLKIT = (
    "install the NVIDIA Container Toolkit, then:"
    " sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
)

_OTHER_IMAGE = "build the target that is for this host: narrowgauge doctor names it"

#: (part of the engine's text, what, next step); the first that is found counts.
_REFUSALS = (
    (
        'could not select device driver "cdi"',
        "this engine does not give devices by CDI",
        'Docker 25 to 27: "features": {"cdi": true} in /etc/docker/daemon.json, then'
        " sudo systemctl restart docker; or update to Docker 28",
    ),
    (
        "container runtime hook directly",
        "--gpus does not work on a Jetson",
        "choose the Jetson's own target: narrowgauge doctor names it",
    ),
    (
        "unsatisfied condition: cuda",
        "the driver of this host is too old for the image",
        "update the NVIDIA driver; narrowgauge doctor says to which",
    ),
    (
        "libnvidia-ml.so",
        "the engine finds no NVIDIA driver on its host",
        "is the driver loaded? nvidia-smi",
    ),
    (
        "could not select device driver",
        "this engine cannot give a container the GPU",
        TOOLKIT,
    ),
    (
        "unknown or invalid runtime name: nvidia",
        "this engine has no NVIDIA runtime",
        TOOLKIT,
    ),
    ("unknown runtime specified nvidia", "this engine has no NVIDIA runtime", TOOLKIT),
    ("unresolvable cdi devices", "this engine knows no CDI device for the GPU", TOOLKIT),
    (
        "error gathering device information",
        "a device file that the container asks for is not on this host",
        "is the driver loaded? nvidia-smi",
    ),
    (
        "exec format error",
        "the image is for another processor",
        _OTHER_IMAGE,
    ),
    (
        "does not match the specified platform",
        "the image is for another processor",
        _OTHER_IMAGE,
    ),
    (
        "does not match the detected host platform",
        "the image is for another processor",
        _OTHER_IMAGE,
    ),
    (
        "bind source path does not exist",
        "a folder that the container mounts is not there",
        "the engine must see the same file system as you do: is it on another machine?",
    ),
    (
        "no such image",
        "the image is not there any more",
        "narrowgauge images build TARGET",
    ),
    (
        "is already in use by container",
        "a container of this name is left from before",
        "narrowgauge attach RUN collects it",
    ),
)


def connection_error(error: BaseException, host: str) -> NarrowgaugeError:
    """Why no engine answers at `host`, told apart by what the socket said."""
    text = _chain(error)
    if host.startswith("ssh://"):
        return DockerUnavailable(
            f"an engine cannot be used over ssh: {host}",
            why="a run mounts folders of this host, and that engine sees only those of its own",
            next_step="run narrowgauge on that machine; or use the engine of this one: unset"
            " DOCKER_HOST, docker context use default; or --executor native",
        )
    if "permission denied" in text.lower():
        return DockerPermission(
            f"the Docker engine at {host} does not let you in",
            why="permission denied on its socket",
            next_step="sudo usermod -aG docker $USER, then log in again;"
            " or run without Docker: --executor native",
        )
    if "no such file" in text.lower():
        why = "its socket does not exist: Docker is not installed, or not started"
    elif "refused" in text.lower():
        why = "its socket is there, but nothing listens: the engine is not started"
    else:
        why = text
    return DockerUnavailable(
        f"no Docker engine answers at {host}",
        why=why,
        next_step="sudo systemctl start docker (or: sudo apt-get install docker.io);"
        " or run without Docker: --executor native",
    )


def too_old_error(version: str, api: str) -> DockerTooOld:
    """The error for an engine below LEAST_API."""
    return DockerTooOld(
        f"the Docker engine is too old: version {version or 'unknown'} (API {api})",
        why=f"narrowgauge needs Docker 20.10 (API {LEAST_API}) or newer: its BuildKit, --gpus",
        next_step="update Docker (sudo apt-get install docker.io, or Docker's own packages);"
        " or run without it: --executor native",
    )


def architecture_error(image: str, made: str, has: str) -> ContainerRefused:
    """The error for an image that is for another processor than the engine's."""
    return ContainerRefused(
        f"the image {image} is for {made}, and this engine runs {has}",
        why="under an emulator its numbers would be the emulator's",
        next_step=f"docker image rm {image}, then build it here; {_OTHER_IMAGE}",
    )


def refusal_error(explanation: str, status: int | None) -> NarrowgaugeError:
    """The engine's refusal to create or start a container, with the way out where we know one."""
    text = explanation.strip()
    lowered = text.lower()
    if "no space left on device" in lowered:
        return DiskFull(
            "the engine has no room left",
            why=text,
            next_step="docker system df shows what takes it; docker image prune frees some",
        )
    for part, what, next_step in _REFUSALS:
        if part in lowered:
            return ContainerRefused(what, why=text, next_step=next_step)
    return ContainerRefused(
        "the engine refused the container",
        why=f"{text} (HTTP status {status})" if status else text,
        next_step="narrowgauge plan EXPERIMENT prints the same as a docker run line to try by hand",
    )


def _chain(error: BaseException) -> str:
    """Every message of an exception and its causes: the SDK wraps the socket's own four deep."""
    parts = []
    current: BaseException | None = error
    while current is not None:
        parts.append(str(current))
        current = current.__cause__ or current.__context__
    return "; ".join(dict.fromkeys(filter(None, parts)))
