"""Builds an image by content: base, context, docker build, verify, alias."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from narrowgauge.errors import BuildFailed, UnresolvedPins, UsageError, disk_full
from narrowgauge.images.base import BaseImage, build_platform, ensure_base
from narrowgauge.images.client import BuildClient, find_client, translate
from narrowgauge.images.content import (
    IN_IMAGE,
    LABEL_BASE_DIGEST,
    LABEL_CONTENT,
    LABEL_SOURCE,
    content_tag,
    dockerfile_path,
    image_name,
    lock_path,
    notebook_lock_path,
    source_hash,
    standin_name,
    verify_path,
)
from narrowgauge.images.inspect import facts_of, find_image
from narrowgauge.images.render import check, render_dockerfile, render_verify
from narrowgauge.targets import Target
from narrowgauge_contract.record import ImageFacts

__all__ = [
    "BuildRequest", "build_image", "ensure_image", "make_context", "stream_command", "verify_image",
]  # fmt: skip

Say = Callable[[str], None]

#: What `docker build` may read of a checkout, besides the lock, the check and the wheels.
_SOURCES = (
    Path("docker/entrypoint.sh"),
    Path("experiments"),
    *(Path("src") / package for package in IN_IMAGE),
)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "build")
_WHEELS = Path("docker/wheels")
_TAIL_LINES = 40


@dataclass(frozen=True)
class BuildRequest:
    """What to build. `base`: a stand-in for the target's own. `wheels`: a folder of every wheel.

    `no_cache`: every layer anew. `frozen`: refuse where a pin is unresolved.
    """

    root: Path
    target: Target
    base: str | None = None
    wheels: Path | None = None
    no_cache: bool = False
    frozen: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def ensure_image(root: Path, target: Target, env: Mapping[str, str], say: Say) -> ImageFacts:
    """The image of `target` for the checkout `root`: the one that is there, or a new build.

    Raises NotApplicableError, DockerUnavailable, DockerPermission, ToolchainMissing,
    BaseUnreachable, DiskFull, BuildFailed.
    """
    client = find_client(target.builder, env)
    found = find_image(client.inspect, root, target)
    return found or build_image(BuildRequest(root, target, env=env), say)


def build_image(request: BuildRequest, say: Say) -> ImageFacts:
    """Build, verify and alias one image; nothing where it is there. Raises as `ensure_image` does,
    and UnresolvedPins where `frozen` forbids it."""
    root, target = request.root, request.target
    if request.frozen:
        _require_pins(target)
    check(
        root,
        {
            dockerfile_path(target): render_dockerfile(root, target),
            verify_path(target): render_verify(root, target),
        },
    )
    client = find_client(target.builder, request.env)
    platform = build_platform(client, target)
    base = _base(request, client, platform, say)
    tag = content_tag(
        root,
        target,
        standin_base=request.base,
        standin_digest=base.digest if request.base and base else "",
    )
    name = image_name(target, tag)
    facts = None if request.no_cache else _there(client, name)
    if facts is None:
        base = base or _ensure_base(client, target.base.reference, platform, say)
        _build(request, client, base, platform, tag, say)
        facts = _there(client, name)
        if facts is None:
            raise BuildFailed(f"{name} was built, but the engine does not have it")
    else:
        say(f"{name} is up to date")
    for alias in [target.alias, *([standin_name(root, target)] if request.base else [])]:
        client.tag(name, alias)
    if target.unresolved:
        say(
            f"unresolved pins: {', '.join(target.unresolved)}; its records say so. Where registry"
            f" and indexes answer: narrowgauge images lock {target.name}"
        )
    return facts


def verify_image(client: BuildClient, name: str, platform: str, source: str, say: Say) -> None:
    """Run the image's own check as a run would, and compare the source it says it holds."""
    words = [client.executable, "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL"]
    words += [f"--platform={platform}"] if platform else []
    words += ["--security-opt=no-new-privileges", "--tmpfs=/tmp:exec", "--tmpfs=/cache:exec"]
    words += ["--entrypoint=/opt/narrowgauge/verify", name]
    log = stream_command(words, client.env, f"the check of {name} fails", say)
    if f"source {source}" not in log:
        raise BuildFailed(
            f"{name} holds another source than this checkout",
            why=f"expected source {source}\n" + "\n".join(log[-5:]),
            next_step="was a file changed while it was built? build again",
        )


def _require_pins(target: Target) -> None:
    if target.unresolved:
        raise UnresolvedPins(
            f"--frozen, and '{target.name}' has unresolved pins: {', '.join(target.unresolved)}",
            why="what would be built could differ from what others build from the same commit",
            next_step=f"narrowgauge images lock {target.name}, where registry and indexes answer",
        )


def _base(request: BuildRequest, client: BuildClient, platform: str, say: Say) -> BaseImage | None:
    """A stand-in's base, whose digest is a part of the tag; the true base is asked for later."""
    return _ensure_base(client, request.base, platform, say) if request.base else None


