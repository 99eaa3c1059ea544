"""The targets: what `docker/targets.toml` says, parsed once and checked.

Frozen dataclasses with an own strict parse, not pydantic: importing pydantic and building these
models takes about 75 ms, a quarter of what `narrowgauge plan` may take in all; this takes 5.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import NarrowgaugeError, TargetsFileError, UnknownNameError
from narrowgauge.table_reader import TableReader, as_table
from narrowgauge_contract.spec import load_toml

__all__ = [
    "TARGETS_FILE",
    "UNRESOLVED",
    "Accelerator",
    "Base",
    "Builder",
    "Fits",
    "Optional",
    "Target",
    "Torch",
    "load_targets",
    "parse_targets",
    "target_named",
    "unresolved",
    "version_tuple",
]

#: Where the targets stand in a checkout.
TARGETS_FILE = Path("docker/targets.toml")
#: What a digest that nobody has asked the registry for is written as.
UNRESOLVED = "unresolved"

_NAME = re.compile(r"^[a-z][a-z0-9-]*$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_HASHED = re.compile(r"^[a-z0-9-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}$")
_REPOSITORY = re.compile(r"^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+$")
_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
_CAPABILITY = re.compile(r"^[0-9]{1,2}\.[0-9]a?$")
_MODULE = re.compile(r"^[a-z_][a-z0-9_]*$")
_VERSION = re.compile(r"^[0-9]+(\.[0-9]+)*$")
_ARCHITECTURES = ("amd64", "arm64")


class Accelerator(str, enum.Enum):
    """How a container is given its accelerator."""

    NONE = "none"
    DEVICE_REQUEST = "device-request"
    NVIDIA_RUNTIME = "nvidia-runtime"
    CDI = "cdi"


class Builder(str, enum.Enum):
    """`buildkit`: the engine's own BuildKit or buildx. `buildx`: only buildx."""

    BUILDKIT = "buildkit"
    BUILDX = "buildx"


@dataclass(frozen=True)
class Base:
    """The image a target stands on. `digest` is None until a registry was asked for it."""

    repository: str
    tag: str
    digest: str | None

    @property
    def reference(self) -> str:
        """What stands after FROM: pinned by digest where it is known."""
        suffix = f"@{self.digest}" if self.digest else ""
        return f"{self.repository}:{self.tag}{suffix}"


@dataclass(frozen=True)
class Torch:
    """`version` is None, and the rest empty, where the base's own torch is kept.

    `source`: the arguments that tell pip where its wheel lies; none for the public index.
    `sha256`: of the wheel for each architecture; None until somebody who reaches the source has
    asked it.
    """

    version: str | None = None
    source: tuple[str, ...] = ()
    sha256: tuple[str, ...] | None = None

    @property
    def public_version(self) -> str | None:
        """Without the local part: `1.8.0` of `1.8.0+cu111`, which other builds have too."""
        return self.version and self.version.partition("+")[0]


@dataclass(frozen=True)
class Optional:
    """Packages that lie on an index of their own and that an image can do without.

    `index`: a requirement, hash included, whose installation makes pip know that index.
    `imports`: the module whose import shows that they work.
    """

    index: str
    packages: tuple[str, ...]
    imports: str


@dataclass(frozen=True)
class Fits:
    """The hosts a target works on. A bound that is None does not bind.

    Capabilities and `*_least`, `*_most` are inclusive; `l4t_below` is exclusive.
    """

    needs_gpu: bool
    capability_least: str | None = None
    capability_most: str | None = None
    driver_least: str | None = None
    l4t_least: str | None = None
    l4t_below: str | None = None


@dataclass(frozen=True)
class Target:
    """One kind of hardware and the image for it.

    `capabilities` are the compute capabilities the kernels are compiled for. `accelerators` are
    tried in order. `packages` are what the lock pins, besides torch itself; `notebook` what the
    notebook's image adds. `setup` are the base's own commands that complete it. With
    `site_packages` the base's Python packages are seen.
    """

    name: str
    title: str
    base: Base
    architectures: tuple[str, ...]
    python: str
    torch: Torch
    capabilities: tuple[str, ...]
    accelerators: tuple[Accelerator, ...]
    builder: Builder
    read_only_root: bool
    fits: Fits
    packages: tuple[str, ...]
    cuda: str | None = None
    tensorrt: str | None = None
    download_mb: int | None = None
    site_packages: bool = False
    setup: tuple[str, ...] = ()
    notebook: tuple[str, ...] = ()
    optional: Optional | None = None

    @property
    def alias(self) -> str:
        """The name that compose.yaml and the scripts use for the newest build."""
        return f"narrowgauge/{self.name}:local"

    @property
    def unresolved(self) -> tuple[str, ...]:
        """The pins that nobody has asked registry or index for yet: of `base` and `torch`.

        Optional packages count for none: which of them an image has, its records say.
        """
        missing = {
            "base": self.base.digest is None,
            "torch": bool(self.torch.version) and self.torch.sha256 is None,
        }
        return tuple(name for name, unpinned in missing.items() if unpinned)


def load_targets(path: Path) -> dict[str, Target]:
    """Read and check targets.toml. Raises TargetsFileError."""
    try:
        document = load_toml(path)
    except NarrowgaugeError as error:
        raise TargetsFileError(error.what, why=error.why, next_step=error.next_step) from error
    return parse_targets(document, where=str(path))


