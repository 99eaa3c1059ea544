"""The base of an image: is it here for the right architecture, and what does getting it cost?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import BuildFailed, DiskFull, ToolchainMissing
from narrowgauge.images.client import BuildClient
from narrowgauge.targets import Target

__all__ = ["BaseImage", "build_platform", "ensure_base", "registry_size", "require_emulation"]

Say = Callable[[str], None]

#: A line that many have; what is said of minutes is for it.
_LINE_BITS_PER_S = 100e6
#: Layers are compressed in the registry; unpacked, and while they are, they take about this more.
_UNPACKED = 2.5
#: Where Linux says which foreign programs it can run, and by whose name.
_EMULATORS = {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}
_BINFMT = Path("proc/sys/fs/binfmt_misc")


@dataclass(frozen=True)
class BaseImage:
    """A base that is in the engine. `digest` is the registry's, or the image's id where none is."""

    reference: str
    digest: str


def build_platform(client: BuildClient, target: Target, root: Path = Path("/")) -> str:
    """The platform to build for by emulation, such as `linux/arm64`; empty where none is needed.

    Raises ToolchainMissing where it is known that this host cannot emulate it.
    """
    here = client.architecture()
    if here in target.architectures:
        return ""
    wanted = target.architectures[0]
    if client.is_local():
        require_emulation(wanted, root)
    return f"linux/{wanted}"


def require_emulation(architecture: str, root: Path) -> None:
    """Raise ToolchainMissing, with what to install, unless Linux can run foreign programs."""
    if not (root / _BINFMT / _EMULATORS[architecture]).is_file():
        raise ToolchainMissing(
            f"this host cannot run programs for {architecture}, so it cannot build for it",
            why=f"{_EMULATORS[architecture]} is not registered in /{_BINFMT}",
            next_step="sudo apt-get install qemu-user-static binfmt-support; or build on the board"
            " itself: ./scripts/jetson.sh",
        )


def ensure_base(
    client: BuildClient, reference: str, platform: str, say: Say, pull: Callable[[list[str]], None]
) -> BaseImage:
    """Have the base in the engine; pull it where it is not, having said what that costs.

    `pull` runs a command and raises what its failure means. Raises DiskFull before the pull.
    """
    found = _here(client, reference, platform)
    if found is None:
        size = registry_size(client, reference, platform)
        _announce(reference, size, _free(client), say)
        words = [client.executable, "pull", *([f"--platform={platform}"] if platform else [])]
        pull([*words, reference])
        found = _here(client, reference, platform)
    if found is None:
        raise BuildFailed(f"{reference} was pulled, but the engine does not have it")
    digests = [entry.partition("@")[2] for entry in found.get("RepoDigests") or ()]
    return BaseImage(reference, digests[0] if digests else str(found["Id"]))


def registry_size(client: BuildClient, reference: str, platform: str) -> int | None:
    """How many bytes a pull downloads, as the registry says; None where it does not answer."""
    manifest = _manifest(client, reference)
    if manifest and "manifests" in manifest:
        wanted = platform.rpartition("/")[2] or client.architecture()
        chosen = [
            entry["digest"]
            for entry in manifest["manifests"]
            if entry.get("platform", {}).get("architecture") == wanted
        ]
        repository = reference.partition("@")[0].rpartition(":")[0]
        manifest = _manifest(client, f"{repository}@{chosen[0]}") if chosen else None
    if not manifest or "layers" not in manifest:
        return None
    return sum(int(layer["size"]) for layer in manifest["layers"])


def _manifest(client: BuildClient, reference: str) -> Mapping[str, Any] | None:
    done = client.run(["manifest", "inspect", reference])
    try:
        found: Mapping[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    except ValueError:
        return None
    return found or None


def _here(client: BuildClient, reference: str, platform: str) -> Mapping[str, Any] | None:
    found = client.inspect(reference)
    wanted = platform.rpartition("/")[2]
    # The engine keeps one image per name, so this may be the one for another machine.
    return found if found and (not wanted or found.get("Architecture") == wanted) else None


def _free(client: BuildClient) -> tuple[Path, int] | None:
    """The engine's folder and the bytes that are free there; None where it is on another host."""
    folder = client.root_folder()
    if folder is None or not client.is_local():
        return None
    try:
        return folder, shutil.disk_usage(folder).free
    except OSError:
        return None


def _announce(reference: str, size: int | None, free: tuple[Path, int] | None, say: Say) -> None:
    room = f"{free[1] / 1e9:.0f} GB free in {free[0]}" if free else "free disk unknown from here"
    if size is None:
        say(f"pulling the base {reference}: the registry does not say how large it is; {room}")
        return
    if free and free[1] < size * _UNPACKED:
        raise DiskFull(
            f"no room for the base {reference}",
            why=f"{size / 1e9:.1f} GB to download take about {size * _UNPACKED / 1e9:.1f} GB"
            f" unpacked; {room}",
            next_step="docker system df shows what takes the space; docker image prune frees some",
        )
    minutes = size * 8 / _LINE_BITS_PER_S / 60
    say(
        f"pulling the base {reference}: {size / 1e9:.2f} GB to download, {minutes:.0f} min at"
        f" 100 Mbit/s; {room}"
    )
