"""What an image holds, as a name: equal inputs give the same tag, so an image is built once.

The tag covers the rendered Dockerfile, the lock, the sources, the entry point, the check and the
base. `experiments/` is outside it: a checkout mounts its own over the image's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from narrowgauge.errors import StaleGenerated
from narrowgauge.targets import Target
from narrowgauge_contract.hashing import tree_hash

__all__ = [
    "LABEL_BASE_DIGEST",
    "LABEL_BASE_NAME",
    "LABEL_CONTENT",
    "LABEL_SOURCE",
    "LABEL_STANDIN",
    "LABEL_TARGET",
    "STANDIN_LOCK",
    "content_tag",
    "dockerfile_path",
    "image_name",
    "lock_path",
    "source_hash",
    "standin_name",
]

LABEL_BASE_DIGEST = "org.opencontainers.image.base.digest"
LABEL_BASE_NAME = "org.opencontainers.image.base.name"
LABEL_CONTENT = "io.narrowgauge.content"
LABEL_SOURCE = "io.narrowgauge.source"
LABEL_STANDIN = "io.narrowgauge.standin"
LABEL_TARGET = "io.narrowgauge.target"

#: The lock of a stand-in base, which tests build on where no registry can be reached.
STANDIN_LOCK = Path("docker/locks/standin.txt")

#: The packages of ours that are copied into an image.
_IN_IMAGE = ("narrowgauge_contract", "narrowgauge_kernels", "narrowgauge_lab")
_TAG_DIGITS = 16


def dockerfile_path(target: Target) -> Path:
    """Where the committed Dockerfile stands, relative to the checkout."""
    return Path(f"images/{target.name}/Dockerfile")


def lock_path(target: Target, *, standin: bool) -> Path:
    """Where the pinned packages of `target` stand, relative to the checkout."""
    return STANDIN_LOCK if standin else Path(f"docker/locks/{target.name}.txt")


def source_hash(root: Path) -> str:
    """The sha256 of our source that an image holds: what the lab there says of itself."""
    return tree_hash([root / "src" / name for name in _IN_IMAGE])


def content_tag(
    root: Path, target: Target, *, standin_base: str | None = None, standin_digest: str = ""
) -> str:
    """The tag of what a build of `target` would hold now.

    A stand-in differs from the committed Dockerfile only by its base and its lock, so these two are
    hashed beside it, and nothing has to be rendered to name an image.
    """
    standin = standin_base is not None
    files = (
        dockerfile_path(target),
        lock_path(target, standin=standin),
        Path("docker/entrypoint.sh"),
        Path(f"images/{target.name}/verify"),
    )
    digest = hashlib.sha256()
    for relative in files:
        digest.update(f"{relative.as_posix()}\0".encode() + _read(root / relative) + b"\0")
    digest.update(f"base {standin_base or ''} {standin_digest}\0".encode())
    digest.update(source_hash(root).encode())
    return digest.hexdigest()[:_TAG_DIGITS]


def image_name(target: Target, tag: str) -> str:
    """`narrowgauge/cpu:<tag>`."""
    return f"narrowgauge/{target.name}:{tag}"


def standin_name(root: Path, target: Target) -> str:
    """The name of the stand-in that was built on purpose for this checkout, and for no other."""
    return image_name(target, "standin-" + hashlib.sha256(str(root).encode()).hexdigest()[:12])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise StaleGenerated(
            f"{path} is missing", next_step="narrowgauge images render makes the generated files"
        ) from error
