"""What an image holds, as a name: equal inputs give the same tag, so an image is built once.

The tag covers the rendered Dockerfile, the locks, the sources, the entry point, the check and the
base. `experiments/` is outside it: a checkout mounts its own over the image's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from narrowgauge.errors import StaleGenerated
from narrowgauge.targets import Target
from narrowgauge_contract.hashing import sha256_file, tree_files, tree_hash

__all__ = [
    "IN_IMAGE",
    "LABEL_BASE_DIGEST",
    "LABEL_BASE_NAME",
    "LABEL_CONTENT",
    "LABEL_SOURCE",
    "LABEL_STANDIN",
    "LABEL_TARGET",
    "LABEL_UNRESOLVED",
    "TEMPLATES",
    "content_tag",
    "dockerfile_path",
    "image_name",
    "lock_path",
    "notebook_lock_path",
    "source_hash",
    "standin_name",
    "verify_path",
]

LABEL_BASE_DIGEST = "org.opencontainers.image.base.digest"
LABEL_BASE_NAME = "org.opencontainers.image.base.name"
LABEL_CONTENT = "io.narrowgauge.content"
LABEL_SOURCE = "io.narrowgauge.source"
LABEL_STANDIN = "io.narrowgauge.standin"
LABEL_TARGET = "io.narrowgauge.target"
LABEL_UNRESOLVED = "io.narrowgauge.unresolved"

#: The packages of ours that are copied into an image.
IN_IMAGE = (
    "narrowgauge_contract", "narrowgauge_data", "narrowgauge_kernels", "narrowgauge_lab",
    "narrowgauge_scores",
)  # fmt: skip
#: Of them, what a number depends on. How data got there does not count: it is verified by hash.
_MEASURING = (
    "narrowgauge_contract", "narrowgauge_kernels", "narrowgauge_lab", "narrowgauge_scores",
)  # fmt: skip
#: What a Dockerfile is rendered from, and the check beside it.
TEMPLATES = ("docker/Dockerfile.j2", "docker/macros.j2", "docker/verify.j2")
_ENTRYPOINT = Path("docker/entrypoint.sh")
_TAG_DIGITS = 16


def dockerfile_path(target: Target) -> Path:
    """Where the committed Dockerfile stands, relative to the checkout."""
    return Path(f"images/{target.name}/Dockerfile")


def verify_path(target: Target) -> Path:
    """Where the check that an image runs on itself stands, relative to the checkout."""
    return Path(f"images/{target.name}/verify")


def lock_path(target: Target) -> Path:
    """Where the pinned packages of `target` stand, relative to the checkout."""
    return Path(f"docker/locks/{target.name}.txt")


def notebook_lock_path(target: Target) -> Path:
    """Where the pinned packages of its notebook stand; no file where the base has a notebook."""
    return Path(f"docker/locks/{target.name}-notebook.txt")


def source_hash(root: Path) -> str:
    """The sha256 of what an image measures with: what the lab there says of itself."""
    return tree_hash([root / "src" / name for name in _MEASURING])


def content_tag(
    root: Path,
    target: Target,
    *,
    standin_base: str | None = None,
    standin_digest: str = "",
    sums: MutableMapping[Path, str] | None = None,
) -> str:
    """The tag of what a build of `target` would hold now.

    It is the sha256 of what `sha256sum` prints for the sorted files, so that scripts/board.sh finds
    the same image with that tool alone. A stand-in's differs: its base and the templates that make
    its Dockerfile are hashed beside, and nothing has to be rendered to name an image. `sums`: what
    is hashed already, for several targets at once, whose files are nearly the same.
    """
    known = {} if sums is None else sums
    text = _listing(root, _inputs(root, target), known)
    if standin_base is not None:
        text += f"base {standin_base} {standin_digest}\n" + _listing(root, sorted(TEMPLATES), known)
    return hashlib.sha256(text.encode()).hexdigest()[:_TAG_DIGITS]


def image_name(target: Target, tag: str) -> str:
    """`narrowgauge/cpu:<tag>`."""
    return f"narrowgauge/{target.name}:{tag}"


def standin_name(root: Path, target: Target) -> str:
    """The name of the stand-in that was built on purpose for this checkout, and for no other."""
    return image_name(target, "standin-" + hashlib.sha256(str(root).encode()).hexdigest()[:12])


def _inputs(root: Path, target: Target) -> list[str]:
    """Every file that the image holds or is made by, relative to `root`, sorted bytewise."""
    needed = (_ENTRYPOINT, dockerfile_path(target), verify_path(target), lock_path(target))
    files = [path.as_posix() for path in needed]
    if (root / notebook_lock_path(target)).is_file():
        files.append(notebook_lock_path(target).as_posix())
    for name in IN_IMAGE:
        found = tree_files(root / "src" / name)
        files += [path.relative_to(root).as_posix() for path in found if path.suffix != ".pyc"]
    return sorted(files)


def _listing(root: Path, files: Iterable[str], sums: MutableMapping[Path, str]) -> str:
    lines = []
    for name in files:
        path = root / name
        if path not in sums:
            sums[path] = _sha256(path)
        lines.append(f"{sums[path]}  {name}\n")
    return "".join(lines)


def _sha256(path: Path) -> str:
    try:
        return sha256_file(path)
    except FileNotFoundError as error:
        raise StaleGenerated(
            f"{path} is missing", next_step="narrowgauge images render makes the generated files"
        ) from error
