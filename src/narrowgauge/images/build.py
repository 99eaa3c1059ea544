"""Builds an image by content: base, context, docker build, verify, alias."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from narrowgauge.errors import BuildFailed, NotApplicableError, UsageError, disk_full
from narrowgauge.images.client import BuildClient, find_client, translate
from narrowgauge.images.content import (
    LABEL_BASE_DIGEST,
    LABEL_CONTENT,
    LABEL_SOURCE,
    content_tag,
    dockerfile_path,
    image_name,
    lock_path,
    source_hash,
    standin_name,
)
from narrowgauge.images.inspect import facts_of, find_image
from narrowgauge.images.render import check, render_dockerfile
from narrowgauge.targets import Target
from narrowgauge_contract.record import ImageFacts

__all__ = ["BuildRequest", "build_image", "ensure_image", "make_context"]

Say = Callable[[str], None]

#: What `docker build` may read of a checkout, besides the lock, the check and the wheels.
_SOURCES = (
    Path("docker/entrypoint.sh"),
    Path("experiments"),
    Path("src/narrowgauge_contract"),
    Path("src/narrowgauge_kernels"),
    Path("src/narrowgauge_lab"),
)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "build")
_WHEELS = Path("docker/wheels")
_TAIL_LINES = 40


@dataclass(frozen=True)
class BuildRequest:
    """What to build. `base`: a stand-in for the target's own. `wheels`: a folder of every wheel."""

    root: Path
    target: Target
    base: str | None = None
    wheels: Path | None = None
    no_cache: bool = False
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
    """Build, verify and alias one image. Raises as `ensure_image` does."""
    target = request.target
    if not target.available:
        raise NotApplicableError(
            f"there is no image for the target '{target.name}' yet", why=target.planned
        )
    check(request.root, {dockerfile_path(target): render_dockerfile(request.root, target)})
    client = find_client(target.builder, request.env)
    base = request.base or target.base.reference
    say(_cost(request))
    base_digest = _ensure_base(client, base, say)
    tag = content_tag(
        request.root,
        target,
        standin_base=request.base,
        standin_digest=base_digest if request.base else "",
    )
    name = image_name(target, tag)
    labels = {
        LABEL_BASE_DIGEST: base_digest,
        LABEL_CONTENT: tag,
        LABEL_SOURCE: source_hash(request.root),
    }
    with make_context(request) as context:
        say(f"building {name} on {base}")
        words = [*client.build_words(), "--progress=plain", "--tag", name]
        for key, value in sorted(labels.items()):
            words += ["--label", f"{key}={value}"]
        words += ["--no-cache"] if request.no_cache else []
        words += ["--file", str(context / dockerfile_path(target)), str(context)]
        _stream(words, client.build_environment(), f"the build of {name} failed", say)
    _verify(client, name, labels[LABEL_SOURCE], say)
    aliases = [target.alias] + ([standin_name(request.root, target)] if request.base else [])
    for alias in aliases:
        words = [client.executable, "tag", name, alias]
        _stream(words, client.env, f"{name} cannot be tagged {alias}", say)
    inspected = client.inspect(name)
    if inspected is None:
        raise BuildFailed(f"{name} was built, but the engine does not have it")
    return facts_of(name, inspected)


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
    """A temporary folder with the Dockerfile and exactly what it may read, laid out as a checkout.

    Files are linked where the file systems allow it, else copied.
    """
    target, standin = request.target, request.base is not None
    lock = lock_path(target, standin=standin)
    with tempfile.TemporaryDirectory(prefix="narrowgauge-build-") as folder:
        context = Path(folder)
        try:
            for relative in (*_SOURCES, lock, Path(f"images/{target.name}/verify")):
                _place(request.root / relative, context / relative)
            _place_wheels(request, context / _WHEELS)
            dockerfile = context / dockerfile_path(target)
            dockerfile.write_text(
                render_dockerfile(request.root, target, request.base), encoding="utf-8"
            )
        except OSError as error:
            # copytree gathers what went wrong as text, without an errno.
            if any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
                raise disk_full(context, "the build context") from error
            raise
        yield context


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


def _ensure_base(client: BuildClient, base: str, say: Say) -> str:
    """Have the base in the engine; its registry digest, or its id where it never had one."""
    found = client.inspect(base)
    if found is None:
        say(f"pulling the base {base}")
        words = [client.executable, "pull", base]
        _stream(words, client.env, f"{base} cannot be pulled", say, base)
        found = client.inspect(base)
    if found is None:
        raise BuildFailed(f"{base} was pulled, but the engine does not have it")
    digests = [entry.partition("@")[2] for entry in found.get("RepoDigests") or ()]
    return digests[0] if digests else str(found["Id"])


def _verify(client: BuildClient, name: str, source: str, say: Say) -> None:
    """Run the image's own check as a run would, and compare the source it says it holds."""
    words = [client.executable, "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL"]
    words += ["--security-opt=no-new-privileges", "--tmpfs=/tmp:exec", "--tmpfs=/cache:exec"]
    words += ["--entrypoint=/opt/narrowgauge/verify", name]
    log = _stream(words, client.env, f"{name} was built, but its check fails", say)
    if f"source {source}" not in log:
        raise BuildFailed(
            f"{name} holds another source than this checkout",
            why=f"expected source {source}\n" + "\n".join(log[-5:]),
            next_step="was a file changed while it was built? build again",
        )


def _stream(
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
