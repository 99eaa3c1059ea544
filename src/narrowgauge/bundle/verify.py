"""Checks a bundle, offline and without a checkout: bytes, names, records, its own words."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from narrowgauge.bundle.archive import SealedZip, Unpacked, open_shelf
from narrowgauge.bundle.conclusions import contradictions
from narrowgauge.bundle.entries import (
    BUNDLE_FILE,
    BUNDLE_FORMAT,
    CRATE_FILE,
    STATEMENT_FILE,
    SUMS_FILE,
    VERDICTS_FILE,
    name_problem,
    parse_sums,
)
from narrowgauge.bundle.manifest import Manifest
from narrowgauge.bundle.runs import run_folder_in_bundle
from narrowgauge.bundle.source import SOURCE_FOLDER
from narrowgauge.bundle.verdicts import judge_runs
from narrowgauge.catalog import EXPERIMENT_FILE
from narrowgauge.errors import BundleDamaged
from narrowgauge.judge.gather import CLAIMS_FILE
from narrowgauge.judge.model import Judged, Occasion
from narrowgauge_contract import __version__
from narrowgauge_contract.codec import decode
from narrowgauge_contract.errors import NarrowgaugeError
from narrowgauge_contract.hashing import sha256_file, tree_hash
from narrowgauge_contract.record import Record, parse_record

__all__ = ["Verification", "verify_bundle"]

_CHUNK = 1 << 20
#: Documents are read whole; a bundle's longest is a record.
_MOST_DOCUMENT_BYTES = 512 << 20
_READ_ERRORS = (BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Verification:
    """What was found. `problems`: it is not what was sealed, or contradicts itself; `notes`: worth
    knowing. `sha256` is of the whole file, empty for a folder; `verdicts`: how many were
    had again from the records."""

    path: Path
    sha256: str
    files: int
    bytes: int
    runs: int
    verdicts: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    manifest: Manifest | None

    @property
    def whole(self) -> bool:
        return not self.problems


def verify_bundle(path: Path, *, wanted: str | None = None) -> Verification:
    """Check the bundle at `path`, a file or the folder it was unpacked to.

    `wanted`: the sha256 that its authors give for the file.
    Nothing is unpacked to where its names say. Raises UsageError where there is none, BundleDamaged
    where it cannot be opened or its names are hostile.
    """
    with open_shelf(path) as shelf:
        check = _Check(shelf)
        seal = shelf.seal_problem()
        if seal:
            check.problems.append(seal)
        check.bytes_of_every_file()
        check.documents()
        sha256 = "" if path.is_dir() else sha256_file(path)
        if wanted is not None and sha256 != wanted.strip().lower().removeprefix("sha256:"):
            said = f"its sha256 is {sha256}" if sha256 else "a folder has no sha256"
            check.problems.append(f"it is not the file with sha256 {wanted!a}: {said}")
        return Verification(
            path,
            sha256,
            len(shelf.names),
            check.bytes,
            check.runs,
            check.verdicts,
            tuple(check.problems),
            tuple(check.notes),
            check.manifest,
        )


class _Check:
    """One verification. A file that is damaged is reported and not read as a document."""

    def __init__(self, shelf: SealedZip | Unpacked) -> None:
        self._shelf = shelf
        self._sound: dict[str, str] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.bytes = 0
        self.runs = 0
        self.verdicts = 0
        self.manifest: Manifest | None = None

    def bytes_of_every_file(self) -> None:
        """Each file against SHA256SUMS, in both directions."""
        if SUMS_FILE not in self._shelf.names:
            raise BundleDamaged(
                f"it has no {SUMS_FILE}", why="so it is no bundle, or not all of it"
            )
        sums = self._sums()
        for name in self._shelf.names:
            if name == SUMS_FILE:
                continue
            problem = name_problem(name)
            if problem:
                raise BundleDamaged(f"it holds {name!a}", why=problem)
            found = self._sha256(name)
            if name not in sums:
                self.problems.append(f"{name} is not in {SUMS_FILE}: it was added")
            elif found != sums[name]:
                self.problems.append(f"{name} was changed: {found or 'it cannot be read'}")
            else:
                self._sound[name] = found
        self.problems += [f"{name} is missing" for name in sums if name not in self._shelf.names]

    def documents(self) -> None:
        """What the sound files say, held against each other."""
        self.manifest = self._manifest()
        records = dict(self._records())
        self.runs = len(records)
        self._runs_agree(records)
        self._crate(records)
        self._statement()
        self._verdicts(list(records.values()))

    def _sums(self) -> Mapping[str, str]:
        try:
            return parse_sums(self._read(SUMS_FILE).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BundleDamaged(f"{SUMS_FILE} is not text", why=str(error)) from error

    def _sha256(self, name: str) -> str:
        """Empty where the file cannot be read to its end."""
        digest = hashlib.sha256()
        try:
            with self._shelf.open(name) as stream:
                for chunk in iter(lambda: stream.read(_CHUNK), b""):
                    digest.update(chunk)
                    self.bytes += len(chunk)
        except (BundleDamaged, *_READ_ERRORS):
            return ""
        return digest.hexdigest()

    def _read(self, name: str) -> bytes:
        try:
            with self._shelf.open(name) as stream:
                content = stream.read(_MOST_DOCUMENT_BYTES + 1)
        except _READ_ERRORS as error:
            raise BundleDamaged(f"{name} cannot be read", why=str(error)) from error
        if len(content) > _MOST_DOCUMENT_BYTES:
            raise BundleDamaged(f"{name} is larger than any document of a bundle")
        return content

    def _json(self, name: str) -> Any:
        """A sound file's JSON; None where it is not there, or not sound, which is known already."""
        if name not in self._sound:
            return None
        try:
            return json.loads(self._read(name))
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{name} is not JSON: {error}")
            return None

    def _manifest(self) -> Manifest | None:
        body = self._json(BUNDLE_FILE)
        if body is None:
            if BUNDLE_FILE not in self._shelf.names:
                self.problems.append(f"it has no {BUNDLE_FILE}")
            return None
        if isinstance(body, dict) and body.get("format") != BUNDLE_FORMAT:
            said = f"{BUNDLE_FILE} has format {body.get('format')!r}, this reads {BUNDLE_FORMAT}"
            self.problems.append(f"{said}: a newer Narrowgauge made it")
            return None
        try:
            return decode(Manifest, body, BUNDLE_FILE)
        except NarrowgaugeError as error:
            self.problems.append(error.what)
            return None

    def _records(self) -> Iterator[tuple[str, Record]]:
        for name in self._shelf.names:
            if not (name.startswith("runs/") and name.endswith("/record.json")):
                continue
            body = self._json(name)
            if body is None:
                continue
            folder = name.rpartition("/")[0]
            try:
                record = parse_record(body, name)
            except NarrowgaugeError as error:
                self.problems.append(error.what)
                continue
            problem = _misplaced(record, folder)
            if problem:
                self.problems.append(
                    f"{name} names the run {record.run_id!a} of the experiment"
                    f" {record.experiment!a}: {problem}"
                )
                continue
            yield folder, record

    def _runs_agree(self, records: Mapping[str, Record]) -> None:
        if self.manifest is None:
            return
        said = {run.folder: run for run in self.manifest.runs}
        self.problems += [
            f"{folder} has no sound record" for folder in said if folder not in records
        ]
        self.problems += [f"{folder} is not in {BUNDLE_FILE}" for folder in records.keys() - said]
        for folder, record in records.items():
            self._side_files(folder, record)
            run = said.get(folder)
            if run is not None and (run.run_id, run.status) != (record.run_id, record.status.value):
                self.problems.append(f"{BUNDLE_FILE} says something else of {folder}")
        self._experiments(records)

    def _side_files(self, folder: str, record: Record) -> None:
        left_out = {left.what for left in self.manifest.left_out} if self.manifest else set()
        for side in dict.fromkeys(record.side_files):
            name = f"{folder}/out/{side.path}"
            if name in self._sound:
                if hashlib.sha256(self._read(name)).hexdigest() != side.sha256:
                    self.problems.append(f"{name} is not the file that its record names")
            elif f"the side file {side.path!a} of the run {record.run_id}" not in left_out:
                self.problems.append(f"{name} is missing, and nothing says why")

    def _experiments(self, records: Mapping[str, Record]) -> None:
        """Whether the sources here are those that ran, as the bundle says they are, or not."""
        said = (
            {run.folder: run.same_experiment for run in self.manifest.runs} if self.manifest else {}
        )
        with tempfile.TemporaryDirectory(prefix="narrowgauge-verify-") as scratch:
            experiments = sorted({record.experiment for record in records.values()})
            for number, experiment in enumerate(experiments):
                prefix = f"{SOURCE_FOLDER}/experiments/{experiment}/"
                root = Path(scratch, str(number), experiment)
                self.copy_below(prefix, root)
                found = tree_hash([root]) if root.is_dir() else ""
                for folder, record in records.items():
                    if record.experiment != experiment:
                        continue
                    same = found == record.hashes.experiment
                    if same != said.get(folder, same):
                        self.problems.append(
                            f"{folder}: the sources of '{experiment}' were changed"
                        )
                    elif not same:
                        self.notes.append(
                            f"{folder} ran other sources of '{experiment}' than these"
                        )

    def copy_below(self, prefix: str, root: Path) -> None:
        """Copy the sound files whose names begin with `prefix` below `root`. Raises BundleDamaged
        where two of the names cannot be together on a disk."""
        for name in sorted(self._sound):
            if name.startswith(prefix):
                self._copy(name, root / name.removeprefix(prefix))

    def _copy(self, name: str, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._read(name))
        except OSError as error:
            raise BundleDamaged(f"{name} cannot be written to a disk", why=str(error)) from error

    def _crate(self, records: Mapping[str, Record]) -> None:
        body = self._json(CRATE_FILE)
        if body is None:
            if CRATE_FILE not in self._shelf.names:
                self.problems.append(f"it has no {CRATE_FILE}")
            return
        graph = body.get("@graph") if isinstance(body, dict) else None
        entities = {
            each["@id"]: each
            for each in (graph if isinstance(graph, list) else [])
            if isinstance(each, dict) and isinstance(each.get("@id"), str)
        }
        for record in records.values():
            if f"#{record.run_id}" not in entities:
                self.problems.append(f"{CRATE_FILE} does not know the run {record.run_id}")

    def _statement(self) -> None:
        body = self._json(STATEMENT_FILE)
        if body is None:
            return
        try:
            subjects = {each["name"]: each["digest"]["sha256"] for each in body["subject"]}
        except (KeyError, TypeError) as error:
            self.problems.append(f"{STATEMENT_FILE} is no statement: it lacks {error}")
            return
        for name, digest in subjects.items():
            if name in self._sound and hashlib.sha256(self._read(name)).hexdigest() != digest:
                self.problems.append(f"{STATEMENT_FILE} is about another {name}")

    def _verdicts(self, records: list[Record]) -> None:
        """Judge the records here by the claims here, and compare: so said, so it is."""
        body = self._json(VERDICTS_FILE)
        if body is None:
            self.problems.append("it holds no verdicts that can be read")
            return
        try:
            said = decode(Judged, body, VERDICTS_FILE)
            found = self._judged(records, said.occasion)
        except NarrowgaugeError as error:
            self.problems.append(f"the verdicts cannot be had again: {error.what}")
            return
        self.verdicts = len(found.judgements)
        if self.manifest is None:
            return
        made_by = self.manifest.version
        if said.occasion.version != made_by:
            self.problems.append(
                f"{BUNDLE_FILE} is of version {made_by!a}, {VERDICTS_FILE} of another"
            )
        lines = contradictions(said, found, self.manifest, records, self._sound, self._if_sound)
        if made_by == __version__:
            self.problems += lines
        else:
            judge = f"made by version {made_by}, and judged here by {__version__}"
            self.notes += [f"{each} ({judge})" for each in lines]

    def _judged(self, records: list[Record], occasion: Occasion) -> Judged:
        with tempfile.TemporaryDirectory(prefix="narrowgauge-verify-") as scratch:
            for name in sorted({record.experiment for record in records}):
                for file in (EXPERIMENT_FILE, CLAIMS_FILE):
                    source = f"{SOURCE_FOLDER}/experiments/{name}/{file}"
                    if source in self._sound:
                        self._copy(source, Path(scratch, name, file))
            return judge_runs(
                Path(scratch), records, now=occasion.made_utc, git=occasion.git, replay=True
            )

    def _if_sound(self, name: str) -> bytes | None:
        return self._read(name) if name in self._sound else None


def _misplaced(record: Record, folder: str) -> str:
    """Why a record cannot be that of its folder; empty where it can. What a record says becomes a
    path only after this."""
    for word in (record.experiment, record.run_id):
        problem = "it leads elsewhere" if "/" in word else name_problem(word)
        if problem:
            return problem
    return "" if run_folder_in_bundle(record) == folder else f"that is not {folder}"
