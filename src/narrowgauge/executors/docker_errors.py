"""What the engine and the docker SDK say, as errors of ours with a next step.

The engine's texts are matched as Docker 20.10 to 28 write them; an unknown one is passed on whole.
"""

from __future__ import annotations

from narrowgauge.errors import (
    ContainerRefused,
    DiskFull,
    DockerPermission,
    DockerUnavailable,
    NarrowgaugeError,
)

__all__ = ["connection_error", "refusal_error"]

_TOOLKIT = (
    "install the NVIDIA Container Toolkit, then:"
    " sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
)

#: (part of the engine's text, what, next step); the first that is found counts.
_REFUSALS = (
    (
        "could not select device driver",
        "this engine cannot give a container the GPU",
        _TOOLKIT,
    ),
    (
        "unknown or invalid runtime name: nvidia",
        "this engine has no NVIDIA runtime",
        _TOOLKIT,
    ),
    ("unknown runtime specified nvidia", "this engine has no NVIDIA runtime", _TOOLKIT),
    ("unresolvable cdi devices", "this engine knows no CDI device for the GPU", _TOOLKIT),
    (
        "error gathering device information",
        "a device file that the container asks for is not on this host",
        "is the driver loaded? nvidia-smi",
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