def parse_targets(document: Mapping[str, Any], where: str = "targets.toml") -> dict[str, Target]:
    """Check a parsed targets.toml. Unknown keys are errors that name the nearest known key."""
    targets = {}
    for name, body in document.items():
        place = f"{where} [{name}]"
        if not _NAME.match(name):
            raise TargetsFileError(f"{place}: a target's name is small letters, digits and '-'")
        targets[name] = _parse_target(name, as_table(body, place), place)
    if not targets:
        raise TargetsFileError(f"{where} names no target")
    return targets


def target_named(targets: Mapping[str, Target], name: str) -> Target:
    """The target of that name. Raises UnknownNameError with the nearest name and the list."""
    if name not in targets:
        raise UnknownNameError("target", name, targets)
    return targets[name]


def unresolved(targets: Mapping[str, Target]) -> dict[str, tuple[str, ...]]:
    """The unresolved pins of each target that has some."""
    return {name: target.unresolved for name, target in targets.items() if target.unresolved}


def version_tuple(text: str) -> tuple[int, ...]:
    """`35.2.1` → (35, 2, 1), for comparing; a suffix such as the `a` of 9.0a does not count."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", text))


def _parse_target(name: str, body: dict[str, Any], where: str) -> Target:
    reader = TableReader(body, where)
    target = Target(
        name=name,
        title=reader.text("title"),
        base=_parse_base(TableReader(reader.table("base"), f"{where} base")),
        architectures=reader.members("architectures", _ARCHITECTURES),
        python=reader.matching("python", _VERSION),
        torch=_parse_torch(TableReader(reader.table("torch"), f"{where} torch")),
        capabilities=reader.texts("capabilities", _CAPABILITY),
        accelerators=tuple(
            Accelerator(word)
            for word in reader.members("accelerators", [member.value for member in Accelerator])
        ),
        builder=Builder(reader.member("builder", [member.value for member in Builder])),
        read_only_root=reader.flag("read_only_root"),
        fits=_parse_fits(TableReader(reader.table("fits"), f"{where} fits")),
        packages=reader.texts("packages"),
        cuda=reader.optional("cuda", _VERSION),
        tensorrt=reader.optional("tensorrt", _VERSION),
        download_mb=reader.optional_count("download_mb"),
        site_packages=reader.flag("site_packages"),
        setup=reader.texts("setup"),
        notebook=reader.texts("notebook"),
        optional=_parse_optional(reader, where),
    )
    reader.finish()
    _check_target(target, where)
    return target


def _parse_base(reader: TableReader) -> Base:
    digest = reader.text("digest")
    if digest != UNRESOLVED and not _DIGEST.match(digest):
        raise TargetsFileError(
            f"{reader.where}: digest '{digest}' is neither sha256:<64 hex digits> nor {UNRESOLVED}",
            next_step="narrowgauge images lock asks the registry and writes it",
        )
    base = Base(
        repository=reader.matching("repository", _REPOSITORY),
        tag=reader.matching("tag", _TAG),
        digest=None if digest == UNRESOLVED else digest,
    )
    reader.finish()
    return base


def _parse_torch(reader: TableReader) -> Torch:
    version = reader.optional("version")
    if version is None:
        reader.finish()
        return Torch()
    torch = Torch(version, reader.texts("source"), _parse_hashes(reader))
    reader.finish()
    return torch


def _parse_hashes(reader: TableReader) -> tuple[str, ...] | None:
    hashes = reader.texts("sha256")
    if hashes == (UNRESOLVED,):
        return None
    for sha256 in hashes:
        if not _SHA256.match(sha256):
            raise TargetsFileError(
                f"{reader.where}: sha256 '{sha256}' is neither 64 hex digits nor {UNRESOLVED}",
                next_step="narrowgauge images lock asks the index and writes it",
            )
    return hashes


def _parse_optional(reader: TableReader, where: str) -> Optional | None:
    if not reader.has("optional"):
        return None
    inner = TableReader(reader.table("optional"), f"{where} optional")
    optional = Optional(
        inner.matching("index", _HASHED),
        inner.texts("packages"),
        inner.matching("imports", _MODULE),
    )
    inner.finish()
    return optional


def _parse_fits(reader: TableReader) -> Fits:
    fits = Fits(
        needs_gpu=reader.flag("needs_gpu"),
        capability_least=reader.optional("capability_least", _CAPABILITY),
        capability_most=reader.optional("capability_most", _CAPABILITY),
        driver_least=reader.optional("driver_least", _VERSION),
        l4t_least=reader.optional("l4t_least", _VERSION),
        l4t_below=reader.optional("l4t_below", _VERSION),
    )
    reader.finish()
    return fits


def _check_target(target: Target, where: str) -> None:
    if (Accelerator.NONE in target.accelerators) == target.fits.needs_gpu:
        raise TargetsFileError(f"{where}: accelerators and fits.needs_gpu contradict each other")
    if bool(target.capabilities) != bool(target.cuda):
        raise TargetsFileError(f"{where}: 'cuda' and 'capabilities' belong together")
    if target.torch.version is None and not target.site_packages:
        raise TargetsFileError(f"{where}: the base's own torch is seen only with site_packages")
    hashes = target.torch.sha256
    if hashes is not None and len(hashes) != len(target.architectures):
        raise TargetsFileError(f"{where} torch: one sha256 for each architecture")
