"""A local store of weights, by content: what a run loads is named by its sha256 and its recipe.

    <root>/<sha256>/{weights.pt, weights.json}

Nothing in here opens weights; that takes torch, and is the lab's.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import BadValueError, UsageError, disk_full, results_unwritable
from narrowgauge.store import RunFolder
from narrowgauge_contract.codec import decode, encode, read_json, write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError, UnknownNameError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Weights
from narrowgauge_contract.spec import ExperimentSpec

__all__ = ["SAVE_PARAMETER", "WEIGHTS_FILE", "StoredWeights", "WeightsStore", "default_root",
           "recipe_of", "require_one", "require_saving", "take_from_run"]  # fmt: skip

#: The side file that an experiment leaves, and the parameter that asks for it.
WEIGHTS_FILE = "weights.pt"
SAVE_PARAMETER = "save_weights"
_ABOUT = "weights.json"


@dataclass(frozen=True)
class StoredWeights:
    """One entry. `about` is what a record says of it; `imported_utc` seconds since the epoch."""

    about: Weights
    bytes: int
    imported_utc: float


@dataclass(frozen=True)
class WeightsStore:
    """The store below `root`, which need not exist yet."""

    root: Path

    def add(self, file: Path, *, name: str, recipe: str, now: float) -> StoredWeights:
        """Copy `file` into the store. The same content again gives the entry that is there.

        Raises UsageError where `file` is not a file, BadValueError where the name is taken by other
        content, DiskFull, ResultsUnwritable.
        """
        if not file.is_file():
            raise UsageError(f"{file} is not a file")
        _check_name(name)
        try:
            return self._add(file, name, recipe, now)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(self.root, f"the weights '{name}'") from error
            raise results_unwritable(self.root, error.strerror or str(error)) from error

    def _add(self, file: Path, name: str, recipe: str, now: float) -> StoredWeights:
        digest = sha256_file(file)
        for known in self.all():
            if known.about.sha256 == digest:
                return known
            if known.about.name == name:
                raise _taken(known)
        stored = StoredWeights(Weights(name, digest, recipe), file.stat().st_size, now)
        self.root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=self.root))
        try:
            shutil.copyfile(file, made / WEIGHTS_FILE)
            write_json_atomic(made / _ABOUT, stored)
            made.chmod(0o755)
            os.replace(made, self.root / digest)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return stored

    def require_free(self, name: str) -> None:
        """Refuse, before hours of training, a name that `add` would refuse after. BadValueError."""
        _check_name(name)
        for known in self.all():
            if known.about.name == name:
                raise _taken(known)

    def all(self) -> Iterator[StoredWeights]:
        """Every entry, by name. Raises DamagedRecordError for one that cannot be read."""
        if not self.root.is_dir():
            return
        folders = [path for path in self.root.iterdir() if (path / _ABOUT).is_file()]
        entries = [decode(StoredWeights, read_json(p / _ABOUT), str(p / _ABOUT)) for p in folders]
        yield from sorted(entries, key=lambda entry: entry.about.name)

    def find(self, name: str) -> tuple[StoredWeights, Path]:
        """The entry of that name, or whose sha256 begins so, and its file, checked.

        Raises UnknownNameError, DamagedRecordError.
        """
        entries = list(self.all())
        for entry in entries:
            about = entry.about
            if about.name == name or (len(name) >= 6 and about.sha256.startswith(name)):
                path = self.root / about.sha256 / WEIGHTS_FILE
                if not path.is_file() or sha256_file(path) != about.sha256:
                    raise DamagedRecordError(
                        f"the stored weights '{about.name}' are missing or damaged",
                        why=f"{path} should have sha256 {about.sha256}",
                        next_step=f"make them again ({about.recipe}), or remove {path.parent}",
                    )
                return entry, path
        raise UnknownNameError("weights", name, [entry.about.name for entry in entries])


def _check_name(name: str) -> None:
    if not name or "/" in name or name.startswith("."):
        raise BadValueError(f"'{name}' is no name for weights")


def _taken(known: StoredWeights) -> BadValueError:
    about = known.about
    return BadValueError(
        f"there are other weights of the name '{about.name}'",
        why=f"they have sha256 {about.sha256}, made by: {about.recipe}",
        next_step="choose another name",
    )


def default_root(env: Mapping[str, str], home: Path) -> Path:
    """Where weights lie: beside the data sets of this user."""
    from narrowgauge_data import default_root as data_root

    return data_root(env, home).parent / "weights"


def require_saving(spec: ExperimentSpec) -> None:
    """Raises UsageError for an experiment that does not know how to save its weights."""
    if SAVE_PARAMETER not in spec.parameters:
        raise UsageError(
            f"the experiment '{spec.id}' does not save weights",
            why=f"it declares no parameter '{SAVE_PARAMETER}'",
            next_step="narrowgauge weights import FILE --name NAME --recipe TEXT",
        )


def require_one(jobs: Sequence[Job]) -> None:
    """Raises UsageError for several jobs, or rows of several configurations: which are meant?"""
    rows = {repr(sorted(row.parameters.items())) for job in jobs for row in job.rows}
    if len(rows) > 1:
        raise UsageError(
            f"these parameters make {len(rows)} configurations, and a name is for one",
            next_step="give each parameter one value",
        )


def recipe_of(experiment: str, run_id: str, row: Row) -> str:
    """How these weights were made, in one line that can be run again."""
    words = [f"{k}={v}" for k, v in sorted(row.parameters.items()) if k != SAVE_PARAMETER]
    return f"{experiment} {' '.join(words)} seed={row.seed} (run {run_id}, row {row.index})"


def take_from_run(
    folder: RunFolder, store: WeightsStore, *, name: str, now: float
) -> StoredWeights:
    """Store the weights that the first valid row of a recorded run left, under `name`.

    Raises NarrowgaugeError where no valid row left any, DamagedRecordError where they were changed.
    """
    record = folder.record()
    for row in record.valid_rows():
        side = next((s for s in row.side_files if Path(s.path).name == WEIGHTS_FILE), None)
        if side is None:
            continue
        path = folder.out / side.path
        if not path.is_file() or sha256_file(path) != side.sha256:
            raise DamagedRecordError(
                f"{path} is missing or was changed", why=f"it should have sha256 {side.sha256}"
            )
        recipe = recipe_of(record.experiment, record.run_id, row)
        return store.add(path, name=name, recipe=recipe, now=now)
    raise NoWeightsError(
        f"the run {record.run_id} left no weights",
        why=f"no valid row has the side file {WEIGHTS_FILE}",
        next_step=f"narrowgauge show {record.run_id} says how its rows ended",
    )


class NoWeightsError(NarrowgaugeError):
    """A run that should have left weights did not."""


def weights_json(entries: list[StoredWeights]) -> object:
    """The list for scripts."""
    return encode(entries)
