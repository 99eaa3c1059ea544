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
from narrowgauge_contract.errors import nearest
from narrowgauge_contract.spec import load_toml

__all__ = [
    "TARGETS_FILE",
    "UNRESOLVED",
    "Accelerator",
    "Base",
    "Builder",
    "Fits",
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
_REPOSITORY = re.compile(r"^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+$")
_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
_CAPABILITY = re.compile(r"^[0-9]{1,2}\.[0-9]a?$")
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
    """`install`: the arguments of `pip install`; empty where the base's own torch is kept.

    `version` is None where the base decides it.
    """

    version: str | None
    install: tuple[str, ...]


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

    `capabilities` are the compute capabilities the kernels are compiled for. `planned` says what
    is missing where `available` is false. `accelerators` are tried in order. `packages` are what
    the lock pins, besides torch itself.
    """

    name: str
    title: str
    available: bool
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
    planned: str = ""
    download_mb: int | None = None

    @property
    def alias(self) -> str:
        """The name that compose.yaml and the scripts use for the newest build."""
        return f"narrowgauge/{self.name}:local"


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
        targets[name] = _parse_target(name, _table(body, place), place)
    if not targets:
        raise TargetsFileError(f"{where} names no target")
    return targets


def target_named(targets: Mapping[str, Target], name: str) -> Target:
    """The target of that name. Raises UnknownNameError with the nearest name and the list."""
    if name not in targets:
        raise UnknownNameError("target", name, targets)
    return targets[name]


def unresolved(targets: Mapping[str, Target]) -> tuple[str, ...]:
    """The names of the targets whose base nobody has pinned by digest yet."""
    return tuple(name for name, target in targets.items() if target.base.digest is None)


def version_tuple(text: str) -> tuple[int, ...]:
    """`35.2.1` → (35, 2, 1), for comparing; a suffix such as the `a` of 9.0a does not count."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", text))


def _parse_target(name: str, body: dict[str, Any], where: str) -> Target:
    reader = _Reader(body, where)
    target = Target(
        name=name,
        title=reader.text("title"),
        available=reader.flag("available"),
        base=_parse_base(_Reader(reader.table("base"), f"{where} base")),
        architectures=reader.members("architectures", _ARCHITECTURES),
        python=reader.matching("python", _VERSION),
        torch=_parse_torch(_Reader(reader.table("torch"), f"{where} torch")),
        capabilities=reader.texts("capabilities", _CAPABILITY),
        accelerators=tuple(
            Accelerator(word)
            for word in reader.members("accelerators", [member.value for member in Accelerator])
        ),
        builder=Builder(reader.member("builder", [member.value for member in Builder])),
        read_only_root=reader.flag("read_only_root"),
        fits=_parse_fits(_Reader(reader.table("fits"), f"{where} fits")),
        packages=reader.texts("packages"),
        cuda=reader.optional("cuda", _VERSION),
        tensorrt=reader.optional("tensorrt", _VERSION),
        planned=reader.optional("planned") or "",
        download_mb=reader.optional_count("download_mb"),
    )
    reader.finish()
    _check_target(target, where)
    return target


def _parse_base(reader: _Reader) -> Base:
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


def _parse_torch(reader: _Reader) -> Torch:
    torch = Torch(version=reader.optional("version"), install=reader.texts("install"))
    reader.finish()
    if bool(torch.version) != bool(torch.install):
        raise TargetsFileError(
            f"{reader.where}: 'version' and a non-empty 'install' belong together"
        )
    if torch.version and f"torch=={torch.version}" not in torch.install:
        raise TargetsFileError(f"{reader.where}: 'install' lacks torch=={torch.version}")
    return torch


def _parse_fits(reader: _Reader) -> Fits:
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
    if not target.available and not target.planned:
        raise TargetsFileError(f"{where} is not available, so 'planned' must say what is missing")
    if target.available and target.planned:
        raise TargetsFileError(f"{where} is available, so 'planned' has nothing to say")
    if (Accelerator.NONE in target.accelerators) == target.fits.needs_gpu:
        raise TargetsFileError(f"{where}: accelerators and fits.needs_gpu contradict each other")
    if bool(target.capabilities) != bool(target.cuda):
        raise TargetsFileError(f"{where}: 'cuda' and 'capabilities' belong together")


class _Reader:
    """Takes keys out of one table, checked; what is left at the end is unknown."""

    def __init__(self, body: dict[str, Any], where: str) -> None:
        self.where = where
        self._body = body
        self._known: list[str] = []

    def table(self, key: str) -> dict[str, Any]:
        return _table(self._take(key), f"{self.where} {key}")

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a text", value)
        return value

    def flag(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self.text(key)
        if not pattern.match(value):
            raise self._wrong(key, f"like {pattern.pattern}", value)
        return value

    def optional(self, key: str, pattern: re.Pattern[str] | None = None) -> str | None:
        if key not in self._body:
            self._known.append(key)
            return None
        return self.matching(key, pattern) if pattern else self.text(key)

    def optional_count(self, key: str) -> int | None:
        if key not in self._body:
            self._known.append(key)
            return None
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number above 0", value)
        return value

    def texts(self, key: str, pattern: re.Pattern[str] | None = None) -> tuple[str, ...]:
        value = self._take(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        for item in value:
            if pattern and not pattern.match(item):
                raise self._wrong(key, f"a list of texts like {pattern.pattern}", item)
        return tuple(value)

    def member(self, key: str, known: list[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self._unknown_word(key, value, known)
        return value

    def members(self, key: str, known: list[str] | tuple[str, ...]) -> tuple[str, ...]:
        words = self.texts(key)
        for word in words:
            if word not in known:
                raise self._unknown_word(key, word, known)
        if not words:
            raise self._wrong(key, f"some of {', '.join(known)}", [])
        return words

    def finish(self) -> None:
        """Refuse what nobody asked for."""
        for key in self._body:
            if key not in self._known:
                close = nearest(key, self._known)
                hint = f"did you mean '{close}'? " if close else ""
                raise TargetsFileError(
                    f"{self.where} has the unknown key '{key}'",
                    next_step=f"{hint}Known: {', '.join(sorted(self._known))}",
                )

    def _take(self, key: str) -> Any:
        self._known.append(key)
        if key not in self._body:
            close = nearest(key, self._body)
            hint = f"is '{close}' it, misspelt?" if close else ""
            raise TargetsFileError(f"{self.where} lacks '{key}'", next_step=hint)
        return self._body[key]

    def _wrong(self, key: str, wanted: str, value: object) -> TargetsFileError:
        return TargetsFileError(f"{self.where}: '{key}' should be {wanted}, not {value!r}")

    def _unknown_word(
        self, key: str, word: str, known: list[str] | tuple[str, ...]
    ) -> TargetsFileError:
        close = nearest(word, known)
        hint = f"did you mean '{close}'? " if close else ""
        return TargetsFileError(
            f"{self.where}: {key} '{word}' is not known",
            next_step=f"{hint}Known: {', '.join(known)}",
        )


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetsFileError(f"{where} should be a table")
    return value