def _ensure_base(client: BuildClient, reference: str, platform: str, say: Say) -> BaseImage:
    def pull(words: list[str]) -> None:
        stream_command(words, client.env, f"{reference} cannot be pulled", say, reference)

    return ensure_base(client, reference, platform, say, pull)


def _there(client: BuildClient, name: str) -> ImageFacts | None:
    inspected = client.inspect(name)
    return None if inspected is None else facts_of(name, inspected)


def _build(
    request: BuildRequest,
    client: BuildClient,
    base: BaseImage,
    platform: str,
    tag: str,
    say: Say,
) -> None:
    name = image_name(request.target, tag)
    # Its own name only once it is checked: what has that name is taken without another look.
    unchecked = f"{name}-unchecked"
    source = source_hash(request.root)
    labels = {LABEL_BASE_DIGEST: base.digest, LABEL_CONTENT: tag, LABEL_SOURCE: source}
    say(_cost(request))
    with make_context(request) as context:
        say(f"building {name} on {base.reference}" + (f" for {platform}" if platform else ""))
        words = [*client.build_words(), "--progress=plain", "--tag", unchecked]
        words += ["--platform", platform] if platform else []
        for key, value in sorted(labels.items()):
            words += ["--label", f"{key}={value}"]
        words += ["--no-cache"] if request.no_cache else []
        words += ["--file", str(context / dockerfile_path(request.target)), str(context)]
        stream_command(words, client.build_environment(), f"the build of {name} failed", say)
    verify_image(client, unchecked, platform, source, say)
    client.tag(unchecked, name)
    client.run(["rmi", unchecked])


def _cost(request: BuildRequest) -> str:
    """What a first build downloads, and how long that takes; layers that are there cost nothing."""
    size = request.target.download_mb
    if size is None or request.wheels is not None:
        return f"building the image of {request.target.name}: a few minutes the first time"
    return (
        f"building the image of {request.target.name}: about {size} MB to download the first time"
        f" ({size / 5:.0f} s at 5 MB/s), and about a minute of work"
    )


@contextmanager
def make_context(request: BuildRequest) -> Iterator[Path]:
    """A folder with the Dockerfile and exactly what it may read, laid out as a checkout.

    Always the same one for a checkout and target: BuildKit knows a context by its path, and sends
    only what differs from the last. Files are linked where the file systems allow it, else copied.
    """
    target, standin = request.target, request.base is not None
    locks = [lock_path(target)] + ([notebook_lock_path(target)] if target.notebook else [])
    with _own_folder(_context_folder(request)) as context:
        try:
            for relative in (*_SOURCES, *locks):
                _place(request.root / relative, context / relative)
            _place_wheels(request, context / _WHEELS)
            dockerfile = context / dockerfile_path(target)
            dockerfile.parent.mkdir(parents=True)
            dockerfile.write_text(
                render_dockerfile(request.root, target, request.base), encoding="utf-8"
            )
            check = render_verify(request.root, target, standin=standin)
            (context / verify_path(target)).write_text(check, encoding="utf-8")
        except OSError as error:
            # copytree gathers what went wrong as text, without an errno.
            if any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
                raise disk_full(context, "the build context") from error
            raise
        yield context


def _context_folder(request: BuildRequest) -> Path:
    base = request.env.get("XDG_CACHE_HOME", "")
    cache = Path(base) if base.startswith("/") else Path.home() / ".cache"
    key = hashlib.sha256(f"{request.root}\0{request.target.name}".encode()).hexdigest()[:12]
    return cache / "narrowgauge" / f"context-{request.target.name}-{key}"


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for one process at a time, gone at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(folder, ignore_errors=True)  # a killed build may have left it
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _place(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, destination, ignore=_LEFT_OUT)
    elif source.is_file():
        shutil.copy2(source, destination)
    else:
        raise BuildFailed(f"{source} is missing, and the image needs it")


def _place_wheels(request: BuildRequest, destination: Path) -> None:
    folder = request.wheels or request.root / _WHEELS
    wheels = sorted(folder.glob("*.whl"))
    if request.wheels is not None and not wheels:
        raise UsageError(
            f"--wheels {folder} holds no wheel",
            next_step="leave the option out to take packages from their index",
        )
    destination.mkdir(parents=True)
    for wheel in wheels:
        try:
            os.link(wheel, destination / wheel.name)
        except OSError:
            shutil.copy2(wheel, destination / wheel.name)


def stream_command(
    words: list[str], env: Mapping[str, str], what: str, say: Say, pulling: str = ""
) -> list[str]:
    """Run a command and pass its lines on; its last lines. Raises what `translate` gives."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        words,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            say(line.rstrip())
    if process.returncode != 0:
        raise translate("\n".join(tail), what, pulling=pulling)
    return list(tail)
