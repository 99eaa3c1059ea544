"""Makes a bundle: gathers what belongs in it, describes that, writes it sealed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.bundle.archive import write_archive
from narrowgauge.bundle.crate import crate_text
from narrowgauge.bundle.entries import (
    BUNDLE_FILE,
    BUNDLE_FORMAT,
    CRATE_FILE,
    README_FILE,
    STATEMENT_FILE,
    VERDICTS_FILE,
    Entry,
    Hashed,
    hashed,
)
from narrowgauge.bundle.images import ImagesIn, take_images
from narrowgauge.bundle.manifest import Contents, Kind, LeftOut, Manifest, RunIn, joined
from narrowgauge.bundle.occasions import take_occasions
from narrowgauge.bundle.page import REPORT_FILE, report_page
from narrowgauge.bundle.readme import readme_text
from narrowgauge.bundle.runs import BundledRun, take_runs
from narrowgauge.bundle.source import SCRATCH_PREFIX, take_source
from narrowgauge.bundle.statement import statement_of
from narrowgauge.bundle.verdicts import judge_runs
from narrowgauge.checkout import Checkout, git_facts
from narrowgauge.errors import UsageError
from narrowgauge.images.client import BuildClient
from narrowgauge.judge.model import Judged
from narrowgauge.reproduce.occasions import labelled
from narrowgauge.store import Entry as StoredRun
from narrowgauge_contract import __version__
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.datasets import DATA_SETS
from narrowgauge_contract.hashing import tree_hash
from narrowgauge_contract.record import ImageFacts, MachineFacts, Record

__all__ = ["BundleRequest", "Made", "make_bundle"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class BundleRequest:
    """What to bundle, to where. `results`: the folder that `stored` are of. `now`: seconds since
    the epoch.

    `client` gives the engine's command where images are
    wanted; None leaves all of them out.
    """

    checkout: Checkout
    results: Path
    stored: Sequence[StoredRun]
    kind: Kind
    out: Path
    machine: MachineFacts
    now: float
    client: Callable[[], BuildClient] | None = None
    force: bool = False


@dataclass(frozen=True)
class Made:
    """A bundle that was written. `sha256` is of the whole file; publish it beside the bundle."""

    path: Path
    sha256: str
    bytes: int
    files: int
    manifest: Manifest


def make_bundle(request: BundleRequest, say: Say) -> Made:
    """Write the bundle, whole or not at all.

    Raises UsageError (the file is there, nothing to bundle), DiskFull, and for a full bundle what
    saving an image raises.
    """
    if request.out.exists() and not request.force:
        raise UsageError(f"{request.out} exists", next_step="--force, or another --out FILE")
    runs, refused = take_runs(request.stored)
    if not runs:
        raise UsageError(
            "there is no recorded run to bundle",
            why="; ".join(f"{left.what}: {left.why}" for left in refused),
            next_step="narrowgauge kick, or narrowgauge run EXPERIMENT",
        )
    out_folder = request.out.absolute().parent
    if not out_folder.is_dir():
        raise UsageError(f"there is no folder {out_folder} for the bundle")
    # Before the scratch folder is there, which may lie in the checkout.
    source = _source(request, runs)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=out_folder) as scratch:
        images = _images(request, runs, Path(scratch), say)
        occasions = take_occasions(request.results, frozenset(run.record.run_id for run in runs))
        judged = _judged(request, runs, occasions)
        around = _around(request, runs, judged)
        parts = (*(run.contents for run in runs), occasions, source, images.contents, around)
        contents = joined(parts)
        left_out = (*refused, *contents.left_out, *_never_in(runs))
        manifest = _manifest(request, runs, images, left_out)
        files = hashed([*contents.entries, *_told(manifest)])
        files = _described(judged, runs, images, manifest, files)
        say(f"writing {request.out}: {len(files) + 1} files")
        sha256 = write_archive(request.out, files)
    size = request.out.stat().st_size
    return Made(request.out, sha256, size, len(files) + 1, manifest)


def _judged(request: BundleRequest, runs: Sequence[BundledRun], occasions: Contents) -> Judged:
    judged = judge_runs(
        request.checkout.experiments,
        [run.record for run in runs],
        now=request.now,
        git=git_facts(request.checkout.root),
        replay=False,
    )
    kept = (each.source for each in occasions.entries if each.name.endswith("/judged.json"))
    return labelled(judged, [path for path in kept if path is not None])


def _source(request: BundleRequest, runs: Sequence[BundledRun]) -> Contents:
    experiments = {run.record.experiment for run in runs}
    never = [request.out.absolute(), request.out.resolve()]
    results = request.results.resolve()
    if request.checkout.root in results.parents:
        never.append(results)
    return take_source(request.checkout, request.kind, experiments, never)


def _images(
    request: BundleRequest, runs: Sequence[BundledRun], scratch: Path, say: Say
) -> ImagesIn:
    used = [facts for run in runs if (facts := _image_of(run.record)) is not None]
    if request.client is None:
        why = "images were not asked for; the Dockerfiles, locks and bases' names are here"
        names = sorted({facts.name for facts in used})
        left_out = tuple(LeftOut(f"the image {name}", why) for name in names)
        return ImagesIn((), Contents((), left_out))
    return take_images(used, request.kind, request.client, scratch, say)


def _image_of(record: Record) -> ImageFacts | None:
    return record.host.image if record.host is not None else None


def _around(request: BundleRequest, runs: Sequence[BundledRun], judged: Judged) -> Contents:
    """This host as it is now, where the data sets come from, the verdicts and their report."""
    names = sorted({name for run in runs for name in run.record.data_sets if name in DATA_SETS})
    documents = {
        "host.json": ("the host that bundled", request.machine),
        "data.json": ("where its data come from", {name: DATA_SETS[name] for name in names}),
        VERDICTS_FILE: ("the verdicts on the claims", judged),
    }
    entries = [
        Entry(name, what, content=dumps(body).encode()) for name, (what, body) in documents.items()
    ]
    page = report_page(judged, [run.record for run in runs])
    entries.append(Entry(REPORT_FILE, "the verdicts as a page", content=page))
    return Contents(tuple(entries))


def _never_in(runs: Sequence[BundledRun]) -> tuple[LeftOut, ...]:
    sets = sorted({name for run in runs for name in run.record.data_sets})
    why = "data sets are their authors' to give; data.json says where each is fetched, by sha256"
    return tuple(LeftOut(f"the data set {name}", why) for name in sets)


def _manifest(
    request: BundleRequest,
    runs: Sequence[BundledRun],
    images: ImagesIn,
    left_out: tuple[LeftOut, ...],
) -> Manifest:
    return Manifest(
        format=BUNDLE_FORMAT,
        kind=request.kind,
        made_utc=request.now,
        version=__version__,
        git=git_facts(request.checkout.root),
        runs=tuple(_run_in(request.checkout, run) for run in runs),
        images=images.images,
        left_out=left_out,
    )


def _run_in(checkout: Checkout, run: BundledRun) -> RunIn:
    record = run.record
    folder = checkout.experiments / record.experiment
    same = folder.is_dir() and tree_hash([folder]) == record.hashes.experiment
    return RunIn(
        record.run_id, record.experiment, run.folder, record.target, record.status.value, same
    )


def _told(manifest: Manifest) -> list[Entry]:
    return [
        Entry(BUNDLE_FILE, "what is here and what is not", content=dumps(manifest).encode()),
        Entry(README_FILE, "how to read this bundle", content=readme_text(manifest).encode()),
    ]


def _described(
    judged: Judged,
    runs: Sequence[BundledRun],
    images: ImagesIn,
    manifest: Manifest,
    files: tuple[Hashed, ...],
) -> tuple[Hashed, ...]:
    """The files with the statement about them and the crate that lists all of them."""
    statement = statement_of(
        judged,
        {each.entry.name: each.sha256 for each in files},
        [run.folder for run in runs],
        [image.facts for image in images.images],
    )
    said = dumps(statement).encode()
    entry = Entry(STATEMENT_FILE, "the verdicts as an in-toto statement", content=said)
    files = (*files, *hashed([entry]))
    name = f"Narrowgauge {manifest.kind} bundle"
    crate = Entry(CRATE_FILE, "this crate", content=crate_text(manifest, runs, files, name))
    return (*files, *hashed([crate]))
